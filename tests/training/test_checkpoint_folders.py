"""A folder of checkpoints belongs to one run: what is refused, told, pruned and taken for the newest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe.config import RunConfig
from nestpipe.training.checkpoint import Checkpoints, _each_rank, only_writer
from nestpipe.training.loop import settings_that_decide, step_at_same_sample
from nestpipe.training.manifest import FORMAT, CheckpointError, newest, other_origin, require_resumable


def same_samples(step: int, ranks_then: int) -> int | None:
    return step * ranks_then


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "x"},
        {"ranks": None},
        {"identity": []},
        {"files": 7},
        {"files": {"rank-0.pt": ""}},
        {"method": 1},
        {"format": []},
    ],
)
def test_a_manifest_of_foreign_values_is_refused(tmp_path, wrong) -> None:
    (tmp_path / "step-00000004").mkdir()
    good = {
        "format": FORMAT,
        "method": "m",
        "step": 4,
        "ranks": 2,
        "identity": {},
        "files": {"rank-0.pt": "", "rank-1.pt": ""},
    }
    path = tmp_path / "step-00000004" / "manifest.json"
    path.write_text(json.dumps(good))
    assert newest(tmp_path).step == 4  # type: ignore[union-attr]
    for text in (json.dumps({**good, **wrong}), "[" * 100_000):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest.json cannot be used .*: remove step-00000004 to resume"):
            newest(tmp_path)


class Stub:
    """Trained ``trained`` steps, and has nothing to save."""

    def __init__(self, trained: int) -> None:
        self.trained = trained

    def state_dict(self) -> dict:
        return {}


def saved(checkpoint: Checkpoints, *steps: int) -> list[str]:
    for step in steps:
        checkpoint.save(Stub(step), [])  # type: ignore[arg-type]
    return sorted(p.name for p in checkpoint.folder.iterdir())


def foreign(folder: Path, step: int, **changes) -> None:
    place = folder / f"step-{step:08d}"
    place.mkdir(parents=True)
    manifest = {"format": FORMAT, "method": "m", "step": step, "ranks": 1, "identity": {"seed": 9}}
    (place / "manifest.json").write_text(json.dumps({**manifest, "files": {"rank-0.pt": ""}, **changes}))


@pytest.fixture
def one_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_foreign_checkpoints_are_neither_deleted_nor_in_the_way(one_rank, tmp_path) -> None:
    """Whatever is in the folder already, each save stays until this run has saved newer ones."""
    folder = tmp_path / "ck"
    foreign(folder, 20)
    foreign(folder, 15)
    foreign(folder, 5)
    (folder / "step-00000010").mkdir()  # without a manifest
    strangers = sorted(p.name for p in folder.iterdir())
    own = Checkpoints(folder, "m", {"seed": 3, "grid": (1, 2)})
    assert saved(own, 5) == sorted([*strangers, "step-00000005-2"])
    assert saved(own, 10, 15) == sorted([*strangers, "step-00000010-2", "step-00000015-2"])
    assert saved(own, 15) == sorted([*strangers, "step-00000010-2", "step-00000015-2"])  # saved already


def test_the_newest_is_the_one_saved_last(one_rank, tmp_path) -> None:
    """A run that continues with more ranks is further at a smaller step."""
    folder = tmp_path / "ck"
    foreign(folder, 20, ranks=2, identity={"seed": 3}, files={"rank-0.pt": "", "rank-1.pt": ""}, number=2)
    own = Checkpoints(folder, "m", {"seed": 3})
    saved(own, 12)
    assert newest(folder).step == 12  # type: ignore[union-attr]
    assert saved(own, 20) == ["step-00000012", "step-00000020-2"]
    assert (newest(folder).number, newest(folder).ranks) == (4, 1)  # type: ignore[union-attr]


def test_a_fresh_run_in_a_used_folder_is_refused(one_rank, tmp_path) -> None:
    own = Checkpoints(tmp_path / "ck", "m", {"seed": 3})
    own.begin()
    foreign(own.folder, 20)
    with pytest.raises(CheckpointError, match=r"ck holds checkpoints of an earlier run .*--resume, choose another"):
        own.begin()


def test_another_commit_or_version_is_told_not_refused(one_rank, tmp_path) -> None:
    own = Checkpoints(tmp_path / "ck", "m", {"seed": 3})
    saved(own, 5)
    manifest = newest(own.folder)
    assert other_origin(manifest) == ""
    text = other_origin(replace(manifest, origin={**manifest.origin, "commit": "abc", "torch": "1.0"}))
    assert text.startswith("m resumed step-00000005, which was saved by commit abc (now ") and "torch 1.0 (now" in text


def test_a_run_that_would_end_before_its_checkpoint_is_refused(tmp_path) -> None:
    foreign(tmp_path, 40)
    manifest = newest(tmp_path)
    assert require_resumable(manifest, 1, same_samples, True, 40) == 40
    with pytest.raises(CheckpointError, match="it is at step 40, but this run would end after 10 steps"):
        require_resumable(manifest, 1, same_samples, True, 10)


@pytest.mark.parametrize("error", [OSError, KeyError, EOFError, ImportError, AssertionError])
def test_whatever_fails_on_one_rank_fails_on_all(pool2, error) -> None:
    texts = pool2.run(failing_on_rank_1, error)
    assert len(set(texts)) == 1 and "broken" in texts[0] and "\n" not in texts[0]


def failing_on_rank_1(error: type[Exception]) -> str:
    import torch.distributed as dist

    def work() -> None:
        if dist.get_rank():
            raise error("broken")

    with pytest.raises(CheckpointError) as caught:
        _each_rank(work)
    return str(caught.value)


def test_the_identity_holds_the_data_and_names_the_option_that_differs(tmp_path) -> None:
    from nestpipe.config import OptimizerConfig
    from nestpipe.datasets.loader import load_dataset
    from nestpipe.methods import find_method

    config, method = RunConfig(), find_method("serial")
    data = load_dataset(config.data, config.model, 1)
    settings = settings_that_decide(config, method, data)
    foreign(tmp_path, 4, identity=json.loads(json.dumps(settings)))
    manifest = newest(tmp_path)
    manifest.require(settings)
    lengths = data.lengths.copy()
    lengths[0] += 1
    other = settings_that_decide(config, method, replace(data, lengths=lengths))
    with pytest.raises(CheckpointError, match="data_fingerprint was"):
        manifest.require(other)
    other = settings_that_decide(replace(config, optimizer=OptimizerConfig(sparse_lr=0.2)), method, data)
    with pytest.raises(CheckpointError, match=r"sparse_lr was 0\.05 there and is 0.2 now"):
        manifest.require(other)


def test_two_runs_do_not_save_to_one_folder(tmp_path) -> None:
    folder = str(tmp_path / "saved")
    with only_writer(folder):
        with pytest.raises(CheckpointError, match=r"another run saves to .*saved; wait for it"), only_writer(folder):
            pass
        with only_writer(str(tmp_path / "other")), only_writer(None):
            pass
    with only_writer(folder):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"cannot write into .*file.*choose another"),
        only_writer(f"{tmp_path}/file"),
    ):
        pass


def test_the_step_of_another_number_of_ranks() -> None:
    from nestpipe.datasets.loader import load_dataset

    config = RunConfig()
    dataset = load_dataset(config.data, config.model, 1)
    old, new = dataset.steps_per_epoch(2), dataset.steps_per_epoch(4)
    assert step_at_same_sample(dataset, 4, 6, 2) == 3 and step_at_same_sample(dataset, 2, 3, 4) == 6
    assert step_at_same_sample(dataset, 4, 7, 2) is None
    assert step_at_same_sample(dataset, 4, 3 * old, 2) == 3 * new
