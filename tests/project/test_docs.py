"""The documents: commands parse, links resolve, what is shown as code is code that runs."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import textwrap

import pytest

from nestpipe import cli
from nestpipe.schedule.templates import serial
from nestpipe.schedule.text import load
from results.artefacts import ARTEFACTS
from tests.support.engine_runs import Setting, differences, run_engine
from tests.support.paths import ROOT

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "REPRODUCE.md", "docs/simulator.md")
ALL_DOCUMENTS = sorted({*DOCUMENTS, *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))})
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in fences if name == language]


def commands(text: str) -> list[str]:
    """Command lines in blocks without a language, and in inline code; comments cut."""
    lines = [line.partition("  #")[0].strip() for block in blocks(text, "") for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [c for c in (*lines, *re.findall(r"`([^`\n]+)`", prose)) if re.match(r"(nestpipe|make|python) \S", c)]


COMMANDS = sorted({command for name in DOCUMENTS for command in commands((ROOT / name).read_text())})


def test_there_are_commands():
    assert len(COMMANDS) > 12


class Parsed(Exception):
    """The command got as far as doing its work."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_ones_that_exist(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(command.replace("MS", "100"))
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets
    elif program == "python":
        assert (ROOT / words[0]).is_file()
    elif "FILE" in words or "lookahead,nestpipe" in words:  # stands for the reader's own
        assert words[0] in cli.COMMANDS
    elif words[0] == "schedule":
        assert cli.main(words) == int("no_synchronisation" in command)
    elif words[0] == "run":

        def parsed(*_):
            raise Parsed

        monkeypatch.setattr("nestpipe.commands.run._run_with_progress", parsed)
        monkeypatch.setattr("nestpipe.commands.run.require_writable", lambda path: None)
        with pytest.raises(Parsed):
            cli.main(words)
    else:
        with pytest.raises(SystemExit) as end:
            cli.main([*words, "--help"])
        assert end.value.code == 0
        if "--only" in words:
            assert words[words.index("--only") + 1] in ARTEFACTS


@pytest.mark.parametrize("name", ALL_DOCUMENTS)
def test_links_resolve(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://|#", target):
            assert ((ROOT / name).parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    for path in re.findall(r"`((?:nestpipe|baselines|tests|docs|examples|results|suites|slurm)/[\w./]*)`", text):
        assert (ROOT / path).exists() or path.startswith("results/out/"), path


@pytest.mark.parametrize("name", [*ALL_DOCUMENTS, "LICENSE"])
def test_no_path_of_one_machine(name):
    assert not re.search(r"(?<![\w.])/(work|root|home|tmp)/", (ROOT / name).read_text())


def test_the_loop_in_the_readme_is_the_examples():
    example = (ROOT / "examples" / "own_loop.py").read_text()
    (shown,) = (block for block in blocks(README, "python") if "Engine(" in block)
    loop = [line for line in shown.strip().splitlines() if not line.startswith(("from ", "import ")) and line]
    body = textwrap.dedent(example[example.index("    tables = ") : example.index("    leave_process_group()")])
    assert loop == [line for line in body.strip().splitlines() if line]
    for line in shown.splitlines():
        if line.startswith(("from ", "import ")):
            assert line in example


def test_the_schedule_in_the_readme_is_the_examples():
    text = (ROOT / "examples" / "lookahead.txt").read_text()
    plain = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    assert plain in blocks(README, "")


def test_the_example_runs(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    runpy.run_path(str(ROOT / "examples" / "own_loop.py"), run_name="__main__")
    out = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.01
    assert "user table (1000, 16) after 50 steps" in out


@pytest.mark.slow
def test_the_example_runs_on_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/own_loop.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("after 50 steps") == 2


def test_the_readers_method_trains_as_serial_does():
    setting = Setting(steps=8)
    template = load(ROOT / "examples" / "lookahead.txt")
    assert differences(run_engine(template, setting), run_engine(serial(1), setting)) == []


def test_the_picture_is_what_its_command_draws(tmp_path):
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, "docs/make_pictures.py", str(tmp_path)], check=True, cwd=ROOT)
    labels = [
        re.findall(r"<text[^>]*>([^<]*)</text>", (folder / "step.svg").read_text())
        for folder in (tmp_path, ROOT / "docs" / "pictures")
    ]
    assert labels[0] == labels[1] and "R+1" in labels[0] and "E.2" in labels[0]
