"""The name that ``nestpipe.ranks`` had before; imports of it keep working."""

from nestpipe.ranks import *  # noqa: F403
from nestpipe.ranks import __all__ as __all__
