"""The documents: commands parse, links resolve, and the code that they show runs."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
import tyro

from nestpipe import cli
from nestpipe.methods import UnknownMethod, find_method
from nestpipe.schedule.templates import serial
from nestpipe.schedule.text import load
from results.artefacts import ARTEFACTS
from tests.support.engine_runs import Setting, differences, run_engine
from tests.support.paths import ROOT

DOCUMENTS = tuple(
    str(path.relative_to(ROOT))
    for path in sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("slurm/*.md")))
)
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()

#: What documents write for a value that the reader chooses, and an example of such a value.
PLACEHOLDERS = {"MS": "100", "N": "2", "M": "nestpipe", "P": "h100-ib", "NAME": "table2"}
#: The README has the reader register this method.
READERS_OWN = "lookahead"
#: Words that each command needs before its options.
COMMAND_WORDS = [
    *((name,) for name in cli.COMMANDS if name not in ("schedule", "sweep", "testbed")),
    ("schedule", "serial"),
    ("testbed", "up"),
    *(("sweep", action, "smoke") for action in ("preview", "submit", "status", "resume", "cancel", "collect")),
]


def blocks(text: str, language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in fences if name == language]


def inline_code(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def commands(text: str) -> list[str]:
    """Command lines in bash blocks, in blocks without a language, and in inline code; comments are removed."""
    lines = [line for language in ("", "bash") for block in blocks(text, language) for line in block.splitlines()]
    parts = [part for line in lines for part in line.partition("  #")[0].split("&&")]
    found = [part.strip().removeprefix(".venv/bin/") for part in (*parts, *inline_code(text))]
    return [command for command in found if re.match(r"([A-Z_]+=\S+ )?(nestpipe|make|python|torchrun) \S", command)]


TEXTS = [(ROOT / name).read_text() for name in DOCUMENTS]
COMMANDS = sorted({command for text in TEXTS for command in commands(text)})
OPTIONS = sorted({code for text in TEXTS for code in inline_code(text) if re.match(r"--\w[\w-]*( |$)", code)})
#: Options that are refused without another option.
NEEDS = {"--resume": ("--checkpoint", "folder")}
#: Options of other programs, and --help, after which a command does no work.
FOREIGN_OPTIONS = ("--help", "--kill-on-bad-exit", "--index-url", "--extra-index-url")


class Parsed(Exception):
    """The command has parsed its options and would now do its work."""


def problem(command: str) -> str:
    """What is wrong with a command line that a document shows; empty if it can be typed as shown."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(re.sub(r" \[(--.*?)\]", r" \1", command))]
    while re.match(r"[A-Z_]+=", words[0]):  # environment variables
        words = words[1:]
    program, *words = words
    if program == "make":
        return _make_problem(words)
    if program == "nestpipe" and words == ["sweep"]:  # only the command's name, in a sentence; it needs another word
        return ""
    if program == "nestpipe":
        return _option_problem(words) or _value_problem(words)
    if words[:2] == ["-m", "pytest"]:
        known = (ROOT / "suites" / "conftest.py").read_text()
        unknown = [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in known]
        return f"suites/conftest.py has no {unknown[0]}" if unknown else ""
    files = [word for word in words if word.endswith(".py")]
    return "" if files and all((ROOT / name).is_file() for name in files) else f"no file {files}"


def _make_problem(words: Sequence[str]) -> str:
    for word in words:
        name, is_variable, value = word.partition("=")
        if not is_variable and not re.search(rf"^{name}:", MAKEFILE, re.MULTILINE):
            return f"the Makefile has no target {name}"
        if is_variable and not re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE):
            return f"the Makefile has no variable {name}"
        if name == "REPRODUCE_ARGS" and (found := problem(f"nestpipe reproduce {value}")):
            return found
    return ""


def _option_problem(words: Sequence[str]) -> str:
    """What the command's own parser says. The command does not do its work."""
    parse = tyro.cli

    def parse_only(*args: Any, **options: Any) -> None:
        parse(*args, **options)
        raise Parsed

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        patch.setattr(tyro, "cli", parse_only)
        patch.chdir(ROOT)
        try:
            status = cli.main(words)
        except Parsed:
            return ""
        except SystemExit as end:
            if [word for word in words if word.startswith("--")] == ["--help"] and not end.code:
                return ""
            status = end.code
    return f"{' '.join(words)}: exit status {status}\n{said.getvalue()}"


def _value_problem(words: Sequence[str]) -> str:
    """Checks names of methods and artefacts, for which the parser accepts any text."""
    given = dict(itertools.pairwise(words))
    for name in re.split(r",(?![^(]*\))", given.get("--methods", "")):
        if name and name not in ("all", READERS_OWN) and not (ROOT / name).is_file():
            try:
                find_method(name)
            except UnknownMethod as error:
                return str(error)
    unknown = [name for name in given.get("--only", "records").split(",") if name not in ARTEFACTS]
    return f"no table or figure {unknown[0]}" if unknown else ""


def test_there_are_commands_and_options():
    assert len(COMMANDS) > 40 and len(OPTIONS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_can_be_typed_as_shown(command):
    assert not problem(command)


@pytest.mark.parametrize("options", [code for code in OPTIONS if code.split()[0] not in FOREIGN_OPTIONS])
def test_every_option_belongs_to_a_command(options):
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(options.split("|")[0])]
    words = [*NEEDS.get(words[0], ()), *words]
    of_suites = f'"{words[0]}"' in (ROOT / "suites" / "conftest.py").read_text()
    assert of_suites or any(not _option_problem([*first, *words]) for first in COMMAND_WORDS)


@pytest.mark.parametrize(
    "command",
    [
        "nestpipe advise --wokers 3",
        "nestpipe run --workers many",
        "nestpipe run --methods nestpipe,nonesuch",
        "nestpipe sweep submit smoke --exceutor slurm",
        "nestpipe sweep submt smoke",
        "nestpipe reproduce --only table9",
        "nestpipe nonesuch",
        "make nonesuch",
        "make reproduce REPRODUCE_ARG='--size tiny'",
        "make reproduce REPRODUCE_ARGS='--size small'",
        "python nonesuch.py",
        "python -m pytest suites/ --bench",
    ],
)
def test_a_misspelt_command_is_found(command):
    assert problem(command)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.startswith("nestpipe schedule") and not {"FILE", "--trace"} & {*c.split()}]
)
def test_schedule_commands_answer_as_the_document_says(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(shlex.split(command)[1:]) == int("no_synchronisation" in command)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://|#", target):
            assert ((ROOT / name).parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    for path in re.findall(r"`((?:nestpipe|baselines|tests|tools|docs|examples|results|suites|slurm)/[\w./]*)`", text):
        assert (ROOT / path).exists() or path.startswith("results/out"), path


@pytest.mark.parametrize("name", [*DOCUMENTS, "LICENSE"])
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


def test_the_registration_in_the_readme_makes_the_method(tmp_path):
    (shown,) = (block for block in blocks(README, "python") if "METHOD =" in block)
    example = ROOT / "examples" / "lookahead.txt"
    (tmp_path / "lookahead.txt").write_text(example.read_text())
    names: dict[str, Any] = {"__file__": str(tmp_path / "my_module.py")}
    exec(shown, names)
    assert names["METHOD"].name == READERS_OWN
    assert names["METHOD"].schedule(8) == load(example)


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


def test_every_folder_of_code_has_a_row():
    folders = [path.parent for path in ROOT.glob("*/__init__.py")]
    folders += [path.parent for path in ROOT.glob("nestpipe/*/__init__.py")]
    named = (ROOT / "CONTRIBUTING.md").read_text().partition("## Layout")[2].partition("## Add a method")[0]
    names = [str(folder.relative_to(ROOT)) for folder in folders if folder.name not in ("nestpipe", "tests")]
    assert [name for name in names if f"`{name}/`" not in named] == []
