"""Real rank processes, their process group and their collectives."""

from nestpipe.ranks.pool import RankPool
from nestpipe.ranks.process import RankError, RankFailure
from nestpipe.ranks.rank import send_to_launcher

__all__ = ["RankError", "RankFailure", "RankPool", "send_to_launcher"]
