"""2D-SP (two-dimensional sparse parallelism, arXiv 2508.03854) as schedules, alone and inside NestPipe.

Tables are sharded inside groups of workers and replicated between the groups. The All2Alls stay in
a group; the replicas are synchronised by an AllReduce, which the cost model counts with the gradient
All2All G. The method's momentum-scaled AdaGrad and replicas that drift between synchronisations
change the update rule, which the mark on U says.
"""

from __future__ import annotations

from dataclasses import replace

from nestpipe.schedule import Schedule, nestpipe, serial


def two_d_sp() -> Schedule:
    """Unpipelined, one micro-batch."""
    return _changed_update(serial(), "2d-sp")


def nestpipe_two_d_sp(micro_batches: int = 8) -> Schedule:
    """NestPipe whose exchanges stay in a group: the replica synchronisation travels with each micro-batch's G."""
    return _changed_update(nestpipe(micro_batches), "nestpipe+2d-sp")


def _changed_update(schedule: Schedule, name: str) -> Schedule:
    ops = tuple(replace(o, marks=("update_rule",)) if o.ref.stage == "U" else o for o in schedule.ops)
    return replace(schedule, name=name, ops=ops)
