# heddle from Perl, through its C API: as much of AI::MXNet's KVStore as its documentation shows.
#
#   use Heddle qw(mx);
#   my $kv = mx->kv->create('local');
#   $kv->init(3, mx->nd->ones([2, 3]) * 2);
#   $kv->pull(3, out => my $a = mx->nd->zeros([2, 3]));
#   print $a->aspdl;
#
# The library is the one that HEDDLE_LIBRARY names, or libheddle where the system looks. Errors are
# exceptions. Keys go to the store as strings, so that 3 and '3' are one key.
use strict;
use warnings;

package Heddle::C;

use FFI::CheckLib qw(find_lib_or_die);
use FFI::Platypus 2.00;
use FFI::Platypus::Buffer qw(scalar_to_pointer);

my $ffi = FFI::Platypus->new(
    api => 2,
    lib => $ENV{HEDDLE_LIBRARY} // find_lib_or_die(lib => 'heddle'),
);

use constant {
    ABI_VERSION => 1,
    USER_ERROR  => 1000,
    FLOAT32     => 0,
    INT64       => 7,
    ROW_SPARSE  => 1,
    ADD         => 0,
    MULTIPLY    => 2,
};
use constant DTYPES => {float32 => FLOAT32, int64 => INT64};

$ffi->type('(opaque, opaque, opaque, opaque)->int' => 'updater');
$ffi->attach(HeddleGetAbiVersion => [] => 'int');
$ffi->attach(HeddleLastErrorMessage => [] => 'string');
$ffi->attach(HeddleSetLastError => ['int', 'string'] => 'int');
die "heddle: expected ABI version @{[ABI_VERSION]}, got " . HeddleGetAbiVersion()
    unless HeddleGetAbiVersion() == ABI_VERSION;

# Calls that return a status: attached so that they die, with the message, unless that is 0.
my %calls = (
    HeddleArrayFree => ['opaque'],
    HeddleArrayFromHost =>
        ['size_t', 'double[]', 'int', 'size_t', 'sint64[]', 'int', 'int', 'int', 'opaque*'],
    HeddleRowSparseCreate => ['size_t', 'sint64[]', 'int', 'int', 'int', 'opaque*'],
    HeddleArrayGetShape => ['opaque', 'size_t*', 'opaque*'],
    HeddleArrayGetSize => ['opaque', 'sint64*'],
    HeddleArrayCopy => ['opaque', 'opaque*'],
    HeddleArrayCopyAsKind => ['opaque', 'int', 'opaque*'],
    HeddleArrayCombine => ['opaque', 'int', 'opaque'],
    HeddleArrayCombineScalar => ['opaque', 'int', 'double'],
    HeddleArrayCopyToHost => ['opaque', 'size_t', 'double[]', 'int'],
    HeddleOptimizerCreate => ['string', 'size_t', 'string[]', 'double[]', 'opaque*'],
    HeddleOptimizerFree => ['opaque'],
    HeddleKVStoreCreate => ['string', 'opaque', 'opaque*'],
    HeddleKVStoreFree => ['opaque'],
    HeddleKVStoreInit => ['opaque', 'size_t', 'opaque', 'opaque[]'],
    HeddleKVStorePush => ['opaque', 'size_t', 'opaque', 'opaque[]', 'int'],
    HeddleKVStorePull => ['opaque', 'size_t', 'opaque', 'opaque[]', 'int', 'int'],
    HeddleKVStoreRowSparsePull => ['opaque', 'size_t', 'opaque', 'opaque[]', 'opaque[]', 'int'],
    HeddleKVStoreSetUpdater => ['opaque', 'updater', 'opaque', 'opaque'],
    HeddleKVStoreSetOptimizer => ['opaque', 'opaque'],
    HeddleKVStoreSaveOptimizerStates => ['opaque', 'string', 'int'],
    HeddleKVStoreLoadOptimizerStates => ['opaque', 'string'],
    HeddleKVStoreSetGradientCompression => ['opaque', 'string', 'double'],
    HeddleKVStoreGetType => ['opaque', 'string*'],
    HeddleKVStoreGetRank => ['opaque', 'int*'],
    HeddleKVStoreGetNumWorkers => ['opaque', 'int*'],
    HeddleKVStoreBarrier => ['opaque'],
    HeddleKVStoreSendCommandToServers => ['opaque', 'int', 'size_t', 'string'],
);
$ffi->attach($_ => $calls{$_} => 'int' => sub {
    my ($call, @arguments) = @_;
    $call->(@arguments) == 0 or die 'heddle: ' . HeddleLastErrorMessage() . "\n";
}) for keys %calls;

# An array of HeddleKey, {const char* text; int64_t number}, that points into @$texts.
sub pack_keys {
    my ($texts) = @_;
    my $packed = '';
    $packed .= pack('pq', $texts->[$_], 0) for 0 .. $#$texts;
    return $packed;
}

# The text of a key that a callback is given.
sub key_text {
    my ($text) = unpack('pq', unpack('P16', pack('J', $_[0])));
    return $text;
}

package Heddle::NDArray;

# In place, for all that hold the array: `$stored += $input * 2` in an updater changes the store's.
use overload
    '='  => sub { $_[0] },
    '*'  => sub { my $product = $_[0]->copy; $product *= $_[1]; $product },
    '*=' => sub { Heddle::C::HeddleArrayCombineScalar($_[0]{handle}, Heddle::C::MULTIPLY, $_[1]); $_[0] },
    '+=' => sub { Heddle::C::HeddleArrayCombine($_[0]{handle}, Heddle::C::ADD, $_[1]{handle}); $_[0] };

# Owns the handle, unless it is borrowed from heddle.
sub _wrap { my ($handle, %more) = @_; return bless {handle => $handle, %more}, 'Heddle::NDArray' }
sub DESTROY { my ($self) = @_; Heddle::C::HeddleArrayFree($self->{handle}) unless $self->{borrowed} }

sub _from_list {
    my ($values, $shape, %options) = @_;
    my $dtype = Heddle::C::DTYPES->{$options{dtype} // 'float32'} // die "dtype $options{dtype}: unknown";
    Heddle::C::HeddleArrayFromHost(scalar @$values, $values, 1, scalar @$shape, $shape, $dtype, 0,
                                   $options{ctx} // 0, \my $handle);
    return _wrap($handle);
}

sub full {
    my ($class, $shape, $value, %options) = @_;
    my $count = 1;
    $count *= $_ for @$shape;
    return _from_list([($value) x $count], $shape, %options);
}
sub ones { my ($class, $shape, %options) = @_; return $class->full($shape, 1, %options) }
sub zeros { my ($class, $shape, %options) = @_; return $class->full($shape, 0, %options) }
sub array { my ($class, $values, %options) = @_; return _from_list($values, [scalar @$values], %options) }
sub sparse { return 'Heddle::Sparse' }

sub copy { my ($self) = @_; Heddle::C::HeddleArrayCopy($self->{handle}, \my $copy); return _wrap($copy) }

sub tostype {
    my ($self, $type) = @_;
    my $kind = {default => 0, row_sparse => Heddle::C::ROW_SPARSE}->{$type} // die "stype $type: unknown";
    Heddle::C::HeddleArrayCopyAsKind($self->{handle}, $kind, \my $copy);
    return _wrap($copy);
}

# The elements as text, a line for each row; waits for them.
sub aspdl {
    my ($self) = @_;
    Heddle::C::HeddleArrayGetSize($self->{handle}, \my $size);
    Heddle::C::HeddleArrayGetShape($self->{handle}, \my $ndim, \my $shape);
    my @values = (0) x $size;
    Heddle::C::HeddleArrayCopyToHost($self->{handle}, $size, \@values, 1);
    my $columns = unpack('q', unpack('P8', pack('J', $shape + 8 * ($ndim - 1))));
    my @rows;
    push @rows, '[ ' . join(' ', splice(@values, 0, $columns)) . ']' while @values;
    return '[' . join("\n", @rows) . "]\n";
}

package Heddle::Sparse;

sub zeros {
    my ($class, $type, $shape) = @_;
    die "stype $type: expected row_sparse" unless $type eq 'row_sparse';
    Heddle::C::HeddleRowSparseCreate(scalar @$shape, $shape, Heddle::C::FLOAT32, 0, 0, \my $handle);
    return Heddle::NDArray::_wrap($handle);
}

package Heddle::KVStore;

sub create {
    my ($class, $name) = @_;
    Heddle::C::HeddleKVStoreCreate($name // 'local', undef, \my $handle);
    return bless {handle => $handle}, $class;
}
sub DESTROY { my ($self) = @_; Heddle::C::HeddleKVStoreFree($self->{handle}) }

# A key, or a list of keys, with an array or a list of arrays for each: as one list of texts and one
# of handles, equally long.
sub _pairs {
    my ($keys, $values) = @_;
    ($keys, $values) = ([$keys], [$values]) unless ref $keys;
    die 'expected an array or a list of arrays for each of ' . @$keys . ' keys, got ' . @$values . "\n"
        unless @$keys == @$values;
    my (@texts, @handles);
    for my $i (0 .. $#$keys) {
        for my $array (ref $values->[$i] eq 'ARRAY' ? @{$values->[$i]} : $values->[$i]) {
            push @texts, "$keys->[$i]";
            push @handles, $array->{handle};
        }
    }
    return (\@texts, \@handles);
}

# $call->(handle, count, keys, @arguments)
sub _with_keys {
    my ($self, $call, $texts, @arguments) = @_;
    my $packed = Heddle::C::pack_keys($texts);
    $call->($self->{handle}, scalar @$texts, Heddle::C::scalar_to_pointer($packed), @arguments);
}

sub init {
    my ($self, $key, $value) = @_;
    my ($texts, $handles) = _pairs($key, $value);
    $self->_with_keys(\&Heddle::C::HeddleKVStoreInit, $texts, $handles);
}

sub push {
    my ($self, $key, $value, %options) = @_;
    my ($texts, $handles) = _pairs($key, $value);
    $self->_with_keys(\&Heddle::C::HeddleKVStorePush, $texts, $handles, $options{priority} // 0);
}

sub pull {
    my ($self, $key, %options) = @_;
    my ($texts, $handles) = _pairs($key, $options{out});
    $self->_with_keys(\&Heddle::C::HeddleKVStorePull, $texts, $handles, $options{priority} // 0, 1);
}

# One row_ids array serves all outputs.
sub row_sparse_pull {
    my ($self, $key, %options) = @_;
    my ($texts, $handles) = _pairs($key, $options{out});
    my $ids = $options{row_ids};
    my (undef, $id_handles) = ref $ids eq 'ARRAY' ? _pairs($key, $ids) : (undef, [($ids->{handle}) x @$texts]);
    $self->_with_keys(\&Heddle::C::HeddleKVStoreRowSparsePull, $texts, $handles, $id_handles,
                      $options{priority} // 0);
}

# $updater->($key, $input, $stored) runs inside push; its exception leaves push.
sub _set_updater {
    my ($self, $updater) = @_;
    my $closure = $ffi->closure(sub {
        my (undef, $key, $input, $stored) = @_;
        my @arrays = map { Heddle::NDArray::_wrap($_, borrowed => 1) } $input, $stored;
        return 0 if eval { $updater->(Heddle::C::key_text($key), @arrays); 1 };
        return Heddle::C::HeddleSetLastError(Heddle::C::USER_ERROR, "$@");
    });
    Heddle::C::HeddleKVStoreSetUpdater($self->{handle}, $closure, undef, undef);
    $self->{updater} = $closure;  # lives as long as the store may call it
}

sub set_optimizer {
    my ($self, $name, %parameters) = @_;
    my @names = sort keys %parameters;
    Heddle::C::HeddleOptimizerCreate($name, scalar @names, \@names, [@parameters{@names}], \my $optimizer);
    my $is_set = eval { Heddle::C::HeddleKVStoreSetOptimizer($self->{handle}, $optimizer); 1 };
    my $error = $@;
    Heddle::C::HeddleOptimizerFree($optimizer);  # the store keeps it
    die $error unless $is_set;
}

sub set_gradient_compression {
    my ($self, $params) = @_;
    Heddle::C::HeddleKVStoreSetGradientCompression($self->{handle}, $params->{type},
                                                   $params->{threshold} // 0.5);
}

sub save_optimizer_states {
    my ($self, $fname, %options) = @_;
    Heddle::C::HeddleKVStoreSaveOptimizerStates($self->{handle}, $fname, $options{dump_optimizer} // 0);
}
sub load_optimizer_states {
    my ($self, $fname) = @_;
    Heddle::C::HeddleKVStoreLoadOptimizerStates($self->{handle}, $fname);
}

sub type { my ($self) = @_; Heddle::C::HeddleKVStoreGetType($self->{handle}, \my $type); return $type }
sub rank { my ($self) = @_; Heddle::C::HeddleKVStoreGetRank($self->{handle}, \my $rank); return $rank }
sub num_workers {
    my ($self) = @_;
    Heddle::C::HeddleKVStoreGetNumWorkers($self->{handle}, \my $count);
    return $count;
}
sub _barrier { my ($self) = @_; Heddle::C::HeddleKVStoreBarrier($self->{handle}) }
sub _send_command_to_servers {
    my ($self, $head, $body) = @_;
    Heddle::C::HeddleKVStoreSendCommandToServers($self->{handle}, $head, length $body, $body);
}

package Heddle;

use Exporter qw(import);
our @EXPORT_OK = qw(mx);

sub mx { return 'Heddle' }
sub kv { return 'Heddle::KVStore' }
sub nd { return 'Heddle::NDArray' }
sub cpu { my ($class, $id) = @_; return $id // 0 }

1;
