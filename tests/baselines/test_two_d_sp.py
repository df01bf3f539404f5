"""2D-SP as real DMPCollection, the TorchRec variants, and what their runs show compared with the declared schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("torchrec")

from baselines.torchrec.index_dedup import jagged_unique_indices
from baselines.two_d_sp.schedules import two_d_sp
from nestpipe.checker.observed_run import violations
from nestpipe.checker.rules import check
from nestpipe.methods import MethodOptions
from nestpipe.schedule.building import op, schedule
from tests.support.method_runs import RULES, Run, largest_difference, largest_update, train_methods, weights
from tests.support.method_runs import batches as make_batches

SYNCHRONOUS = MethodOptions(sparse_optimizer="sgd")


def runs_on(pool, runs: list[Run], steps: int = 8):
    """Per run: the first rank's outcome, the spans of every rank."""
    ranks = pool.run(train_methods, runs, steps)
    return [(ranks[0][i][0], [rank[i][1] for rank in ranks]) for i in range(len(runs))]


def test_sgd_and_interval_1_is_synchronous_and_the_rest_is_not(pool4):
    runs = [Run("serial", "sgd"), Run("2d-sp", "sgd"), Run("2d-sp", "sgd", interval=2), Run("serial"), Run("2d-sp")]
    (plain, _), (two, _), (late, _), (plain_ada, _), (two_ada, _) = runs_on(pool4, runs)
    moved = largest_update(plain)
    assert moved > 1e-2
    assert largest_difference(two, plain) <= 1e-4 * moved
    assert largest_difference(late, plain) > 0.05 * moved
    assert largest_difference(two_ada, plain_ada) > 0.05 * largest_update(plain_ada)
    for options, verdict in (
        (SYNCHRONOUS, []),
        (replace(SYNCHRONOUS, sync_interval=2), ["update_rule"]),
        (MethodOptions(), ["update_rule"]),
    ):
        assert [p.kind for p in check(two_d_sp(1, options))] == verdict


def replicas(interval: int, scale: float):
    """On a rank: the largest difference of its tables from every rank's, after each of 5 steps."""
    import torch.distributed as dist

    from baselines.two_d_sp.trainer import two_d_sp_trainer
    from tests.support.method_runs import SEED, SPEC, sgd

    trainer = two_d_sp_trainer(SPEC, RULES["rowwise_adagrad"], sgd, SEED, 2, interval, scale)
    try:
        iterator, spread = iter(make_batches(8)), []
        for _ in range(5):
            trainer.progress(iterator)
            mine = weights(trainer)["table item"]
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mine)
            spread.append(max(float((other - mine).abs().max()) for other in every))
        return spread, weights(trainer)["table item"]
    finally:
        trainer.close()


def test_replicas_drift_between_synchronisations_and_meet_at_each(pool4):
    spread, table = pool4.run(replicas, 2, 2.0)[0]
    assert [s == 0 for s in spread] == [True, False, True, False, True]
    assert not torch.equal(table, pool4.run(replicas, 2, 1.0)[0][1])


def reference_two_d_sp(steps: int, groups: int, world: int, scale: float):
    """The same in one process, replica by replica: AdaGrad by the docstring's formula, then the mean of replicas."""
    from tests.support.method_runs import SEED, TABLES, make_batch
    from tests.support.torchrec_model import Model, PlainEmbeddings

    rule = RULES["rowwise_adagrad"]
    model = Model(PlainEmbeddings())
    tables = list(model.embeddings.tables.values())
    states = [torch.zeros(t.rows, 1) for t in TABLES]
    sizes = [6 - r % 2 for r in range(world)]
    for step in range(steps):
        parts = [make_batch(step, r, sizes[r], None) for r in range(world)]
        dense = [torch.zeros_like(p) for p in model.dense.parameters()]
        sums = [[torch.zeros_like(t), torch.zeros_like(s)] for t, s in zip(tables, states, strict=True)]
        for g in range(groups):
            model.zero_grad()
            (sum(model(parts[r]).sum() for r in range(g, world, groups)) / sum(sizes)).backward()
            for total, p in zip(dense, model.dense.parameters(), strict=True):
                total += p.grad
            for (weight, state), t, s in zip(sums, tables, states, strict=True):
                gradient = groups * t.grad
                own = s + gradient.square().mean(1, keepdim=True)
                weight += (t - rule.lr * gradient / ((own / scale).sqrt() + rule.eps)).detach() / groups
                state += own / groups
        with torch.no_grad():
            for (weight, state), t, s in zip(sums, tables, states, strict=True):
                t.copy_(weight)
                s.copy_(state)
            for total, p in zip(dense, model.dense.parameters(), strict=True):
                p -= 0.1 * total
    assert SEED == 3
    return {f"table {t.name}": w.detach() for t, w in zip(TABLES, tables, strict=True)}


def test_momentum_scaled_adagrad_follows_the_formula_in_the_docstring(pool4):
    [(two, _)] = runs_on(pool4, [Run("2d-sp")], 6)
    moved = largest_update(two)
    for name, value in reference_two_d_sp(6, groups=2, world=4, scale=2.0).items():
        assert (two.tensors[name] - value).abs().max() <= 1e-4 * moved


def test_the_number_of_groups_is_the_scale_that_comes_closest_to_plain_training(pool4):
    """Why the accumulator is divided, not multiplied: see the docstring of ``baselines.two_d_sp.trainer``."""
    (plain, _) = pool4.run(train_methods, [Run("serial")], 40)[0][0]
    gaps = []
    for scale in (0.5, 1.0, 2.0):
        table = pool4.run(scaled, scale, 40)[0]
        gaps.append(float((table - plain.tensors["table item"]).square().mean().sqrt()))
    assert gaps[0] > gaps[1] > gaps[2]


def scaled(scale: float, steps: int) -> torch.Tensor:
    from baselines.two_d_sp.trainer import two_d_sp_trainer
    from tests.support.method_runs import SEED, SPEC, sgd

    trainer = two_d_sp_trainer(SPEC, RULES["rowwise_adagrad"], sgd, SEED, 2, 1, scale)
    try:
        iterator = iter(make_batches(steps))
        for _ in range(steps):
            trainer.progress(iterator)
        return trainer.table("item")
    finally:
        trainer.close()


@pytest.mark.slow
def test_eight_ranks_in_four_groups():
    from nestpipe.ranks.pool import RankPool

    with RankPool(8, timeout_s=240.0) as pool:
        runs = [Run("serial", "sgd"), Run("2d-sp", "sgd", groups=4), Run("2d-sp", groups=4)]
        (plain, _), (two, _), (ada, spans) = runs_on(pool, runs, 6)
        assert largest_difference(two, plain) <= 1e-4 * largest_update(plain)
        reference = reference_two_d_sp(6, groups=4, world=8, scale=4.0)
        for name, value in reference.items():
            assert (ada.tensors[name] - value).abs().max() <= 1e-4 * largest_update(ada)
        for rank in spans:
            assert violations(rank, Run("2d-sp", groups=4).template) == []


def test_torchrec_variants_learn_the_same_up_to_what_travels(pool2):
    names = ("torchrec", "torchrec-planner", "torchrec-dedup", "torchrec-bf16")
    found = dict(zip(names, runs_on(pool2, [Run(name) for name in names]), strict=True))
    plain = found["torchrec"][0]
    moved = largest_update(plain)
    for name in ("torchrec-planner", "torchrec-dedup"):
        assert largest_difference(found[name][0], plain) <= 1e-4 * moved
    assert 1e-4 * moved < largest_difference(found["torchrec-bf16"][0], plain) < 0.1 * moved
    for name, (_, spans) in found.items():
        for rank in spans:
            assert violations(rank, Run(name).template) == [], name


def sent_bytes(name: str) -> tuple[int, int]:
    """On a rank, of three steps: bytes sent, and the fewest bytes possible in float32."""
    trainer = Run(name).trainer()
    try:
        iterator = iter(make_batches(4))
        results = [trainer.progress(iterator) for _ in range(3)]
        return sum(r.embedding_bytes for r in results), sum(r.minimum_embedding_bytes for r in results)
    finally:
        trainer.close()


def test_what_travels_is_half_in_bf16_and_the_minimum_with_deduplication(pool2):
    (plain, least), (half, _), (once, _) = (pool2.run(sent_bytes, f"torchrec{v}")[0] for v in ("", "-bf16", "-dedup"))
    assert half == plain / 2
    assert once == least < plain


def replica_bytes(interval: int) -> list[int]:
    trainer = Run("2d-sp", interval=interval).trainer()
    try:
        iterator = iter(make_batches(4))
        return [trainer.progress(iterator).replica_bytes for _ in range(4)]
    finally:
        trainer.close()


def test_replicas_are_counted_when_they_are_averaged(pool4):
    """A ring AllReduce over two groups sends each rank's rows, weight and state, once."""
    (every,), (third,) = (pool4.run(replica_bytes, k)[:1] for k in (1, 3))
    assert every[0] > 0 and every == [every[0]] * 4
    assert third == [every[0], 0, 0, every[0]]


def test_a_wrong_declaration_is_not_allowed(pool4):
    [(_, torchrec), (_, two), (_, late)] = runs_on(pool4, [Run("torchrec"), Run("2d-sp"), Run("2d-sp", interval=3)], 9)
    right, declared = Run("torchrec").template, Run("2d-sp").template
    unpipelined = schedule("wrong", 1, [*right.ops[1:3], op("K", after="H O-1"), *right.ops[3:]])
    moved = [o for o in declared.ops if o.ref.stage not in "DO"]
    after = schedule("wrong", 1, [*moved, op("O", after="U A"), op("D.1", after="O", reads="", writes="table")])
    other_lane = replace(right, ops=tuple(replace(o, lane="compute") if o.ref.stage == "A" else o for o in right.ops))
    for rank in torchrec:
        assert violations(rank, right) == []
        assert any("K" in text and "O" in text for text in violations(rank, unpipelined))
        assert any("lane" in text for text in violations(rank, other_lane))
        assert any("D1.1 is declared but was not seen" in text for text in violations(rank, declared))
    for rank in two:
        assert violations(rank, declared) == []
        assert any(text.startswith("D") for text in violations(rank, after))
        assert any("D0.1 was seen but is not declared" in text for text in violations(rank, right))
    for rank in late:
        assert violations(rank, declared, sometimes="D") == []
        assert {s.batch for s in rank if s.stage == "D"} == {0, 3, 6}


def test_the_cpu_kernel_for_index_deduplication():
    """Three tables with two, one and one features, and three samples; the last table's feature has no keys."""
    base = torch.tensor([0, 0, 10, 15, 19])  # tables of 10, 5 and 4 rows
    tables = torch.tensor([0, 2, 2, 3, 4])
    counts = torch.tensor([2, 0, 3, 1, 1, 0, 2, 2, 0, 0, 0, 0])
    keys = torch.tensor([3, 7, 3, 3, 9, 7, 0, 4, 4, 1, 4])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    lengths, ends, unique, reverse = jagged_unique_indices(base, tables, offsets, keys)
    assert torch.equal(unique[reverse], keys)
    assert unique.tolist() == [0, 3, 7, 9, 1, 4]
    assert lengths.view(4, 3).sum(1).tolist() == [4, 0, 2, 0] or lengths.view(4, 3)[:2].sum() == 4
    assert lengths.sum() == len(unique) and torch.equal(ends, torch.cat([ends.new_zeros(1), lengths.cumsum(0)]))
    empty = jagged_unique_indices(base, tables, torch.zeros(13, dtype=torch.int64), keys[:0])
    assert [len(x) for x in empty] == [12, 13, 0, 0]
