"""The baselines as methods that ``nestpipe`` finds by entry point. Their trainers are imported when one is built."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from baselines.torchrec.schedules import torchrec_schedule
from baselines.two_d_sp.schedules import (
    nestpipe_two_d_sp,
    nestpipe_two_d_sp_exact,
    two_d_sp,
    unpipelined_two_d_sp,
    without_marks,
)
from baselines.uniemb import uniemb, uniemb_with_hand_over
from nestpipe.methods import Method, MethodOptions, PricedAs, engine_trainer, scheduled_method
from nestpipe.schedule.building import marked
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.templates import nestpipe

if TYPE_CHECKING:
    from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, Trainer

_OWN_SAVINGS = "the cost model does not know what this variant of TorchRec saves"


def _fbgemm_cannot_train(dim: int, rule: str) -> str:
    """Why fbgemm's CPU tables cannot hold these, known before ranks start; rules as in ``torchrec.sharding.FUSED``."""
    if rule not in ("sgd", "rowwise_adagrad"):
        return f"fbgemm on a CPU trains tables by sgd or rowwise_adagrad, not {rule}: change --sparse-optimizer"
    return f"fbgemm's tables have dims that are multiples of 4, not {dim}: change --embedding-dim" if dim % 4 else ""


def _torchrec_trainer(
    method: Method,
    spec: ModelSpec,
    sparse: SparseOptimizer,
    dense: DenseOptimizer,
    seed: int,
    micro_batches: int,
    **sharding: bool,
) -> Trainer:
    from baselines.torchrec.trainer import torchrec_trainer  # imports torchrec, which is needed for training only

    return torchrec_trainer(spec, sparse, dense, seed, method.name, **sharding)


def _two_d_sp_trainer(
    method: Method, spec: ModelSpec, sparse: SparseOptimizer, dense: DenseOptimizer, seed: int, micro_batches: int
) -> Trainer:
    from baselines.two_d_sp.trainer import two_d_sp_trainer  # imports torchrec, which is needed for training only

    return two_d_sp_trainer(spec, sparse, dense, seed, method.options.replica_groups, method.options.sync_interval)


TORCHREC = Method(
    "torchrec",
    "real TorchRec: DistributedModelParallel, row-wise, fused kernel, TrainPipelineSparseDist",
    lambda _, options: torchrec_schedule(),
    _torchrec_trainer,
    observed=True,
    fixed_micro_batches=1,
    takes_micro_batches=False,
    reshards=False,
    needs=("torchrec",),
    cannot_train=_fbgemm_cannot_train,
)
TORCHREC_PLANNER = replace(
    TORCHREC,
    name="torchrec-planner",
    summary="real TorchRec, tables sharded as its planner chooses (row-wise or table-wise)",
    make_schedule=lambda _, options: torchrec_schedule("torchrec-planner"),
    make_trainer=partial(_torchrec_trainer, planner=True),
    base="torchrec",
    not_priced=_OWN_SAVINGS,
)
TORCHREC_BF16 = replace(
    TORCHREC,
    name="torchrec-bf16",
    summary="real TorchRec with embeddings and gradients quantised to bfloat16 on the wire (QCommsConfig)",
    make_schedule=lambda _, options: marked(torchrec_schedule("torchrec-bf16"), "EG", "lossy"),
    make_trainer=partial(_torchrec_trainer, bf16=True),
    base="torchrec",
)
TORCHREC_DEDUP = replace(
    TORCHREC,
    name="torchrec-dedup",
    summary="real TorchRec with index deduplication; on a CPU by our own kernel, because fbgemm has none",
    make_schedule=lambda _, options: torchrec_schedule("torchrec-dedup"),
    make_trainer=partial(_torchrec_trainer, dedup=True),
    base="torchrec",
    not_priced=_OWN_SAVINGS,
)
TWO_D_SP = replace(
    TORCHREC,
    name="2d-sp",
    summary="real TorchRec's DMPCollection: tables sharded in replica groups, replicas averaged (--replica-groups)",
    make_schedule=two_d_sp,
    make_trainer=_two_d_sp_trainer,
    paper_method="2D-SP",
    base="torchrec",
    priced_as=PricedAs(
        lambda _: unpipelined_two_d_sp(),
        "The published times of 2D-SP are those of an unpipelined step that brings the gradients of other groups "
        "together before the update. Real TorchRec also hides key routing, and averages the replicas after it.",
    ),
)


def _nestpipe_two_d_sp(micro_batches: int, options: MethodOptions) -> Schedule:
    """With SGD, 2D-SP's update rule is the plain one: no mark."""
    found = nestpipe_two_d_sp(micro_batches)
    return without_marks(found) if options.sparse_optimizer == "sgd" else found


NESTPIPE_TWO_D_SP = Method(
    "nestpipe+2d-sp",
    "NestPipe in replica groups, with 2D-SP's update rule",
    _nestpipe_two_d_sp,
    engine_trainer,
    paper_method="NestPipe+2D-SP",
)
NESTPIPE_TWO_D_SP_EXACT = scheduled_method(
    "nestpipe+2d-sp-exact",
    "NestPipe in replica groups, gradients summed over groups before the update: synchronous",
    nestpipe_two_d_sp_exact,
)
NESTPIPE_BF16 = scheduled_method(
    "nestpipe+bf16",
    "NestPipe with embeddings and gradients in bfloat16 on the wire",
    lambda n: marked(nestpipe(n, name="nestpipe+bf16"), "EG", "lossy"),
)
UNIEMB = scheduled_method(
    "uniemb",
    "UniEmb reconstructed: lookups prefetched, stale by one step; All2Alls exposed",
    lambda _: uniemb(),
    "UniEmb",
    micro_batches=1,
    priced_as=PricedAs(
        lambda _: uniemb_with_hand_over(),
        "Table II shows 36 ms of UniEmb's lookup exposed, which the cost model charges as the hand-over of prefetched "
        "rows (S). The form that is run updates the table itself and has no hand-over.",
    ),
)
