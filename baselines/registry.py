"""The baselines as methods that ``nestpipe`` finds by entry point. Their packages are imported when one is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from baselines.torchrec.schedules import _torchrec, torchrec_bf16_schedule, torchrec_schedule
from baselines.two_d_sp.schedules import exact, nestpipe_two_d_sp, nestpipe_two_d_sp_exact, two_d_sp_schedule
from baselines.uniemb import uniemb
from nestpipe.engine.engine import Engine
from nestpipe.methods import Build, Method, MethodOptions, scheduled_method
from nestpipe.schedule.building import marked
from nestpipe.schedule.operations import Schedule
from nestpipe.schedule.templates import nestpipe
from nestpipe.trainer import DenseOptimizer, ModelSpec, SparseOptimizer, Trainer


def _build_torchrec(name: str, planner: bool = False, bf16: bool = False, dedup: bool = False) -> Build:
    def build(
        spec: ModelSpec, sparse: SparseOptimizer, dense: DenseOptimizer, seed: int, micro_batches: int
    ) -> Trainer:
        from baselines.torchrec.sharding import one_dimensional
        from baselines.torchrec.trainer import TorchRecTrainer

        distribute = partial(one_dimensional, planner=planner, bf16=bf16, dedup=dedup)
        return TorchRecTrainer(spec, sparse, dense, seed, name=name, distribute=distribute)

    return build


def _fbgemm_refuses(dim: int, rule: str) -> str:
    """What fbgemm's CPU tables cannot hold; said before ranks start. The rules are ``torchrec_sharding.FUSED``'s."""
    if rule not in ("sgd", "rowwise_adagrad"):
        return f"fbgemm on a CPU trains tables by sgd or rowwise_adagrad, not {rule}: --sparse-optimizer"
    return f"fbgemm's tables have dims that are multiples of 4, not {dim}: --embedding-dim" if dim % 4 else ""


def _torchrec_method(name: str, summary: str, make: Callable[[int], Schedule], **sharding: bool) -> Method:
    return Method(
        name, summary, make, _build_torchrec(name, **sharding), observed=True, micro_batches=1, refuse=_fbgemm_refuses
    )


TORCHREC = _torchrec_method(
    "torchrec",
    "real TorchRec: DistributedModelParallel, row-wise, fused kernel, TrainPipelineSparseDist",
    torchrec_schedule,
)
TORCHREC_PLANNER = _torchrec_method(
    "torchrec-planner",
    "real TorchRec, tables sharded as its planner chooses (row-wise or table-wise)",
    lambda _: _torchrec("torchrec-planner"),
    planner=True,
)
TORCHREC_BF16 = _torchrec_method(
    "torchrec-bf16",
    "real TorchRec with embeddings and gradients quantised to bfloat16 on the wire (QCommsConfig)",
    torchrec_bf16_schedule,
    bf16=True,
)
TORCHREC_DEDUP = _torchrec_method(
    "torchrec-dedup",
    "real TorchRec with index deduplication; on a CPU by a kernel of ours, which fbgemm lacks there",
    lambda _: _torchrec("torchrec-dedup"),
    dedup=True,
)


def _adapt_two_d_sp(method: Method, options: MethodOptions) -> Method:
    def build(
        spec: ModelSpec, sparse: SparseOptimizer, dense: DenseOptimizer, seed: int, micro_batches: int
    ) -> Trainer:
        from baselines.two_d_sp.trainer import two_d_sp_trainer

        return two_d_sp_trainer(spec, sparse, dense, seed, options.replica_groups, options.sync_interval)

    return replace(method, schedule=partial(two_d_sp_schedule, options), build=build)


TWO_D_SP = _adapt_two_d_sp(
    Method(
        "2d-sp",
        "real TorchRec's DMPCollection: tables sharded in replica groups, replicas averaged (--replica-groups)",
        torchrec_schedule,
        _build_torchrec("2d-sp"),
        "2D-SP",
        observed=True,
        micro_batches=1,
        adapt=_adapt_two_d_sp,
        refuse=_fbgemm_refuses,
    ),
    MethodOptions(),
)


def _grouped_method(name: str, summary: str, make: Callable[[int], Schedule], paper: str | None = None) -> Method:
    """A method of the engine in replica groups. With SGD, 2D-SP's update rule is the plain one: no mark."""

    def adapt(method: Method, options: MethodOptions) -> Method:
        def template(micro_batches: int) -> Schedule:
            found = make(micro_batches)
            return exact(found, name) if options.sparse_optimizer == "sgd" else found

        def build(
            spec: ModelSpec, sparse: SparseOptimizer, dense: DenseOptimizer, seed: int, micro_batches: int
        ) -> Trainer:
            groups = options.replica_groups
            return Engine(template(micro_batches), spec, sparse, dense, seed, replica_groups=groups)

        return replace(method, schedule=template, build=build)

    return adapt(replace(scheduled_method(name, summary, make, paper), adapt=adapt), MethodOptions())


NESTPIPE_TWO_D_SP = _grouped_method(
    "nestpipe+2d-sp", "NestPipe in replica groups, with 2D-SP's update rule", nestpipe_two_d_sp, "NestPipe+2D-SP"
)
NESTPIPE_TWO_D_SP_EXACT = _grouped_method(
    "nestpipe+2d-sp-exact",
    "NestPipe in replica groups, gradients summed over groups before the update: synchronous",
    nestpipe_two_d_sp_exact,
)
NESTPIPE_BF16 = scheduled_method(
    "nestpipe+bf16",
    "NestPipe with embeddings and gradients in bfloat16 on the wire",
    lambda n: replace(marked(nestpipe(n), "EG", "lossy"), name="nestpipe+bf16"),
)
UNIEMB = scheduled_method(
    "uniemb",
    "UniEmb reconstructed: lookups prefetched, stale by one step; All2Alls exposed",
    lambda _: uniemb(),
    "UniEmb",
    micro_batches=1,
)
