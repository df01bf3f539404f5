"""Ends, errors and empty batches in loops as people write them. Against plain loops."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

pytest.importorskip("torchrec")

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.adoption_cases import Clicks, Scores, clicks, rank
from tests.support.adoption_loops import pipeline_of, sized, to_the_end

NONE = torch.empty(0, dtype=torch.int64)


def empty(samples: int = 0) -> Clicks:
    ids = KeyedJaggedTensor(["a", "b"], NONE, lengths=NONE, stride=samples)
    return Clicks(ids, torch.zeros(0, 3), torch.zeros(0))


def with_an_empty_batch(step: int) -> list[int]:
    """One rank has a batch without samples, of a KeyedJaggedTensor of no stride."""
    batches = sized(4, 5, 6)
    if rank() == 1:
        batches[step] = empty()
    pipeline = pipeline_of()
    trained = to_the_end(pipeline, iter(batches))
    pipeline.close()
    return trained


@pytest.mark.parametrize("step", [0, 1])
def test_a_rank_with_an_empty_batch(pool2, step):
    wanted = [4, 5, 6]
    assert pool2.run(with_an_empty_batch, step) == [wanted, [0 if n == step else wanted[n] for n in range(3)]]


def test_a_batch_of_no_samples_anywhere():
    pipeline = pipeline_of()
    assert to_the_end(pipeline, iter([*sized(4), empty(), *sized(5)])) == [4, 0, 5]
    pipeline.close()


def uneven() -> int:
    pipeline = pipeline_of()
    trained = to_the_end(pipeline, iter(sized(*[4] * (3 + 2 * rank()))))
    pipeline.close()
    return len(trained)


def test_ranks_with_different_numbers_of_batches(pool2):
    assert pool2.run(uneven) == [5, 5]


def closed_early() -> tuple[float, list[str]]:
    """Five steps of endless data, whose reading is slow on one rank, then close()."""

    def endless():
        for n in range(10**6):
            if n > 6 and rank() == 0:
                time.sleep(0.3)
            yield sized(4)[0]

    before = {thread.name for thread in threading.enumerate()}
    pipeline, batches = pipeline_of(), endless()
    for _ in range(5):
        pipeline.progress(batches)
    began = time.monotonic()
    pipeline.close()
    left = [t.name for t in threading.enumerate() if t.name not in before and "nest" in t.name.lower()]
    return time.monotonic() - began, left


def test_close_in_the_middle_of_an_epoch(pool2):
    for seconds, threads in pool2.run(closed_early):
        assert seconds < 4 and threads == []


def test_an_error_of_the_loader_is_named_again_by_later_calls():
    def broken():
        yield from sized(4, 5)
        raise OSError("disk on fire")

    pipeline, batches = pipeline_of(), broken()
    with pytest.raises(OSError, match="disk on fire"):
        to_the_end(pipeline, batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="disk on fire"):
            pipeline.progress(iter(sized(4)))
    pipeline.close()


def test_an_error_of_the_model_is_named_again_by_later_calls():
    class Fails(Scores):
        calls = 0

        def loss(self, score, batch):
            self.calls += 1
            if self.calls > 7:
                raise ArithmeticError("my own error")
            return super().loss(score, batch)

    pipeline, batches = pipeline_of(Fails(), check=False), iter(clicks(steps=8)())
    with pytest.raises(ArithmeticError, match="my own error"):
        to_the_end(pipeline, batches)
    with pytest.raises(RuntimeError, match="my own error"):
        pipeline.progress(batches)
    pipeline.close()


def test_ctrl_c_and_then_another_call():
    """Every batch that is trained afterwards is trained whole and once, or the first error is named."""
    wanted = []
    reference = pipeline_of()
    to_train = list(clicks(steps=8)())
    batches = iter(to_train)
    for _ in to_train:
        wanted.append(reference.progress(batches).loss)
    reference.close()

    def slow():
        for n, batch in enumerate(to_train):
            if n == 5:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            yield batch

    pipeline, batches, losses, interrupts = pipeline_of(), slow(), [], 0
    while True:
        try:
            losses.append(pipeline.progress(batches).loss)
        except StopIteration:
            break
        except KeyboardInterrupt:
            interrupts += 1
        except RuntimeError as error:
            assert "KeyboardInterrupt" in str(error) or "interrupt" in str(error)
            break
    pipeline.close()
    assert interrupts == 1 and losses == wanted[: len(losses)] and len(losses) >= 1
