"""The exceptions that heddle raises.

All derive from :class:`Error`; those for which Python has a class of its own derive from that too, so
``except ValueError`` and ``except heddle.Error`` both work. Errors of Python code that heddle calls
(an updater, an op) come back as they are.
"""

import builtins


class Error(RuntimeError):
    """The base of all errors of heddle."""

    __str__ = BaseException.__str__  # that of KeyError shows the message in quotes


class InvalidArgument(Error, ValueError):
    """Something was passed that cannot work; nothing was changed."""


class InvalidType(InvalidArgument, TypeError):
    """An argument has a type that is not expected there; nothing was changed."""


class UnknownKey(InvalidArgument, KeyError):
    """The store does not have the key; nothing was changed."""


class InvalidState(Error):
    """The call cannot work now: a wait inside an op, or the engine has stopped."""


class AccessError(Error):
    """An op touched an array that it does not name."""


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline passed."""


class OutOfMemory(Error, MemoryError):
    """The cap of heddle's memory, or the machine's memory, is exhausted."""


class IoError(Error, OSError):
    """A file could not be read, written or understood."""


class NetworkError(Error, ConnectionError):
    """A peer could not be reached, or what it sent makes no sense."""


class CudaError(Error):
    """A call of the CUDA runtime failed, or a GPU reported an error."""


class NcclError(Error):
    """A call of NCCL failed, or NCCL is not there."""


class OpError(Error):
    """An asynchronous op ended without a result."""


MXNetError = Error
