"""What stores written in Python derive from and are tested with, where MXNet has it."""

from . import KVStoreBase, TestStore, create

__all__ = ["KVStoreBase", "TestStore", "create"]
