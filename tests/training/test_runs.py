"""`nestpipe run` from end to end: the files it writes, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nestpipe.measurement.record import Store

NESTPIPE = [sys.executable, "-m", "nestpipe.cli"]
SMALL = ("--data-scale=0.0001", "--batch-size=16", "--negatives=8", "--embedding-dim=16", "--width=16")
SMALL += ("--sequence-length=12",)
#: What the records must hold, by name.
FIELDS = (
    "losses",
    "step_ms",
    "qps",
    "input_ms",
    "lookup_ms",
    "exposed_lookup_ms",
    "communication_ms",
    "exposed_communication_ms",
    "exposed_communication_ratio",
    "exposed_vs_serial",
    "dense_sync_ms",
    "dense_ms",
    "update_ms",
    "skew_ms",
    "other_ms",
    "utilisation",
    "duplication_factor",
    "embedding_bytes",
    "minimum_embedding_bytes",
)


def nestpipe_run(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [*NESTPIPE, "run", *SMALL, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """One run of three methods with everything switched on: (stdout, records by method, folder)."""
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    folder = tmp_path_factory.mktemp("run")
    files = ["--json", f"{folder}/out.json", "--trace", f"{folder}/traces", "--store", f"{folder}/store"]
    done = nestpipe_run("--methods", "serial,nestpipe,torchrec", "--workers", "2", "--steps", "6", "--evaluate", *files)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "out.json").read_text())["methods"], folder


def test_json_holds_a_record_per_method_with_every_field(outputs):
    _, records, _ = outputs
    assert list(records) == ["serial", "nestpipe", "torchrec"]
    for name, record in records.items():
        assert record["kind"] == "measured" and record["method"] == name and record["workers"] == 2
        for field in FIELDS:
            assert np.isfinite(record[field]).all() and record[field], field
            if field != "losses":
                assert len(record[field]) == len(record["steps"]) == 6
                assert record["median"][field] == pytest.approx(np.median(record[field]))
    assert [records[name]["paper_method"] for name in records] == ["TorchRec", "NestPipe", None]


def test_warm_up_of_each_round_is_left_out(outputs):
    for record in outputs[1].values():
        assert record["steps"] == [4, 5, 6, 11, 12, 13]  # two rounds of 4 + 3 steps
        assert len(record["losses"]) == 14


def test_losses_agree(outputs):
    losses = [record["losses"] for record in outputs[1].values()]
    assert losses[0][0] > losses[0][-1]
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], atol=1e-4)


def test_parts_sum_to_the_step(outputs):
    parts = ["dense_ms", "update_ms", "skew_ms", "other_ms"]
    parts += [f"exposed_{name}_ms" for name in ("input", "lookup", "communication", "dense_sync")]
    for record in outputs[1].values():
        np.testing.assert_allclose(sum(np.array(record[part]) for part in parts), record["step_ms"], rtol=1e-6)


def test_ratios_follow_from_the_times(outputs):
    records = outputs[1]
    exposed = records["serial"]["median"]["exposed_communication_ms"]
    for record in records.values():
        expected = np.array(record["exposed_communication_ms"]) / exposed
        np.testing.assert_allclose(record["exposed_vs_serial"], expected)
        np.testing.assert_allclose(record["qps"], 32 / np.array(record["step_ms"]) * 1e3)
        assert all(
            a >= b > 0 for a, b in zip(record["embedding_bytes"], record["minimum_embedding_bytes"], strict=True)
        )
    assert records["serial"]["median"]["exposed_vs_serial"] == pytest.approx(1.0)
    np.testing.assert_allclose(records["serial"]["exposed_communication_ratio"], 1.0, atol=1e-6)


def test_evaluation_is_the_same_for_every_method(outputs):
    metrics = [record["evaluation"] for record in outputs[1].values()]
    assert set(metrics[0]) == {"HR@10", "NDCG@10", "HR@50", "NDCG@50", "users"}
    assert metrics[0]["users"] > 0
    for other in metrics[1:]:
        assert other == pytest.approx(metrics[0], abs=0.05)


def test_traces_open_and_show_every_rank(outputs):
    folder = outputs[2] / "traces"
    assert {p.name for p in folder.iterdir()} == {f"{m}.perfetto.json" for m in ("serial", "nestpipe", "torchrec")}
    for path in folder.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        assert {e["pid"] for e in events} == {0, 1}
        assert {e["name"][0] for e in events if e["ph"] == "X"} >= set("PHKREFBGAUO")


def test_store_gives_the_same_records(outputs):
    _, records, folder = outputs
    stored, skipped = Store(folder / "store").read()
    assert not skipped
    assert {r.key for r in stored} == {r["key"] for r in records.values()}


def test_table_shows_ratios_and_agreement(outputs):
    out = outputs[0]
    assert "measured: 2 ranks, loopback" in out and "speed-up over serial" in out and "1.00x" in out
    assert "largest difference in a step's loss from serial" in out


@pytest.mark.slow
def test_one_worker_and_batches_smaller_than_the_micro_batches(tmp_path):
    words = ["--methods", "serial(8),nestpipe", "--workers", "1", "--steps", "2", "--rounds", "1"]
    done = nestpipe_run(*words, "--batch-size", "3", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "out.json").read_text())["methods"]
    assert records["serial(8)"]["losses"] == records["nestpipe"]["losses"]
    assert records["nestpipe"]["embedding_bytes"] == [0.0, 0.0]  # nothing travels
    assert records["nestpipe"]["exposed_vs_serial"] == []  # plain serial did not run


@pytest.mark.slow
def test_an_epoch_shorter_than_the_warm_up_reports_only_losses(tmp_path):
    words = ["--methods", "serial,nestpipe", "--workers", "1", "--epochs", "1", "--data-scale", "0.000001"]
    done = nestpipe_run(*words, "--batch-size", "20", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    for record in json.loads((tmp_path / "out.json").read_text())["methods"].values():
        assert record["losses"] and record["steps"] == []


@pytest.mark.slow
def test_four_ranks(tmp_path):
    words = ["--methods", "serial,nestpipe,torchrec", "--workers", "4", "--steps", "4"]
    done = nestpipe_run(*words, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "out.json").read_text())["methods"]
    for record in records.values():
        assert record["workers"] == 4
        np.testing.assert_allclose(record["losses"], records["serial"]["losses"], atol=1e-4)


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that ``launcher`` has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if parent == launcher and b"nestpipe.ranks.rank" in command:
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("after_s", [pytest.param(0.0, marks=pytest.mark.slow), 3.0])
def test_ctrl_c_ends_everything(after_s):
    words = ["--methods", "nestpipe", "--workers", "2", "--steps", "100000"]
    process = subprocess.Popen(
        [*NESTPIPE, "run", *SMALL, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    deadline = time.monotonic() + 60
    while len(ranks := ranks_of(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(ranks) == 2
    time.sleep(after_s)
    asked = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the launcher's group; ranks have their own group
    _, error = process.communicate(timeout=30)
    assert time.monotonic() - asked < 10
    assert process.returncode == 130
    assert "interrupted; all ranks have ended" in error and "Traceback" not in error
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.slow
def test_two_runs_at_once():
    words = ["--methods", "serial,nestpipe", "--workers", "2", "--steps", "2", "--rounds", "1"]
    processes = [
        subprocess.Popen([*NESTPIPE, "run", *SMALL, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outs = [(process.communicate(timeout=240), process.returncode) for process in processes]
    losses = []
    for (out, error), status in outs:
        assert status == 0, error
        losses.append(next(line.split() for line in out.splitlines() if "loss, last step" in line))
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.root
def test_shaped_links(tmp_path):
    words = ["--methods", "serial", "--steps", "2", "--rounds", "1", "--testbed", "netns:100mbit,2ms"]
    done = nestpipe_run(*words, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    if "Running on loopback instead" in done.stderr:
        pytest.skip(done.stderr.splitlines()[0])
    record = json.loads((tmp_path / "out.json").read_text())["methods"]["serial"]
    assert record["testbed"] == "netns:100mbit,2ms" and "netns:100mbit,2ms" in done.stdout
    assert record["median"]["communication_ms"] >= 2 * 2  # two exchanges, 2 ms each way
