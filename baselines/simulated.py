"""The baselines as the simulator takes them: their schedules, and whether their tables are replicated in groups."""

from __future__ import annotations

from collections.abc import Mapping

from baselines.two_d_sp.schedules import nestpipe_two_d_sp, two_d_sp
from baselines.uniemb import uniemb_with_hand_over
from nestpipe.schedule.operations import Schedule
from nestpipe.simulator.methods import BUILT_IN, SimulatedMethod


def _uniemb(_: int) -> Schedule:
    return uniemb_with_hand_over()


def _two_d_sp(_: int) -> Schedule:
    return two_d_sp()


def _torchrec(_: int) -> Schedule:
    from baselines.torchrec.schedules import torchrec_schedule  # imports torch, which the others do without

    return torchrec_schedule()


BASELINES = (
    SimulatedMethod("2d-sp", _two_d_sp, "2D-SP", 1, grouped=True),
    SimulatedMethod("uniemb", _uniemb, "UniEmb", 1),
    SimulatedMethod("nestpipe+2d-sp", nestpipe_two_d_sp, "NestPipe+2D-SP", grouped=True),
    SimulatedMethod("torchrec", _torchrec, None, 1),
)

#: What the paper's tables hold, in their order, and real torchrec.
METHODS: Mapping[str, SimulatedMethod] = {
    m.name: m
    for m in (
        BUILT_IN["serial"],
        BASELINES[3],
        *BASELINES[:2],
        BUILT_IN["dbp-only"],
        BUILT_IN["fwp-only"],
        BUILT_IN["nestpipe"],
        BASELINES[2],
    )
}


def simulated_methods(names: str) -> dict[str, SimulatedMethod]:
    """METHODS, and those of ``names`` (comma-separated) that are registered besides and are all schedule.

    Left out is what the cost model does not know of: foreign pipelines' own savings, lossy communication.
    """
    wanted = {name.strip() for name in names.split(",")} - {*METHODS, "all", ""}
    if not wanted:
        return dict(METHODS)
    from nestpipe.methods import find_method, known_methods  # imports torch, which the others do without

    own = {}
    for name in sorted(wanted & set(known_methods())):
        method = find_method(name)
        ops = method.schedule(2).ops
        if not method.observed and not any("lossy" in op.marks for op in ops):
            grouped = any(op.ref.stage == "D" for op in ops)
            own[name] = SimulatedMethod(name, method.schedule, method.paper_method, method.micro_batches, grouped)
    return {**METHODS, **own}
