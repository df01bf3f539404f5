"""Real TorchRec's pipelines as schedules: declared here, observed in a run's trace."""

from __future__ import annotations

from collections.abc import Iterable

from nestpipe.schedule.building import op, schedule
from nestpipe.schedule.operations import Op, Schedule


def torchrec_schedule(name: str = "torchrec", before_step: Iterable[Op] = ()) -> Schedule:
    """The schedule of torchrec's ``TrainPipelineSparseDist``, as declared; one host thread issues all in this order.

    Key routing of the next batch runs during this batch's forward. The fused optimizer updates the
    table inside backward, so there is no buffer to write back and nothing to synchronise. ``before_step``: operations
    between U and O, which O waits for.
    """
    extra = list(before_step)
    last = " ".join(o.ref.relative() for o in extra)
    ops = [
        op("K+1", after="H+1 O-1"),
        op("P+2", after="O-1"),
        op("H+2", after="P+2"),
        op("R", after="K H+2"),
        op("E.1", after="R"),
        op("F.1", after="E.1"),
        op("B.1", after="F.1"),
        op("A", after="B.1"),
        op("G.1", after="B.1"),
        op("U", after="G.1", writes="accumulator table"),
        *extra,
        op("O", after=f"U A {last}"),
    ]
    return schedule(name, 1, ops)
