"""FuXi against a slow reference, one sample and one position at a time, from the paper's formulas; both backbones
under every method of the engine."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from nestpipe.datasets.loader import load_dataset
from nestpipe.engine.engine import Engine
from nestpipe.models.fuxi import FuXi
from nestpipe.models.next_item import BACKBONES, build_model_spec
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.templates import dbp_only, nestpipe, serial
from nestpipe.trainer import SparseOptimizer
from nestpipe.training.loop import train_on_rank
from tests.support.engine_runs import differences, train
from tests.support.hstu_reference import LONGEST, run, silu


def rms(x):
    return x / torch.sqrt((x * x).mean() + 1e-6)


def reference(fuxi: FuXi, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """arXiv 2502.03036, section 3, for one history [t, width]."""
    x = [row + fuxi.positions[i] for i, row in enumerate(x)]
    for block in fuxi.blocks:
        width = len(x[0])
        size = width // block.heads
        projected = [silu(block.uvqk.weight @ rms(row)) for row in x]
        u, v, q, k = zip(*(p.split([3 * width, width, width, width]) for p in projected), strict=True)
        rows = []
        for i in range(len(x)):
            channels = []
            for h in range(block.heads):
                mine = slice(h * size, (h + 1) * size)
                position, time, semantic = (torch.zeros(size) for _ in range(3))
                for j in range(i + 1):
                    bucket = min(int(math.log2(1 + abs(int(times[i] - times[j])))), 31)
                    position = position + block.position_bias[i - j] * v[j][mine]
                    time = time + block.time_bias[bucket] * v[j][mine]
                    semantic = semantic + silu(q[i][mine] @ k[j][mine]) / LONGEST * v[j][mine]
                channels += [position, time, semantic]
            gated = rms(torch.cat(channels)) * u[i]
            fused = block.fuse.weight @ gated + block.fuse.bias + x[i]
            swiglu = silu(block.gate.weight @ rms(fused)) * (block.up.weight @ rms(fused))
            rows.append(block.down.weight @ swiglu + fused)
        x = rows
    return torch.stack(x)


@pytest.fixture(scope="module")
def fuxi() -> FuXi:
    torch.manual_seed(0)
    model = FuXi(width=8, layers=2, heads=2, longest=LONGEST)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, LONGEST), min_size=1, max_size=4), st.integers(0, 99))
def test_equals_the_reference_sample_by_sample(fuxi, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(n, 8, generator=generator) for n in lengths]
    times = [torch.randint(0, 10**9, (n,), generator=generator).sort().values for n in lengths]
    for got, one, when in zip(run(fuxi, x, times), x, times, strict=True):
        if len(one):
            torch.testing.assert_close(got, reference(fuxi, one, when), rtol=1e-4, atol=1e-4)


def test_each_channel_matters(fuxi):
    x, times = torch.randn(6, 8), torch.arange(6) * 1000
    (before,) = run(fuxi, [x], [times])
    (later,) = run(fuxi, [x], [times * 64])
    assert not torch.allclose(before[-1], later[-1])  # time
    assert torch.allclose(before[0], later[0])
    grown = torch.cat([torch.zeros(1, 8), x])
    (shifted,) = run(fuxi, [grown], [torch.cat([times[:1], times])])
    assert not torch.allclose(before[-1], shifted[-1])  # position


def test_is_causal(fuxi):
    x, times = torch.randn(6, 8), torch.arange(6) * 1000
    changed = x.clone()
    changed[4:] = 5.0
    later = torch.where(torch.arange(6) >= 4, times + 10**6, times)
    torch.testing.assert_close(run(fuxi, [x], [times])[0][:4], run(fuxi, [changed], [later])[0][:4])


def test_gradients_do_not_depend_on_company(fuxi):
    long, short = torch.randn(9, 8), torch.randn(3, 8)
    times = [torch.arange(9) * 60, torch.arange(3) * 7]
    alone = short.clone().requires_grad_()
    run(fuxi, [alone], times[1:])[0].sum().backward()
    together = short.clone().requires_grad_()
    run(fuxi, [long, together], times)[1].sum().backward()
    torch.testing.assert_close(alone.grad, together.grad, rtol=1e-4, atol=1e-5)


METHODS = {"serial": serial, "nestpipe": nestpipe, "fwp-only": fwp_only, "dbp-only": lambda _: dbp_only()}


@pytest.mark.parametrize("backbone", sorted(BACKBONES))
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_method_trains_both_backbones_as_serial_does(backbone, micro_batches):
    """Bit for bit against serial(N), on the real task."""
    torch.set_num_threads(1)
    data = DataConfig(data_scale=2e-5, batch_size=9, negatives=4, interest_clusters=3)
    model = ModelConfig(embedding_dim=8, dense_layers=1, width=8, sequence_length=8, backbone=backbone)
    training = TrainingConfig(data=data, model=model)
    dataset = load_dataset(data, model, seed=1)
    spec = build_model_spec(training, dataset)
    outcomes = {}
    for name, make in METHODS.items():
        if name == "dbp-only" and micro_batches > 1:
            continue
        engine = Engine(make(micro_batches), spec, SparseOptimizer(), partial(torch.optim.Adam, lr=1e-2), seed=1)
        try:
            outcome = train(engine, dataset.batches(0, 1), 6)
            outcome.tensors |= {"item": engine.table("item").clone()}
            outcome.tensors |= {key: value.clone() for key, value in engine.dense_state().items()}
        finally:
            engine.close()
        outcomes[name] = outcome
    assert len(set(outcomes["serial"].losses)) == 6
    for name, outcome in outcomes.items():
        assert differences(outcome, outcomes["serial"]) == [], name


@pytest.mark.slow
@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_every_registered_method_trains_both_backbones(pool2, backbone):
    """Two ranks: synchronous methods, TorchRec's own among them, have the losses of serial; the others stay near."""
    pytest.importorskip("torchrec")
    alike = ("serial", "torchrec", "nestpipe", "fwp-only", "dbp-only", "serial(3)", "nestpipe+2d-sp-exact")
    near = ("uniemb", "2d-sp", "nestpipe+2d-sp", "nestpipe+bf16")
    config = RunConfig(
        methods=",".join((*alike, *near)),
        steps=4,
        rounds=1,
        micro_batches=3,
        data=DataConfig(data_scale=2e-5, batch_size=9, negatives=4, interest_clusters=3),
        model=ModelConfig(embedding_dim=8, dense_layers=1, width=8, sequence_length=8, backbone=backbone),
    )
    ranks = pool2.run(train_on_rank, config)
    losses = {
        name: [sum(r.loss for r in step) for step in zip(*(rank[name].results for rank in ranks), strict=True)]
        for name in ranks[0]
    }
    for name in alike:
        assert losses[name] == pytest.approx(losses["serial"], rel=1e-4), name
    for name in near:
        assert losses[name] == pytest.approx(losses["serial"], rel=0.3), name
