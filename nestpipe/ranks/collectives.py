"""The collectives of the engine, one process group per lane."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def error_on_its_way() -> bool:
    """Whether an error is being raised, as seen in a ``finally``: the other ranks then never reach a barrier."""
    return sys.exc_info()[0] not in (None, StopIteration)


class Exchange:
    """All2All and AllReduce on one process group; without torch.distributed there is one rank and nothing is sent.

    ``partition``: the ranks of every group, including this rank's; None for one group of all ranks. Constructing one is
    collective over all ranks, whatever their group.
    """

    def __init__(self, partition: Sequence[Sequence[int]] | None = None):
        joined = dist.is_available() and dist.is_initialized()
        self.group = None
        if joined:
            groups = [dist.new_group(list(ranks)) for ranks in partition] if partition else [dist.new_group()]
            mine = next(i for i, ranks in enumerate(partition) if dist.get_rank() in ranks) if partition else 0
            self.group = groups[mine]
        self.rank = dist.get_rank(self.group) if joined else 0
        self.world_size = dist.get_world_size(self.group) if joined else 1

    def all_to_all(self, target: Tensor, source: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        """Send ``send[d]`` rows of ``source`` to each rank d, in rank order, and fill ``target`` likewise.

        Both tensors are contiguous and have one dtype. Splits are in rows and may be zero; both sides agree on them.
        """
        if self.world_size == 1:
            target.copy_(source)
        elif self._gloo_on(source.device):
            self._point_to_point(target, source, receive, send)
        else:
            dist.all_to_all_single(target, source, list(receive), list(send), group=self.group)

    def _gloo_on(self, device: torch.device) -> bool:
        # The name of a group for two kinds of device is "cpu:gloo,cuda:nccl", so the device's own backend is asked.
        group: Any = self.group
        return bool(group._get_backend(device).name() == "gloo")

    def _point_to_point(self, target: Tensor, source: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        # gloo's all-to-all queues its receive notices behind the payload, which halves the rate of a full-duplex
        # link. If every receive is posted before the first send, the exchange takes the ideal time.
        incoming, outgoing = target.split(list(receive)), source.split(list(send))
        works: list[dist.Work | None] = []
        for step in range(1, self.world_size):
            peer = (self.rank - step) % self.world_size
            if receive[peer]:
                works.append(dist.irecv(incoming[peer], group=self.group, group_src=peer))
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            if send[peer]:
                works.append(dist.isend(outgoing[peer], group=self.group, group_dst=peer))
        incoming[self.rank].copy_(outgoing[self.rank])
        for work in works:
            if work is not None:  # None: this rank is not in the group
                work.wait()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)

    def all_reduce_each(self, tensors: Sequence[Tensor]) -> None:
        """``all_reduce`` for each of ``tensors``, all at once, so that the latency is paid once."""
        if self.world_size > 1:
            for work in [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]:
                if work is not None:  # None: this rank is not in the group
                    work.wait()

    def broadcast(self, tensor: Tensor) -> None:
        """Make ``tensor`` that of the group's first rank, in place."""
        if self.world_size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[world_size, *tensor.shape]: every rank's tensor, all of the same shape."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return torch.stack(gathered)

    def close(self) -> None:
        """Collective if there is a group: no rank may leave while another still communicates with it."""
        if self.group is not None and dist.is_initialized():
            dist.barrier(group=self.group)
            dist.destroy_process_group(self.group)
        self.group = None
