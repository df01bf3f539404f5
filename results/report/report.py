"""``report.html``: one file with everything in it. It starts with what does not match, and why."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup

from nestpipe.machine.json_files import read_json
from nestpipe.measurement.record import KINDS, Record
from results.artefacts import ARTEFACTS, Artefact, Mismatch, Table, make
from results.experiments.part_names import CONVERGENCE
from results.experiments.plan import Options, all_parts, command, is_tiny
from results.report.render import to_html
from results.sources import Sources
from results.tables.side_by_side import CELLS, TOLERANCE_PCT


@dataclass(frozen=True)
class How:
    """``commands`` that regenerate an artefact's records; ``seconds``: how long they last took, in words."""

    commands: tuple[str, ...]
    seconds: str = ""


def make_all(sources: Sources, names: Sequence[str] | None = None) -> list[Artefact]:
    """The artefacts of these names, by default all that are not empty. Raises UnknownArtefact.

    Titles say whether measured runs are tiny.
    """
    made = [_sized(make(name, sources), sources) for name in names or ARTEFACTS]
    return made if names else [a for a in made if a.tables or a.pictures or a.text]


def size_word(sources: Sources, *parts: str) -> str:
    """``tiny`` if everything measured for these parts is of size tiny, ``partly tiny`` if some of it is, else "".

    This is read from the configurations of records and curves, so it does not matter when they were made.
    """
    configs = [record.config for record in sources.measured(*parts)]
    if CONVERGENCE in parts:
        configs += [curve.config for curve in sources.curves()]
    tiny = [is_tiny(config) for config in configs]
    if not any(tiny):
        return ""
    return "tiny" if all(tiny) else "partly tiny"


def _sized(artefact: Artefact, sources: Sources) -> Artefact:
    """``artefact`` with the size of its measured runs in its titles."""
    planned = all_parts(Options())
    parts = [part.name for part in planned if artefact.name in part.feeds]
    if not parts:  # records that no part of the plan made
        parts = sorted(sources.parts.keys() - {part.name for part in planned})
    word = size_word(sources, *parts)
    if not word:
        return artefact
    tables = tuple(
        replace(table, title=f"{table.title} ({word})") if _is_measured(table) else table for table in artefact.tables
    )
    return replace(artefact, title=f"{artefact.title} ({word})", tables=tables)


def _is_measured(table: Table) -> bool:
    """Whether some of its numbers are measured or derived from measured numbers."""
    return "kind" not in table.cells or bool((table.cells["kind"] == "measured").any())


def to_report(sources: Sources, artefacts: Sequence[Artefact]) -> str:
    """The report as HTML. It can be read without a network."""
    size = size_word(sources, *sources.parts, CONVERGENCE)
    options = Options(size="tiny" if size == "tiny" else "full")
    reproduce = "nestpipe reproduce --size tiny" if size == "tiny" else "nestpipe reproduce"
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["base64"] = lambda text: base64.b64encode(text.encode()).decode()
    environment.filters["table"] = lambda table: Markup(to_html(table))
    template = environment.from_string(Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8"))
    parts = {part.name: part for part in all_parts(options)}
    missing = sorted({part for artefact in artefacts for part in artefact.missing})
    return template.render(
        counts=_counts(sources),
        size=size,
        reproduce=reproduce,
        tolerance=f"A simulated cell does not match if its error exceeds {TOLERANCE_PCT:g} % plus the rounding of the "
        "printed number.",
        mismatches=_by_place(artefacts),
        missing=[
            (f"{name} ({parts[name].title})" if name in parts else name, f"{reproduce} --only {name}")
            for name in missing
        ],
        skipped=sources.skipped,
        diverged=sources.diverged(),
        artefacts=artefacts,
        how=how_to(sources.folder, options, [a.name for a in artefacts]),
        environment=environment_table(sources),
    )


def _counts(sources: Sources) -> str:
    kinds = [record.kind for part in sources.parts.values() for record in part]
    numbers = {"published": len(sources.published)} | {kind: kinds.count(kind) for kind in KINDS[1:]}
    return (
        f"{numbers['published']} published numbers, {numbers['simulated']} simulated and "
        f"{numbers['measured']} measured records"
    )


def _by_place(artefacts: Sequence[Artefact]) -> dict[str, list[Mismatch]]:
    found: dict[str, list[Mismatch]] = {}
    for artefact in artefacts:
        for mismatch in artefact.mismatches:
            found.setdefault(mismatch.where, []).append(mismatch)
    return found


def how_to(folder: Path, options: Options, names: Sequence[str]) -> Mapping[str, How]:
    """For each artefact, the commands of the plan that feed it and how long they took here."""
    times = read_times(folder)
    result = {}
    for name in names:
        feeding = [part for part in all_parts(options) if name in part.feeds]
        lines = [command(config, f"{folder.name}/records/{part.name}") for part in feeding for config in part.runs]
        taken = [times[part.name] for part in feeding if part.name in times]
        words = _duration(sum(taken)) if feeding and len(taken) == len(feeding) else ""
        result[name] = How((*lines, f"nestpipe report --only {name}"), words) if feeding else How(())
    return result


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def read_times(folder: Path) -> dict[str, float]:
    """Seconds that each part took, as ``nestpipe reproduce`` recorded them."""
    try:
        return {str(k): float(v) for k, v in read_json(folder / "times.json").items()}
    except (OSError, ValueError, AttributeError):
        return {}


def environment_table(sources: Sources) -> Table:
    """Where the records come from: one row per kind, host, commit and set of versions."""
    rows: dict[tuple[str, ...], int] = {}
    for part in sources.parts.values():
        for record in part:
            key = _origin(record)
            rows[key] = rows.get(key, 0) + 1
    frame = pd.DataFrame(
        [(*key, str(count)) for key, count in sorted(rows.items())],
        columns=["kind", "commit", "processor", "cores", "system", "versions", "records"],
    )
    caption = "Versions, commit and machine are those in the records."
    return Table("environment-table", "Where the records come from", caption, frame, pd.DataFrame(columns=CELLS))


def _origin(record: Record) -> tuple[str, ...]:
    origin = record.provenance
    host, versions = origin.get("host", {}), origin.get("versions", {})
    return (
        record.kind,
        str(origin.get("commit") or "?"),
        str(host.get("cpu", "?")),
        str(host.get("cores", "?")),
        str(host.get("system", "?")),
        ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
    )
