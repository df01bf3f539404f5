"""Reads text files in blocks of whole lines, so that a log of any size needs little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Block:
    """``text``: whole lines, each ended by one line feed. ``first_line``: the number of the first line, from 1.

    ``end``: bytes of the file up to and including this block.
    """

    text: bytes
    first_line: int
    end: int

    @property
    def lines(self) -> int:
        return self.text.count(b"\n")


def blocks(path: Path, size: int = BLOCK_BYTES) -> Iterator[Block]:
    """The file's lines: CRLF becomes LF, and a last line without a line feed gets one. Raises OSError."""
    rest, line, end = b"", 1, 0
    with path.open("rb") as file:
        while chunk := file.read(size):
            end += len(chunk)
            text = rest + chunk
            cut = text.rfind(b"\n") + 1
            rest = text[cut:]
            if cut:
                block = Block(text[:cut].replace(b"\r\n", b"\n"), line, end)
                line += block.lines
                yield block
    if rest:
        yield Block(rest.removesuffix(b"\r") + b"\n", line, end)


@dataclass
class BadRows:
    """Counts rows that cannot be used and remembers the first few. Raises at the first one unless ``skip``.

    ``error`` makes the exception from the sentence that names the file, the line and the problem.
    """

    skip: bool
    error: Callable[[str], Exception]
    count: int = 0
    examples: tuple[str, ...] = ()
    named: int = 5

    def add(self, path: Path, line: int, complaint: str) -> None:
        text = f"{path}:{line}: {complaint}"
        if not self.skip:
            raise self.error(f"{text}; correct the line, or pass --on-bad-row skip")
        self.count += 1
        if len(self.examples) < self.named:
            self.examples += (text,)
