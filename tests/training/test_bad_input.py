"""Bad input gives one clear line (what, where, what to do) and an exit status, without a traceback."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time

import pytest
import torch

from nestpipe import cli
from nestpipe.config import MAX_SIZES
from nestpipe.data.batch import Batch, Jagged
from nestpipe.engine.engine import Engine
from nestpipe.engine.lanes import MakeLanes, OneAtATime
from nestpipe.engine.thread_lanes import ThreadLanes
from nestpipe.ranks.process import RankError
from nestpipe.schedule.templates import nestpipe, serial
from tests.support.engine_runs import SPEC, Outcome, Setting, differences, make_batches, train

GOOD = "1\t10\t5\t881250949\n"
METHODS = r"one of .*nestpipe, .*serial, torchrec"

#: command line -> what its message must say. `{there}`: a folder with the files below.
COMMANDS = {
    "run --methods nestpip": rf"unknown method 'nestpip'; choose {METHODS}",
    "run --methods serial,torchrec(4)": r"'torchrec\(4\)': torchrec cannot run 4 micro-batches",
    "run --methods ,": r"--methods names no method; try --methods serial",
    "run --methods serial,serial": r"--methods names a method twice: serial,serial",
    "run --methods serial,torchrec --embedding-dim 6": r"torchrec: fbgemm's tables have dims .* multiples of 4, not 6",
    "run --methods 2d-sp --sparse-optimizer adam": r"2d-sp: fbgemm on a CPU trains tables by sgd or rowwise_adagrad",
    "converge --seeds 0": r"--seeds, --steps and --evaluations must be at least 1",
    "converge --seeds 999999999": r"--seeds 999999999 is too many; it must be at most 1000",
    "converge --steps 1": r"--evaluations 5 is more than --steps 1; it must be at most that",
    "converge --steps 99999999999999": r"--steps must be at most",
    "run --workers 0": r"--workers must be at least 1, not 0",
    "run --workers -3": r"--workers must be at least 1, not -3",
    "run --workers two": r"--workers.*'two'",
    "run --steps 0": r"--steps must be at least 1, not 0",
    "run --rounds 30": r"--rounds 30 is more than --steps 20",
    "run --micro-batches 0": r"--micro-batches must be at least 1, not 0",
    "run --epochs 0": r"--epochs must be at least 1, not 0",
    "run --seed -1": r"--seed must not be negative, got -1",
    "run --timeout 0": r"--timeout must be above 0 seconds, not 0",
    "run --pace-dense nan": r"--pace-dense must be 0 or more milliseconds, not nan",
    "run --batch-size 0": r"batch_size is 0; it must be at least 1",
    "run --negatives -1": r"negatives is -1; it must be at least 1",
    "run --data-scale inf": r"data_scale is inf; it must be a number above 0",
    "run --sequence-length 0": r"sequence_length is 0; it must be at least 1",
    "run --heads 3": r"width 64 is not divisible by heads 3",
    "run --sparse-lr nan": r"sparse_lr is nan; it must be a number of at least 0",
    "run --dense-lr -1": r"dense_lr is -1.0; it must be a number of at least 0",
    "run --timeout inf": r"--timeout must be at most 2000000 seconds \(23 days\), not inf",
    "run --seed 9999999999": r"--seed must be at most 2147483647, got 9999999999",
    "run --workers 99999": r"--workers must be at most 8192, not 99999",
    "run --steps 99999999999": r"--steps must be at most 2147483647, not 99999999999",
    "run --micro-batches 1025": r"--micro-batches must be at most 1024, not 1025",
    "run --methods serial(1025)": r"'serial\(1025\)': micro-batches must be at most 1024",
    "run --data-scale 101": r"data_scale is 101.0; it must be at most 100",
    **{
        f"run --{name.replace('_', '-')} {most + 1}": rf"{name} is {most + 1}; it must be at most {most}"
        for name, most in MAX_SIZES.items()
    },
    "run --stepz 3": r"--stepz.*--steps INT",
    "run --testbed loop": r"testbed 'loop': write loopback or netns:RATE,DELAY, e.g. netns:200mbit,1ms",
    "run --testbed netns:fast": r"rate 'fast': write a number with kbit, mbit or gbit, e.g. 200mbit",
    "run --testbed netns:200mbit,soon": r"delay 'soon': write a number with us, ms or s, e.g. 1ms",
    "run --testbed netns:200mbit,1ms,hosts=0": r"after the rate comes at most one delay and one hosts=N",
    "testbed up --hosts 0": r"a testbed has 1 to 250 hosts, not 0",
    "run --testbed netns:0.5kbit": r"rate '0.5kbit': write one from 1kbit to 1000gbit, or none",
    "run --testbed netns:1001gbit": r"rate '1001gbit': write one from 1kbit to 1000gbit, or none",
    "run --testbed netns:200mbit,11s": r"delay '11s': write at most 10s; ranks give up on a slower link",
    "reproduce --testbed foo --folder {there}/new": r"testbed 'foo': write loopback",
    "reproduce --seed -1 --folder {there}/new": r"--seed must not be negative, got -1",
    "report --records {there}/none --folder {there}/new": r"/none: no such folder or file; correct --records",
    "sweep preview smoke --checkpoint-every -1": r"--checkpoint-every is -1; it must be at least 0",
    "sweep preview smoke --max-workers -1": r"--max-workers is -1; it must be at least 0",
    "run --dataset netflix": r"netflix.*synthetic.*movielens",
    "run --dataset movielens": r"no file given; pass --data-path",
    "run --dataset movielens --data-path {there}/none": r"/none: no such file; pass --data-path",
    "run --dataset movielens --data-path {there}/empty": r"empty: the file is empty; expected user, item",
    "run --dataset movielens --data-path {there}/short": r"short:2: 3 tab-separated fields.*--on-bad-row skip",
    "run --dataset movielens --data-path {there}/word": r"word:3: item id 'ten' is not a number.*correct the line",
    "run --dataset movielens --data-path {there}/minus": r"minus:1: user id -1 is negative",
    "run --dataset movielens --data-path {there}/huge": r"huge:2: item id 9999999999999999999 is too large",
    "run --dataset movielens --data-path {there}/gap": r"gap:2: empty line",
    "run --json {there}/file/out.json": r"cannot write into {there}/file: it is not a folder; choose another place",
    "run --json {there}": r"cannot write {there}: it is a folder; name a file in it",
    "run --json /proc/none/out.json": r"cannot write into /proc/none: .*; choose another place",
    "run --store {there}/file": r"cannot write into {there}/file: it is not a folder",
    "run --trace {there}/file": r"cannot write into {there}/file: it is not a folder",
    "schedule nope": r"unknown method 'nope'; choose one of .*; and there is no file of that name",
    "schedule {there}/none": r"/none: there is no such file",
    "schedule {there}": r"cannot be read as a schedule: .*Is a directory",
    "schedule {there}/binary": r"/binary: cannot be read as a schedule: ",
    "schedule {there}/empty": r"/empty: expected 'schedule NAME micro_batches=N' and at least one operation line",
    "schedule {there}/short": r"/short:1: '1': unknown stage '1', one of P H K R",
    "schedule nestpipe --micro-batches 0": r"--micro-batches must be at least 1, not 0",
    "schedule nestpipe --micro-batches 1025": r"--micro-batches must be at most 1024, not 1025",
    "schedule serial(99999999999)": r"'serial\(99999999999\)': micro-batches must be at most 1024",
    "schedule {there}/window": r"/window:1: 'micro_batches=1025': expected a whole number from 1 to 1024",
    "schedule {there}/idle": r"idle: no operation is on the lane 'compute', so a step has no end; add one",
    "schedule {there}/cycle": r"the schedule has a cycle: R0 can never start",
    "schedule /dev/zero": r"/dev/zero: is not a schedule: more than 4194304 characters",
    "schedule": r"(?i)missing.*schedule",
    "frobnicate": r"invalid choice: 'frobnicate' \(choose from",
    "": r"usage: nestpipe COMMAND",
}
FILES = {
    "file": b"",
    "empty": b"",
    "short": (GOOD + "2\t11\t4\n" + GOOD).encode(),
    "word": (GOOD + GOOD + "2\tten\t4\t881250949\n").encode(),
    "minus": b"-1\t10\t5\t881250949\n",
    "huge": (GOOD + "1\t9999999999999999999\t5\t881250949\n").encode(),
    "gap": (GOOD + "\n" + GOOD).encode(),
    "idle": b"schedule idle micro_batches=1\nP+2 input\n",
    "cycle": b"schedule cycle micro_batches=1\nR+1 rows after R+1\nF.1 compute after R\n",
    "window": b"schedule wide micro_batches=1025\n",
    "binary": b"\xff\xfe\x00\x01",
}


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    folder = tmp_path_factory.mktemp("there")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("line", COMMANDS)
def test_command_line(there, line, capsys, monkeypatch):
    def no_ranks(*arguments, **options):
        raise AssertionError("ranks were started before the input was checked")

    monkeypatch.setattr("nestpipe.training.runs.RankPool", no_ranks)
    try:
        status = cli.main(line.replace("{there}", str(there)).split())
    except SystemExit as end:  # wrong options
        status = end.code
    out, error = capsys.readouterr()
    assert status == 2 and "Traceback" not in error and not out
    if error.startswith("nestpipe "):
        assert error.count("\n") == 1  # one line
    shown = " ".join(re.sub("[│─╭╮╰╯]", " ", error).split())
    assert re.search(COMMANDS[line].replace("{there}", re.escape(str(there))), shown), shown


def test_bad_rows_are_skipped_and_counted(tmp_path):
    rows = [f"{user}\t{item}\t5\t{100 + item}\n" for user in range(1, 9) for item in range(1, 9)]
    (tmp_path / "u.data").write_text("".join([*rows[:20], "1\t2\t3\n", *rows[20:], "x\t1\t1\t1\n"]))
    out = tmp_path / "out.json"
    small = "--batch-size 2 --negatives 4 --embedding-dim 8 --width 8 --sequence-length 4 --dense-layers 1"
    words = f"run --methods nestpipe --workers 1 --steps 2 --rounds 1 {small}".split()
    words += ["--dataset", "movielens", "--data-path", str(tmp_path), "--on-bad-row", "skip", "--json", str(out)]
    done = subprocess.run([sys.executable, "-m", "nestpipe.cli", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())["methods"]["nestpipe"]
    (note,) = record["notes"]
    assert note.startswith("2 malformed rows were skipped: ") and "u.data:21: 3 tab-separated fields" in note
    assert "2 malformed rows were skipped" in done.stdout
    assert len(record["losses"]) == 6 and all(loss > 0 for loss in record["losses"])  # 8 micro-batches of 2 samples


BAD_KEYS = {"beyond the table": 41, "negative": -1, "int64 max": 2**63 - 1, "int64 min": -(2**63)}


def train_with_bad_key(key: int, schedule=None, lanes: MakeLanes = ThreadLanes) -> Outcome:
    setting = Setting()
    batches = make_batches(6)
    bad = batches[3].sparse["wanted"]
    flat = bad.flat.clone()
    flat[len(flat) // 2] = key
    sparse = {**batches[3].sparse, "wanted": Jagged(flat, bad.counts)}
    batches[3] = Batch(sparse, batches[3].sample_ids, batches[3].extra)
    engine = Engine(
        schedule or nestpipe(4), SPEC, setting.sparse_optimizer, setting.dense_optimizer, seed=3, lanes=lanes
    )
    try:
        return train(engine, iter(batches), None)
    finally:
        engine.close()


@pytest.mark.parametrize("name", BAD_KEYS)
@pytest.mark.parametrize("lanes", [ThreadLanes, OneAtATime])
def test_bad_keys_are_named_with_feature_and_table(name, lanes):
    key = BAD_KEYS[name]
    with pytest.raises(ValueError, match=rf"^feature 'wanted' holds key {key}, but table 'item' has rows 0\.\.40$"):
        train_with_bad_key(key, lanes=lanes)


def bad_key_on_rank_1(key: int, micro_batches: int) -> None:
    train_with_bad_key(key if torch.distributed.get_rank() else 0, nestpipe(micro_batches))


def test_a_bad_key_on_one_of_two_ranks_ends_both_and_is_named_first(pool2):
    pool2.run(bad_key_on_rank_1, 0, 4)
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        pool2.run(bad_key_on_rank_1, 2**63 - 1, 4)
    assert time.monotonic() - began < 10
    first = str(error.value).splitlines()[0]
    assert first == (
        "rank 1: ValueError: feature 'wanted' holds key 9223372036854775807, but table 'item' has rows 0..40"
    )


def edge(case: str, method: str) -> tuple[Outcome, Outcome]:
    """On a rank: ``method`` and serial on odd but legal data."""
    rank = torch.distributed.get_rank()
    batches = {
        "empty histories": lambda: [_emptied(b) for b in make_batches(6, rank)],
        "empty batches on one rank": lambda: make_batches(6, rank, samples=0 if rank else 8),
        "rank 1 ends first": lambda: make_batches(6 - 4 * rank, rank),
        "rank 0 has nothing at all": lambda: make_batches(5, rank) if rank else [],
        "fewer samples than micro-batches": lambda: make_batches(6, rank, samples=2),
        "nobody has any data": lambda: [],
    }[case]()
    outcomes = []
    for schedule in (nestpipe(8) if method == "nestpipe" else serial(8), serial(8)):
        setting = Setting()
        engine = Engine(schedule, SPEC, setting.sparse_optimizer, setting.dense_optimizer, seed=3)
        try:
            outcome = train(engine, iter(batches), None)
            outcome.tensors["item"] = engine.table("item").clone()
            outcomes.append(outcome)
        finally:
            engine.close()
    return outcomes[0], outcomes[1]


def _emptied(batch: Batch) -> Batch:
    none = Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(len(batch), dtype=torch.int64))
    return Batch({**batch.sparse, "seen": none, "wanted": none}, batch.sample_ids, batch.extra)


EDGES = {
    "empty histories": 6,
    "empty batches on one rank": 6,
    "rank 1 ends first": 6,
    "rank 0 has nothing at all": 5,
    "fewer samples than micro-batches": 6,
    "nobody has any data": 0,
}


@pytest.mark.parametrize("case", EDGES)
def test_odd_but_legal_data_trains_as_serial_does(pool2, case):
    for outcome, wanted in pool2.run(edge, case, "nestpipe"):
        assert len(outcome.losses) == EDGES[case]
        assert differences(outcome, wanted) == []
        assert all(torch.isfinite(t).all() for t in outcome.tensors.values())


def test_a_locale_that_lacks_a_character_loses_no_results(tmp_path):
    out = tmp_path / "out.json"
    small = "--batch-size 2 --negatives 4 --embedding-dim 8 --width 8 --sequence-length 4 --dense-layers 1"
    words = f"run --methods serial --workers 1 --steps 1 --rounds 1 {small} --json {out}".split()
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-m", "nestpipe.cli", *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and json.loads(out.read_text())["methods"]["serial"]


def test_output_that_cannot_be_written_loses_no_results(tmp_path):
    out = tmp_path / "out.json"
    small = "--batch-size 2 --negatives 4 --embedding-dim 8 --width 8 --sequence-length 4 --dense-layers 1"
    words = f"run --methods serial --workers 1 --steps 1 --rounds 1 {small} --json {out}".split()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nestpipe.cli", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and "No space left" in done.stderr and "Traceback" not in done.stderr
    assert json.loads(out.read_text())["methods"]["serial"]


@pytest.mark.parametrize("error", [MemoryError("too\nmuch"), OverflowError("too large")])
def test_a_size_that_no_machine_can_hold_is_one_line(error, capsys, monkeypatch):
    def fail(arguments):
        raise error

    monkeypatch.setattr("nestpipe.commands.methods.main", fail)
    assert cli.main(["methods"]) == (1 if isinstance(error, MemoryError) else 2)
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupt_during_the_imports_is_one_line(capsys, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["run"]) == 130
    assert capsys.readouterr().err == "nestpipe run: error: interrupted before anything had started\n"


@pytest.mark.parametrize("size", ["--batch-size 1048576 --negatives 1048576", "--embedding-dim 65536 --data-scale 0.5"])
def test_more_than_a_rank_can_hold_is_one_line(size):
    def bounded() -> None:  # the same limit on every machine, whatever memory it has
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))

    words = f"run --methods serial --workers 1 --steps 1 --rounds 1 --dense-layers 1 --sequence-length 4 {size}".split()
    command = [sys.executable, "-m", "nestpipe.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=bounded)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "nestpipe run: error: out of memory; choose smaller sizes (rank 0: " in done.stderr, done.stderr
