"""Key routing: which rows of which rank a batch needs, for each micro-batch.

Keys are deduplicated on both sides. The requester sends each distinct key of a micro-batch once. The
owner retrieves each distinct row of the batch once, no matter how many ranks asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.embedding.host_table import ShardLayout
from nestpipe.embedding.memory import HOST
from nestpipe.ranks.collectives import Exchange

Agree = Callable[[Tensor], Tensor]


def _no_positions() -> Tensor:
    return HOST.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class MicroPlan:
    """One micro-batch's part of a routing plan. All tensors are int64.

    ``inverse`` [keys]: for each key, feature after feature, its row among those received. ``receive`` and ``send``:
    how many rows come from and go to each rank. ``send_index`` [sum(send)]: positions in the buffer of the rows to
    send, in rank order of their requesters.

    Only if tables are replicated over groups: ``everywhere`` [n]: positions in the buffer of the rows that any
    group's micro-batch touches. ``arrive_index`` [sum(send)]: positions in ``everywhere`` of the rows sent.
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

    ``rows`` int64 [distinct], sorted: local rows of this rank that the batch touches on any rank. ``shared`` and
    ``shared_before``: positions of the rows that both batches touch, in ``rows`` and in the previous plan's ``rows``.

    Counts of the keys that this rank asks for: ``travelling``, each once per micro-batch; ``distinct``, each once
    per batch; ``remote`` and ``minimum_remote``, those of ``travelling`` and ``distinct`` that other ranks own.

    ``ended``: no rank has any more data, and the plan is empty.
    """

    micro: tuple[MicroPlan, ...] = ()
    rows: Tensor = field(default_factory=_no_positions)
    shared: Tensor = field(default_factory=_no_positions)
    shared_before: Tensor = field(default_factory=_no_positions)
    global_samples: int = 0
    travelling: int = 0
    distinct: int = 0
    remote: int = 0
    minimum_remote: int = 0
    ended: bool = False

    @property
    def synchronised(self) -> list[int]:
        """The number of rows that D exchanges for each micro-batch; empty if tables are not replicated."""
        return [len(m.everywhere) for m in self.micro if m.everywhere is not None]


def batch_keys(parts: Sequence[Batch], layout: ShardLayout) -> Tensor:
    """int64 [keys]: each key as one number for (micro-batch, owner, local row), so that sorting groups them like that.

    Raises ValueError, which names feature, key and table, if a key is negative or beyond the table.
    """
    span = layout.world_size * layout.local_rows
    pieces = []
    for m, part in enumerate(parts):
        for t, table in enumerate(layout.tables):
            for feature in part.features_of(table):
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
    return torch.cat(pieces) if pieces else _no_positions()


@dataclass(frozen=True)
class _Wanted:
    """The keys that this rank asks for.

    ``distinct`` int64: sorted numbers of ``batch_keys``. ``inverse`` int64 [keys]: each key's position in
    ``distinct``. ``bounds`` int64 [micro-batches * ranks + 1]: the index in ``distinct`` at which each
    (micro-batch, owner) begins. ``counts`` int64 [micro-batches, ranks]: distinct keys of each.
    """

    distinct: Tensor
    inverse: Tensor
    bounds: np.ndarray
    counts: np.ndarray


def _only_this_group(facts: Tensor) -> Tensor:
    return facts.unsqueeze(0)


def route(
    parts: Sequence[Batch],
    ended: bool,
    layout: ShardLayout,
    exchange: Exchange,
    previous: RoutingPlan | None,
    agree: Agree = _only_this_group,
    taken: int = 0,
) -> RoutingPlan:
    """The routing plan of a batch, whose micro-batches are ``parts``. Collective: exchanges sizes, then keys.

    ``ended``: this rank has no more data and ``parts`` are empty. It still takes part until no rank has any data.
    ``previous``: the plan of the previous batch, if buffers are to be synchronised with it. ``agree``: maps numbers
    that the group of ``exchange`` knows, int64 [n], to those of all groups, [groups, n]. ``taken``: how many iterators
    this rank has been given. Raises ValueError on all ranks if they differ in that.
    """
    wanted = _count(parts, layout)
    asked, facts = _exchange_counts(wanted, sum(map(len, parts)), ended, taken, exchange)
    samples, groups_ended, least, most = agree(facts).unbind(1)
    _require_one_pass(int(least.min()), int(most.max()))
    global_samples = int(samples.sum())
    if groups_ended.all():
        return RoutingPlan(ended=True)
    local = wanted.distinct % layout.local_rows
    incoming = _exchange_keys(local, wanted.counts, asked, exchange)
    if asked.size == 1:
        rows, positions = local, torch.arange(len(local))  # already distinct and sorted
    else:
        rows, positions = torch.unique(incoming, return_inverse=True)
    micro = _micro_plans(parts, layout, wanted, asked, positions)
    shared, shared_before = shared_positions(rows, previous.rows) if previous is not None else (rows[:0], rows[:0])
    span = layout.world_size * layout.local_rows
    once = wanted.distinct if len(parts) == 1 else torch.unique(wanted.distinct % span)
    own = torch.tensor([exchange.rank * layout.local_rows, (exchange.rank + 1) * layout.local_rows])
    low, high = torch.searchsorted(once, own).tolist()
    return RoutingPlan(
        micro=micro,
        rows=rows,
        shared=shared,
        shared_before=shared_before,
        global_samples=global_samples,
        travelling=len(wanted.distinct),
        distinct=len(once),
        remote=len(wanted.distinct) - int(wanted.counts[:, exchange.rank].sum()),
        minimum_remote=len(once) - (high - low),
    )


def _count(parts: Sequence[Batch], layout: ShardLayout) -> _Wanted:
    """Deduplicate the keys of each micro-batch and count them by owner."""
    distinct, inverse = torch.unique(batch_keys(parts, layout), return_inverse=True)
    # Counts use numpy: for a few numbers it is faster than torch, and does not release the interpreter each time.
    edges = torch.from_numpy(np.arange(len(parts) * layout.world_size + 1) * layout.local_rows)
    bounds = torch.searchsorted(distinct, edges).numpy()
    return _Wanted(distinct, inverse, bounds, np.diff(bounds).reshape(len(parts), layout.world_size))


def _exchange_counts(
    wanted: _Wanted, samples: int, ended: bool, taken: int, exchange: Exchange
) -> tuple[np.ndarray, Tensor]:
    """Keys that each rank asks this one for, int64 [ranks, micro-batches], and facts about the group, int64 [4].

    The facts: its samples; whether its data has ended; the least and the most iterators that its ranks were given.
    """
    micros, world = wanted.counts.shape
    facts = np.empty((world, micros + 3), dtype=np.int64)
    facts[:, :micros] = wanted.counts.T
    facts[:, micros] = samples
    facts[:, micros + 1] = ended
    facts[:, micros + 2] = taken
    theirs = np.empty_like(facts)
    exchange.all_to_all(torch.from_numpy(theirs), torch.from_numpy(facts), [1] * world, [1] * world)
    total, all_ended, takens = theirs[:, micros].sum(), theirs[:, micros + 1].all(), theirs[:, micros + 2]
    return theirs[:, :micros], torch.tensor([int(total), int(all_ended), int(takens.min()), int(takens.max())])


def _require_one_pass(least: int, most: int) -> None:
    if least != most:
        raise ValueError(
            f"ranks read different passes over the data (one was given {least} iterators so far, another {most}): "
            "pass a new iterator to progress() in the same call on every rank"
        )


def _exchange_keys(local: Tensor, counts: np.ndarray, asked: np.ndarray, exchange: Exchange) -> Tensor:
    """int64 [asked.sum()]: local rows that the ranks ask this one for, by rank and then by micro-batch."""
    micros, world = counts.shape
    outgoing = local
    if micros > 1:  # keys are sent grouped by owner, but were sorted by micro-batch first
        pieces = local.split(counts.flatten().tolist())
        outgoing = torch.cat([pieces[m * world + r] for r in range(world) for m in range(micros)])
    incoming = HOST.empty(int(asked.sum()), dtype=torch.int64)
    exchange.all_to_all(incoming, outgoing, asked.sum(1).tolist(), counts.sum(0).tolist())
    return incoming


def _micro_plans(
    parts: Sequence[Batch], layout: ShardLayout, wanted: _Wanted, asked: np.ndarray, positions: Tensor
) -> tuple[MicroPlan, ...]:
    """``positions`` int64 [asked.sum()]: for each row that a rank asks for, its position in the buffer."""
    micros, world = wanted.counts.shape
    chunks = positions.split(asked.flatten().tolist())  # [requester][micro-batch]
    keys = [sum(part.sparse[f].values().numel() for t in layout.tables for f in part.features_of(t)) for part in parts]
    starts = wanted.bounds[: micros * world : world].tolist()  # each micro-batch's first key
    plans = []
    for m, inverse in enumerate(wanted.inverse.split(keys)):
        index = [chunks[r * micros + m] for r in range(world)]
        plans.append(
            MicroPlan(
                inverse=inverse - starts[m] if starts[m] else inverse,
                receive=tuple(wanted.counts[m].tolist()),
                send=tuple(asked[:, m].tolist()),
                send_index=index[0] if world == 1 else torch.cat(index),
            )
        )
    return tuple(plans)


def shared_positions(rows: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in ``rows`` and in ``previous`` of their common values. Both are int64, sorted and distinct."""
    if not len(rows) or not len(previous):
        return rows[:0], rows[:0]
    at = torch.searchsorted(previous, rows).clamp_(max=len(previous) - 1)
    shared = (previous[at] == rows).nonzero().squeeze(1)
    return shared, at[shared]
