"""The arrays of ``heddle.nd``, under the other name that MXNet has for them."""

from ..nd import *  # noqa: F403
from ..nd import __all__ as __all__, random as random
