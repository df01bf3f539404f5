"""One clock for the spans of all ranks.

Spans are stamped with ``time.perf_counter_ns``, which on Linux is CLOCK_MONOTONIC. All processes of a host share
it, but the clocks of different hosts are unrelated.
"""

from __future__ import annotations

import pathlib
import time

import torch
import torch.distributed as dist

PINGS = 8


def boot_id() -> str:
    """The identity of this host's running kernel. Processes with the same identity share CLOCK_MONOTONIC."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def clock_offset(group: dist.ProcessGroup | None = None) -> float:
    """Seconds to add to this rank's ``time.perf_counter`` to get the clock of the group's first rank.

    Collective: every rank of ``group`` (default: all ranks) must call it at the same point. The result is exactly
    0.0 on every rank if all share one kernel. Otherwise it is measured as NTP does it: of ``PINGS`` pings, the one
    with the shortest round trip counts. That round trip is taken to be symmetric, so the error is at most half of it.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    boot_ids: list[str] = [""] * world_size
    dist.all_gather_object(boot_ids, boot_id(), group=group)
    if len(set(boot_ids)) == 1:
        return 0.0
    offset = 0.0
    for peer in range(1, world_size):
        if rank == 0:
            _answer_pings(peer, group)
        elif rank == peer:
            offset = _ping_first_rank(group)
    return offset


def _device(group: dist.ProcessGroup | None) -> torch.device:
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _answer_pings(peer: int, group: dist.ProcessGroup | None) -> None:
    stamp = torch.zeros(1, dtype=torch.int64, device=_device(group))
    for _ in range(PINGS):
        dist.recv(stamp, group=group, group_src=peer)
        stamp.fill_(time.perf_counter_ns())
        dist.send(stamp, group=group, group_dst=peer)


def _ping_first_rank(group: dist.ProcessGroup | None) -> float:
    stamp = torch.zeros(1, dtype=torch.int64, device=_device(group))
    pings = []
    for _ in range(PINGS):
        sent_ns = time.perf_counter_ns()
        dist.send(stamp, group=group, group_dst=0)
        dist.recv(stamp, group=group, group_src=0)
        theirs_ns = int(stamp.item())  # on CUDA this also waits for the reply
        received_ns = time.perf_counter_ns()
        pings.append((received_ns - sent_ns, theirs_ns - (sent_ns + received_ns) / 2))
    return min(pings)[1] / 1e9
