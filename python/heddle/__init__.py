"""heddle: an asynchronous dependency engine and a key-value store for parameters.

    >>> import heddle as mx
    >>> kv = mx.kv.create('local')
    >>> kv.init(3, mx.nd.ones((2, 3)) * 2)
    >>> a = mx.nd.zeros((2, 3))
    >>> kv.pull(3, out=a)
    >>> a.asnumpy()
    array([[2., 2., 2.],
           [2., 2., 2.]], dtype=float32)

Operations on arrays and stores are queued and return at once; reading values waits for them.
"""

from . import error
from .error import (AccessError, CudaError, Error, InvalidArgument, InvalidState, InvalidType, IoError, MXNetError,
                    NcclError, NetworkError, OpError, OutOfMemory, TimeoutError, UnknownKey)
from .context import Context, cpu, cpu_pinned, current_context, gpu, num_gpus
from . import base
from . import nd
from . import ndarray
from . import sparse
from . import engine
from . import random
from . import lr_scheduler
from . import optimizer
from . import kvstore
from . import kvstore as kv
from . import profiler
from . import np
from . import npx

__version__ = "0.1.0"
__all__ = [
    "AccessError", "Context", "CudaError", "Error", "InvalidArgument", "InvalidState", "InvalidType", "IoError",
    "MXNetError", "NcclError", "NetworkError", "OpError", "OutOfMemory", "TimeoutError", "UnknownKey", "base", "cpu",
    "cpu_pinned", "current_context", "engine", "error", "gpu", "kv", "kvstore", "lr_scheduler", "nd", "ndarray", "np",
    "npx", "num_gpus", "optimizer", "profiler", "random", "sparse",
]
