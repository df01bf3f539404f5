"""Submitting, watching, resuming and cancelling a sweep, with a faked Slurm."""

from __future__ import annotations

from pathlib import Path

from nestpipe.measurement.record import Store
from slurm.collect import collect
from slurm.failures import write_failure
from slurm.folder import TOLD_TO_STOP, write_json
from slurm.grid import load_grid
from slurm.sbatch import sbatch_text
from slurm.status import counts, point_states
from tests.support.sweep_commands import GRID, finish, nestpipe, submit

# Submission


def test_one_array_per_shape_with_its_limit(slurm, sweep, capsys):
    out = submit(capsys)
    assert "8 points submitted, 0 simulated, 0 were here before" in out
    one, two = slurm.scripts()
    for text, nodes in ((one, 1), (two, 2)):
        for line in (
            f"nodes={nodes}",
            "ntasks-per-node=2",
            "array=0-3%2",
            "partition=debug",
            "signal=USR2@90",
            "requeue",
        ):
            assert f"#SBATCH --{line}\n" in text
        assert "--kill-on-bad-exit=1" in text
    assert {p.submission["job"] for p in sweep.points()} == {f"{a}_{i}" for a in (101, 102) for i in range(4)}
    assert counts(point_states(sweep)) == "8 points: 8 pending"


def test_submitting_again_submits_only_what_is_new(slurm, sweep, capsys):
    submit(capsys)
    assert (
        "0 points submitted, 0 simulated, 8 were here before"
        in nestpipe(capsys, "submit", "grid.toml", "--executor", "slurm")[1]
    )
    reordered = GRID.replace('["serial", "nestpipe"]', '["nestpipe", "serial"]').replace("[2, 4]", "[4, 2]")
    Path("grid.toml").write_text(reordered)
    assert "0 points submitted" in nestpipe(capsys, "submit", "grid.toml", "--executor", "slurm")[1]
    Path("grid.toml").write_text(reordered.replace("[8, 16]", "[16, 8, 24]"))
    assert "4 points submitted, 0 simulated, 8 were here before" in submit(capsys)
    assert len(slurm.scripts()) == 4 and len(slurm.queue()) == 12


def test_two_submissions_at_once(slurm, sweep, capsys):
    with sweep.locked():
        status, _, err = nestpipe(capsys, "submit", "grid.toml", "--executor", "slurm")
    assert status == 1 and "another command is submitting" in err
    assert slurm.scripts() == []


def test_sbatch_that_refuses_is_one_line(slurm, sweep, capsys):
    slurm.refuse("sbatch: error: invalid partition specified: debug\nsbatch: error: Batch job submission failed\n")
    status, _, err = nestpipe(capsys, "submit", "grid.toml", "--executor", "slurm")
    assert status == 1 and err.count("\n") == 1 and "sbatch refused 4 jobs: invalid partition" in err
    (slurm.folder / "refuse").unlink()
    assert "8 points submitted" in submit(capsys)


def test_without_slurm_the_message_names_the_way(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("grid.toml").write_text(GRID)
    status, _, err = nestpipe(capsys, "submit", "grid.toml", "--executor", "slurm")
    assert status == 1 and "no sbatch here" in err and "--executor local" in err


def test_points_that_cannot_run_stop_everything_before_it_starts(slurm, capsys):
    Path("grid.toml").write_text(
        GRID.replace("steps = 2", "steps = 2\ndata_scale = -1.0").replace("data_scale = 0.0001\n", "")
    )
    status, _, err = nestpipe(capsys, "submit", "grid.toml", "--executor", "slurm")
    assert status == 2 and err.startswith("nestpipe sweep: error: grid.toml:8: data_scale") and not slurm.scripts()


def test_options_override_the_file(slurm, sweep, capsys):
    words = ["--partition", "high", "--account", "me", "--time", "30", "--gpus-per-node", "4", "--constraint", "a100"]
    submit(capsys, *words, "--setup", "module load python", "export A='b c'", "--parallelism", "3")
    text = slurm.scripts()[0]
    for line in ("partition=high", "account=me", "time=30", "gpus-per-node=4", "constraint=a100", "array=0-3%3"):
        assert f"#SBATCH --{line}\n" in text
    assert "\nmodule load python\nexport A='b c'\n" in text


def test_preview_submits_nothing_and_shows_the_text(slurm, capsys):
    status, out, _ = nestpipe(capsys, "preview", "grid.toml")
    assert status == 0 and not slurm.scripts() and not Path("sweeps").exists()
    assert "#SBATCH --array=0-3%2" in out and "8 points: 8 jobs in 2 arrays" in out and "Nothing was submitted" in out
    submit(capsys)
    logs = Path("sweeps/grid/logs").absolute()
    shown = sbatch_text(load_grid(Path("grid.toml")).cluster, 1, 2, "grid", 4, logs)
    assert shown == slurm.scripts()[0]


def test_larger_than_the_cluster_is_simulated_and_says_so(slurm, sweep, capsys):
    assert "4 points submitted, 4 simulated" in submit(capsys, "--max-workers", "2")
    done = [s for s in point_states(sweep) if s.state == "done"]
    assert len(done) == 4 and all(s.detail == "simulated" for s in done)
    collected = collect(sweep, Path("store"))
    records, skipped = Store(Path("store")).read()
    assert collected.new == 4 and not skipped and {r.kind for r in records} == {"simulated"}


def test_a_folder_that_cannot_be_written_is_one_line(slurm, capsys):
    Path("file").touch()
    for folder in ("file", "file/below"):
        status, _, err = nestpipe(capsys, "submit", "grid.toml", "--executor", "slurm", "--folder", folder)
        assert status == 1 and err.count("\n") == 1 and f"cannot write into {folder}" in err
    assert not slurm.scripts()


# States of points


def test_states_and_what_resume_submits(slurm, sweep, capsys):
    submit(capsys)
    folders = sweep.points()
    names = ["done", "running", "requeued", "failed", "lost", "cancelled", "gave up", "pending"]
    by_name = dict(zip(names, folders, strict=True))
    jobs = {name: folder.submission["job"] for name, folder in by_name.items()}
    finish(slurm, by_name["done"], 1)
    for name in ("running", "requeued", "cancelled"):
        note = TOLD_TO_STOP if name == "cancelled" else ""
        write_json(
            by_name[name].path / "progress.json", {"job": jobs[name], "step": 3, "of": 6, "note": note, "restarts": 1}
        )
    slurm.set(jobs["running"], "RUNNING")
    for name in ("failed", "lost", "cancelled", "gave up"):
        slurm.set(jobs[name], "")
    sweep.logs.mkdir(exist_ok=True)
    (sweep.logs / f"{jobs['failed']}_1_log.err").write_text("noise\nBoom on a rank\nsubmitit ERROR (...) - triggered\n")
    write_failure(by_name["failed"], jobs["failed"], 0, RuntimeError("Connection closed by peer [127.0.0.1]"))
    write_failure(by_name["failed"], jobs["failed"], 1, ValueError("boom\nmore"))
    write_json(by_name["gave up"].path / "failures" / f"{jobs['gave up']}-0.json", {"rank": 0, "what": "gave up: time"})
    states = {s.folder.path.name: s for s in point_states(sweep)}
    assert {name: states[f.path.name].state for name, f in by_name.items()} == {name: name for name in names}
    failed = states[by_name["failed"].path.name]
    assert failed.detail == "rank 1: ValueError: boom" and list(failed.stderr) == ["noise", "Boom on a rank"]
    status, out, _ = nestpipe(capsys, "status", "grid")
    assert status == 1 and "Boom on a rank" in out and "step 3 of 6, restarted 1x" in out

    status, out, _ = nestpipe(capsys, "resume", "grid", "--time", "90")
    assert status == 0 and "4 points submitted" in out and "4 left alone" in out
    after = {s.folder.path.name: s.state for s in point_states(sweep)}
    assert {name: after[f.path.name] for name, f in by_name.items()} == {
        **{name: "pending" for name in ("failed", "lost", "cancelled", "gave up", "pending")},
        **{name: name for name in ("done", "running", "requeued")},
    }
    assert "#SBATCH --time=90\n" in slurm.scripts()[-1]
    assert nestpipe(capsys, "resume", "grid")[1].startswith("0 points submitted")


def test_ranks_of_a_stopped_job_that_report_each_other_have_not_failed(slurm, sweep, capsys):
    submit(capsys)
    one, two = sweep.points()[:2]
    for folder, error in ((one, RuntimeError("Connection reset by peer")), (two, ValueError("a bug"))):
        job = folder.submission["job"]
        slurm.set(job, "")
        write_json(folder.path / "progress.json", {"job": job, "step": 3, "of": 6, "note": TOLD_TO_STOP})
        write_failure(folder, job, 1, error)
    assert [s.state for s in point_states(sweep, [one.path.name, two.path.name])] == ["cancelled", "failed"]


def test_a_slurm_that_does_not_answer_is_not_taken_for_lost_jobs(slurm, sweep, capsys):
    submit(capsys)
    slurm.stop_answering()
    assert counts(point_states(sweep)) == "8 points: 8 unknown"
    status, _, err = nestpipe(capsys, "resume", "grid")
    assert status == 1 and "squeue does not answer" in err
    assert len(slurm.scripts()) == 2


def test_cancel_and_resume(slurm, sweep, capsys):
    submit(capsys)
    finish(slurm, sweep.points()[0], 1)
    assert "cancelled 7 jobs" in nestpipe(capsys, "cancel", "grid")[1]
    assert slurm.queue() == []
    assert counts(point_states(sweep)) == "8 points: 1 done, 7 cancelled"
    assert "7 points submitted" in nestpipe(capsys, "resume", "grid")[1]


def test_a_sweep_that_does_not_exist(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for action in ("status", "resume", "cancel", "collect"):
        status, _, err = nestpipe(capsys, action, "smoke")
        assert status == 1 and "sweeps/smoke holds no sweep; submit one" in err and err.count("\n") == 1
