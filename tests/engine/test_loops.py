"""Loops as people write them: epochs by length, iterators that change, errors in between, an early close."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from nestpipe.data.batch import Batch
from nestpipe.engine.engine import Engine
from nestpipe.engine.lanes import OneAtATime
from nestpipe.engine.thread_lanes import ThreadLanes
from nestpipe.methods import MethodOptions, find_method
from nestpipe.schedule.operations import Ref, Schedule
from nestpipe.schedule.templates import nestpipe, serial
from tests.support.engine_runs import SPEC, Setting, jitter, make_batch

METHODS = ["serial", "fwp-only", "nestpipe", "dbp-only", "uniemb"]
SETTING = Setting()
#: For each call its pass over the data; None: until StopIteration. Passes come back, and some change in mid-pass.
LOOPS: dict[str, list[tuple[str, int | None]]] = {
    "epochs by length": [("a", 4), ("b", 4), ("c", 4)],
    "until the end": [("a", None), ("b", None), ("c", None)],
    "another in mid-pass": [("a", 2), ("b", None), ("a", None)],
    "in turns": [("a", 3), ("b", None), ("a", None), ("b", None)],
    "one call each": [("a", 1), ("b", 1), ("c", 1), ("b", 1), ("a", 1), ("b", None), ("c", None), ("a", None)],
}


def schedule_of(method: str) -> Schedule:
    found = find_method(method).with_options(MethodOptions(replica_groups=2))
    return found.schedule(found.micro_batches_of(2))


def make_engine(schedule: Schedule, lanes=ThreadLanes, groups: int = 1) -> Engine:
    return Engine(schedule, SPEC, SETTING.sparse_optimizer, SETTING.dense_optimizer, 3, lanes, groups)


def passes(sizes: dict[str, int]) -> dict[str, Iterator[Batch]]:
    """By name, iterators of batches that can be told apart by their samples."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: iter([make_batch(generator, 10 * (1 + number) + n) for n in range(size)])
        for number, (name, size) in enumerate(sizes.items())
    }


def loop(engine: Engine, sizes: dict[str, int], calls: list[tuple[str, int | None]]) -> list:
    """What each call gave: the samples of the batch, or "end"."""
    given, seen = passes(sizes), []
    for name, most in calls:
        for _ in range(99 if most is None else most):
            try:
                seen.append(engine.progress(given[name]).samples)
            except StopIteration:
                seen.append("end")
                break
    assert engine.trained == sum(1 for n in seen if n != "end")
    return seen


def loops_on_this_rank(methods: list[str], shorter: dict[str, int]) -> list[str]:
    """Sentences on what went wrong. ``shorter``: by pass, how many batches rank 0 has fewer than its peer."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    longest = {"a": 4, "b": 4, "c": 4}
    sizes = {name: size - (shorter.get(name, 0) if rank == 0 else 0) for name, size in longest.items()}
    every = [10 * (1 + p) + n for p, name in enumerate(sizes) for n in range(sizes[name])]
    wrong = []
    for method in methods:
        schedule = schedule_of(method)
        for title, calls in LOOPS.items():
            used = {name for name, _ in calls}
            delayed = partial(ThreadLanes, delay=jitter(len(title), 2e-5))
            lanes = OneAtATime if method == "serial" or len(title) % 2 else delayed
            engine = make_engine(schedule, lanes, 2 if method == "nestpipe+2d-sp" else 1)
            seen = loop(engine, sizes, calls)
            if title == "epochs by length":
                seen += loop_rest(engine)
            engine.close()
            trained = sorted(n for n in seen if n not in ("end", 0))
            wanted = [n for n in every if "abc"[n // 10 - 1] in used]
            if trained != wanted:
                wrong.append(f"{method}, {title}: trained {trained}, not {wanted}")
            if title == "epochs by length" and not shorter and seen != every:
                wrong.append(f"{method}, {title}: {seen}")
            if title == "until the end" and seen.count("end") != 3:
                wrong.append(f"{method}, {title}: {seen}")
    return wrong


def loop_rest(engine: Engine) -> list:
    """Nothing is left over after the last pass."""
    try:
        return [engine.progress(iter([])).samples]
    except StopIteration:
        return []


def test_every_loop_trains_each_batch_once(pool2) -> None:
    assert loops_on_this_rank(METHODS, {}) == []
    assert pool2.run(loops_on_this_rank, ["nestpipe", "nestpipe+2d-sp"], {"a": 1, "b": 3}) == [[], []]
    assert pool2.run(loops_on_this_rank, ["nestpipe"], {"a": 4, "b": 4, "c": 4}) == [[], []]


def test_the_same_iterator_is_asked_again_after_its_end() -> None:
    class Restarted:
        """Like the iterator of a loader with persistent workers: each end is followed by another pass."""

        def __init__(self) -> None:
            self.inner: Iterator[Batch] = iter([])

        def __iter__(self) -> Iterator[Batch]:
            self.inner = iter(SETTING.batches(0)[:3])
            return self

        def __next__(self) -> Batch:
            return next(self.inner)

    for schedule in (serial(2), nestpipe(2)):
        engine, loader, counts = make_engine(schedule), Restarted(), []
        for _ in range(3):
            before, batches = engine.trained, iter(loader)
            with pytest.raises(StopIteration):
                while True:
                    engine.progress(batches)
            counts.append(engine.trained - before)
        engine.close()
        assert counts == [3, 3, 3]


def changed_at_different_calls(method: str, groups: int) -> str:
    torch.set_num_threads(1)
    engine = make_engine(schedule_of(method), groups=groups)
    first, second = iter(SETTING.batches(0)), iter(SETTING.batches(0, 1))
    try:
        for call in range(12):
            engine.progress(first if call < 2 + dist.get_rank() else second)
    except ValueError as error:
        return str(error)
    finally:
        engine.close()
    return "trained"


@pytest.mark.parametrize(("method", "groups"), [("serial", 1), ("nestpipe", 1), ("nestpipe+2d-sp", 2)])
def test_ranks_that_change_their_iterator_at_different_calls_are_refused(pool2, method: str, groups: int) -> None:
    one, other = pool2.run(changed_at_different_calls, method, groups)
    assert one == other
    assert "pass a new iterator to progress() in the same call on every rank" in one and "\n" not in one


class Interrupted:
    """Raises KeyboardInterrupt in the thread that calls, in operation ``at``, or in a wait once ``at`` has begun."""

    def __init__(self, at: Ref) -> None:
        self.at = at

    def lanes(self, make):
        def made(schedule: Schedule, execute):
            def run(ref: Ref) -> None:
                if ref == self.at:
                    raise KeyboardInterrupt
                execute(ref)

            return make(schedule, run)

        return made


@pytest.mark.parametrize("stage", ["P", "K", "F", "O", "W"])
@pytest.mark.parametrize("lanes", [ThreadLanes, OneAtATime])
def test_after_an_interrupt_every_call_names_it_and_the_last_whole_step(lanes, stage: str) -> None:
    micro = 1 if stage == "F" else 0
    engine = make_engine(nestpipe(2), Interrupted(Ref(stage, 7, micro)).lanes(lanes))
    batches, losses = iter(SETTING.batches(0)), []
    with pytest.raises(KeyboardInterrupt):
        while True:
            losses.append(engine.progress(batches).loss)
    whole = engine.trained - 1
    assert len(losses) in (whole, whole + 1)
    for call in (lambda: engine.progress(batches), lambda: engine.table("item"), engine.state_dict):
        with pytest.raises(RuntimeError) as caught:
            call()
        text = str(caught.value)
        assert "\n" not in text and "ended with KeyboardInterrupt; the last whole step is " in text
        assert int(text.split("last whole step is ")[1].split(".")[0]) in (whole, whole + 1)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 2


def test_a_ctrl_c_while_the_caller_waits_ends_training() -> None:
    reached, go = threading.Event(), threading.Event()

    def slow() -> Iterator[Batch]:
        for n, batch in enumerate(SETTING.batches(0)):
            if n == 12:
                reached.set()
                go.wait(10)
            yield batch

    def interrupt() -> None:
        reached.wait(10)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    engine, batches = make_engine(nestpipe(2)), slow()
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.progress(batches)
    trained = engine.trained
    go.set()
    with pytest.raises(RuntimeError, match=f"step {trained} ended with KeyboardInterrupt"):
        engine.progress(batches)
    assert engine.trained == trained
    engine.close()


def test_a_stop_iteration_of_the_model_is_not_the_end_of_the_data() -> None:
    def lanes(schedule: Schedule, execute):
        def run(ref: Ref) -> None:
            if ref == Ref("F", 2, 1):
                raise StopIteration
            execute(ref)

        return OneAtATime(schedule, run)

    engine, batches = make_engine(serial(2), lanes), iter(SETTING.batches(0))
    with pytest.raises(RuntimeError, match="step 2 was ended by a StopIteration that is not the iterator's"):
        while True:
            engine.progress(batches)
    engine.close()


def closed_in_mid_pass(slow: float) -> tuple[float, bool, int]:
    torch.set_num_threads(1)
    read, before = [], set(threading.enumerate())

    def batches() -> Iterator[Batch]:
        for n, batch in enumerate(SETTING.batches(0)):
            read.append(n)
            if dist.get_rank() == 0 and n > 6:
                time.sleep(slow)
            yield batch

    engine, source = make_engine(nestpipe(4)), batches()
    for _ in range(7):
        engine.progress(source)
    began = time.monotonic()
    engine.close()
    alive = bool(set(threading.enumerate()) - before)
    return time.monotonic() - began, alive, len(read)


def test_close_in_mid_pass_leaves_no_rank_in_a_collective(pool2) -> None:
    for seconds, alive, read in pool2.run(closed_in_mid_pass, 0.15):
        assert seconds < 3 and not alive and read <= 11


def drawing(batches: list[Batch], draws: bool) -> Iterator[Batch]:
    for batch in batches:
        noise = torch.randn(len(batch)) if draws else torch.ones(len(batch))
        time.sleep(random.random() * 3e-4)
        yield Batch(batch.sparse, batch.sample_ids, {"label": batch.extra["label"] + 0.1 * noise})


class Dropping(SPEC.build):  # type: ignore[misc, name-defined]
    def forward(self, batch: Batch):
        return torch.nn.functional.dropout(super().forward(batch), 0.5)


def random_losses(lanes, draws: bool, drops: bool) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    spec = type(SPEC)(SPEC.tables, Dropping if drops else SPEC.build)
    engine = Engine(nestpipe(2), spec, SETTING.sparse_optimizer, SETTING.dense_optimizer, 3, lanes)
    losses = []
    for epoch in range(2):
        batches = drawing(SETTING.batches(0, epoch)[:9], draws)
        for _ in range(9):
            losses.append(engine.progress(batches).loss)
            losses.append(float(torch.rand(())))  # a caller that draws between steps
    active = engine._stages.turns.active
    engine.close()
    return losses, active


def test_random_numbers_are_the_same_in_every_run() -> None:
    for draws, drops, runs in ((True, True, 5), (False, True, 1), (True, False, 1)):
        listed, active = random_losses(OneAtATime, draws, drops)
        assert active == draws
        for seed in range(runs):
            delay = jitter(seed, 2e-4)
            assert random_losses(partial(ThreadLanes, delay=delay), draws, drops) == (listed, active)
        assert len(set(listed)) > 10 and all(a != b for a, b in pairwise(listed[::2]))
