"""The name that ``nestpipe.ranks`` had before; imports of it keep working."""

from nestpipe.ranks import RankError, RankFailure, RankPool, send_to_launcher
from nestpipe.ranks.process_group import RankPlace, join_process_group, leave_process_group

__all__ = [
    "RankError",
    "RankFailure",
    "RankPlace",
    "RankPool",
    "join_process_group",
    "leave_process_group",
    "send_to_launcher",
]
