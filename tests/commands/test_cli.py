"""The command line: what each command prints and how it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nestpipe import cli
from nestpipe.schedule.frozen_window import fwp_only
from nestpipe.schedule.templates import nestpipe
from nestpipe.schedule.text import to_text
from tests.support.paths import ROOT

NESTPIPE = [sys.executable, "-m", "nestpipe.cli"]


def call(capsys, *words: str) -> tuple[int, str, str]:
    """Status, stdout, stderr of a command run in this process."""
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    return (status, *capsys.readouterr())


def test_help_names_every_command(capsys):
    status, out, _ = call(capsys, "--help")
    assert status == 0 and all(name in out for name in cli.COMMANDS)


def test_version(capsys):
    assert call(capsys, "--version") == (0, "nestpipe 0.1.0\n", "")


def test_without_a_command_it_lists_them(capsys):
    status, out, err = call(capsys)
    assert status == 2 and not out and all(f"  {name} " in err for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(capsys, command):
    status, out, _ = call(capsys, command, "--help")
    assert status == 0 and f"nestpipe {command}" in out


def test_help_of_run_has_units_and_defaults(capsys):
    _, out, _ = call(capsys, "run", "--help")
    out = " ".join(out.replace("│", " ").split())
    for words in ("(default: serial,nestpipe,torchrec)", "--pace-dense FLOAT", "this many ms", "Samples per worker"):
        assert words in out


def test_help_needs_neither_torch_nor_the_command_lines_libraries():
    code = "import sys; sys.modules.update(torch=None, tyro=None, rich=None)"
    code += "\nfrom nestpipe import cli\ncli.main(['--help'])"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_missing_library_is_named_with_the_fix(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "nestpipe.commands.methods", raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
    status, _, error = call(capsys, "methods")
    assert status == 2 and "needs the package 'tyro'" in error and "nestpipe[all]" in error


def test_methods(capsys):
    status, out, _ = call(capsys, "methods")
    assert status == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert {"serial", "nestpipe", "dbp-only", "fwp-only", "torchrec"} <= set(names)


def test_schedule_draws_a_step(capsys):
    status, out, _ = call(capsys, "schedule", "nestpipe")
    assert status == 0
    assert all(f"{lane} |" in out for lane in ("compute", "all2all", "rows"))
    assert "G gradient All2All" in out


@pytest.mark.parametrize(
    "method", ["serial", "serial(8)", "nestpipe", "nestpipe(1)", "dbp-only", "fwp-only", "torchrec"]
)
def test_shipped_methods_are_synchronous(capsys, method):
    status, out, _ = call(capsys, "schedule", method, "--check")
    assert status == 0 and "synchronous" in out


def test_text_form_goes_through_a_file(capsys, tmp_path):
    _, text, _ = call(capsys, "schedule", "nestpipe", "--text", "--micro-batches", "2")
    assert text == to_text(nestpipe(2))
    path = tmp_path / "mine"
    path.write_text(text)
    assert call(capsys, "schedule", str(path), "--text")[1] == text
    assert call(capsys, "schedule", str(path), "--check")[0] == 0
    assert call(capsys, "schedule", str(path))[1] == call(capsys, "schedule", "nestpipe", "--micro-batches", "2")[1]


def test_check_names_the_stale_read(capsys, tmp_path):
    lines = [line for line in to_text(nestpipe(2)).splitlines() if not line.startswith("S+1")]
    bare = [line.split("  after")[0] for line in lines]  # S was in the edges too
    path = tmp_path / "no_synchronisation.txt"
    path.write_text("\n".join([*bare, "derive edges", ""]))
    status, out, _ = call(capsys, "schedule", str(path), "--check")
    assert status == 1 and "NOT plain synchronous training" in out and "stale: " in out
    assert "more (--all shows them)" in out or out.count("stale: ") <= 10
    status, everything, _ = call(capsys, "schedule", str(path), "--check", "--all")
    assert status == 1 and len(everything) >= len(out) - 40 and "--all" not in everything


def test_check_begins_with_causes_of_many_problems(capsys, tmp_path):
    text = (ROOT / "examples" / "lookahead.txt").read_text()
    broken = tmp_path / "broken.txt"
    broken.write_text("".join(line for line in text.splitlines(True) if not line.startswith(("R+1", "derive"))))
    assert cli.main(["schedule", str(broken), "--check"]) == 1
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert "there is no R (embedding retrieval)" in first and "derive edges" in second


@pytest.mark.parametrize("make", [nestpipe, fwp_only])
def test_schedules_have_micro_batches(make):
    with pytest.raises(ValueError, match="micro_batches is 0, must be at least 1"):
        make(0)


def test_check_names_the_race(capsys, tmp_path):
    text = to_text(nestpipe(2))
    line = next(line for line in text.splitlines() if line.startswith("U "))
    path = tmp_path / "race.txt"
    path.write_text(text.replace(line, line.split("  after")[0]))
    status, out, _ = call(capsys, "schedule", str(path), "--check")
    assert status == 1 and "race: " in out


@pytest.mark.parametrize("words", [["schedule", "nestpipe"], ["schedule", "nestpipe", "--text"], ["run", "--help"]])
def test_a_reader_that_goes_away_is_not_an_error(words):
    """As in ``nestpipe schedule nestpipe | head -1`` if head ends first."""
    process = subprocess.Popen([*NESTPIPE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    error = process.stderr.read()
    assert error == "" and process.wait() == 1


def test_without_stdout():
    line = f"{sys.executable} -m nestpipe.cli schedule nestpipe >&-"
    done = subprocess.run(line, shell=True, stderr=subprocess.PIPE, text=True)
    assert "Traceback" not in done.stderr


def test_traceback_on_request(capsys, monkeypatch):
    monkeypatch.setenv("NESTPIPE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown method"):
        cli.main(["run", "--methods", "nope"])


def test_interrupt_before_any_rank_has_started(capsys, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("nestpipe.commands.methods.main", interrupted)
    assert call(capsys, "methods")[0] == 130
