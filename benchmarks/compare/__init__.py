"""Holds heddle against its peers and the machine's limits; see benchmarks/compare.sh."""
