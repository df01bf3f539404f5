"""Real TorchRec behind the Trainer interface, against a plain loop with dense gradients."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

from nestpipe.data.batch import Batch
from nestpipe.machine.versions import installed_versions, mismatch
from nestpipe.schedule.operations import Ref
from nestpipe.trainer import ModelSpec, SparseOptimizer
from tests.support.torchrec_model import SEED, TABLES, Model, PlainEmbeddings, adam, make_batch, sgd

pytest.importorskip("torchrec")
RULES = [SparseOptimizer("sgd", lr=0.5), SparseOptimizer("rowwise_adagrad", lr=0.05, eps=1e-4)]
STEPS = 10


def stream(rank: int, sizes: list[list[int]], know_total: bool) -> list[Batch]:
    """``sizes[step][rank]`` samples; a negative size: this rank's data has ended."""
    return [
        make_batch(step, rank, n[rank], sum(n) if know_total else None) for step, n in enumerate(sizes) if n[rank] >= 0
    ]


def make_trainer(rule: SparseOptimizer, dense_optimizer, **options):
    from baselines.torchrec.trainer import TorchRecTrainer

    return TorchRecTrainer(ModelSpec(TABLES, Model), rule, dense_optimizer, SEED, **options)


def run_to_end(trainer, batches) -> list:
    iterator, results = iter(batches), []
    while True:
        try:
            results.append(trainer.progress(iterator))
        except StopIteration:
            return results


def train(rule, dense_optimizer, sizes, know_total=True, observe=True):
    """On a rank: results, spans, final weights."""
    trainer = make_trainer(rule, dense_optimizer, observe=observe)
    try:
        results = run_to_end(trainer, stream(dist.get_rank(), sizes, know_total))
        tables = {t.name: trainer.table(t.name) for t in TABLES}
        dense = {name: value.clone() for name, value in trainer.dense_state().items()}
        return results, trainer.take_spans(), tables, dense
    finally:
        trainer.close()


def plain_loop(rule, dense_optimizer, sizes):
    """The same training in one process: global losses per step, the model, the largest movement of a weight."""
    model = Model(PlainEmbeddings())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = dense_optimizer(list(model.dense.parameters()))
    tables = list(model.embeddings.tables.values())
    states = [torch.zeros(len(t), 1) for t in tables]
    losses = []
    for step, per_rank in enumerate(sizes):
        batches = [make_batch(step, rank, n, None) for rank, n in enumerate(per_rank) if n >= 0]
        loss = sum(model(batch).sum() for batch in batches) / max(1, sum(len(b) for b in batches))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for table, state in zip(tables, states, strict=True):
                if rule.name == "sgd":
                    table -= rule.lr * table.grad
                else:
                    state += table.grad.pow(2).mean(1, keepdim=True)
                    table -= rule.lr * table.grad / (state.sqrt() + rule.eps)
        losses.append(loss.item())
    moved = max(float((p.detach() - before[name]).abs().max()) for name, p in model.named_parameters())
    return losses, model, moved


def assert_equal_to_plain(ranks, rule, dense_optimizer, sizes) -> None:
    losses, model, moved = plain_loop(rule, dense_optimizer, sizes)
    assert moved >= 1e-2
    for results, _, tables, dense in ranks:
        assert len(results) == len(losses)
        for name, table in tables.items():
            assert (table - model.embeddings.tables[name]).abs().max() <= 1e-4 * moved
        plain_dense = {n: p for n, p in model.named_parameters() if not n.startswith("embeddings.")}
        assert dense.keys() == plain_dense.keys()
        for name, value in dense.items():
            assert (value - plain_dense[name]).abs().max() <= 1e-4 * moved
    for step, loss in enumerate(losses):
        assert sum(results[step].loss for results, *_ in ranks) == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_equals_a_plain_loop(pool2, rule):
    sizes = [[6, 6]] * STEPS
    assert_equal_to_plain(pool2.run(train, rule, sgd, sizes), rule, sgd, sizes)


def test_four_ranks_and_a_rank_without_rows_of_a_table(pool4):
    sizes = [[3, 2, 0, 4], [1, 1, 1, 1], [0, 0, 2, 0], [5, 4, 3, 2], [2, 2, 2, 2], [4, 4, 4, 4]]
    rule = SparseOptimizer("sgd", lr=0.5)
    assert_equal_to_plain(pool4.run(train, rule, sgd, sizes), rule, sgd, sizes)


def test_equals_a_plain_loop_with_adam(pool2):
    sizes = [[6, 6]] * STEPS
    assert_equal_to_plain(pool2.run(train, RULES[1], adam, sizes), RULES[1], adam, sizes)


@pytest.mark.parametrize("know_total", [True, False], ids=["aligned", "agreed"])
def test_uneven_and_empty_batches(pool2, know_total):
    sizes = [[5, 2], [0, 4], [3, 0], [0, 6], [1, 1], [7, 3], [4, 4], [2, 5]]
    ranks = pool2.run(train, RULES[1], sgd, sizes, know_total)
    assert_equal_to_plain(ranks, RULES[1], sgd, sizes)


@pytest.mark.parametrize("sizes", [[[4, 4], [4, -1], [4, -1], [3, -1]], [[-1, 4], [-1, 4], [-1, 2]]])
def test_a_rank_whose_data_has_ended_continues_with_empty_batches(pool2, sizes):
    ranks = pool2.run(train, RULES[0], sgd, sizes, False)
    assert_equal_to_plain(ranks, RULES[0], sgd, sizes)


def test_observation_changes_no_bit(pool2):
    sizes = [[6, 4]] * 6
    seen = pool2.run(train, RULES[1], adam, sizes, True, True)
    unseen = pool2.run(train, RULES[1], adam, sizes, True, False)
    for (results, spans, tables, dense), (results_off, none, tables_off, dense_off) in zip(seen, unseen, strict=True):
        assert spans and not none
        assert [r.loss for r in results] == [r.loss for r in results_off]
        for with_hooks, without in ((tables, tables_off), (dense, dense_off)):
            assert all(torch.equal(with_hooks[name], without[name]) for name in without)


def test_spans_show_every_stage_of_every_batch(pool2):
    for _, spans, _, _ in pool2.run(train, RULES[1], adam, [[6, 4]] * 6):
        for batch in range(6):
            assert {s.stage for s in spans if s.batch == batch} == set("PHKREFBGAUO")
        assert {s.batch for s in spans} == set(range(6))
        assert all(s.start <= s.end for s in spans)
        host = sorted((s for s in spans if s.stage in "PHRFBUO"), key=lambda s: s.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(host))
        once = [s for s in spans if s.stage != "K"]
        assert len(once) == len({(s.stage, s.batch) for s in once})
        at = {(s.stage, s.batch): s for s in once}
        for batch in range(6):
            chain = [at[stage, batch] for stage in "PHREFBGUO"]
            assert all(a.end <= b.start for a, b in itertools.pairwise(chain))
            assert at["A", batch].start >= at["B", batch].start
            assert at["A", batch].end <= at["O", batch].start
            keys = [s for s in spans if s.stage == "K" and s.batch == batch]
            assert max(s.end for s in keys) <= at["R", batch].start
            if batch:  # keys are routed while the batch before trains
                assert min(s.start for s in keys) < at["F", batch - 1].start


def test_observed_order_is_one_that_the_declared_schedule_allows(pool2):
    from baselines.torchrec.schedules import torchrec_schedule

    template = torchrec_schedule()
    for _, spans, _, _ in pool2.run(train, RULES[1], adam, [[6, 4]] * 8):
        start, end = {}, {}
        for s in spans:
            ref = Ref(s.stage, s.batch, s.micro)
            start[ref] = min(s.start, start.get(ref, s.start))
            end[ref] = max(s.end, end.get(ref, s.end))
        for op in template.unroll(8):
            assert op.lane == next(s.lane for s in spans if s.stage == op.ref.stage)
            for before in op.after:
                # DDP launches the AllReduce inside the backward, once its last dense gradient is ready.
                done = start[before] if (op.ref.stage, before.stage) == ("A", "B") else end[before]
                assert done <= start[op.ref], f"{op.ref} began before {before} had ended"


def test_traffic_and_its_minimum(pool2):
    sizes = [[6, 4]] * 3
    ranks = pool2.run(train, RULES[0], sgd, sizes)
    for step in range(3):
        batches = [make_batch(step, rank, sizes[step][rank], 10) for rank in range(2)]
        for rank, (results, *_) in enumerate(ranks):
            sent = minimum = distinct = keys = 0
            for table in TABLES:
                block = -(-table.rows // 2)
                of = [torch.cat([b.sparse[f].values() for f in table.features]) for b in batches]
                mine, theirs = of[rank], of[1 - rank]
                asked, given = theirs[theirs // block == rank], mine[mine // block != rank]
                sent += 4 * table.dim * (len(asked) + len(given))
                minimum += 4 * table.dim * (len(asked.unique()) + len(given.unique()))
                keys, distinct = keys + len(mine), distinct + len(mine.unique())
            result = results[step]
            assert (result.embedding_bytes, result.minimum_embedding_bytes) == (sent, minimum)
            assert result.duplication_factor == pytest.approx(keys / distinct)


def two_epochs():
    trainer = make_trainer(RULES[0], sgd)
    try:
        batches = stream(dist.get_rank(), [[3, 3]] * 4, True)
        return [[r.step for r in run_to_end(trainer, batches)] for _ in range(2)], trainer.take_spans()
    finally:
        trainer.close()


def test_second_epoch_by_a_new_iterator(pool2):
    for epochs, spans in pool2.run(two_epochs):
        assert epochs == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert {s.batch for s in spans if s.stage == "O"} == set(range(8))


def resume(rule, dense_optimizer):
    """Losses 4..7 of a trainer that continues, and of another one that took over its state after batch 3."""
    batches = stream(dist.get_rank(), [[4, 4]] * 8, True)
    first = make_trainer(rule, dense_optimizer)
    iterator = iter(batches)
    for _ in range(4):
        first.progress(iterator)
    state = first.state_dict()
    straight = [first.progress(iterator).loss for _ in range(4)]
    first.close()
    second = make_trainer(rule, dense_optimizer)
    other = iter(batches)  # this trainer has batches in flight, which are dropped
    second.progress(other)
    second.load_state_dict(state)
    resumed = [r.loss for r in run_to_end(second, batches[state["batches"] :])]
    second.close()
    return straight, resumed


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_state_dict_round_trip(pool2, rule):
    for straight, resumed in pool2.run(resume, rule, adam):
        assert straight == resumed


def refused(rule, tables):
    from baselines.torchrec.trainer import TorchRecTrainer

    with pytest.raises(ValueError) as error:
        TorchRecTrainer(ModelSpec(tables, Model), rule, sgd, SEED)
    return str(error.value)


def test_what_torchrec_cannot_train_is_refused(pool2):
    for message in pool2.run(refused, SparseOptimizer("adam"), TABLES):
        assert "adam" in message and "rowwise_adagrad" in message
    unequal = (TABLES[0], dataclasses.replace(TABLES[1], dim=4))
    assert all("one dim" in message for message in pool2.run(refused, RULES[0], unequal))


def test_version_mismatch_names_three_versions_and_a_fix():
    found = {"torch": "2.11.0", "torchrec": "1.8.0", "fbgemm": "not installed"}
    message = mismatch(found)
    assert all(part in message for part in ("torch 2.11.0", "torchrec 1.8.0", "fbgemm not installed", "pip install"))
    assert mismatch(installed_versions()) is None
