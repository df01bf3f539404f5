"""Table I is derived: cells follow from records, schedules and thresholds, and name what they rest on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchrec")
pytest.importorskip("pandas")

from nestpipe.measurement.record import METRICS, Record
from results.sources import Sources
from results.tables.table1 import COLUMNS, EFFICIENT, FAMILIES, KEPT, table1


def record(method: str, lookup=10.0, communication=10.0, qps=100.0, workers=2, losses=(1.0, 0.9), **more) -> Record:
    kind = more.get("kind", "measured")
    metrics = {name: [] for name in METRICS}
    metrics |= {"exposed_lookup_ms": [lookup] * 3, "exposed_communication_ms": [communication] * 3}
    metrics |= {"qps": [qps * workers] * 3, "step_ms": [1.0] * 3}
    config = {"micro_batches": 8, "clustering": more.get("clustering", False), "pace_dense": 5.0}
    return Record(kind, method, None, workers, 1, config, [4, 5, 6], metrics, losses, paced=True)


def derived(measured: list[Record], simulated: list[Record] = ()) -> tuple[dict, list]:
    """Cells by (representative, property), mismatches."""
    artefact = table1(Sources({"two-hosts": tuple(measured), "simulated": tuple(simulated)}, (), Path()))
    frame = artefact.tables[1].frame
    method_of = {family.title: family.method for family in FAMILIES}
    cells = {(method_of[r.family], r.property): (r.derived, r.evidence) for r in frame.itertuples()}
    assert len(cells) == 25 and all(evidence for _, evidence in cells.values())
    return cells, list(artefact.mismatches)


def test_without_records_only_the_checker_speaks() -> None:
    cells, mismatches = derived([])
    consistency = [cells[family.method, "consistency"][0] for family in FAMILIES]
    assert consistency == ["no", "no", "yes", "no", "yes"] == [family.printed[2] for family in FAMILIES]
    assert cells["nestpipe", "lookup"][0] == "-" and "reproduce --only table1" in cells["nestpipe", "lookup"][1]
    assert mismatches == []


def test_thresholds_and_bases() -> None:
    measured = [
        record("serial"),
        record("torchrec", communication=20.0),
        record("nestpipe", lookup=KEPT * 10.0, communication=KEPT * 10.0 + 0.01),
        record("2d-sp", communication=KEPT * 20.0, losses=(1.0, 0.8)),
        record("uniemb", lookup=0.0, losses=(1.0, 0.8)),
        record("nestpipe+2d-sp", lookup=0.0, communication=1.0),
    ]
    cells, mismatches = derived(measured)
    assert cells["nestpipe", "lookup"][0] == "yes" and cells["nestpipe", "communication"][0] == "no"
    assert cells["2d-sp", "communication"][0] == "yes"  # its base is real torchrec
    assert "torchrec 20.0 ms (75%; measured" in cells["2d-sp", "communication"][1]
    assert cells["2d-sp", "orthogonal to NestPipe"][0] == "yes"
    assert cells["torchrec-bf16", "orthogonal to NestPipe"][0] == "-"
    assert [m.what for m in mismatches] == ["NestPipe, communication: derived no, printed yes"]


def test_a_run_that_contradicts_the_checker_is_a_mismatch() -> None:
    measured = [record("serial"), record("nestpipe", losses=(1.0, 0.9 + 1e-3)), record("uniemb")]
    cells, mismatches = derived(measured)
    assert cells["nestpipe", "consistency"][0] == "yes" and "CONTRADICTS" in cells["nestpipe", "consistency"][1]
    assert "CONTRADICTS" in cells["uniemb", "consistency"][1]
    assert sum("disagree" in m.what for m in mismatches) == 2


def test_scalability_is_simulated_where_it_can_be_and_measured_else() -> None:
    simulated = [record("nestpipe", qps=q, workers=n, kind="simulated") for n, q in ((128, 100.0), (1536, 94.0))]
    low = 100.0 * EFFICIENT - 0.1
    measured = [record("nestpipe", workers=n, qps=1.0 / n) for n in (2, 4)]
    measured += [record("torchrec-bf16", workers=n, qps=q) for n, q in ((2, 100.0), (4, low))]
    cells, _ = derived(measured, simulated)
    assert cells["nestpipe", "scalability"] == (
        "yes",
        "94% of the QPS per worker from 128 to 1536 workers (simulated)",
    )
    assert cells["torchrec-bf16", "scalability"][0] == "no"
    assert "from 2 to 4 workers (measured)" in cells["torchrec-bf16", "scalability"][1]
    assert cells["uniemb", "scalability"][0] == "-"


def test_sample_clustering_stands_for_scheduling() -> None:
    measured = [record("serial"), record("nestpipe", communication=9.0), record("nestpipe", 0.0, 1.0, clustering=True)]
    cells, _ = derived(measured)
    assert cells["torchrec-planner", "orthogonal to NestPipe"][0] == "yes"
    assert "with clustering" in cells["torchrec-planner", "orthogonal to NestPipe"][1]
    assert set(COLUMNS) == {column for _, column in cells}
