"""All ranks learn whether one has failed. If only one raised, the others would wait for it in the next collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Failed:
    """The first rank that failed, and why."""

    rank: int
    why: str


def outcomes(failure: str | None, result: Any = None) -> tuple[list[Any], Failed | None]:
    """The results of all ranks in rank order, and the first failure, or None if no rank has failed.

    Collective. Every rank gets the same answer, so that all can raise. Without a process group there is only
    this process.
    """
    found: list[Any] = [(failure, result)]
    if dist.is_available() and dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, (failure, result))
    failed = next((Failed(rank, why) for rank, (why, _) in enumerate(found) if why is not None), None)
    return [value for _, value in found], failed
