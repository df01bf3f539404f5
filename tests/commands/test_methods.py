"""The registry of methods."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import pytest

from nestpipe import schedule
from nestpipe.config import ConfigError, RunConfig
from nestpipe.methods import (
    BUILT_IN,
    Method,
    MethodOptions,
    UnknownMethod,
    find_method,
    known_methods,
    methods_of,
    scheduled_method,
)
from nestpipe.schedule.text import parse

MINE = scheduled_method("mine", "a reader's own", schedule.nestpipe)


@pytest.fixture
def outside(monkeypatch):
    """An installed package that provides the methods ``mine`` and ``broken``."""
    found = [
        metadata.EntryPoint("mine", f"{__name__}:MINE", "nestpipe.methods"),
        metadata.EntryPoint("broken", "no_such_module:METHOD", "nestpipe.methods"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: found if group == "nestpipe.methods" else [])


def test_built_in_methods_have_a_schedule_with_their_micro_batches():
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


def test_a_fixed_number_of_micro_batches_cannot_be_changed(monkeypatch):
    """This depends on what the method says, not on its name."""
    fixed = scheduled_method("fixed", "one micro-batch", lambda _: schedule.dbp_only(), micro_batches=1)
    monkeypatch.setitem(BUILT_IN, "fixed", fixed)
    assert fixed.schedule(8).micro_batches == 1 and find_method("fixed") is fixed
    with pytest.raises(UnknownMethod, match="fixed cannot run 4 micro-batches"):
        find_method("fixed(4)")


def test_what_is_special_about_a_method_is_in_the_method():
    special = {name: find_method(name) for name in known_methods()}
    assert {name for name, m in special.items() if m.replicated} == {"2d-sp", "nestpipe+2d-sp", "nestpipe+2d-sp-exact"}
    torchrec = {name for name, m in special.items() if m.needs == ("torchrec",)}
    assert torchrec == {name for name, m in special.items() if m.observed}
    assert torchrec == {name for name, m in special.items() if not m.reshards}
    assert torchrec == {name for name, m in special.items() if m.base == "torchrec"} | {"torchrec"}
    lossy = {"torchrec-bf16", "nestpipe+bf16"}
    assert {name for name, m in special.items() if m.why_not_priced} == lossy | {"torchrec-planner", "torchrec-dedup"}
    assert {name for name, m in special.items() if m.priced_as} == {"2d-sp", "uniemb"}


def test_what_is_priced_is_what_runs_unless_the_method_says_why():
    for name in known_methods():
        method = find_method(name)
        same = method.priced_schedule(4) is method.schedule(4)
        assert same == (method.priced_as is None), name
        assert same or method.priced_as.reason.endswith(".")  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["uniemb", "2d-sp", "nestpipe"])
def test_the_priced_schedule_can_be_shown(name, capsys):
    from nestpipe import cli

    method = find_method(name)
    assert cli.main(["schedule", name, "--priced", "--text"]) == 0
    out = capsys.readouterr().out
    shown = parse(out)  # the reason is a comment of the text form
    assert shown.ops == method.priced_schedule(4).ops
    assert (method.priced_as is None) or method.priced_as.reason in out


def test_options_reach_the_schedule():
    plain = find_method("nestpipe+2d-sp")
    assert any(op.marks for op in plain.schedule(2).ops)
    sgd = plain.with_options(MethodOptions(sparse_optimizer="sgd"))
    assert not any(op.marks for op in sgd.schedule(2).ops)


def test_a_missing_package_is_named(monkeypatch):
    method = replace(find_method("nestpipe"), name="mine", needs=("no_such_package",))
    monkeypatch.setitem(BUILT_IN, "mine", method)
    assert method.missing_packages() == ["no_such_package"]
    with pytest.raises(ConfigError, match="mine: needs the package 'no_such_package'"):
        methods_of(RunConfig(methods="serial,mine"))


def test_methods_of_a_configuration_have_its_options_and_are_those_that_can_train():
    (method,) = methods_of(RunConfig(methods="nestpipe+2d-sp", workers=6, replica_groups=3, sync_interval=2))
    assert method.options == MethodOptions(3, 2, "rowwise_adagrad")
    with pytest.raises(ConfigError, match="--workers 4 cannot be split into --replica-groups 3 of equal size"):
        methods_of(RunConfig(methods="nestpipe+2d-sp", workers=4, replica_groups=3))
    assert methods_of(RunConfig(methods="nestpipe", workers=4, replica_groups=3))


WITHOUT_TORCH = {
    "find": "import nestpipe.methods as m; [m.find_method(name) for name in m.known_methods()]",
    **{
        words: f"from nestpipe import cli; assert cli.main({words.split()}) == 0"
        for words in (
            "methods",
            "simulate --workers 128 --steps 2",
            "advise --workers 64 --reach 1",
            "schedule nestpipe --check",
            "schedule torchrec --text",
            "sweep preview smoke",
        )
    },
}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_no_torch_until_a_trainer_is_built(name):
    code = f"import sys; {WITHOUT_TORCH[name]}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
