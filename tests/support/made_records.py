"""Records made up for tests of tables and figures: no process runs, times are whatever the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from nestpipe.measurement.record import METRICS, Record
from results.experiments.plan import FULL, SIZE_SWEEP

_PAPER = {"serial": "TorchRec", "nestpipe": "NestPipe", "dbp-only": "DBP-only", "fwp-only": "FWP-only"}


def measured(
    method: str,
    step_ms: Sequence[float],
    *,
    workers: int = 2,
    paced: bool = True,
    seed: int = 1,
    micro_batches: int = 1,
    clustering: bool = False,
    exposed: float = 20.0,
    **model: Any,
) -> Record:
    """A measured record in rounds of three steps; ``exposed``: ms of communication on the critical path."""
    steps = [7 * (i // 3) + 4 + i % 3 for i in range(len(step_ms))]
    values = {name: [0.0] * len(steps) for name in METRICS}
    values["step_ms"] = list(step_ms)
    values["qps"] = [64 * workers / ms * 1e3 for ms in step_ms]
    values["dense_ms"] = [0.5 * ms for ms in step_ms]
    values["communication_ms"] = [40.0] * len(steps)
    values["exposed_communication_ms"] = [exposed] * len(steps)
    values["embedding_bytes"] = [1e6] * len(steps)
    config = replace(FULL, pace_dense=150.0 if paced else 0.0, clustering=clustering, micro_batches=micro_batches)
    if model:
        config = replace(config, data=SIZE_SWEEP.data, model=replace(SIZE_SWEEP.model, **model))
    whole = {k: v for k, v in asdict(config).items() if k not in ("methods", "workers", "seed", "testbed", "timeout")}
    return Record(
        kind="measured",
        method=method,
        paper_method=_PAPER.get(method),
        workers=workers,
        seed=seed,
        config=whole,
        steps=steps,
        metrics=values,
        losses=[3.0, 2.9, 2.8],
        paced=paced,
        testbed="netns:200mbit,1ms",
        provenance={"versions": {"torch": "0"}, "commit": "abc", "host": {"cpu": "any", "cores": 2}},
    )


def session(**options: Any) -> list[Record]:
    """One interleaved run: each method's steps in two rounds, the second round 10 % slower for all."""
    steps = {"serial": 300.0, "serial(8)": 330.0, "torchrec": 280.0, "dbp-only": 250.0, "nestpipe": 200.0}
    return [
        measured(name, [ms, ms + 1, ms - 1, 1.1 * ms, 1.1 * ms + 1, 1.1 * ms - 1], exposed=ms / 10, **options)
        for name, ms in steps.items()
    ]
