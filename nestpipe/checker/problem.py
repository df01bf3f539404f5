"""What the checker reports."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.schedule.operations import Ref


@dataclass(frozen=True)
class Problem:
    """``kind``: malformed, deadlock, race, stale, incomplete, order, lossy or update_rule. ``text``: one sentence.

    ``ops``: the two operations of a race.
    """

    kind: str
    text: str
    ops: tuple[Ref, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
