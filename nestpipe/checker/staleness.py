"""A schedule executed on symbolic rows: which updates does each read see?

There is one row for each set of batches that could touch a row: all sets within six consecutive batches,
and all pairs. A row's weight and its optimizer state are separate sets of the updates applied, one bit per
batch. Sums (gradients over micro-batches) are ordered tuples, since the order of a floating-point sum
shows in its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nestpipe.checker.problem import Problem
from nestpipe.schedule.operations import Op, Schedule
from nestpipe.schedule.stages import GLOBALS, MICRO_RINGS, of_stage

#: The micro-batch number of a dense gradient that has been summed over workers.
_REDUCED = 0


@dataclass
class Slot:
    """Contents of a ring slot: the (batch, micro-batch) that it was filled for, and the symbolic value."""

    owner: tuple[int, int] | None = None
    value: Any = None


@dataclass
class _State:
    schedule: Schedule
    batches: int
    slots: dict[tuple[str, int], Slot] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def slot(self, resource: str, op: Op) -> Slot:
        return self.slots.setdefault(self.schedule.slot(resource, op.ref), Slot())

    def report(self, kind: str, text: str) -> None:
        self.problems.append(Problem(kind, text))


def wrong_values(schedule: Schedule, order: Sequence[Op], batches: int) -> list[Problem]:
    """Every value that differs from unpipelined training when ``order`` is executed: stale, incomplete, order.

    Raises ValueError for a stage without a rule.
    """
    rows = _symbolic_rows(batches)
    state = _State(schedule, batches)
    zero = np.zeros((2, len(rows)), dtype=np.int64)  # row 0: weights, row 1: optimizer state
    state.slots["table", 0] = Slot((0, 0), zero.copy())
    state.slots["dense", 0] = Slot((0, 0), 0)
    state.slots["dense_gradient", 0] = Slot((0, 0), ())
    rules = {
        letter: of_stage(RULES, letter, "a rule for the checker", "RULES in nestpipe/checker/staleness.py")
        for letter in dict.fromkeys(op.ref.stage for op in schedule.ops)
    }
    for op in order:
        if not _reads_own_slots(state, op):
            continue
        touched = (rows >> op.ref.batch & 1).astype(bool)
        rules[op.ref.stage](state, op, rows, touched)
    _check_end(state, rows)
    return state.problems


def _symbolic_rows(batches: int) -> np.ndarray:
    """int64: one number per row, bit b set if batch b touches it."""
    near = np.arange(1, 1 << min(batches, 6), dtype=np.int64)
    rows = [near << first for first in range(batches - min(batches, 6) + 1)]
    pairs = [1 << a | 1 << b for b in range(batches) for a in range(b)]
    return np.unique(np.concatenate([*rows, np.array(pairs, dtype=np.int64)]))


def _reads_own_slots(state: _State, op: Op) -> bool:
    """Whether every ring slot that ``op`` reads holds the value of its own batch, neither missing nor overwritten."""
    for resource in op.reads:
        name = resource.removesuffix("-1")
        if name in GLOBALS or (resource.endswith("-1") and op.ref.batch == 0):
            continue
        slot = state.slot(resource, op)
        want = (op.ref.batch - resource.endswith("-1"), op.ref.micro if name in MICRO_RINGS else 0)
        if slot.owner != want:
            holds = "nothing yet" if slot.owner is None else f"what belongs to batch {slot.owner[0]}"
            state.report("stale", f"{op.ref} reads {name} of batch {want[0]}, but the slot holds {holds}")
            return False
    return True


def _fill(state: _State, op: Op, name: str, value: Any) -> None:
    """Write ``value`` if the operation declares that it writes there. If it does not, readers miss the value."""
    if name not in op.writes:
        return
    slot = state.slot(name, op)
    slot.owner = (op.ref.batch, op.ref.micro if name in MICRO_RINGS else 0)
    slot.value = value


def _pass_on(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    for name in op.writes:
        _fill(state, op, name, ())


def _retrieve(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    _fill(state, op, "buffer", np.where(touched, state.slots["table", 0].value, -1))


def _synchronise(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    if op.ref.batch == 0:
        return
    target, source = state.slot("buffer", op), state.slot("buffer-1", op)
    if target.owner != (op.ref.batch, 0):
        state.report("stale", f"{op.ref} synchronises a buffer that has not been filled for batch {op.ref.batch}")
        return
    both = touched & (rows >> (op.ref.batch - 1) & 1).astype(bool)
    target.value = np.where(both, source.value, target.value)


def _send(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    value = state.slot("buffer", op).value
    want = rows & ((1 << op.ref.batch) - 1)  # every update of an earlier batch that touches the row
    wrong = touched & (value[0] != want)
    if wrong.any():
        state.report("stale", _stale_read(op, rows, value[0], want, wrong))
    _fill(state, op, "received", value[0].copy())


def _stale_read(op: Op, rows: np.ndarray, seen: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> str:
    # Name the most recent missing update: rows that two neighbouring batches share are the most common case.
    row = int(np.flatnonzero(wrong)[-1])
    missing = [b for b in range(op.ref.batch) if (want[row] & ~seen[row]) >> b & 1]
    extra = [b for b in range(op.ref.batch, 63) if (seen[row] & ~want[row]) >> b & 1] if seen[row] >= 0 else []
    if extra:
        return f"{op.ref} reads a row that already has the update of batch {extra[0]}: read too late"
    last = missing[-1]
    return (
        f"{op.ref} reads a stale row: the update U{last} is missing (rows that batches {last} and {op.ref.batch} share)"
    )


def _forward(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    version = state.slots["dense", 0].value
    if version != op.ref.batch:
        text = f"{op.ref} computes with dense weights after {version} of {op.ref.batch} optimizer steps"
        state.report("stale", text)
    _fill(state, op, "activation", version)


def _backward(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    version = state.slots["dense", 0].value
    if version != op.ref.batch:
        text = f"{op.ref} computes with dense weights after {version} of {op.ref.batch} optimizer steps"
        state.report("stale", text)
    _fill(state, op, "gradient", (op.ref.batch, op.ref.micro))
    total = state.slots["dense_gradient", 0]
    total.value = (*total.value, (op.ref.batch, op.ref.micro))


def _arrive(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    gradient = state.slot("gradient", op).value
    if state.schedule.replicated and not state.schedule.averages_replicas:
        _fill(state, op, "arrived", gradient)  # D sums it over groups
    else:
        _accumulate(state, op, gradient)


def _accumulate(state: _State, op: Op, gradient: tuple[int, int]) -> None:
    if "accumulator" not in op.writes:
        return
    slot = state.slot("accumulator", op)
    if slot.owner != (op.ref.batch, 0):
        if slot.value:
            left = slot.owner[0] if slot.owner else "?"
            state.report("stale", f"{op.ref} adds to an accumulator whose gradients of batch {left} were never used")
        slot.owner = (op.ref.batch, 0)
        slot.value = ()
    slot.value = (*slot.value, gradient)


def _synchronise_replicas(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    if not state.schedule.averages_replicas:
        _accumulate(state, op, state.slot("arrived", op).value)
        return
    for name in op.writes:
        slot = state.slot(name, op)
        slot.value = np.where(touched, slot.value | 1 << op.ref.batch, slot.value)


def _all_reduce(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    total = state.slots["dense_gradient", 0]
    _check_sum(state, op, total.value, "dense gradients")
    total.value = (*total.value, (op.ref.batch, _REDUCED))
    _fill(state, op, "loss_count", op.ref.batch)


def _check_sum(state: _State, op: Op, got: tuple[Any, ...], what: str) -> None:
    want = [(op.ref.batch, m) for m in range(1, state.schedule.micro_batches + 1)]
    if sorted(got) != want:
        text = f"{op.ref} consumes the {what} of {_names(got)}, but it must be {_names(want)}, each once"
        state.report("incomplete", text)
    elif list(got) != want:
        order = ", ".join(str(m) for _, m in got)
        text = f"{op.ref} consumes {what} summed in the order {order}: equal to float tolerance, not bit for bit"
        state.report("order", text)


def _names(gradients: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"A{batch}" if micro == _REDUCED else f"{batch}.{micro}" for batch, micro in gradients) or "none"


def _sparse_update(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    slot = state.slot("accumulator", op)
    if slot.owner == (op.ref.batch, 0):
        _check_sum(state, op, slot.value, "embedding gradients")
    else:
        _check_sum(state, op, (), "embedding gradients")
    slot.owner = None
    slot.value = ()
    name = "table" if state.schedule.updates_table else "buffer"
    target = state.slot(name, op)
    if name == "buffer" and target.owner != (op.ref.batch, 0):
        state.report("stale", f"{op.ref} updates a buffer that does not hold batch {op.ref.batch}")
        return
    want = rows & ((1 << op.ref.batch) - 1)
    wrong = touched & ((target.value != want).any(axis=0))
    if wrong.any():
        state.report("stale", _stale_read(op, rows, np.where(wrong, target.value.min(axis=0), want), want, wrong))
    if not state.schedule.averages_replicas:  # otherwise only this group has the update until D
        target.value = np.where(touched, target.value | 1 << op.ref.batch, target.value)


def _dense_update(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    total = state.slots["dense_gradient", 0]
    if not total.value or total.value[-1] != (op.ref.batch, _REDUCED):
        text = f"{op.ref} uses dense gradients that A{op.ref.batch} has not yet summed over workers"
        state.report("incomplete", text)
    total.value = ()
    state.slots["dense", 0].value += 1


def _write_back(state: _State, op: Op, rows: np.ndarray, touched: np.ndarray) -> None:
    table, source = state.slots["table", 0], state.slot("buffer", op).value
    table.value = np.where(touched, source, table.value)


def _check_end(state: _State, rows: np.ndarray) -> None:
    table = state.slots["table", 0].value
    wrong = (table != rows).any(axis=0)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[-1])
        missing = [b for b in range(state.batches) if (rows[row] & ~table[:, row].min()) >> b & 1]
        which = f"the update of batch {missing[-1]}" if missing else "a consistent pair of weight and optimizer state"
        state.report("incomplete", f"at the end the host table lacks {which} (weight or optimizer state)")
    if state.slots["dense", 0].value != state.batches:
        done = state.slots["dense", 0].value
        state.report("incomplete", f"at the end the dense weights have had {done} of {state.batches} optimizer steps")


Rule = Callable[[_State, Op, np.ndarray, np.ndarray], None]

#: By stage, what executes an operation on symbolic rows, given (state, operation, rows, rows that its batch touches).
RULES: Mapping[str, Rule] = {
    "P": _pass_on,
    "H": _pass_on,
    "K": _pass_on,
    "R": _retrieve,
    "S": _synchronise,
    "E": _send,
    "F": _forward,
    "B": _backward,
    "G": _arrive,
    "D": _synchronise_replicas,
    "A": _all_reduce,
    "U": _sparse_update,
    "O": _dense_update,
    "W": _write_back,
}
