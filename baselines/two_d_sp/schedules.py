"""2D-SP (two-dimensional sparse parallelism, arXiv 2508.03854) as schedules, by itself and inside NestPipe.

Tables are sharded inside groups of workers and replicated between the groups. The All2Alls stay inside
a group. Stage ``D`` brings what the other groups have learned, micro-batch by micro-batch, so that
NestPipe hides it like the gradient All2All (Table IV: 1/8 of 452 ms stays exposed). The method's
momentum-scaled AdaGrad changes the update rule, and the mark on ``U`` says so: the engine then keeps the
gradients of the groups apart and averages what each group's update would have given. Without the mark
(the exact form), D sums gradients over groups, and U is that of plain synchronous training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baselines.torchrec.schedules import torchrec_schedule
from nestpipe.methods import MethodOptions
from nestpipe.schedule.building import one_at_a_time, op, schedule
from nestpipe.schedule.operations import Op, Schedule
from nestpipe.schedule.templates import nestpipe, serial


def two_d_sp(micro_batches: int, options: MethodOptions) -> Schedule:
    """2D-SP as declared: torchrec's order, with D(t), the averaging of the replicas, between U(t) and O(t).

    D changes the update rule unless it follows every SGD step (see ``baselines.two_d_sp.trainer``). With an interval
    above 1, most batches have no D; the declared step is one that has it.
    """
    synchronous = options.sparse_optimizer == "sgd" and options.sync_interval == 1
    replicas = op("D.1", after="U A", reads="", writes="table", marks=() if synchronous else ("update_rule",))
    return torchrec_schedule("2d-sp", [replicas])


def unpipelined_two_d_sp(micro_batches: int = 1) -> Schedule:
    """Nothing overlaps, and D comes before the update: the schedule assumed for the paper's step times of 2D-SP."""
    ops = [replace(o, after=()) for o in serial(micro_batches).ops]
    return schedule("2d-sp", micro_batches, one_at_a_time(_with_replicas(ops)), derive=False)


def nestpipe_two_d_sp(micro_batches: int = 8, received: int = 3) -> Schedule:
    """NestPipe with exchanges that stay inside a group, and with 2D-SP's update rule."""
    template = nestpipe(micro_batches, received)
    ops = [replace(o, after=()) for o in template.ops]  # edges are derived again, with D included
    return schedule("nestpipe+2d-sp", micro_batches, _with_replicas(ops), received=received)


def nestpipe_two_d_sp_exact(micro_batches: int = 8, received: int = 3) -> Schedule:
    """``nestpipe_two_d_sp`` with the update rule of plain synchronous training."""
    return without_marks(nestpipe_two_d_sp(micro_batches, received), "nestpipe+2d-sp-exact")


def without_marks(template: Schedule, name: str | None = None) -> Schedule:
    ops = tuple(replace(o, marks=()) for o in template.ops)
    return replace(template, name=name or template.name, ops=ops)


def _with_replicas(ops: Sequence[Op]) -> list[Op]:
    result: list[Op] = []
    for o in ops:
        if o.ref.stage == "G":
            result += [replace(o, writes=("arrived",)), op(f"D.{o.ref.micro}")]
        elif o.ref.stage == "U":
            result.append(replace(o, marks=("update_rule",)))
        else:
            result.append(o)
    return result
