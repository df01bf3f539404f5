"""NestPipe in a TorchRec user's own loop: what is refused, equality with the user's loop, DLRM against DMP."""

from __future__ import annotations

import difflib

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("torchrec")

from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from nestpipe.adoption.pipeline import NestPipeline
from nestpipe.adoption.separable import NotSeparable
from nestpipe.embedding.pooling import pool
from nestpipe.trainer import SparseOptimizer
from tests.support.adoption_models import DIM, ROWS, SGD, Clicks, bags, sgd, user_batch
from tests.support.example_modules import EXAMPLES, example


def in_batch_negatives(score, label):
    return nn.functional.cross_entropy(score[:, None] * score[None, :], torch.arange(len(score)))


def weighted_mean(score, label):
    return (label.abs() * (score - label).square()).sum() / label.abs().sum()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Clicks(bags(), middle=nn.BatchNorm1d(8)), r"net\.1 \(BatchNorm1d\)"),
        (lambda: Clicks(bags(), loss=in_batch_negatives), "in-batch negatives"),
        (lambda: Clicks(bags(), loss=weighted_mean), "is not the sum over its parts"),
        (lambda: Clicks(bags(), loss=lambda s, y: (s - y).square().sum()), "reduction='sum'"),
    ],
)
def test_what_a_frozen_window_cannot_train_is_refused_before_the_first_step(model, message):
    with pytest.raises(NotSeparable, match=message):
        NestPipeline(model(), sgd, SGD, micro_batches=2).progress(iter([user_batch(8, 1)]))


def test_one_micro_batch_may_mix_samples():
    pipeline = NestPipeline(Clicks(bags(), middle=nn.BatchNorm1d(8)), sgd, SGD, micro_batches=1)
    assert pipeline.progress(iter([user_batch(8, 1)])).loss > 0
    pipeline.close()


def test_the_check_changes_neither_model_nor_random_numbers():
    """If the check drew random numbers, dropout would draw other ones in a checked run than in an unchecked one."""
    results = []
    for check in (True, False):
        torch.manual_seed(1)
        model = Clicks(bags(), middle=nn.Dropout(0.5))
        pipeline = NestPipeline(model, sgd, SGD, micro_batches=2, check=check)
        batches = iter([user_batch(8, seed) for seed in (1, 2)])
        losses = [pipeline.progress(batches).loss for _ in range(2)]
        assert model.training
        results.append((losses, {name: value.clone() for name, value in pipeline.export().state_dict().items()}))
        pipeline.close()
    (losses, state), (unchecked_losses, unchecked_state) = results
    assert losses == unchecked_losses
    assert all(torch.equal(state[name], unchecked_state[name]) for name in state)


def test_other_refusals():
    uneven = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(num_embeddings=5, embedding_dim=d, name=f"t{d}", feature_names=[f"f{d}"]) for d in (4, 8)
        ]
    )
    with pytest.raises(ValueError, match=r"unequal dims.*t4 4, t8 8"):
        NestPipeline(Clicks(uneven), sgd, SGD)
    with pytest.raises(ValueError, match="no EmbeddingBagCollection"):
        NestPipeline(nn.Linear(1, 1), sgd, SGD)
    with pytest.raises(ValueError, match="apply_optimizer_in_backward"):
        NestPipeline(Clicks(bags()), sgd)
    with pytest.raises(ValueError, match="reduction 'max'"):
        NestPipeline(Clicks(bags()), sgd, SGD, reduction="max")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_equals_the_users_own_loop(weighted, reduction):
    """Autograd on the unsharded model, whole batches, against micro-batches; two epochs of batches of unequal size."""
    torch.set_num_threads(1)
    batches = [user_batch(n, n, weighted) for n in (8, 5, 8, 3, 1, 8)]
    loss = None if reduction == "mean" else (lambda s, y: (s - y).square())
    plain, ours = (Clicks(bags(weighted=weighted), loss=loss) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    start = plain.collection.embedding_bags["t1"].weight.detach().clone()
    tables = list(plain.collection.parameters())
    optimizers = [torch.optim.SGD(tables, lr=0.3), sgd(list(plain.net.parameters()))]
    losses = []
    for batch in batches * 2:
        loss = plain(batch)[0].mean()
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pipeline = NestPipeline(ours, sgd, SGD, micro_batches=3, reduction=reduction)
    got = []
    for _ in range(2):
        source = iter(batches)
        while True:
            try:
                got.append(pipeline.progress(source).loss)
            except StopIteration:
                break
            assert sum(len(scores) for scores in pipeline.outputs) == len(batches[(len(got) - 1) % 6].label)
    moved = (plain.collection.embedding_bags["t1"].weight - start).abs().max()
    assert moved > 1e-2 and got == pytest.approx(losses, rel=1e-4)
    for name in ("t1", "t2"):
        difference = (pipeline.trainer.table(name) - plain.collection.embedding_bags[name].weight).abs().max()
        assert difference <= 1e-4 * moved
    for (name, wanted), mine in zip(plain.net.named_parameters(), ours.net.parameters(), strict=True):
        assert torch.allclose(wanted, mine, rtol=1e-4, atol=1e-6), name
    pipeline.close()


class Both(nn.Module):
    """A pooled collection and a sequence collection in one model, each in its own module."""

    def __init__(self):
        super().__init__()
        tables = [EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name="s1", feature_names=["a", "c"])]
        self.inner = nn.ModuleDict({"pooled": bags(), "sequence": EmbeddingCollection(tables=tables)})
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.net = nn.Linear(5 * DIM, 1)

    def forward(self, batch):
        rows = self.inner["sequence"](batch.sparse)["c"]
        last = pool(rows.values(), rows.lengths())
        score = self.net(torch.cat([self.inner["pooled"](batch.sparse).values(), last], 1)).squeeze(1)
        return (score - batch.label).square().mean()


def test_several_collections_of_both_kinds():
    torch.set_num_threads(1)
    plain, ours = Both(), Both()
    ours.load_state_dict(plain.state_dict())
    batches = [user_batch(8, n) for n in range(6)]
    tables = [p for name, p in plain.named_parameters() if "net" not in name]
    optimizers = [torch.optim.SGD(tables, lr=0.3), sgd(list(plain.net.parameters()))]
    for batch in batches:
        plain(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pipeline = NestPipeline(ours, sgd, SGD, micro_batches=3, clustering=True)
    source = iter(batches)
    for _ in batches:
        pipeline.progress(source)
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    for table in ("t1", "t2"):
        torch.testing.assert_close(
            pipeline.trainer.table(table), plain.inner["pooled"].embedding_bags[table].weight.data
        )
    torch.testing.assert_close(pipeline.trainer.table("s1"), plain.inner["sequence"].embeddings["s1"].weight.data)
    pipeline.close()


def without_data_on_rank_1(rank_1_has: int, refused: bool) -> str | list[float]:
    """Losses of two steps, of which rank 1 has data in ``rank_1_has`` and rank 0 in all; or why they are refused."""
    dense = in_batch_negatives if refused and dist.get_rank() == 0 else None
    pipeline = NestPipeline(Clicks(bags(), loss=dense), sgd, SGD, micro_batches=2)
    batches = iter([user_batch(4, n) for n in range(2 if dist.get_rank() == 0 else rank_1_has)])
    try:
        return [pipeline.progress(batches).global_loss for _ in range(2)]
    except ValueError as error:
        return str(error)
    finally:
        pipeline.close()


def test_what_one_rank_refuses_all_refuse(pool2):
    one, other = pool2.run(without_data_on_rank_1, 2, refused=True)
    assert "in-batch negatives" in one and other == f"rank 0: {one}"


@pytest.mark.parametrize("batches", [0, 1])
def test_a_rank_whose_data_ends_early_trains_nothing_while_others_train(pool2, batches):
    """Also if it has no data at all: it learns from the others what the model looks up."""
    one, other = pool2.run(without_data_on_rank_1, batches, refused=False)
    assert one == other and len(one) == 2 and all(loss > 0 for loss in one)


# ---- DLRM ----


def test_the_example_changes_at_most_five_lines():
    theirs, ours = ((EXAMPLES / f"dlrm_{name}.py").read_text().splitlines() for name in ("torchrec", "nestpipe"))
    changes = [line for line in difflib.ndiff(theirs, ours) if line[:2] in ("+ ", "- ") and line[2:].strip()]
    assert sum(line.startswith("+ ") for line in changes) <= 5 and sum(line.startswith("- ") for line in changes) <= 5


def test_the_change_in_the_readme_is_the_examples():
    readme = (EXAMPLES.parent / "README.md").read_text()
    shown = readme.partition("```diff\n")[2].partition("```")[0].splitlines()
    theirs, ours = ((EXAMPLES / f"dlrm_{name}.py").read_text().splitlines() for name in ("torchrec", "nestpipe"))
    changes = [line[0] + line[2:] for line in difflib.ndiff(theirs, ours) if line[0] in "+-" and line[2:].strip()]
    assert sorted(shown) == sorted(changes)


def dlrm_losses(steps: int, micro_batches: int, rule: str):
    """On a rank: unmodified DLRM under DistributedModelParallel and under NestPipe, from the same weights."""
    from baselines.torchrec.sharding import shards

    common = example("dlrm_common")
    optimizer = {"sgd": SparseOptimizer("sgd", lr=10.0), "rowwise_adagrad": SparseOptimizer(rule, 0.02, 1e-4)}[rule]
    torch.manual_seed(1)  # as in any data-parallel program: the same dense weights on all ranks
    model, other = common.dlrm(), common.dlrm()
    other.load_state_dict(model.state_dict())
    start = {name: bag.weight.detach().clone() for name, bag in common.bags_of(model).embedding_bags.items()}
    rank, world = dist.get_rank(), dist.get_world_size()

    dmp, pipeline = common.torchrec_pipeline(model, optimizer)
    collection = common.sharded_bags(dmp)
    source = common.criteo(rank, world, steps)
    theirs = [float(pipeline.progress(source)[0]) for _ in range(steps)]
    tables = {name: torch.zeros_like(weight) for name, weight in start.items()}
    for shard in shards(collection):
        tables[shard.table][shard.first : shard.first + len(shard.weight)] = shard.weight
    for table in tables.values():
        dist.all_reduce(table)
    dense = {n.replace("module.", ""): p.detach().clone() for n, p in dmp.named_parameters() if "embedding" not in n}
    pipeline.detach()

    nest = NestPipeline(other, common.dense_optimizer, optimizer, micro_batches=micro_batches, clustering=True)
    source = common.criteo(rank, world, steps)
    ours = [world * nest.progress(source).loss for _ in range(steps)]
    gaps, moved = {}, max(float((tables[n] - start[n]).abs().max()) for n in tables)
    for name, table in tables.items():
        gaps[name] = float((nest.trainer.table(name) - table).abs().max())
    mine = {n: p for n, p in other.named_parameters()}
    dense_gap = max(float((dense[n.replace("_dmp_wrapped_", "")] - p.detach()).abs().max()) for n, p in mine.items())
    nest.close()
    return theirs, ours, max(gaps.values()), moved, dense_gap, len(mine)


@pytest.mark.parametrize("rule", ["rowwise_adagrad", pytest.param("sgd", marks=pytest.mark.slow)])
def test_dlrm_under_nestpipe_equals_dlrm_under_dmp(pool2, rule):
    for theirs, ours, gap, moved, dense_gap, parameters in pool2.run(dlrm_losses, 8, 4, rule):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert moved > 1e-2 and gap <= 1e-4 * moved
        assert parameters >= 8 and dense_gap <= 1e-4 * moved
