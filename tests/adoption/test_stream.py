"""Batches that are read before their turn, to find one of two samples, are as if they had been read in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchrec")

from nestpipe.adoption.batches import BatchFormat, Reads
from nestpipe.adoption.stream import Stream

SIZES = [(1, 1, 0), (1, 4), (4, 1), (0, 1, 1, 2), (1,), ()]


def stream_of(batches: Iterator[Tensor]) -> Stream:
    form = BatchFormat()
    return Stream(batches, None, lambda batch, first_id: form.to_batch(batch, first_id, Reads({}, {})), form)


def passes(sizes: tuple[int, ...], times: int) -> Iterator[Tensor | None]:
    """Batches whose values are drawn; None if an iterator would stop there."""
    for _ in range(times):
        for size in sizes:
            yield torch.rand(size)
        yield None


class GoesOn:
    """An iterator that begins another pass after each StopIteration, and uses its tensors again."""

    def __init__(self, found: Iterator[Tensor | None]) -> None:
        self._found = found
        self._last: Tensor | None = None

    def __iter__(self) -> GoesOn:
        return self

    def __next__(self) -> Tensor:
        if self._last is not None:
            self._last.zero_()
        self._last = next(self._found)
        if self._last is None:
            raise StopIteration
        return self._last


def all_of(stream: Stream) -> list[list[float]]:
    return [part.extra[""].tolist() for part in stream]


@pytest.mark.parametrize("sizes", SIZES)
def test_looking_ahead_changes_neither_batches_nor_passes(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    wanted = [all_of(stream_of(GoesOn(passes(sizes, 1)))) for _ in range(2)]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    stream = stream_of(GoesOn(passes(sizes, 2)))
    before = torch.get_rng_state()
    for _ in range(2):
        first = stream.peek(2)
        assert (first is None) == (not sizes)
        assert first is None or len(first) == next((n for n in sizes if n > 1), sizes[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert [all_of(stream), all_of(stream)] == wanted
    assert torch.equal(torch.get_rng_state(), after)
