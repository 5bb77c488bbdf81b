#!/usr/bin/env perl
# The KVStore session that Perl users know, on heddle. Runs with
#
#   HEDDLE_LIBRARY=build/release/libheddle.so perl -Iexamples/perl examples/perl/kvstore.pl
#
# Four logical CPU devices stand for the GPUs. A section that presumes other values than the one before
# leaves starts with a store of its own.
use strict;
use warnings;

use Heddle qw(mx);

my $shape = [2, 3];
my $cpus = [map { mx->cpu($_) } 0 .. 3];

print "# init\n";
my $kv = mx->kv->create('local');
$kv->init(3, mx->nd->ones($shape) * 2);
my $a = mx->nd->zeros($shape);
$kv->pull(3, out => $a);
print $a->aspdl;

my $keys = [5, 7, 9];
$kv->init($keys, [map { mx->nd->ones($shape) } 0 .. @$keys - 1]);

print "# push\n";
$kv->push(3, mx->nd->ones($shape) * 8);
$kv->pull(3, out => $a);
print $a->aspdl;

# Aggregate the values, then push.
my $b = [map { mx->nd->ones($shape, ctx => $_) } @$cpus];
$kv->push(3, $b);
$kv->pull(3, out => $a);
print $a->aspdl;

# A list of keys, on one device.
$kv->push($keys, [map { mx->nd->ones($shape) } 0 .. @$keys - 1]);
$b = [map { mx->nd->zeros($shape) } 0 .. @$keys - 1];
$kv->pull($keys, out => $b);
print $b->[1]->aspdl;

# On several devices.
$b = [map { [map { mx->nd->ones($shape, ctx => $_) } @$cpus] } 0 .. @$keys - 1];
$kv->push($keys, $b);
$kv->pull($keys, out => $b);
print $b->[1][1]->aspdl;

print "# pull\n";
my $twos = mx->kv->create('local');
$twos->init([3, @$keys], [map { mx->nd->ones($shape) * 2 } 0 .. @$keys]);
$a = mx->nd->zeros($shape);
$twos->pull(3, out => $a);
print $a->aspdl;

# Into several devices.
$b = [map { mx->nd->ones($shape, ctx => $_) } @$cpus];
$twos->pull(3, out => $b);
print $b->[1]->aspdl;

# A list of keys, on one device.
$b = [map { mx->nd->zeros($shape) } 0 .. @$keys - 1];
$twos->pull($keys, out => $b);
print $b->[1]->aspdl;

# On several devices.
$b = [map { [map { mx->nd->ones($shape, ctx => $_) } @$cpus] } 0 .. @$keys - 1];
$twos->pull($keys, out => $b);
print $b->[1][1]->aspdl;

print "# row_sparse_pull\n";
my $sparse_kv = mx->kv->create('local');
my $square = [3, 3];
$sparse_kv->init('3', mx->nd->ones($square)->tostype('row_sparse'));
my $rows = mx->nd->sparse->zeros('row_sparse', $square);
my $row_ids = mx->nd->array([0, 2], dtype => 'int64');
$sparse_kv->row_sparse_pull('3', out => $rows, row_ids => $row_ids);
print $rows->aspdl;
my $duplicate_row_ids = mx->nd->array([2, 2], dtype => 'int64');
$sparse_kv->row_sparse_pull('3', out => $rows, row_ids => $duplicate_row_ids);
print $rows->aspdl;
my $unsorted_row_ids = mx->nd->array([1, 0], dtype => 'int64');
$sparse_kv->row_sparse_pull('3', out => $rows, row_ids => $unsorted_row_ids);
print $rows->aspdl;

print "# _set_updater\n";
my $update = sub {
    my ($key, $input, $stored) = @_;
    print "update on key: $key\n";
    $stored += $input * 2;
};
$kv->_set_updater($update);
$kv->pull(3, out => $a);
print $a->aspdl;
$kv->push(3, mx->nd->ones($shape));
$kv->pull(3, out => $a);
print $a->aspdl;
