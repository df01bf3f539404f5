"""report.html is complete and self-contained, and a browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import pytest

from nestpipe.cli import main
from nestpipe.measurement.record import Store
from nestpipe.simulator.scenario import SimulateConfig, simulate
from results.artefacts import ARTEFACTS
from tests.support.made_records import measured, session
from tests.support.paths import ROOT

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: No window, and no traffic in the background.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records like those of a whole run, and the report that the command line makes from them."""
    folder = tmp_path_factory.mktemp("out")
    sweep = SimulateConfig(methods="serial,nestpipe", workers="1536")
    parts = {
        "simulated": simulate(SimulateConfig()),
        "simulated-gpu": simulate(SimulateConfig(hardware="gpu-128-kuairand")),
        "simulated-micro-batches": [
            r
            for n, clustering in ((16, "profile"), (16, "off"), (64, "profile"))
            for r in simulate(_with(sweep, micro_batch=n, clustering=clustering))
        ],
        "simulated-sizes": [r for n in (2, 4) for r in simulate(_with(sweep, dense_layers=n))],
        "two-hosts": [*session(), *session(paced=False)],
        "four-hosts": session(workers=4),
        "micro-batches": [measured(f"nestpipe({n})", [200.0, 210.0], micro_batches=n) for n in (2, 8)],
        "sizes": [
            measured(m, [99.0, 98.0], dense_layers=n, paced=False) for m in ("serial", "nestpipe") for n in (1, 2)
        ],
    }
    for part, records in parts.items():
        for record in records:
            Store(folder / "records" / part).write(record)
    (folder / "records" / "two-hosts" / "half.json").write_text('{"schema": "nest')
    began = time.monotonic()
    assert main(["report", "--folder", str(folder)]) == 0
    print(f"report in {time.monotonic() - began:.1f} s")
    return folder


def _with(config, **changes):
    from dataclasses import replace

    return replace(config, **changes)


class Page(HTMLParser):
    """Tags and attributes of a page; fails if tags are not closed."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.found = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def test_everything_is_in_it_and_nothing_is_fetched(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    headings = [a.get("id") for a in page.all("section")]
    assert headings[0] == "mismatches" and headings[-1] == "environment"
    assert headings[1:-1] == [f"{name}-section" for name in ARTEFACTS if name != "records"]
    for image in page.all("img"):
        assert image["src"].startswith("data:image/svg+xml;base64,") and len(image["alt"]) > 40
    links = [a["href"] for a in page.all("a")]
    assert links and all(link.startswith("#") for link in links)
    assert {link[1:] for link in links} <= {attributes.get("id") for _, attributes in page.found}
    assert not page.all("script") and not page.all("link")
    assert not re.search(r"(?:src|href)=[\"']?https?:|url\(", text)


def test_what_does_not_match_comes_first_with_reasons(folder):
    text = (folder / "report.html").read_text()
    first = text[text.index('id="mismatches"') : text.index("<nav>")]
    assert "published 25.2 % [N], simulated 3.1" in first and "2 of 64 All2Alls are exposed" in first
    assert "Table III prints 2.65" in first
    assert "Skipped: two-hosts/half.json" in first


def test_a_hostile_name_is_only_text(folder, tmp_path):
    for part in ("simulated", "two-hosts"):
        shutil.copytree(folder / "records" / part, tmp_path / "records" / part)
    Store(tmp_path / "records" / "two-hosts").write(measured("<script>alert(1)</script>", [1.0, 2.0]))
    assert main(["report", "--folder", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_only_one_artefact(folder, capsys):
    before = (folder / "report.html").stat().st_mtime_ns
    assert main(["report", "--folder", str(folder), "--only", "table4"]) == 0
    out = capsys.readouterr().out
    assert "| total communication [ms]" in out and "tables/table4.tex" in out and "Table II," not in out
    assert (folder / "report.html").stat().st_mtime_ns == before
    assert main(["report", "--folder", str(folder), "--only", "table9"]) == 2
    assert "no table or figure 'table9'" in capsys.readouterr().err


def test_pictures_and_tables_are_files_too(folder):
    names = {path.name for path in folder.rglob("*.*")}
    for name in ("table2.md", "table2.csv", "table2.tex", "fig9.png", "fig9.svg", "timeline-schedules.svg"):
        assert name in names


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_shows_it(folder, tmp_path):
    page = (folder / "report.html").resolve().as_uri()
    shot = tmp_path / "page.png"
    for extra in (["--dump-dom"], [f"--screenshot={shot}", "--window-size=1300,2500", "--hide-scrollbars"]):
        run = subprocess.run(
            [
                str(BROWSER),
                *FLAGS,
                f"--user-data-dir={tmp_path / 'profile'}",
                "--virtual-time-budget=5000",
                *extra,
                page,
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        if extra == ["--dump-dom"]:
            assert run.stdout.count("<figure>") >= 6 and "What does not match, and why" in run.stdout
    from matplotlib.image import imread

    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (2500, 1300)
    assert 0.01 < (pixels.min(axis=2) < 0.5).mean() < 0.5, "text and lines on white"


def test_paths_of_this_machine_are_not_in_it(folder):
    text = (folder / "report.html").read_text()
    assert str(ROOT) not in text and str(folder) not in text
