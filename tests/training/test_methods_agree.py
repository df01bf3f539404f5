"""Methods trained side by side: NestPipe equals serial training bit for bit, and real TorchRec to float tolerance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nestpipe.config import WARM_UP_STEPS, DataConfig, ModelConfig, OptimizerConfig, RunConfig
from nestpipe.training.loop import dense_optimizer, train_on_rank
from tests.support.paths import MOVIELENS

SETTING = RunConfig(
    methods="serial(8),nestpipe",
    steps=20,
    rounds=1,
    data=DataConfig(data_scale=1e-4, batch_size=16, negatives=8),
    model=ModelConfig(embedding_dim=16, width=16, sequence_length=12),
)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_nestpipe_equals_serial_with_the_same_micro_batches_bit_for_bit(pool2, optimizer):
    config = replace(SETTING, optimizer=OptimizerConfig(sparse_optimizer=optimizer))
    for rank in pool2.run(train_on_rank, config):
        serial, nestpipe = ([r.loss for r in rank[name].results] for name in ("serial(8)", "nestpipe"))
        assert serial == nestpipe and len(serial) == 20 + WARM_UP_STEPS


def trained(config: RunConfig, steps: int) -> dict[str, tuple]:
    """On a rank: per method the losses and weights after ``steps`` steps, and the weights that it began with."""
    import torch.distributed as dist

    from nestpipe.datasets.loader import load_dataset
    from nestpipe.methods import find_method
    from nestpipe.models.next_item import build_model_spec
    from nestpipe.trainer import SparseOptimizer

    options = config.optimizer
    sparse = SparseOptimizer(options.sparse_optimizer, options.sparse_lr, options.sparse_eps)
    dataset = load_dataset(config.data, config.model, config.seed)
    outcome = {}
    for name in config.method_names:
        method, spec = find_method(name), build_model_spec(config.training, dataset)
        trainer = method.build(spec, sparse, dense_optimizer(options), config.seed, config.micro_batches)

        def weights(trainer=trainer):
            dense = {n: value.clone() for n, value in trainer.dense_state().items()}
            return {"table": trainer.table("item").clone(), **dense}

        before = weights()
        batches = dataset.batches(dist.get_rank(), dist.get_world_size())
        losses = [trainer.progress(batches).loss for _ in range(steps)]
        outcome[name] = (losses, before, weights())
        trainer.close()
    return outcome


EQUAL_TO_TORCHREC = {
    "sgd": OptimizerConfig(sparse_optimizer="sgd", sparse_lr=2.0, dense_optimizer="sgd", dense_lr=0.05),
    # AdaGrad divides by the root of a gradient's square: at a small eps the rounding of tiny gradients counts.
    "rowwise_adagrad": OptimizerConfig(sparse_lr=0.05, sparse_eps=1e-4, dense_optimizer="sgd", dense_lr=0.05),
}


@pytest.mark.parametrize("rule", EQUAL_TO_TORCHREC)
def test_nestpipe_equals_real_torchrec_to_float_tolerance(pool2, rule):
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    config = replace(SETTING, methods="torchrec,nestpipe", optimizer=EQUAL_TO_TORCHREC[rule])
    ranks = pool2.run(trained, config, 20)
    for rank in ranks:
        (_, before, torchrec), (_, same, nestpipe) = (rank[name] for name in ("torchrec", "nestpipe"))
        assert before.keys() == nestpipe.keys() == torchrec.keys()
        assert all((before[name] == same[name]).all() for name in before)
        moved = {name: float((torchrec[name] - before[name]).abs().max()) for name in before}
        assert moved["table"] >= 1e-2 and max(v for n, v in moved.items() if n != "table") >= 1e-2
        for name in before:
            assert float((nestpipe[name] - torchrec[name]).abs().max()) <= 1e-4 * max(moved.values()), name
    for step in range(20):
        torchrec, nestpipe = (sum(rank[name][0][step] for rank in ranks) for name in ("torchrec", "nestpipe"))
        assert nestpipe == pytest.approx(torchrec, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", EQUAL_TO_TORCHREC)
def test_nestpipe_equals_real_torchrec_on_four_ranks(pool4, rule):
    config = replace(SETTING, methods="torchrec,nestpipe", optimizer=EQUAL_TO_TORCHREC[rule])
    for rank in pool4.run(trained, config, 20):
        (_, before, torchrec), (_, _, nestpipe) = (rank[name] for name in ("torchrec", "nestpipe"))
        moved = max(float((torchrec[name] - before[name]).abs().max()) for name in before)
        assert moved >= 1e-2
        assert max(float((nestpipe[n] - torchrec[n]).abs().max()) for n in before) <= 1e-4 * moved


@pytest.mark.slow
def test_losses_agree_with_torchrecs_over_100_steps_of_movielens(pool2):
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    if not MOVIELENS.exists():
        pytest.skip("MovieLens 100K is not here; set NESTPIPE_ML100K to its folder")
    data = DataConfig(dataset="movielens", data_path=str(MOVIELENS), on_bad_row="skip")
    config = RunConfig(methods="torchrec,nestpipe", data=data)  # row-wise AdaGrad 0.05, Adam 1e-3
    ranks = pool2.run(trained, config, 100)
    torchrec, nestpipe = (np.sum([rank[name][0] for rank in ranks], axis=0) for name in ("torchrec", "nestpipe"))
    assert torchrec[0] - torchrec[-10:].mean() > 0.2  # it learns
    assert np.abs(torchrec - nestpipe).max() <= 1e-4
