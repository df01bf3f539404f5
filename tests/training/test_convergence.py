"""Fig. 6: NestPipe drifts from TorchRec no further than rounding does; a stale run fails the same test."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.training.convergence import ConvergenceConfig, Curve, converge, curve_config, read_curves, write_curve
from results.figures.fig6_convergence import QUALITY, drift_ratio, fig6, paired_gap, within_rounding
from results.report.render import to_markdown
from results.sources import Sources

TINY = ConvergenceConfig(
    methods="serial,serial(2),nestpipe,uniemb",
    seeds=1,
    workers=1,
    steps=6,
    evaluations=2,
    micro_batches=2,
    data=DataConfig(data_scale=2e-5, batch_size=16, negatives=4, interest_clusters=3, users=60),
    model=ModelConfig(embedding_dim=8, dense_layers=1, heads=1, width=8, sequence_length=8),
)


def made_up(method: str, seed: int, error: float, growth: float = 0.0) -> Curve:
    rng = np.random.default_rng(seed)
    base = 2 + rng.normal(size=40)
    wobble = np.random.default_rng([seed, len(method)]).normal(size=40) * error * np.exp(growth * np.arange(40))
    quality = {metric: [0.1 + 0.01 * seed + error, 0.2 + 0.01 * seed + error] for metric in QUALITY} | {
        "users": [9.0, 9.0]
    }
    return Curve(method, seed, curve_config(TINY), (base + wobble).tolist(), [20, 40], quality)


def curves(**errors: float) -> list[Curve]:
    names = {"torchrec": 0.0, "torchrec~ulp": 1e-8} | errors
    return [made_up(name, seed, error) for name, error in names.items() for seed in (1, 2, 3)]


def test_paired_gap_is_students():
    gap = paired_gap([1.0, 2.0, 4.0], [0.5, 1.0, 2.0])
    assert gap.each == (0.5, 1.0, 2.0) and gap.mean == pytest.approx(7 / 6)
    half = 4.302652729911275 * np.std([0.5, 1, 2], ddof=1) / np.sqrt(3)  # t of 2 degrees of freedom
    assert (gap.low, gap.high) == pytest.approx((7 / 6 - half, 7 / 6 + half))
    assert np.isnan(paired_gap([1.0], [0.0]).low)


def test_rounding_passes_and_staleness_fails():
    found = curves(nestpipe=1.2e-8, exact=0.0, stale=1e-4)
    assert within_rounding("nestpipe", found) and within_rounding("exact", found)
    assert not within_rounding("stale", found)
    with pytest.raises(KeyError):
        within_rounding("absent", found)


def test_drift_is_reported_relative_to_the_twins():
    found = curves(nestpipe=1e-8, exact=0.0)
    ratio = drift_ratio("nestpipe", found)
    assert 0.5 < ratio.mean < 2 and ratio.low < ratio.mean < ratio.high and len(ratio.each) == 3
    assert drift_ratio("exact", found).high == 0.0


def test_curves_are_stored_and_foreign_files_ignored(tmp_path):
    curve = made_up("torchrec~ulp", 2, 1e-8)
    write_curve(tmp_path, curve)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"schema": "other"}')
    (found,) = read_curves(tmp_path)
    assert dataclasses.asdict(found) == json.loads(json.dumps(dataclasses.asdict(curve)))


def test_the_figure_and_its_table(tmp_path):
    for curve in [*curves(nestpipe=1e-8, uniemb=1e-3), *(made_up("serial(2)", s, 1e-8) for s in (1, 2, 3))]:
        write_curve(tmp_path / "convergence", curve)
    other = dataclasses.replace(made_up("torchrec", 1, 0.0), config={**curve_config(TINY), "steps": 7})
    write_curve(tmp_path / "convergence", other)  # another setting is left out
    sources = Sources({}, (), tmp_path)
    artefact = fig6(sources)
    (table,), (picture,) = artefact.tables, artefact.pictures
    assert list(table.frame["method"]) == [
        "real torchrec", "real torchrec, one weight + 1 ulp", "NestPipe", "serial(2)", "UniEmb",
    ]  # fmt: skip
    rows = table.frame.set_index("method")
    assert list(rows["no more than rounding"]) == ["-", "-", "yes", "yes", "no"]
    assert "NestPipe against serial(2): losses differ by at most" in table.caption
    row = rows.loc["UniEmb"]
    assert row["gap HR@10, 1e-3"] == "+1.00 [+1.00, +1.00]" and row["published gap [N], 1e-3"].startswith("HR@10 -2.1")
    assert "UniEmb" in to_markdown(table) and picture.svg.startswith("<?xml") and "3 seeds" in picture.caption
    assert set(table.cells["kind"]) == {"measured"}


def test_without_curves_it_says_what_to_run(tmp_path):
    assert "nestpipe converge" in fig6(Sources({}, (), tmp_path)).text[0]


@pytest.mark.parametrize("options", [{"seeds": 0}, {"steps": 0}, {"evaluations": 0}, {"methods": " "}])
def test_impossible_settings(tmp_path, options):
    with pytest.raises(ValueError, match="at least 1"):
        converge(dataclasses.replace(TINY, **options), tmp_path)


def test_runs_resume_and_nestpipe_equals_serial_n(tmp_path):
    """The gap to serial(N) is 0, bit for bit; UniEmb is stale and differs at once."""
    told = []
    first = converge(
        dataclasses.replace(TINY, methods="serial(2)"), tmp_path, lambda title, done, total: told.append((title, total))
    )
    again = converge(TINY, tmp_path, lambda title, done, total: told.append((title, total)))
    by = {curve.method: curve for curve in again}
    assert by["serial(2)"].losses == first[0].losses and len(read_curves(tmp_path)) == 4
    assert not any(title == "serial(2), seed 1" for title, total in told if total == 24)
    assert by["nestpipe"].losses == by["serial(2)"].losses and by["nestpipe"].quality == by["serial(2)"].quality
    assert by["serial"].losses == pytest.approx(by["nestpipe"].losses, rel=1e-5)
    assert by["uniemb"].losses != pytest.approx(by["serial"].losses, rel=1e-5)
    assert by["nestpipe"].evaluated == [3, 6] and by["nestpipe"].quality["users"][0] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_against_real_torchrec_over_three_seeds(tmp_path):
    pytest.importorskip("torchrec")
    config = ConvergenceConfig(
        methods="torchrec,torchrec~ulp,nestpipe,serial(8),uniemb",
        steps=120,
        evaluations=1,
        data=DataConfig(data_scale=5e-4, users=2000, batch_size=64, negatives=32),
    )
    found = converge(config, tmp_path)
    by = {(curve.method, curve.seed): curve for curve in found}
    for seed in (1, 2, 3):
        assert by["nestpipe", seed].losses == by["serial(8)", seed].losses
        assert by["nestpipe", seed].quality == by["serial(8)", seed].quality
    assert within_rounding("nestpipe", found)
    assert not within_rounding("uniemb", found)
