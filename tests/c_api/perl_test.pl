#!/usr/bin/env perl
# perl_test.pl <kvstore.pl> <perl_session.txt>: the published session prints its published values, and what
# else examples/perl/Heddle.pm offers does what it says.
use strict;
use warnings;

use File::Temp qw(tempdir);
use Heddle qw(mx);
use Test::More;

my ($session, $published) = @ARGV;
my $read = sub { open(my $file, '<', $_[0]) or die "$_[0]: $!"; local $/; return scalar <$file> };
is(scalar `$^X $session`, $read->($published), 'the published session prints its published values');
is($?, 0, 'the session ends well');

my $kv = mx->kv->create('Local');
is($kv->type, 'local', 'type');
is($kv->rank, 0, 'rank');
is($kv->num_workers, 1, 'num_workers');
$kv->_barrier;
$kv->_send_command_to_servers(0, 'body');

# Errors are exceptions with heddle's messages.
my $out = mx->nd->zeros([2]);
ok(!eval { $kv->pull(7, out => $out); 1 }, 'a pull of an unknown key dies');
like($@, qr/^heddle: .*unknown key '7'/, 'and names the key');
ok(!eval { mx->kv->create('no such'); 1 }, 'an unknown type dies');
like($@, qr/no such/, 'and names it');
ok(!eval { $kv->init([1, 2], [$out]); 1 }, 'lists of other lengths die');
$kv->init(1, $out);
$kv->_set_updater(sub { die "not today\n" });
ok(!eval { $kv->push(1, mx->nd->ones([2])); 1 }, 'an exception of the updater leaves push');
like($@, qr/^heddle: not today$/m, 'with its message');
$kv->pull(1, out => $out);
is($out->aspdl, "[[ 0 0]]\n", 'and the value stays');

# 3 and '3' are one key.
$kv->init('3', mx->nd->ones([2]));
$kv->pull(3, out => $out);
is($out->aspdl, "[[ 1 1]]\n", 'keys are strings');

# Optimizers, and their states through a file.
my $file = tempdir(CLEANUP => 1) . '/states';
my @stores = map { mx->kv->create('device') } 0 .. 1;
for my $store (@stores) {
    $store->init(1, mx->nd->zeros([2]));
    $store->set_optimizer('sgd', learning_rate => 0.5, momentum => 0.5);
}
$stores[0]->push(1, mx->nd->ones([2]) * 4);
$stores[0]->save_optimizer_states($file);
$stores[1]->load_optimizer_states($file);
$stores[1]->push(1, mx->nd->ones([2]) * 4);    # momentum -2 * 0.5, gradient -2
$stores[1]->pull(1, out => $out);
is($out->aspdl, "[[ -3 -3]]\n", 'states are saved and loaded');
ok(!eval { $stores[0]->set_optimizer('sgd', lr => 1); 1 }, 'an unknown parameter dies');
like($@, qr/learning_rate/, 'and names the one that is meant');

my $compressed = mx->kv->create('device');
$compressed->set_gradient_compression({type => '2bit', threshold => 0.5});
$compressed->init(1, mx->nd->zeros([2]));
$compressed->push(1, mx->nd->full([2], 0.7));
$compressed->pull(1, out => $out);
is($out->aspdl, "[[ 0.5 0.5]]\n", 'gradients are compressed');

done_testing();
