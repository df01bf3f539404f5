"""Real rank processes, their exchanges, and hosts with shaped links on one machine."""

from nestpipe.ranks.pool import (
    RankError,
    RankFailure,
    RankPlace,
    RankPool,
    join_process_group,
    leave_process_group,
    send_to_launcher,
)

__all__ = [
    "RankError",
    "RankFailure",
    "RankPlace",
    "RankPool",
    "join_process_group",
    "leave_process_group",
    "send_to_launcher",
]
