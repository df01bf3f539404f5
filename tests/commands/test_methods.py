"""The registry of methods."""

from __future__ import annotations

from importlib import metadata

import pytest

from nestpipe import schedule
from nestpipe.methods import Method, UnknownMethod, find_method, known_methods, scheduled_method

MINE = scheduled_method("mine", "a reader's own", schedule.nestpipe)


@pytest.fixture
def outside(monkeypatch):
    """An installed package that brings the methods ``mine`` and ``broken``."""
    found = [
        metadata.EntryPoint("mine", f"{__name__}:MINE", "nestpipe.methods"),
        metadata.EntryPoint("broken", "no_such_module:METHOD", "nestpipe.methods"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: found if group == "nestpipe.methods" else [])


def test_built_in_methods_have_a_schedule_of_their_micro_batches():
    for name in ("serial", "nestpipe", "dbp-only", "fwp-only"):
        method = find_method(name)
        template = method.schedule(4)
        assert template.micro_batches == method.micro_batches_of(4) and method.summary
        assert template is method.schedule(4)  # made once
    assert {"serial", "nestpipe", "dbp-only", "fwp-only", "torchrec"} <= set(known_methods())


@pytest.mark.parametrize(
    ("name", "micro_batches", "paper"),
    [
        ("serial", 1, "TorchRec"),
        ("serial(1)", 1, "TorchRec"),
        ("serial(8)", 8, None),
        ("nestpipe", None, "NestPipe"),
        ("nestpipe(4)", 4, "NestPipe"),
        (" fwp-only(2) ", 2, "FWP-only"),
        ("torchrec", 1, None),
    ],
)
def test_micro_batches_in_the_name(name, micro_batches, paper):
    method = find_method(name)
    assert (method.fixed_micro_batches, method.paper_method) == (micro_batches, paper)
    assert method.name == name.strip()


@pytest.mark.parametrize("name", ["nestpip", "", "nestpipe()", "nestpipe(x)", "nestpipe(-1)", "a b", "nestpipe(4"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(UnknownMethod) as error:
        find_method(name)
    assert f"'{name}'" in str(error.value) and "serial, torchrec" in str(error.value)


@pytest.mark.parametrize("name", ["nestpipe(0)", "torchrec(4)", "dbp-only(2)"])
def test_impossible_micro_batches_are_refused(name):
    with pytest.raises(UnknownMethod, match="cannot run"):
        find_method(name)


def test_methods_from_outside(outside):
    assert find_method("mine") is MINE
    assert find_method("mine(4)").fixed_micro_batches == 4
    assert known_methods() == ["broken", "dbp-only", "fwp-only", "mine", "nestpipe", "serial"]
    with pytest.raises(UnknownMethod, match=r"broken.*no_such_module:METHOD.*cannot be loaded"):
        find_method("broken")


def test_a_broken_method_does_not_hide_the_others(outside, capsys):
    from nestpipe import cli

    assert cli.main(["methods"]) == 0
    out = capsys.readouterr().out
    assert "broken" in out and "cannot be loaded" in out and "no_such_module" in out and "mine" in out
    assert cli.main(["run", "--methods", "broken"]) == 2
    error = capsys.readouterr().err
    assert "broken" in error and "no_such_module" in error and "Traceback" not in error


def test_a_method_is_a_plain_value():
    assert isinstance(find_method("torchrec"), Method) and find_method("torchrec").observed


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("def METHOD(:", "cannot be loaded: SyntaxError: "),
        ("nothing_of_that_name", "cannot be loaded: NameError: "),
        ("raise RuntimeError('two\\nlines')", "cannot be loaded: RuntimeError: two lines"),
        ("import sys; sys.exit(3)", "cannot be loaded: SystemExit: 3"),
        ("METHOD = 7", "is of type int, not a nestpipe Method"),
    ],
)
def test_a_module_that_fails_in_any_way_is_one_line(tmp_path, monkeypatch, source, reason):
    name = f"foreign_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    entry = metadata.EntryPoint("foreign", f"{name}:METHOD", "nestpipe.methods")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    with pytest.raises(UnknownMethod) as error:
        find_method("foreign")
    assert reason in str(error.value) and "\n" not in str(error.value)
