"""The baselines as methods that ``nestpipe`` finds by entry point. Their packages are imported when one is built."""

from __future__ import annotations

from nestpipe.methods import Method
from nestpipe.schedule import Schedule, op, schedule
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, Trainer


def torchrec_schedule(micro_batches: int = 1) -> Schedule:
    """What torchrec's ``TrainPipelineSparseDist`` does, declared; one host thread issues everything in this order.

    Key routing of the next batch runs beside this batch's forward. The fused optimizer updates the
    table inside backward, so there is no buffer to write back and nothing to synchronise.
    """
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
        op("O", after="U A"),
    ]
    return schedule("torchrec", 1, ops)


def _build_torchrec(
    spec: ModelSpec, sparse: SparseOptimizer, dense: DenseOptimizer, seed: int, micro_batches: int
) -> Trainer:
    from baselines.torchrec_dmp import TorchRecTrainer

    return TorchRecTrainer(spec, sparse, dense, seed)


TORCHREC = Method(
    "torchrec",
    "real TorchRec: DistributedModelParallel, row-wise, fused kernel, TrainPipelineSparseDist",
    torchrec_schedule,
    _build_torchrec,
    observed=True,
    micro_batches=1,
)
