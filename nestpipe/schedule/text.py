"""The text form of a schedule, one operation per line: printed and parsed.

    schedule nestpipe micro_batches=8
    ring buffer=2 received=3
    R+1   rows     after K+1 W-1 S   reads plan table   writes buffer
    E.2   all2all

Without ``reads`` or ``writes`` an operation has those of its stage, and without ``marks`` it has no marks.
Lines are in schedule order. A line ``derive edges`` adds the edges that reads and writes need.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from nestpipe.schedule.building import op, parse_ref, schedule
from nestpipe.schedule.operations import MAX_BATCHES, MAX_MICRO_BATCHES, Op, Schedule
from nestpipe.schedule.stages import BATCH_RINGS, GLOBALS, MICRO_RINGS, STAGES

# A schedule is unrolled over the batches that it spans, so a large offset costs time and memory.
_MAX_AHEAD = MAX_BATCHES
_MAX_CHARACTERS = 4 << 20
KEYWORDS = ("after", "reads", "writes", "marks")


class ScheduleError(ValueError):
    """The text is not a schedule. The message names the file and the line, and says what to do."""


def to_text(schedule: Schedule) -> str:
    """The schedule as text, from which ``parse`` makes an equal schedule."""
    lines = [f"schedule {schedule.name} micro_batches={schedule.micro_batches}"]
    lines.append("ring " + " ".join(f"{name}={size}" for name, size in schedule.rings.items()))
    width = max(len(o.lane) for o in schedule.ops)
    for o in schedule.ops:
        line = f"{o.ref.relative():<6} {o.lane:<{width}}"
        if o.after:
            line += "  after " + " ".join(r.relative() for r in o.after)
        if (o.reads, o.writes) != (o.stage.reads, o.stage.writes):
            line += "".join(
                f"  {word} " + " ".join(x or ("-",)) for word, x in (("reads", o.reads), ("writes", o.writes))
            )
        if o.marks:
            line += "  marks " + " ".join(o.marks)
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def parse(text: str, source: str = "schedule") -> Schedule:
    """The schedule that ``text`` describes. Raises ScheduleError, which names ``source`` and the line."""
    name, micro_batches, derive = "", 0, False
    rings: dict[str, int] = {}
    ops: list[Op] = []
    for number, raw in enumerate(text.splitlines(), 1):
        words = raw.partition("#")[0].split()
        if not words:
            continue
        try:
            if words[0] == "schedule":
                size = _setting(words[2], ("micro_batches",))[1]
                if name or len(words) > 3:
                    raise ValueError("expected one line 'schedule NAME micro_batches=N', with nothing after it")
                name, micro_batches = words[1], size
            elif words[0] == "ring":
                for ring, size in (_setting(w, (*BATCH_RINGS, *MICRO_RINGS)) for w in words[1:] or [words[1]]):
                    if ring in rings:
                        raise ValueError(f"ring '{ring}' is given twice, first as {rings[ring]}: keep one")
                    rings[ring] = size
            elif words == ["derive", "edges"]:
                derive = True
            else:
                ops.append(_operation(words))
        except (ValueError, IndexError) as error:
            reason = str(error) if isinstance(error, ValueError) else "the line ends too early"
            raise ScheduleError(f"{source}:{number}: {reason}") from None
    if not name or not ops:
        raise ScheduleError(f"{source}: expected 'schedule NAME micro_batches=N' and at least one operation line")
    try:
        return schedule(name, micro_batches, ops, derive=derive, **rings)
    except ValueError as error:
        raise ScheduleError(f"{source}: {error}") from None


def load(path: str | Path) -> Schedule:
    """The schedule in a file. Raises ScheduleError, also if the file cannot be read."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:
            raise ScheduleError(f"{path}: is not a schedule: more than {_MAX_CHARACTERS} characters")
        return parse(text, str(path))
    except FileNotFoundError:
        raise ScheduleError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: cannot be read as a schedule: {error}") from None


def _setting(word: str, known: tuple[str, ...]) -> tuple[str, int]:
    key, _, value = word.partition("=")
    if key not in known:
        raise ValueError(f"unknown setting '{key}', expected one of {' '.join(known)}")
    if not value.isdecimal() or not 1 <= int(value[:9]) <= MAX_MICRO_BATCHES:
        raise ValueError(f"'{word}': expected a whole number from 1 to {MAX_MICRO_BATCHES}, as in {key}=2")
    return key, int(value)


def _require_near(text: str) -> None:
    if abs(parse_ref(text).batch) > _MAX_AHEAD:
        raise ValueError(f"'{text}': expected an offset of at most {_MAX_AHEAD} batches")


def _require_no_slip(lane: str) -> None:
    """Raises ValueError for a lane whose name looks like a misspelt one. A number makes another: ``compute2``."""
    known = tuple(dict.fromkeys(stage.lane for stage in STAGES.values()))
    if lane in known or lane.rstrip("0123456789").rstrip("-_") in known:
        return
    if near := difflib.get_close_matches(lane.casefold(), known, n=1, cutoff=0.75):
        raise ValueError(f"lane '{lane}': is it '{near[0]}'? A lane of your own needs a name that is less like it")


def _operation(words: list[str]) -> Op:
    _require_near(words[0])
    if len(words) < 2 or words[1] in KEYWORDS:
        raise ValueError(f"'{words[0]}': expected its lane next, as in '{words[0]} {STAGES[words[0][0]].lane}'")
    _require_no_slip(words[1])
    parts: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words[2:]:
        if word in KEYWORDS:
            if word in parts:
                raise ValueError(f"'{word}' is in the line twice: give all of it once")
            current = parts[word] = []
        elif current is None:
            raise ValueError(f"'{word}': expected one of {' '.join(KEYWORDS)}")
        elif word != "-":
            current.append(word)
    if empty := [word for word in ("after", "marks") if parts.get(word) == []]:
        raise ValueError(f"'{empty[0]}': nothing follows it")
    for text in parts.get("after", ()):
        _require_near(text)
    known = (*BATCH_RINGS, *MICRO_RINGS, *GLOBALS)
    for resource in (*parts.get("reads", ()), *parts.get("writes", ())):
        if resource.endswith("-1") and resource[:-2] in (*MICRO_RINGS, *GLOBALS):
            raise ValueError(f"'{resource}': only these have a slot of the batch before: {' '.join(BATCH_RINGS)}")
        if resource.removesuffix("-1") not in known:
            raise ValueError(f"unknown resource '{resource}', expected one of {' '.join(known)}")
    access = {word: " ".join(parts[word]) for word in ("reads", "writes") if word in parts}
    return op(words[0], " ".join(parts.get("after", ())), words[1], parts.get("marks", ()), **access)
