"""The pieces of a step that move rows and keys, against memory bandwidth and against torch and fbgemm."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nestpipe.clustering.clustering import cluster, distinct_keys
from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.tables import TableConfig
from nestpipe.embedding.dual_buffer import synchronise
from nestpipe.embedding.host_table import shard_layout
from nestpipe.embedding.key_routing import route
from nestpipe.embedding.retrieval_write_back import Rows, empty_rows
from nestpipe.embedding.sparse_optimizers import sparse_update
from nestpipe.ranks.collectives import Exchange
from nestpipe.trainer import SparseOptimizer

ADAGRAD = SparseOptimizer("rowwise_adagrad", lr=0.05, eps=1e-8)


class Sizes:
    """``table`` rows of ``dim``, of which a batch touches ``rows``; ``samples`` of ``length`` keys to route."""

    def __init__(self, full: bool) -> None:
        self.table, self.dim, self.rows = (500_000, 128, 50_000) if full else (2_000, 16, 500)
        self.samples, self.length = (512, 50) if full else (32, 10)
        self.rounds = 20 if full else 1


@pytest.fixture(autouse=True)
def one_thread():
    """As every method runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def sizes(pytestconfig: pytest.Config) -> Sizes:
    return Sizes(pytestconfig.option.benchmark)


@pytest.fixture(scope="session")
def bandwidth(sizes: Sizes) -> float:
    """Bytes per second, read and written, of a large copy on one thread."""
    torch.set_num_threads(1)
    source = torch.rand(sizes.table * sizes.dim)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 2 * 4 * source.numel() / min(times)


def measure(
    benchmark: Any, group: str, sizes: Sizes, function: Callable[..., object], setup: Callable[[], Any] | None = None
) -> None:
    benchmark.group = f"kernels: {group}"
    if setup is None:
        benchmark.pedantic(function, rounds=sizes.rounds, iterations=1, warmup_rounds=1)
    else:
        benchmark.pedantic(function, setup=lambda: ((setup(),), {}), rounds=sizes.rounds, iterations=1, warmup_rounds=1)


def of_bandwidth(benchmark: Any, moved: float, bandwidth: float) -> None:
    """Note how much of the memory's bandwidth ``moved`` bytes a call make."""
    rate = moved / benchmark.stats.stats.median
    benchmark.extra_info.update(gbytes_per_s=rate / 1e9, of_copy_bandwidth=rate / bandwidth)


@pytest.fixture
def host_table(sizes: Sizes) -> Rows:
    return Rows(torch.rand(sizes.table, sizes.dim), torch.rand(sizes.table, 1))


@pytest.fixture
def touched(sizes: Sizes) -> Tensor:
    return torch.randperm(sizes.table)[: sizes.rows].sort().values


@pytest.mark.parametrize("what", ["nestpipe", "torch", "fbgemm"])
def test_retrieval(what, sizes, host_table, touched, bandwidth, benchmark):
    """R: rows of the host table into the prefetch buffer."""
    out = empty_rows(sizes.rows, sizes.dim, 1)
    if what == "nestpipe":
        measure(benchmark, "retrieval", sizes, lambda: host_table.gather(touched, out))
        assert torch.equal(out.weight, host_table.weight[touched]) and torch.equal(out.state, host_table.state[touched])
    elif what == "torch":
        measure(benchmark, "retrieval", sizes, lambda: torch.nn.functional.embedding(touched, host_table.weight))
    else:
        lookup = _fbgemm(sizes, host_table.weight)
        offsets = torch.arange(sizes.rows + 1)
        with torch.no_grad():
            assert torch.equal(lookup(touched, offsets), host_table.weight[touched])
            measure(benchmark, "retrieval", sizes, lambda: lookup(touched, offsets))
    of_bandwidth(benchmark, 2 * 4 * sizes.rows * (sizes.dim + 1), bandwidth)


def test_buffer_synchronisation(sizes, touched, bandwidth, benchmark):
    """S: rows that two neighbouring batches share, from one buffer to the other."""
    new, old = (empty_rows(sizes.rows, sizes.dim, 1) for _ in range(2))
    for rows in (new, old):
        rows.weight.uniform_()
        rows.state.uniform_()
    shared = torch.randperm(sizes.rows)[: sizes.rows // 2].sort().values
    at = torch.randperm(sizes.rows)[: sizes.rows // 2].sort().values
    measure(benchmark, "buffer synchronisation", sizes, lambda: synchronise(new, old, shared, at))
    assert torch.equal(new.weight[shared], old.weight[at])
    assert torch.equal(new.state[shared], old.state[at])
    of_bandwidth(benchmark, 2 * 4 * len(shared) * (sizes.dim + 1), bandwidth)


@pytest.mark.parametrize("what", ["nestpipe", "torch", "fbgemm"])
def test_sparse_update(what, sizes, host_table, touched, bandwidth, benchmark):
    """U: row-wise AdaGrad on the rows of a batch. torch has no row-wise rule; its sparse AdaGrad keeps a state per
    element. fbgemm's runs inside backward, so that its time holds the forward's bookkeeping too."""
    gradient = torch.rand(sizes.rows, sizes.dim) - 0.5
    if what == "nestpipe":
        rows = empty_rows(sizes.rows, sizes.dim, 1)
        host_table.gather(touched, rows)
        before = rows.weight.clone()
        expected_state = rows.state + gradient.square().mean(1, keepdim=True)
        sparse_update(ADAGRAD, rows, gradient.clone())
        expected = before - ADAGRAD.lr * gradient / (expected_state.sqrt() + ADAGRAD.eps)
        torch.testing.assert_close(rows.weight, expected)
        measure(benchmark, "sparse update", sizes, lambda g: sparse_update(ADAGRAD, rows, g), gradient.clone)
    elif what == "torch":
        weight = torch.nn.Parameter(host_table.weight)
        optimizer = torch.optim.Adagrad([weight], lr=ADAGRAD.lr, eps=ADAGRAD.eps)
        weight.grad = torch.sparse_coo_tensor(touched[None], gradient, weight.shape, is_coalesced=True)
        measure(benchmark, "sparse update", sizes, optimizer.step)
    else:
        lookup, offsets = _fbgemm(sizes, host_table.weight), torch.arange(sizes.rows + 1)
        measure(benchmark, "sparse update", sizes, lambda out: out.backward(gradient), lambda: lookup(touched, offsets))
    of_bandwidth(benchmark, 3 * 4 * sizes.rows * sizes.dim, bandwidth)


@pytest.mark.parametrize("what", ["nestpipe", "nestpipe, 8 micro-batches", "torch.unique", "fbgemm bucketize"])
def test_key_routing(what, sizes, benchmark):
    """K: deduplicate and bucket the keys of a batch (one rank: nothing travels)."""
    keys = _skewed_keys(sizes)
    batch = _batch(keys, sizes)
    layout = shard_layout([TableConfig("item", sizes.table, sizes.dim, ("item",), 1.0)], 1)
    if what.startswith("nestpipe"):
        parts = batch.split(8) if "8" in what else [batch]
        exchange = Exchange()
        plan = route(parts, False, layout, exchange, None)
        assert plan.distinct == len(set(keys.tolist())) and torch.equal(plan.rows, keys.unique())
        measure(benchmark, "key routing", sizes, lambda: route(parts, False, layout, exchange, None))
    elif what == "torch.unique":
        measure(benchmark, "key routing", sizes, lambda: torch.unique(keys, return_inverse=True))
    else:
        pytest.importorskip("fbgemm_gpu")
        lengths = torch.full((sizes.samples,), sizes.length)
        block = torch.tensor([-(-sizes.table // 2)])
        measure(
            benchmark,
            "key routing",
            sizes,
            lambda: torch.ops.fbgemm.block_bucketize_sparse_features(lengths, keys, False, True, block, 2),
        )


def test_clustering(sizes, benchmark):
    """Samples that share keys into one micro-batch: fewer distinct keys in total than in the order they came."""
    keys = _skewed_keys(sizes).numpy()
    offsets = np.arange(0, len(keys) + 1, sizes.length)[None]
    part = cluster(keys, offsets, 8)
    as_they_came = np.repeat(np.arange(8), sizes.samples // 8)
    before, after = (distinct_keys(keys, offsets, p) for p in (as_they_came, part))
    assert after < before
    measure(benchmark, "clustering", sizes, lambda: cluster(keys, offsets, 8))
    benchmark.extra_info.update(distinct_as_they_came=int(before), distinct_clustered=int(after))


def _skewed_keys(sizes: Sizes) -> Tensor:
    """Few popular keys and many rare ones, in groups of interest so that there is something to cluster."""
    groups = torch.randint(8, (sizes.samples, 1))
    popular = (torch.rand(sizes.samples, sizes.length) ** 3 * sizes.table / 8).long()
    return (popular + groups * (sizes.table // 8)).clamp_(max=sizes.table - 1).flatten()


def _batch(keys: Tensor, sizes: Sizes) -> Batch:
    lengths = torch.full((sizes.samples,), sizes.length)
    return Batch({"item": Jagged(keys, lengths)}, torch.arange(sizes.samples), {})


def _fbgemm(sizes: Sizes, weight: Tensor) -> Any:
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    lookup = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(sizes.table, sizes.dim, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=ADAGRAD.lr,
        eps=ADAGRAD.eps,
        pooling_mode=common.PoolingMode.NONE,
    )
    lookup.split_embedding_weights()[0].copy_(weight)
    return lookup
