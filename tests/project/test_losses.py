"""Losses do not change: those of every method are bit for bit those of commit 8e7163e.

A change that is meant to alter numbers must regenerate ``losses.json`` (``python tests/project/test_losses.py``) and
say why. Bits depend on the processor's instruction set and on the versions of torch and fbgemm. If these differ, the
test is skipped and says what differs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nestpipe.methods import known_methods

FIXTURE = Path(__file__).with_name("losses.json")
SIZES = shlex.split(
    "--steps 20 --rounds 1 --batch-size 16 --embedding-dim 16 "
    "--width 16 --heads 2 --dense-layers 1 --sequence-length 10 "
    "--negatives 8 --data-scale 0.0001 --micro-batches 4 --sparse-lr 0.5 "
    "--dense-lr 0.01 "
)
#: Ranks -> methods: replica groups of more than one rank need four.
METHODS = {
    2: (
        "serial,serial(4),nestpipe,dbp-only,fwp-only,uniemb,nestpipe+bf16,"
        "torchrec,torchrec-planner,torchrec-bf16,torchrec-dedup"
    ),
    4: "2d-sp,nestpipe+2d-sp,nestpipe+2d-sp-exact",
}
RULES = ("sgd", "rowwise_adagrad")


def setting() -> dict[str, str]:
    """What the bits of a loss depend on, apart from the code."""
    torch = pytest.importorskip("torch")
    versions = {name: metadata.version(name) for name in ("torch", "torchrec", "fbgemm-gpu-cpu")}
    return {"instructions": torch.backends.cpu.get_cpu_capability(), **versions}


def losses(workers: int, rule: str) -> dict[str, list[str]]:
    """By method, the losses of all steps, including warm-up, as hexadecimal floats."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "records.json"
        words = ["--methods", METHODS[workers], "--workers", str(workers), *SIZES, "--sparse-optimizer", rule]
        command = [sys.executable, "-m", "nestpipe.cli", "run", *words, "--json", str(target)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        records: dict[str, Any] = json.loads(target.read_text())["methods"]
    return {name: [loss.hex() for loss in record["losses"]] for name, record in records.items()}


def test_every_method_is_in_the_fixture() -> None:
    named = {name for names in METHODS.values() for name in names.split(",")}
    assert set(known_methods()) <= named
    kept = json.loads(FIXTURE.read_text())["losses"]
    assert set(kept) == {f"{name}/{rule}" for name in named for rule in RULES}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("workers", METHODS)
def test_losses_are_those_of_the_fixture(workers: int, rule: str) -> None:
    pytest.importorskip("torchrec")
    kept = json.loads(FIXTURE.read_text())
    if setting() != kept["setting"]:
        pytest.skip(f"the fixture was made with {kept['setting']}, but this is {setting()}")
    for name, found in losses(workers, rule).items():
        assert found == kept["losses"][f"{name}/{rule}"], name


if __name__ == "__main__":
    made = {f"{n}/{rule}": x for workers in METHODS for rule in RULES for n, x in losses(workers, rule).items()}
    FIXTURE.write_text(json.dumps({"setting": setting(), "losses": made}, indent=1, sort_keys=True) + "\n")
