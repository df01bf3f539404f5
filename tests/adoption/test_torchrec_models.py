"""torchrec's own models, unmodified, on 2 ranks: under NestPipeline and under DistributedModelParallel.

Those of its examples that are not in the wheel are written from their description, see torchrec_examples.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("torchrec")

from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed.test_utils.model_input import ModelInput
from torchrec.distributed.test_utils.test_model import (
    TestMixedEmbeddingSparseArch,
    TestModelWithPreproc,
    TestOverArchRegroupModule,
    TestSparseNN,
    TestTowerCollectionSparseNN,
    TestTowerSparseNN,
)
from torchrec.models.deepfm import SimpleDeepFMNN, SimpleDeepFMNNWrapper
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain, DLRMWrapper
from torchrec.models.experimental.transformerdlrm import DLRM_Transformer
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import fuse_embedding_optimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nestpipe.adoption.pipeline import NestPipeline
from nestpipe.trainer import SparseOptimizer
from tests.support.dmp import train_dmp
from tests.support.torchrec_examples import Bert4Rec, TwoTowers, WithDenseTable

KEYS, DIM, ROWS, DENSE, STEPS = [f"cat_{n}" for n in range(4)], 8, 60, 5, 4
ADAGRAD = SparseOptimizer("rowwise_adagrad", lr=0.05, eps=1e-8)


def collection(names: list[str] = KEYS, device: str = "cpu") -> EmbeddingBagCollection:
    pooling = (PoolingType.SUM, PoolingType.MEAN)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                num_embeddings=ROWS + n, embedding_dim=DIM, name=f"t_{key}", feature_names=[key], pooling=pooling[n % 2]
            )
            for n, key in enumerate(names)
        ],
        device=torch.device(device),
    )


def random_batches(names: list[str] = KEYS) -> Iterator[Batch]:
    return iter(
        RandomRecDataset(
            keys=names, batch_size=12, hash_size=ROWS, ids_per_feature=3, min_ids_per_feature=0, num_dense=DENSE,
            manual_seed=10 + dist.get_rank(), num_batches=STEPS, num_generated_batches=STEPS,
        )
    )  # fmt: skip


class DeepFMTrain(nn.Module):
    """The loss that a user writes around SimpleDeepFMNN."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.BCELoss()

    def forward(self, batch):
        found = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        return self.loss(found, batch.labels.float()), found.detach()


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def transformer() -> nn.Module:
    return without_dropout(
        DLRMTrain(DLRM_Transformer(collection(), DENSE, [16, DIM], [16, 1], nhead=2, ntransformer_layers=1))
    )


def tables(prefix: str = "", count: int = 4) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            num_embeddings=ROWS + n,
            embedding_dim=DIM,
            name=f"{prefix}table_{n}",
            feature_names=[f"{prefix}feature_{n}"],
        )
        for n in range(count)
    ]


def sparse_nn(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    cpu = torch.device("cpu")
    return lambda: kind(
        tables=tables(), weighted_tables=tables("weighted_", 2), num_float_features=10, dense_device=cpu,
        sparse_device=cpu, **options,
    )  # fmt: skip


def mixed() -> nn.Module:
    sequence = EmbeddingConfig(num_embeddings=ROWS + 2, embedding_dim=DIM, name="table_2", feature_names=["feature_2"])
    return TestMixedEmbeddingSparseArch(
        tables=[*tables(count=2), sequence], num_float_features=10, dense_device=torch.device("cpu")
    )


def inputs(weighted: bool = True) -> Callable[[], Iterator[ModelInput]]:
    def batches() -> Iterator[ModelInput]:
        with torch.random.fork_rng():
            torch.manual_seed(77)
            made = [
                ModelInput.generate_global_and_local_batches(
                    world_size=2, batch_size=12, num_float_features=10, tables=tables(),
                    weighted_tables=tables("weighted_", 2) if weighted else [], pooling_avg=4,
                )[1][dist.get_rank()]
                for _ in range(STEPS)
            ]  # fmt: skip
        return iter(made)

    return batches


def sequences() -> Iterator[Batch]:
    """Sequences of up to 8 items, some of which are masked."""
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(STEPS):
        lengths = torch.randint(1, 9, (12,), generator=generator)
        ids = torch.randint(1, ROWS, (int(lengths.sum()),), generator=generator)
        masked = torch.rand(12, 8, generator=generator) < 0.3
        masked[:, 0] = True
        labels = torch.randint(1, ROWS, (12, 8), generator=generator) * masked
        yield Batch(torch.zeros(12, 1), KeyedJaggedTensor(["item"], ids, lengths=lengths), labels)


@dataclass(frozen=True)
class Model:
    """``refused``: the message with micro-batches. ``options``: of NestPipeline. ``reference``: what DMP trains."""

    make: Callable[[], nn.Module]
    batches: Callable[[], Iterator[Any]] = random_batches
    refused: str = ""
    options: Any = None
    reference: Callable[[], nn.Module] | None = None


def bert(loss: str) -> Callable[[], nn.Module]:
    return lambda: Bert4Rec(ROWS, 8, DIM, loss)


ONE = {"micro_batches": 1}
TWO = ["query", "item"]
MODELS = {
    "DLRM": Model(lambda: DLRMTrain(DLRM(collection(), DENSE, [16, DIM], [16, 1]))),
    "DLRM_DCN": Model(
        lambda: DLRMTrain(DLRM_DCN(collection(), DENSE, [16, DIM], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=8))
    ),
    "DLRM_Projection": Model(
        lambda: DLRMTrain(
            DLRM_Projection(
                collection(),
                DENSE,
                [16, DIM],
                [16, 1],
                interaction_branch1_layer_sizes=[3 * DIM],
                interaction_branch2_layer_sizes=[3 * DIM],
            )
        )
    ),
    "DLRM_Transformer": Model(transformer, refused="attention over the batch"),
    "DLRM_Transformer, one micro-batch": Model(transformer, options=ONE),
    "SimpleDeepFMNN": Model(lambda: DeepFMTrain(SimpleDeepFMNN(DENSE, collection(), 12, 5))),
    "DLRMWrapper": Model(
        lambda: DLRMWrapper(EmbeddingBagCollection(tables=tables()), 10, [16, DIM], [16, 1]), inputs(False)
    ),
    "SimpleDeepFMNNWrapper": Model(
        lambda: SimpleDeepFMNNWrapper(10, EmbeddingBagCollection(tables=tables()), 12, 5), inputs(False)
    ),
    "TestSparseNN": Model(sparse_nn(TestSparseNN), inputs()),
    "TestSparseNN, outputs regrouped": Model(
        sparse_nn(TestSparseNN, over_arch_clazz=TestOverArchRegroupModule), inputs()
    ),
    "TestSparseNN, features processed": Model(
        sparse_nn(TestSparseNN, max_feature_lengths={"table_0": 10, "table_1": 12}), inputs()
    ),
    "TestTowerSparseNN": Model(sparse_nn(TestTowerSparseNN), inputs()),
    "TestTowerCollectionSparseNN": Model(sparse_nn(TestTowerCollectionSparseNN), inputs()),
    "TestMixedEmbeddingSparseArch": Model(mixed, inputs(False)),
    "TestModelWithPreproc": Model(
        lambda: TestModelWithPreproc(tables(count=3), tables("weighted_", 1), torch.device("cpu")),
        inputs(),
        options={"reduction": "sum"},
    ),
    "two towers": Model(lambda: TwoTowers(collection(TWO), [16, 8]), lambda: random_batches(TWO)),
    "two towers, in-batch softmax": Model(
        lambda: TwoTowers(collection(TWO), [16, 8], softmax=True), lambda: random_batches(TWO), "in-batch negatives"
    ),
    "two towers, in-batch softmax, one micro-batch": Model(
        lambda: TwoTowers(collection(TWO), [16, 8], softmax=True), lambda: random_batches(TWO), options=ONE
    ),
    "bert4rec": Model(bert("mean"), sequences, "mean over other things than samples"),
    "bert4rec, one micro-batch": Model(bert("mean"), sequences, options=ONE),
    "a table that is data-parallel": Model(
        lambda: WithDenseTable(DLRM(collection(KEYS[:3]), DENSE, [16, DIM], [16, 1]), ROWS + 3, DIM)
    ),
    "fused optimizer": Model(
        lambda: fuse_embedding_optimizer(
            DLRMTrain(DLRM(collection(), DENSE, [16, DIM], [16, 1])), torch.optim.SGD, {"lr": 0.1}, torch.device("cpu")
        ),
        refused="before fuse_embedding_optimizer",
    ),
}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()


def train_nest(model: nn.Module, batches: Iterator[Any], rule: SparseOptimizer | None, **options: Any):
    pipeline = NestPipeline(model, sgd, rule, **{"micro_batches": 4, **options})
    losses = []
    try:
        while True:
            losses.append(pipeline.progress(batches).global_loss)
    except StopIteration:
        pass
    names = [table.name for table in pipeline._tables]
    found = {name: pipeline.trainer.table(name).clone() for name in names}
    pipeline.close()
    return losses, found, {name: p.detach().clone() for name, p in model.named_parameters()}


def gaps(name: str) -> tuple[str, float, float, float, float, int]:
    """On a rank: the refusal, gaps of losses , tables and weights, how far tables moved, number of weights."""
    torch.set_num_threads(1)
    case = MODELS[name]
    try:
        ours = train_nest(seeded(case.make), case.batches(), ADAGRAD, **(case.options or {}))
    except ValueError as error:
        return str(error), 0.0, 0.0, 0.0, 0.0, 0
    theirs = train_dmp(seeded(case.reference or case.make), case.batches(), sgd, ADAGRAD)
    start = seeded(case.make).state_dict()
    moved = max(
        float((table - next(v for key, v in start.items() if key.endswith(f".{name}.weight"))).abs().max())
        for name, table in theirs[1].items()
    )
    assert len(ours[0]) == len(theirs[0]) == STEPS
    dense = {key: value for key, value in theirs[2].items() if key in ours[2]}
    return (
        "",
        max(abs(a - b) / abs(b) for a, b in zip(ours[0], theirs[0], strict=True)),
        max(float((ours[1][key] - value).abs().max()) for key, value in theirs[1].items()),
        max((float((ours[2][key] - value).abs().max()) for key, value in dense.items()), default=0.0),
        moved,
        len(dense),
    )


QUICK = ("TestSparseNN", "fused optimizer")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_equals_torchrecs_own_pipeline_or_is_refused(pool2, name):
    for said, losses, found, dense, moved, weights in pool2.run(gaps, name):
        if MODELS[name].refused:
            assert MODELS[name].refused in said and "\n" not in said
        else:
            assert said == "" and losses < 1e-5 and moved > 1e-3 and found <= 1e-4 * moved and dense <= 1e-5
            assert weights >= (0 if "Preproc" in name else 4)


def golden() -> tuple[list[float], list[float], float]:
    """As torchrec's golden training: tables on the meta device, the optimizer stated on them, no seed, no plan."""
    model = DLRMTrain(DLRM(collection(device="meta"), DENSE, [16, DIM], [16, 1], dense_device=torch.device("cpu")))
    apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.05})
    losses, found, dense = train_nest(model, random_batches(), None)
    return (
        losses,
        dense["model.dense_arch.model._mlp.0._linear.weight"].flatten().tolist(),
        float(found["t_cat_0"].std()),
    )


def test_golden_training_without_a_seed(pool2):
    (losses, weights, spread), other = pool2.run(golden)
    assert len(losses) == STEPS and (losses, weights) == other[:2] and spread > 0.01


def summed() -> tuple[float, float]:
    """bert4rec with the mean over all masked items, in one micro-batch of one rank's loop and as a sum and a count."""
    whole, parts = (train_nest(seeded(bert("summed")), sequences(), ADAGRAD, micro_batches=n) for n in (1, 4))
    losses = max(abs(a - b) / abs(b) for a, b in zip(whole[0], parts[0], strict=True))
    return losses, float((whole[1]["item_embedding"] - parts[1]["item_embedding"]).abs().max())


@pytest.mark.slow
def test_bert4rec_with_a_count_trains_in_micro_batches(pool2):
    for losses, found in pool2.run(summed):
        assert losses < 1e-5 and found < 1e-5
