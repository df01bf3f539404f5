"""Checkpoints: a run that resumes from one equals a run that never stopped; damaged and foreign ones are refused."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrec")

from nestpipe.training.checkpoint import Checkpoints
from nestpipe.training.manifest import CheckpointError, newest
from tests.support.engine_runs import Outcome, differences
from tests.support.method_runs import Run, batches, largest_difference, weights
from tests.support.torchrec_model import TABLES

STEPS, SAVED_AT = 9, 4


def same_samples(ranks: int, step: int, ranks_then: int) -> int | None:
    return step * ranks_then // ranks if step * ranks_then % ranks == 0 else None


def checkpoints(folder: str, run: Run, **identity) -> Checkpoints:
    return Checkpoints(Path(folder), run.method, {"seed": 3, **identity})


def straight_and_saved(folder: str, run: Run) -> Outcome:
    """On a rank: all steps, with a checkpoint saved on the way while batches are in flight."""
    trainer, results = run.trainer(), []
    try:
        iterator = iter(batches(STEPS))
        for step in range(STEPS):
            results.append(trainer.progress(iterator))
            if step + 1 == SAVED_AT:
                checkpoints(folder, run).save(trainer, results)
        return Outcome([r.loss for r in results], [r.samples for r in results], weights(trainer))
    finally:
        trainer.close()


def resumed(folder: str, run: Run, forget_early_rows: bool = False, warm: bool = False) -> Outcome:
    """The same run resumed from the checkpoint, by a fresh trainer or by one that has trained already (``warm``)."""
    import torch.distributed as dist

    trainer = run.trainer()
    try:
        if warm:
            trainer.progress(iter(batches(STEPS)))
        loaded = checkpoints(folder, run).load(trainer, partial(same_samples, dist.get_world_size()))
        assert loaded is not None and trainer.trained == SAVED_AT == len(loaded.results) and loaded.note == ""
        results = loaded.results
        if forget_early_rows:
            trainer.load_state_dict({**trainer.state_dict(), "in_flight": {}})
        iterator = iter(batches(STEPS)[SAVED_AT:])
        results += [trainer.progress(iterator) for _ in range(STEPS - SAVED_AT)]
        return Outcome([r.loss for r in results], [r.samples for r in results], weights(trainer))
    finally:
        trainer.close()


METHODS = ["nestpipe", "fwp-only", "uniemb", "nestpipe+bf16", "nestpipe+2d-sp", "nestpipe+2d-sp-exact", "torchrec"]


@pytest.mark.parametrize("method", METHODS)
def test_resuming_equals_never_stopping(pool2, tmp_path, method: str) -> None:
    run = Run(method, dense="adam")
    whole = pool2.run(straight_and_saved, str(tmp_path), run)
    for warm in (False, True):
        for one, other in zip(pool2.run(resumed, str(tmp_path), run, False, warm), whole, strict=True):
            if method == "torchrec":
                assert largest_difference(one, other) <= 1e-6
                assert one.losses == pytest.approx(other.losses, abs=1e-6)
            else:
                assert differences(one, other) == []


def test_diverged_replicas_resume_as_they_were(pool4, tmp_path) -> None:
    run = Run("2d-sp", interval=3)
    whole = pool4.run(straight_and_saved, str(tmp_path), run)
    assert largest_difference(whole[0], whole[1]) > 1e-3  # after 9 steps the last two are not averaged
    for one, other in zip(pool4.run(resumed, str(tmp_path), run), whole, strict=True):
        assert largest_difference(one, other) <= 1e-6
        assert one.losses == pytest.approx(other.losses, abs=1e-6)


def test_rows_that_were_read_early_matter(pool2, tmp_path) -> None:
    run = Run("uniemb")
    whole = pool2.run(straight_and_saved, str(tmp_path), run)
    forgotten = pool2.run(resumed, str(tmp_path), run, True)
    assert any(differences(one, other) for one, other in zip(forgotten, whole, strict=True))


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam"])
def test_another_number_of_ranks_reshards(pool2, pool4, tmp_path, rule: str) -> None:
    """From 2 ranks to 4: rows of tables and optimizer state move to other ranks, and the whole table is the same."""
    run = Run("nestpipe", rule)
    pool2.run(straight_and_saved, str(tmp_path), run)
    before, after = (pool.run(state_of, str(tmp_path), run)[0] for pool in (pool2, pool4))
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    assert (before[1], after[1]) == (SAVED_AT, SAVED_AT // 2)
    assert torch.equal(before[2], after[2])


def state_of(folder: str, run: Run):
    """On a rank, after loading: weights, batches trained, the optimizer state of all ranks' rows in table order."""
    import torch.distributed as dist

    trainer = run.trainer()
    try:
        checkpoints(folder, run).load(trainer, partial(same_samples, dist.get_world_size()))
        rows = [trainer.row_state(table.name) for table in TABLES]
        return weights(trainer), trainer.trained, torch.cat(rows)
    finally:
        trainer.close()


def refusal(folder: str, run: Run, identity: dict) -> tuple[str, bool]:
    """On a rank: the message, and whether the trainer is as it was."""
    import torch.distributed as dist

    trainer = run.trainer()
    try:
        before = weights(trainer)
        with pytest.raises(CheckpointError) as error:
            checkpoints(folder, run, **identity).load(trainer, partial(same_samples, dist.get_world_size()))
        after = weights(trainer)
        return str(error.value), all(torch.equal(after[name], value) for name, value in before.items())
    finally:
        trainer.close()


def refusals(pool, folder: Path, run: Run, **identity) -> str:
    """All ranks refuse, in one line, the same for all, and change nothing."""
    messages, unchanged = zip(*pool.run(refusal, str(folder), run, identity), strict=True)
    assert all(unchanged) and len(set(messages)) == 1 and "\n" not in messages[0]
    return messages[0]


def test_a_checkpoint_that_is_damaged_foreign_or_of_other_ranks_is_refused(pool2, pool4, tmp_path) -> None:
    run = Run("nestpipe")
    pool2.run(straight_and_saved, str(tmp_path), run)
    [place] = tmp_path.iterdir()
    assert "seed was 3 there and is 4 now" in refusals(pool2, tmp_path, run, seed=4)

    file = place / "rank-1.pt"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert "rank-1.pt does not match its checksum; remove step-00000004" in refusals(pool2, tmp_path, run)
    file.unlink()
    assert "rank-1.pt cannot be read" in refusals(pool2, tmp_path, run)
    assert "rank-1.pt cannot be read" in refusals(pool4, tmp_path, run)
    file.write_bytes(sound)

    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**manifest, "step": 3}))
    assert "its 3 steps end inside a step of 4 ranks" in refusals(pool4, tmp_path, run)
    (place / "manifest.json").write_text("{")
    assert "manifest.json cannot be used" in refusals(pool2, tmp_path, run)


def test_methods_that_cannot_reshard_say_so(pool2, pool4, tmp_path) -> None:
    for method, reason in (("torchrec", "fit their own number of ranks"), ("uniemb", "read early")):
        pool2.run(straight_and_saved, str(tmp_path / method), Run(method))
        assert reason in refusals(pool4, tmp_path / method, Run(method))


class Intruder:
    def __reduce__(self):
        return os.mkdir, ("intruder",)


def test_nothing_executes_on_load(pool2, tmp_path, monkeypatch) -> None:
    import hashlib

    monkeypatch.chdir(tmp_path)
    run = Run("nestpipe")
    pool2.run(straight_and_saved, str(tmp_path), run)
    [place] = tmp_path.iterdir()
    torch.save({"trainer": Intruder()}, place / "rank-0.pt")
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"]["rank-0.pt"] = hashlib.sha256((place / "rank-0.pt").read_bytes()).hexdigest()
    (place / "manifest.json").write_text(json.dumps(manifest))
    assert "rank-0.pt holds more than plain tensors" in refusals(pool2, tmp_path, run)
    assert not list(tmp_path.rglob("intruder"))


def save_into(folder: str, rank_that_cannot: int) -> str:
    import torch.distributed as dist

    run = Run("serial")
    trainer, results, write = run.trainer(), [], torch.save
    try:
        iterator = iter(batches(6))
        for step in range(5):
            results.append(trainer.progress(iterator))
            if step == 4 and dist.get_rank() == rank_that_cannot:
                torch.save = full_disk
            if step < 4:
                checkpoints(folder, run).save(trainer, results)
        with pytest.raises(CheckpointError) as error:
            checkpoints(folder, run).save(trainer, results)
        return str(error.value)
    finally:
        torch.save = write
        trainer.close()


def full_disk(state, file):
    file.write(b"half")
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_leaves_the_previous_checkpoint(pool2, tmp_path) -> None:
    assert all("No space left" in text for text in pool2.run(save_into, str(tmp_path), 1))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".step-00000005.writing", "step-00000003", "step-00000004"]
    assert newest(tmp_path).step == 4
    assert newest(tmp_path / "none") is None
