"""The structure of the project: no import circles, no imports upward, few late imports, and short modules."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

import pytest

from tests.support.imports import circles, imports, late_imports, modules, room
from tests.support.paths import ROOT

#: The rooms from the ground up. A room imports only from itself and from lower floors.
FLOORS = (
    ("nestpipe", "nestpipe.machine", "nestpipe.schedule"),
    ("nestpipe.data", "nestpipe.measurement", "nestpipe.testbed", "nestpipe.cli", "nestpipe.schedule_text"),
    ("nestpipe.config", "nestpipe.checker", "nestpipe.clustering", "nestpipe.ranks", "nestpipe.trainer"),
    ("nestpipe.datasets", "nestpipe.embedding", "nestpipe.models", "nestpipe.launch", "results.published"),
    ("nestpipe.engine", "baselines.torchrec", "baselines.uniemb", "results.frames"),
    ("nestpipe.methods",),
    ("nestpipe.simulator", "nestpipe.training", "nestpipe.adoption", "baselines.two_d_sp"),
    ("nestpipe.simulator.fit", "nestpipe.simulator.calibrate", "nestpipe.drawing", "baselines.registry", "slurm"),
    ("results.experiments", "results.sources"),
    ("results.artefacts",),
    ("results.tables",),
    ("results.figures", "results.report"),
    ("nestpipe.commands",),
    ("suites",),
)
MAX_LINES = 330
MAX_LATE = 25

KNOWN = modules()
ARROWS = imports(KNOWN)
#: A package's ``__init__`` is a face for outside users. It exports what its own room has.
FACES = {name for name, path in KNOWN.items() if path.name == "__init__.py"}


def test_no_module_imports_in_a_circle() -> None:
    assert circles({(a.source, a.target) for a in ARROWS if a.source != a.target}) == []


def test_no_room_imports_upward() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    rooms = {room(name, KNOWN) for name in KNOWN if name not in FACES} | {"nestpipe"}
    assert rooms <= set(floor), "a new room: put it on a floor"
    upward = []
    for arrow in ARROWS:
        source, target = room(arrow.source, KNOWN), room(arrow.target, KNOWN)
        if source != target and arrow.source not in FACES and floor[source] <= floor[target]:
            upward.append(f"{arrow.source}:{arrow.line} imports {arrow.target}")
    assert upward == []


def test_nobody_inside_imports_a_face() -> None:
    """A face imports all of its room, so a module that imports one name from it would depend on everything there."""
    faces = {name for name in FACES if KNOWN[name].read_text().count("import ")}
    allowed = {"nestpipe.launch", "nestpipe.schedule_text"}  # these are faces as well
    assert [a for a in ARROWS if a.target in faces and a.source not in allowed | FACES] == []


def test_late_imports_are_few_and_each_has_its_reason() -> None:
    outside = [late for late in late_imports(KNOWN) if ".commands." not in late.source]
    assert len(outside) <= MAX_LATE, "\n".join(f"{late.source}:{late.line} {late.target}" for late in outside)
    assert [f"{late.source}:{late.line} imports {late.target}" for late in outside if not late.reason] == []


@pytest.mark.parametrize("folder", ["nestpipe", "baselines", "results", "slurm", "suites", "tests", "tools", "docs"])
def test_a_module_fits_one_sitting(folder: str) -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_helper_imports_a_test() -> None:
    for path in [*(ROOT / "tests" / "support").glob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert ".test_" not in f".{node.module}" and not (node.module or "").startswith("test_"), path.name


@pytest.mark.parametrize(
    "code",
    [
        "import nestpipe.methods",
        "from nestpipe.methods import find_method, known_methods; [find_method(name) for name in known_methods()]",
        "import nestpipe.config, nestpipe.schedule, nestpipe.checker, nestpipe.testbed",
        "from nestpipe.cli import main; main(['methods'])",
        "from nestpipe.cli import main; main(['schedule', 'nestpipe', '--check'])",
        "from nestpipe.cli import main; main(['simulate', '--workers', '64', '--methods', 'all'])",
        "from nestpipe.cli import main; main(['advise', '--workers', '64', '--reach', '1'])",
        "from nestpipe.cli import main; main(['sweep', 'preview', 'smoke'])",
    ],
)
def test_torch_is_imported_only_when_something_trains(code: str) -> None:
    code = f"import sys\n{code}\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_where_the_papers_words_lead_there_is_a_file() -> None:
    guesses = tomllib.loads((ROOT / "tests" / "project" / "first_guesses.toml").read_text())
    assert [path for path in guesses.values() if not (ROOT / path).is_file()] == []
