"""Key routing: which rows of which rank a batch needs, micro-batch by micro-batch.

Keys are deduplicated on both sides: the requester sends each distinct key of a micro-batch once,
the owner retrieves each distinct row of the batch once, whoever asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.embedding.host_table import ShardLayout
from nestpipe.ranks.collectives import Exchange

Agree = Callable[[int, bool], tuple[int, bool]]


@dataclass(frozen=True)
class MicroPlan:
    """One micro-batch's part of a routing plan; all int64.

    ``inverse`` [keys]: per key, features one after the other, its row among the received;
    ``receive``/``send``: rows from and to each rank; ``send_index`` [sum(send)]: positions in the
    buffer of the rows that travel, in rank order of their requesters. Where tables are replicated over groups:
    ``everywhere`` [n], positions in the buffer of the rows that any group's micro-batch touches, and ``arrive_index``
    [sum(send)], positions in ``everywhere`` of the rows that travel here.
    """

    inverse: Tensor
    receive: tuple[int, ...]
    send: tuple[int, ...]
    send_index: Tensor
    everywhere: Tensor | None = None
    arrive_index: Tensor | None = None


@dataclass(frozen=True)
class RoutingPlan:
    """Everything that later stages need to know about a batch's keys.

    ``rows`` int64 [distinct], sorted: local rows of this rank that the batch touches, anywhere.
    ``shared``/``shared_before``: positions in ``rows`` and in the previous plan's ``rows`` of the
    rows that both batches touch. ``travelling``: keys that this rank asks for, each once per
    micro-batch; ``distinct``: each once per batch; ``remote``, ``minimum_remote``: those of other
    ranks among them. ``ended``: no rank has any more data (an empty plan).
    """

    micro: tuple[MicroPlan, ...] = ()
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    shared: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    shared_before: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    global_samples: int = 0
    travelling: int = 0
    distinct: int = 0
    remote: int = 0
    minimum_remote: int = 0
    ended: bool = False

    @property
    def synchronised(self) -> list[int]:
        """Rows per micro-batch that D exchanges; empty where tables are not replicated."""
        return [len(m.everywhere) for m in self.micro if m.everywhere is not None]


def batch_keys(parts: Sequence[Batch], layout: ShardLayout) -> Tensor:
    """int64 [keys]: every key as (micro-batch, owner, local row) in one number, so that sorting groups them so.

    Raises ValueError naming feature, key and table where a key is negative or beyond the table.
    """
    span = layout.world_size * layout.local_rows
    pieces = []
    for m, part in enumerate(parts):
        for t, table in enumerate(layout.tables):
            for feature in table.features:
                keys = part.sparse[feature].values()
                if not len(keys):
                    continue
                low, high = torch.aminmax(keys)
                if low < 0 or high >= table.rows:
                    bad = int(low if low < 0 else high)
                    raise ValueError(
                        f"feature '{feature}' holds key {bad}, but table '{table.name}' has rows 0..{table.rows - 1}"
                    )
                if layout.world_size == 1:
                    pieces.append(keys + (m * span + layout.base[t]))
                else:
                    owner = keys // layout.block[t]
                    local = keys - owner * layout.block[t]
                    pieces.append(owner * layout.local_rows + local + (m * span + layout.base[t]))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def route(
    parts: Sequence[Batch],
    ended: bool,
    layout: ShardLayout,
    exchange: Exchange,
    before: RoutingPlan | None,
    agree: Agree = lambda samples, ended: (samples, ended),
) -> RoutingPlan:
    """The routing plan of a batch given as its micro-batches. Collective: one exchange of sizes, one of keys.

    ``ended``: this rank has no more data and ``parts`` are empty; it takes part until no rank has any.
    ``before``: the previous batch's plan, where buffers are to be synchronised with it. ``agree``: what the group of
    ``exchange`` knows (samples, has the data ended) -> what all ranks know.
    """
    world, micros = layout.world_size, len(parts)
    keys = batch_keys(parts, layout)
    distinct, inverse = torch.unique(keys, return_inverse=True)
    span = world * layout.local_rows
    # Counts are numpy's: on a few numbers it is faster than torch, and does not give the interpreter away each time.
    edges = torch.from_numpy(np.arange(micros * world + 1) * layout.local_rows)
    bounds = torch.searchsorted(distinct, edges).numpy()
    wanted = np.diff(bounds).reshape(micros, world)

    facts = np.empty((world, micros + 2), dtype=np.int64)
    facts[:, :micros], facts[:, micros], facts[:, micros + 1] = wanted.T, sum(map(len, parts)), ended
    theirs = np.empty_like(facts)
    exchange.all_to_all(torch.from_numpy(theirs), torch.from_numpy(facts), [1] * world, [1] * world)
    asked, samples_of, ended_of = theirs[:, :micros], theirs[:, micros], theirs[:, micros + 1]
    global_samples, all_ended = agree(int(samples_of.sum()), bool(ended_of.all()))
    if all_ended:
        return RoutingPlan(ended=True)

    # Keys travel grouped by owner; they were sorted by micro-batch first.
    local = distinct % layout.local_rows
    pieces = local.split(wanted.flatten().tolist())
    outgoing = local if micros == 1 else torch.cat([pieces[m * world + r] for r in range(world) for m in range(micros)])
    incoming = torch.empty(int(asked.sum()), dtype=torch.int64)
    exchange.all_to_all(incoming, outgoing, asked.sum(1).tolist(), wanted.sum(0).tolist())

    if world == 1 and micros == 1:
        rows, positions = local, torch.arange(len(local))  # already distinct and sorted
    else:
        rows, positions = torch.unique(incoming, return_inverse=True)
    chunks = positions.split(asked.flatten().tolist())  # [requester][micro-batch]
    features = [feature for table in layout.tables for feature in table.features]
    inverses = inverse.split([sum(part.sparse[feature].values().numel() for feature in features) for part in parts])
    starts = bounds[: micros * world : world].tolist()  # each micro-batch's first key
    plans = []
    for m in range(micros):
        index = [chunks[r * micros + m] for r in range(world)]
        plans.append(
            MicroPlan(
                inverses[m] - starts[m] if starts[m] else inverses[m],
                tuple(wanted[m].tolist()),
                tuple(asked[:, m].tolist()),
                index[0] if world == 1 else torch.cat(index),
            )
        )
    shared, shared_before = shared_positions(rows, before.rows) if before is not None else (rows[:0], rows[:0])
    once = distinct if micros == 1 else torch.unique(distinct % span)
    own = edges[exchange.rank : exchange.rank + 2]
    low, high = torch.searchsorted(once, own).tolist()
    return RoutingPlan(
        micro=tuple(plans),
        rows=rows,
        shared=shared,
        shared_before=shared_before,
        global_samples=global_samples,
        travelling=len(distinct),
        distinct=len(once),
        remote=len(distinct) - int(wanted[:, exchange.rank].sum()),
        minimum_remote=len(once) - (high - low),
    )


def shared_positions(rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the common values of two sorted, distinct int64 vectors, in each."""
    if not len(rows) or not len(before):
        return rows[:0], rows[:0]
    at = torch.searchsorted(before, rows).clamp_(max=len(before) - 1)
    shared = (before[at] == rows).nonzero().squeeze(1)
    return shared, at[shared]
