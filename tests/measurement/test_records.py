"""The run record: round trip, identity, medians, atomic writes, and the store."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from nestpipe.measurement.exposed_time import EXPOSED, StepTimes
from nestpipe.measurement.provenance import provenance
from nestpipe.measurement.record import (
    METRICS,
    SCHEMA,
    Record,
    RecordError,
    Store,
    metrics_from_times,
    record_from_json,
)

RECORD = Record(
    kind="measured",
    method="nestpipe",
    paper_method="NestPipe",
    workers=2,
    seed=1,
    config={"micro_batches": 8, "data": {"dataset": "synthetic"}, "model": {"width": 8}},
    steps=[4, 5, 6],
    metrics={"step_ms": [3.0, 1.0, 10.0], "qps": [100.0, 300.0, 200.0], "exposed_vs_serial": []},
    losses=[4.0, 3.5, 3.0],
    evaluation={"HR@10": 0.1},
    notes=["a note"],
    provenance={"host": {"cores": 2}},
)


def test_round_trip_through_json():
    again = record_from_json(json.loads(json.dumps(RECORD.to_json())))
    assert again == RECORD and again.key == RECORD.key


def test_typical_is_the_mean_of_simulated_steps_and_the_median_of_others():
    simulated = dataclasses.replace(RECORD, kind="simulated")
    assert RECORD.typical("step_ms") == 3.0
    assert simulated.typical("step_ms") == pytest.approx(14 / 3)


def test_speed_up_and_scaling_are_ratios_of_typical_values():
    slow = dataclasses.replace(RECORD, metrics={"step_ms": [6.0, 2.0, 9.0], "qps": [50.0] * 3})
    assert RECORD.speedup_over(slow) == 2.0 and slow.speedup_over(RECORD) == 0.5
    large = dataclasses.replace(RECORD, workers=8, metrics={"step_ms": [3.0] * 3, "qps": [600.0] * 3})
    assert large.scaling_from(RECORD) == pytest.approx(600 / 8 / (200 / 2))


def test_json_is_flat_with_values_and_medians():
    data = RECORD.to_json()
    assert data["schema"] == SCHEMA and data["key"] == RECORD.key
    assert data["step_ms"] == [3.0, 1.0, 10.0]
    assert data["median"] == {"step_ms": 3.0, "qps": 200.0}  # without values there is no median


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "simulated"},
        {"method": "serial"},
        {"workers": 4},
        {"seed": 2},
        {"testbed": "netns:200mbit,1ms"},
        {"paced": True},
        {"config": {"micro_batches": 4, "data": {"dataset": "synthetic"}}},
    ],
)
def test_key_names_what_was_run(changed):
    assert dataclasses.replace(RECORD, **changed).key != RECORD.key


def test_key_does_not_depend_on_what_came_out_or_on_order():
    other = dataclasses.replace(
        RECORD,
        metrics={},
        losses=[],
        steps=[9],
        provenance={},
        notes=[],
        config={"data": {"dataset": "synthetic"}, "micro_batches": 8},
    )
    before = dataclasses.replace(RECORD, config={"micro_batches": 8, "data": {"dataset": "synthetic"}})
    assert other.key == before.key == "29edc8103de65e30"  # pinned: stored records keep their names


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"schema": "nestpipe-record-0"}, "expected schema nestpipe-record-1, found 'nestpipe-record-0'"),
        ({}, "found None"),
        ([1, 2], "found 'list'"),
        ({"schema": SCHEMA, "kind": "measured"}, "lacks config, method, seed, steps, workers"),
        ({**RECORD.to_json(), "kind": "guessed"}, "kind 'guessed' is not one of published, simulated, measured"),
        ({**RECORD.to_json(), "config": [1]}, "config is [1], expected dict"),
        ({**RECORD.to_json(), "config": {"data": {}}}, "its config lacks micro_batches, model"),
        ({**RECORD.to_json(), "kind": "simulated"}, "its config lacks hardware, workload"),
        ({**RECORD.to_json(), "method": 5}, "method is 5, expected str"),
        ({**RECORD.to_json(), "workers": "two"}, "workers is 'two', expected int"),
        ({**RECORD.to_json(), "testbed": None}, "testbed is None, expected str"),
        ({**RECORD.to_json(), "notes": 7}, "notes is 7, expected list"),
        ({**RECORD.to_json(), "steps": "abc"}, "steps is 'abc', expected list"),
        ({**RECORD.to_json(), "losses": ["x"]}, "losses is ['x'], expected a list of numbers"),
        ({**RECORD.to_json(), "step_ms": [None, 1.0, 2.0]}, "step_ms is [None, 1.0, 2.0], expected a list of numbers"),
        ({**RECORD.to_json(), "step_ms": [1.0]}, "step_ms has 1 values for 3 steps"),
    ],
)
def test_foreign_files_are_refused_by_name(data, reason):
    with pytest.raises(RecordError) as error:
        record_from_json(data, "there.json")
    assert str(error.value).startswith("there.json: ") and reason in str(error.value)


def test_metrics_follow_from_the_account():
    names = ["step", "dense", "update", "skew", "other", *EXPOSED, *(f"exposed_{name}" for name in EXPOSED)]
    ms = {name: np.array([[1.0, 3.0], [2.0, 4.0]]) * (i + 1) for i, name in enumerate(names)}
    ms["communication"][1] = 0.0
    metrics = metrics_from_times(StepTimes((4, 5), ms), keep=[5, 4], samples={4: 10.0, 5: 12.0})
    assert metrics["step_ms"] == [3.0, 2.0]  # mean over ranks, in the order asked for
    assert metrics["qps"] == [12 / 3.0 * 1e3, 10 / 2.0 * 1e3]
    assert metrics["utilisation"] == [2.0, 2.0]
    exposed, total = ms["exposed_communication"].mean(1), ms["communication"].mean(1)
    assert metrics["exposed_communication_ratio"] == [0.0, exposed[0] / total[0]]  # nothing to expose: 0, not NaN
    assert set(metrics) <= set(METRICS)


def test_provenance_names_versions_commit_host_and_command():
    data = provenance()
    assert {"python", "torch", "numpy"} <= set(data["versions"])
    assert data["command"] and data["host"]["cores"] and "commit" in data
    json.dumps(data)


def test_store_gives_back_what_was_put_in(tmp_path):
    store = Store(tmp_path / "store")
    other = dataclasses.replace(RECORD, method="serial(8)")
    paths = [store.write(r) for r in (RECORD, other, dataclasses.replace(RECORD, losses=[1.0]))]
    assert paths[0] == paths[2] and paths[1].name == f"measured-serial-8-{other.key}.json"
    records, skipped = store.read()
    assert not skipped
    assert {r.method: list(r.losses) for r in records} == {"nestpipe": [1.0], "serial(8)": [4.0, 3.5, 3.0]}


def test_store_skips_and_names_what_it_cannot_read(tmp_path):
    store = Store(tmp_path)
    whole = store.write(RECORD).read_text()
    (tmp_path / "half.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "foreign.json").write_text('{"schema": "other"}')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    records, skipped = store.read()
    assert records == [RECORD]
    assert [text.split(":")[0] for text in skipped] == ["bytes.json", "foreign.json", "half.json"]
    assert "remove it or run it again" in skipped[2]


def test_unreadable_files_of_every_kind_are_named_and_the_others_are_read(tmp_path):
    whole = Store(tmp_path).write(RECORD)
    text = whole.read_text()
    broken = {
        "half": text[: len(text) // 2].encode(),
        "binary": b"\xff\xfe\x00",
        "empty": b"",
        "deep": b"[" * 100_000,
        "long": b'{"schema": ' + b"9" * 5000 + b"}",
    }
    for name, content in broken.items():
        (tmp_path / f"z-{name}.json").write_bytes(content)
    (tmp_path / "z-folder.json").mkdir()
    (tmp_path / "z-link.json").symlink_to("nowhere")
    (tmp_path / "crlf.json").write_bytes(text.replace("\n", "\r\n").encode())
    records, skipped = Store(tmp_path).read()
    assert records == [RECORD, RECORD]
    assert sorted(s.split(".json:")[0] for s in skipped) == sorted(f"z-{n}" for n in (*broken, "folder", "link"))
