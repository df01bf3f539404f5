"""From records to tables: what is compared with what, and that nothing but the set of records matters."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pandas as pd
import pytest

from nestpipe.measurement.record import RecordError, Store
from nestpipe.simulator.scenario import SimulateConfig, simulate
from results.artefacts import ARTEFACTS, UnknownArtefact, make
from results.frames.frames import medians, published_frame, ratios, step_frame
from results.frames.labels import label_of, variant_of
from results.published import load_published
from results.report.render import to_csv, to_latex, to_markdown
from results.report.write import write_artefacts
from results.sources import Sources, read_parts, sources_from
from results.tables.paper_inconsistencies import paper_inconsistencies
from results.tables.side_by_side import NOTHING
from tests.support.made_records import measured, session

TABLES = ("table2", "table3", "table4", "ladder")


@pytest.fixture(scope="module")
def simulated():
    return simulate(SimulateConfig())


@pytest.fixture(scope="module")
def gpu():
    return simulate(SimulateConfig(hardware="gpu-128-kuairand"))


@pytest.fixture
def folder(tmp_path, simulated, gpu):
    """Stores as ``nestpipe reproduce`` leaves them."""
    parts = {
        "simulated": simulated,
        "simulated-gpu": gpu,
        "two-hosts": [*session(), *session(paced=False)],
        "four-hosts": session(workers=4),
    }
    for part, records in parts.items():
        for record in records:
            Store(tmp_path / "records" / part).write(record)
    return tmp_path


def files(sources: Sources, folder) -> dict[str, bytes]:
    written = write_artefacts([make(name, sources) for name in TABLES], folder)
    return {path.name: path.read_bytes() for path in written}


def test_the_order_and_number_of_records_do_not_matter(folder, tmp_path):
    sources = sources_from(folder)
    first = files(sources, tmp_path / "a")
    shuffled = {part: [*records, *records] for part, records in sources.parts.items()}
    for records in shuffled.values():
        random.Random(1).shuffle(records)
    parts = {part: tuple(records) for part, records in reversed(shuffled.items())}
    assert files(replace(sources, parts=parts), tmp_path / "b") == first
    store = Store(folder / "records" / "two-hosts")
    added = store.write(measured("nestpipe", [1.0, 2.0, 3.0], seed=7))
    assert files(sources_from(folder), tmp_path / "c") != first
    added.unlink()
    assert files(sources_from(folder), tmp_path / "d") == first


def test_figures_are_the_same_bytes_each_time(folder):
    sources = sources_from(folder)
    one, two = (make("fig8", sources).pictures[0] for _ in range(2))
    assert one.svg == two.svg and one.png == two.png


def test_a_foreign_schema_is_refused_with_a_message_and_a_half_written_record_named(folder):
    before = len(sources_from(folder).parts["two-hosts"])
    broken = folder / "records" / "two-hosts"
    whole = next(broken.glob("*nestpipe*.json"))
    (broken / "half.json").write_text(whole.read_text()[:500])
    (broken / "foreign.json").write_text(json.dumps({"schema": "somebody-else-9"}))
    sources = sources_from(folder)
    assert len(sources.parts["two-hosts"]) == before
    named = "\n".join(sources.skipped)
    assert "two-hosts/half.json" in named and "expected schema nestpipe-record-1, found 'somebody-else-9'" in named
    assert len(make("table2", sources).tables[0].frame) > 20


def test_two_settings_that_read_alike_stand_in_columns_of_their_own(folder):
    """As where ``--size tiny`` and full runs share a folder: the conditions in words are the same."""
    for record in session(embedding_dim=17):
        Store(folder / "records" / "two-hosts").write(record)
    sources = sources_from(folder)
    for name in TABLES:
        for table in make(name, sources).tables:
            here = table.cells[(table.cells["kind"] == "measured") & (table.cells["metric"] == "step latency")]
            assert not here.duplicated(["conditions", "workers", "label"]).any()
    titles = [table.title for table in make("ladder", sources).tables]
    assert any("embedding_dim 17" in title for title in titles) and any("embedding_dim 128" in t for t in titles)


def test_records_that_are_nowhere_are_an_error(folder):
    with pytest.raises(RecordError, match=r"nowhere: no such folder or file; correct --records"):
        sources_from(folder, folder / "nowhere")


def test_no_column_mixes_kinds(folder):
    for name in TABLES:
        for table in make(name, sources_from(folder)).tables:
            cells = table.cells
            by_column = cells.groupby(["kind", "conditions"])
            assert len(by_column) >= cells["kind"].nunique()
            heads = [h for h in table.frame if h.startswith("measured: ")]
            assert set(cells.loc[cells["kind"] == "measured", "conditions"]) >= {h[10:] for h in heads}
            if {"published", "simulated"} <= set(table.frame):
                assert set(cells["kind"]) >= {"published", "simulated"}


def test_table_2_holds_the_paper_the_simulator_and_the_run(folder):
    table = make("table2", sources_from(folder)).tables[0]
    frame = table.frame.set_index(["metric", "method"])
    row = frame.loc[("step latency [ms]", "NestPipe")]
    assert row["published"] == "1,895.98"
    simulated = float(row["simulated"].replace(",", ""))
    assert row["error %"] == f"{(simulated / 1895.98 - 1) * 100:+.1f}"
    speedup = frame.loc[("speed-up over TorchRec [x]", "NestPipe")]
    paced = next(head for head in frame if "PACED" in head)
    assert speedup[paced].startswith("1.50 (1.50-1.50)"), "median over rounds of ratios within a round"
    assert frame.loc[("step latency [ms]", "serial(8)"), "published"] == NOTHING


def test_every_printed_number_is_in_a_table(folder):
    sources = sources_from(folder)
    printed = published_frame(sources.published)
    for where, name in (("II", "table2"), ("III", "table3"), ("IV", "table4")):
        wanted = printed[(printed["where"] == where) & (printed["mark"] == "T")]["value"]
        cells = pd.concat([table.cells for table in make(name, sources).tables])
        assert set(wanted) <= set(cells.loc[cells["kind"] == "published", "value"])
        # The GPU row of Table II stands for TorchRec; every printed cell has a simulated one beside it.
        main = make(name, sources).tables[0].frame
        assert (main.loc[main["published"] != NOTHING, "simulated"] != NOTHING).all()


def test_forms_of_a_table(folder):
    table = make("table4", sources_from(folder)).tables[0]
    assert to_markdown(table).count("\n|") == len(table.frame) + 2
    latex = to_latex(table)
    assert r"\toprule" in latex and r"\bottomrule" in latex and r"error \%" in latex and r"$\pm$" in latex
    read = pd.read_csv(pd.io.common.StringIO(to_csv(table)))
    assert len(read) == len(table.cells) and set(read["kind"]) == {"published", "simulated", "measured"}


def test_ratios_are_within_a_session_and_a_round():
    slow = [
        replace(r, seed=2, metrics={**r.metrics, "step_ms": [10 * x for x in r.metrics["step_ms"]]}) for r in session()
    ]
    steps = step_frame([*session(), *slow])
    gains = ratios(steps, "serial").set_index("method")
    assert gains.loc["nestpipe", "value"] == pytest.approx(1.5) and gains.loc["nestpipe", "n"] == 4
    assert steps.groupby("key")["round"].max().eq(1).all()
    assert medians(steps, ["step_ms"]).set_index("method").loc["nestpipe", "n"] == 12


def test_scaling_is_within_a_family_of_settings(folder):
    """A run of another size on one number of ranks only changes nothing for the others, and gets no efficiency."""

    def scaling(label):
        (table,) = [t for t in make("table3", sources_from(folder)).tables if t.name == "table3-measured"]
        here = table.cells[(table.cells["metric"] == "scaling efficiency") & (table.cells["label"] == label)]
        return dict(zip(here["conditions"], here["value"], strict=True))

    (before,) = scaling("NestPipe").values()
    for record in session(workers=4, embedding_dim=17):
        Store(folder / "records" / "four-hosts").write(record)
    ((conditions, after),) = scaling("NestPipe").items()
    assert after == before and "embedding_dim 128" in conditions


def test_methods_are_told_by_name_not_by_label(folder):
    """A method of somebody's own that is called like the label of another is no part of that other's row."""
    for record in (measured("NestPipe", [50.0] * 6), measured("TorchRec (serial)", [1.0] * 6)):
        Store(folder / "records" / "two-hosts").write(record)
    gains = ratios(sources_from(folder).steps("two-hosts"), "serial")
    assert gains[gains["method"] == "nestpipe"]["value"].tolist() == pytest.approx([1.5, 1.5])


def test_clustering_is_a_rung_of_its_own(folder):
    store = Store(folder / "records" / "two-hosts")
    for record in (
        measured("serial", [300.0] * 6, clustering=True),
        measured("nestpipe", [190.0] * 6, clustering=True, micro_batches=8),
    ):
        store.write(record)
    assert label_of(variant_of(record)) == "NestPipe + clustering"
    ladder = make("ladder", sources_from(folder)).tables[0].frame
    assert list(ladder["rung"]) == ["serial", "+DBP", "+FWP", "+clustering"]
    assert ladder["speed-up over serial"].iloc[-1].startswith("1.58")


def test_a_rung_that_does_not_improve_is_named(folder):
    store = Store(folder / "records" / "two-hosts")
    store.write(measured("nestpipe", [400.0] * 6, exposed=150.0))
    found = make("ladder", sources_from(folder)).mismatches
    assert any("+FWP gives 0." in m.what and "PACED" in m.what for m in found)


def test_frames_are_made_once_for_the_same_records(folder):
    sources = sources_from(folder)
    assert sources.steps("two-hosts") is sources.steps("two-hosts")
    assert sources.simulated_means("simulated") is sources.simulated_means("simulated")
    other = replace(sources, parts={})
    assert other.of("two-hosts") == () and other.steps("two-hosts").empty


def test_what_the_paper_contradicts_itself_in():
    found = {m.what.split(":")[0] for m in paper_inconsistencies(published_frame(load_published()))}
    assert "UniEmb, 1,536 workers" in found and "NestPipe+2D-SP" in found


def test_nothing_to_show_is_said_not_raised(tmp_path):
    sources = Sources({}, tuple(load_published()), tmp_path)
    for name in ARTEFACTS:
        artefact = make(name, sources)
        assert artefact.name == name
    assert make("table2", sources).missing == ("two-hosts", "simulated", "simulated-gpu")
    with pytest.raises(UnknownArtefact, match=r"no table or figure 'table9': one of .*table2"):
        make("table9", sources)


def test_a_file_that_is_no_benchmark_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(RecordError, match="holds no records"):
        read_parts(tmp_path / "x.json")


def test_tables_from_benchmark_json_equal_those_from_the_store(folder, tmp_path):
    sources = sources_from(folder)
    entries = [
        {"extra_info": {"records": [[part, record.to_json()]]}}
        for part, records in sources.parts.items()
        for record in records
    ]
    path = tmp_path / "0001_suites.json"
    path.write_text(json.dumps({"benchmarks": entries}))
    assert files(sources_from(folder, path), tmp_path / "a") == files(sources, tmp_path / "b")


def test_records_of_ones_own_have_a_table(tmp_path):
    """A store by itself, a folder of stores and the files of run and simulate --json; the plan's records stay out."""
    records = [measured("serial", [4.0, 5.0, 6.0]), measured("nestpipe", [2.0, 2.5, 3.0])]
    for record in records:
        Store(tmp_path / "all" / "mine").write(record)
        Store(tmp_path / "all" / "two-hosts").write(record)
    run_file, simulated_file = tmp_path / "run.json", tmp_path / "simulated.json"
    run_file.write_text(json.dumps({"methods": {r.method: r.to_json() for r in records}}))
    few = simulate(SimulateConfig(methods="serial,nestpipe", workers="128,256", steps=2))
    simulated_file.write_text(json.dumps({"records": [r.to_json() for r in few]}))
    for root in (tmp_path / "all", tmp_path / "all" / "mine", run_file):
        (table,) = make("records", sources_from(tmp_path, root)).tables
        frame = table.frame.set_index("method")
        assert (
            list(frame.index) == ["TorchRec (serial)", "NestPipe"] and frame.loc["NestPipe", "step [ms]"][:3] == "2.5"
        )
    (table,) = make("records", sources_from(tmp_path, simulated_file)).tables
    assert (
        len(table.frame) == 4
        and "dim 768" in table.frame["conditions"][0]
        and set(table.cells["kind"]) == {"simulated"}
    )
    (tmp_path / "all" / "mine").rename(tmp_path / "gone")
    assert make("records", sources_from(tmp_path, tmp_path / "all")).tables == ()
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(RecordError, match="holds no records"):
        sources_from(tmp_path, tmp_path / "other.json")


def test_no_cell_is_empty_that_this_machine_can_fill(folder):
    """What REPRODUCE.md promises: every method that ran has a value in every measured column of its metrics."""
    for name, ran in (("table2", 5), ("table4", 2)):
        frame = make(name, sources_from(folder)).tables[0].frame
        for column in (head for head in frame if head.startswith("measured: ")):
            filled = frame[frame[column] != NOTHING]
            per_metric = filled.groupby("metric").size()
            wanted = [m for m in frame["metric"].unique() if "scaling" not in m]
            assert set(per_metric.index) == set(wanted) and per_metric.eq(ran).all()
