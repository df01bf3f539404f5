"""Every method on real ranks: what the checker says and what a run shows agree; methods x ranks x update rules."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchrec")

from baselines.two_d_sp.schedules import nestpipe_two_d_sp_exact, unpipelined_two_d_sp, without_marks
from nestpipe.checker.observed_run import violations
from nestpipe.checker.rules import check
from tests.support.engine_runs import Outcome, differences
from tests.support.method_runs import METHODS, RULES, VERDICTS, Run, largest_difference, largest_update, train_methods

ENGINE = [name for name, method in METHODS.items() if not method.observed]


def runs_on(request, ranks: int, runs: list[Run], steps: int = 6) -> list[list]:
    """Per run, per rank: (outcome, spans)."""
    if ranks == 1:
        results = [request.getfixturevalue("pool1").run(train_methods, runs, steps)[0]]
    else:
        results = request.getfixturevalue(f"pool{ranks}").run(train_methods, runs, steps, timeout_s=240)
    return [[rank[i] for rank in results] for i in range(len(runs))]


@pytest.mark.parametrize("method", METHODS)
def test_the_checker_says_of_each_method_what_is_true(method: str) -> None:
    problems = check(Run(method).template)
    assert {p.kind for p in problems} == ({VERDICTS[method]} if VERDICTS[method] else set())
    if method == "uniemb":
        assert "E1.1 reads a stale row: the update U0 is missing" in problems[0].text


def agreement(plain: Outcome, run: Run, found: Outcome, world: int) -> list[str]:
    """Sentences about disagreements between the checker's verdict on ``run`` and its difference from ``plain``."""
    kinds = {p.kind for p in check(run.template)}
    moved, gap = largest_update(plain), largest_difference(found, plain)
    if moved < 1e-2:
        return [f"{run}: nothing has moved"]
    if kinds and world > 1 and gap <= 1e-4 * moved:
        return [f"{run} is called {kinds} but differs by no more than {gap:.2g} of {moved:.2g}"]
    if not kinds and gap > 1e-4 * moved:
        return [f"{run} is called synchronous but differs by {gap:.2g} of {moved:.2g}"]
    return []


def matrix(request, ranks: int, rule: str, names: list[str]) -> list[str]:
    groups = 2 if ranks > 1 else 1
    runs = [Run("serial", rule), *(Run(name, rule, groups) for name in names)]
    results = runs_on(request, ranks, runs)
    plain = results[0][0][0]
    wrong = []
    for run, per_rank in zip(runs[1:], results[1:], strict=True):
        wrong += agreement(plain, run, per_rank[0][0], ranks)
        for outcome, spans in per_rank:
            wrong += [f"{run}: no spans"] * (not spans) + [f"{run}: steps"] * (len(outcome.losses) != 6)
            if run.found.observed:
                # Within one rank TorchRec exchanges nothing.
                alone = ranks == 1 or (run.method == "2d-sp" and ranks == groups)
                wrong += violations(spans, run.template, sometimes="EG" if alone else "")
    # The global loss is the same for every number of ranks; each rank holds its share.
    losses = [sum(rank[0].losses[0] for rank in per_rank) for per_rank in results]
    exact = [loss for loss, run in zip(losses, runs, strict=True) if "bf16" not in run.method]
    assert max(exact) - min(exact) < 1e-5
    return wrong


ALL = [name for name in VERDICTS if name != "serial"]


@pytest.mark.parametrize(("ranks", "rule"), [(1, "rowwise_adagrad"), (2, "sgd"), (4, "rowwise_adagrad")])
def test_checker_and_reality_agree(request, ranks: int, rule: str) -> None:
    assert matrix(request, ranks, rule, ALL) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_whole_matrix(request, ranks: int, rule: str) -> None:
    names = [name for name in ALL if rule != "adam" or name in ENGINE]
    assert matrix(request, ranks, rule, names) == []


def exact_form(groups: int, overlap: bool):
    """On a rank: the outcome of the exact NestPipe+2D-SP, or of its serial form, and whether all replicas are equal."""
    import torch.distributed as dist

    from nestpipe.engine.engine import Engine, make_lanes
    from tests.support.method_runs import SEED, SPEC, adam, batches, weights

    template = nestpipe_two_d_sp_exact(3) if overlap else without_marks(unpipelined_two_d_sp(3))
    engine = Engine(template, SPEC, RULES["rowwise_adagrad"], adam, SEED, make_lanes(overlap), replica_groups=groups)
    try:
        outcome, iterator = Outcome(), iter(batches(8, known=False))
        while True:
            try:
                outcome.losses.append(engine.progress(iterator).loss)
            except StopIteration:
                break
        outcome.tensors = weights(engine)
        outcome.tensors["state"] = engine.state_dict()["state"].clone()
        table = outcome.tensors["table item"]
        every = [torch.empty_like(table) for _ in range(dist.get_world_size())]
        dist.all_gather(every, table)
        return outcome, all(torch.equal(table, other) for other in every)
    finally:
        engine.close()


@pytest.mark.parametrize("groups", [2, 4])
def test_the_exact_form_equals_its_serial_form_bit_for_bit(request, pool4, groups: int) -> None:
    pipelined, listed = pool4.run(exact_form, groups, True), pool4.run(exact_form, groups, False)
    for (one, equal), (other, _) in zip(pipelined, listed, strict=True):
        assert equal and differences(one, other) == []
    [plain] = pool4.run(train_methods, [Run("serial", dense="adam")], 8)[0]
    moved = largest_update(plain[0])
    for name in ("table item", "table tag"):
        assert (pipelined[0][0].tensors[name] - plain[0].tensors[name]).abs().max() <= 1e-4 * moved


def test_the_papers_form_is_2d_sp(pool4) -> None:
    """NestPipe+2D-SP averages what each group's update would give: real DMPCollection's result, to float tolerance."""
    (ours, _), (theirs, _) = pool4.run(train_methods, [Run("nestpipe+2d-sp"), Run("2d-sp")], 6)[0]
    assert largest_difference(ours, theirs) <= 1e-4 * largest_update(theirs)


@pytest.mark.parametrize("method", ["nestpipe", "nestpipe+2d-sp-exact", "uniemb"])
def test_adam_of_the_engine_equals_a_reference(pool2, method: str) -> None:
    """Against SparseAdam's formulas with a count per row, in float64 on whole tables (UniEmb: only that it runs)."""
    (found, _) = pool2.run(train_methods, [Run(method, "adam")], 6)[0][0]
    reference = adam_reference(6)
    gap = max(float((found.tensors[n] - v).abs().max()) for n, v in reference.items())
    moved = largest_update(found)
    assert moved > 1e-2
    assert gap > 1e-3 * moved if method == "uniemb" else gap <= 1e-4 * moved


def adam_reference(steps: int) -> dict[str, torch.Tensor]:
    from tests.support.method_runs import TABLES, make_batch
    from tests.support.torchrec_model import Model, PlainEmbeddings

    rule = RULES["adam"]
    model = Model(PlainEmbeddings())
    tables = list(model.embeddings.tables.values())
    state = [[torch.zeros(t.shape, dtype=torch.float64) for _ in range(2)] + [torch.zeros(len(t), 1)] for t in tables]
    for step in range(steps):
        parts = [make_batch(step, rank, 6 - rank % 2, None) for rank in range(2)]
        model.zero_grad()
        (sum(model(part).sum() for part in parts) / sum(map(len, parts))).backward()
        with torch.no_grad():
            for p in model.dense.parameters():
                p -= 0.1 * p.grad
            for table, (m, v, count), config in zip(tables, state, TABLES, strict=True):
                keys = torch.cat([part.sparse[f].values() for part in parts for f in config.features])
                rows = keys.unique()
                g = table.grad[rows].double()
                count[rows] += 1
                k = count[rows].double()
                m[rows] = 0.9 * m[rows] + 0.1 * g
                v[rows] = 0.999 * v[rows] + 0.001 * g * g
                step_size = (m[rows] / (1 - 0.9**k)) / ((v[rows] / (1 - 0.999**k)).sqrt() + rule.eps)
                table[rows] -= (rule.lr * step_size).float()
    return {f"table {t.name}": w.detach() for t, w in zip(TABLES, tables, strict=True)}
