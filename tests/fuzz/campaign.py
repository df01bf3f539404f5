"""Runs many cases, on this process or on two ranks."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from nestpipe.ranks.pool import RankPool
from tests.fuzz.cases import Case, draw_case
from tests.fuzz.verdicts import RefusedLater, Verdict, try_case, verdict_of

_LATER = "refused later: "


@dataclass(frozen=True)
class Outcome:
    case: Case
    verdict: Verdict


class Ranks:
    """Two ranks, started when they are first needed, and again after a case has ended them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._pool: RankPool | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, case: Case, fault: str | None) -> list[Any]:
        """What each rank says of ``case``."""
        if self._pool is None or self._pool.broken:
            self._stack.close()
            self._pool = self._stack.enter_context(RankPool(2, timeout_s=60))
        return self._pool.run(on_rank, case, fault)


def on_rank(case: Case, fault: str | None) -> Any:
    """``try_case`` on a rank. An error that is no refusal is returned as Verdict, so that the rank lives on."""
    from tests.fuzz.faults import FAULTS

    torch.set_num_threads(1)
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        found = _tried(case)
    if isinstance(found, RefusedLater):  # the other rank may wait for this one in a collective: end both
        raise RuntimeError(_LATER + found)
    return found


def _tried(case: Case) -> Any:
    try:
        return try_case(case)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return Verdict("CRASH", f"{type(error).__name__}: {lines[0]}")


class Campaign:
    """``on``: 1, 2 or both. ``fault``: one that is put back on the ranks as well."""

    def __init__(self, ranks: Ranks, on: str, fault: str | None = None) -> None:
        self._ranks = ranks
        self._on = on
        self._fault = fault
        self.outcomes: list[Outcome] = []

    @property
    def bad(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.verdict.kind in ("DIFFERENT", "CRASH")]

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong, and three quarters of the cases trained."""
        tried = [o for o in self.outcomes if o.verdict.kind != "skipped"]
        return not self.bad and sum(o.verdict.kind == "equal" for o in tried) >= 0.75 * len(tried)

    def run(
        self, first: int, seconds: float, cases: int | None, show: bool = False, stop_at_first: bool = False
    ) -> None:
        end = time.monotonic() + seconds
        seed = first
        while (time.monotonic() < end) if cases is None else seed < first + cases:
            on = int(self._on) if self._on != "both" else 2 if seed % 3 == 2 else 1
            self.outcomes.append(self.run_one(seed, on))
            seed += 1
            kind = self.outcomes[-1].verdict.kind
            if show and kind in ("DIFFERENT", "CRASH"):
                print(f"seed {seed - 1}, {on} rank(s): {kind}: {self.outcomes[-1].verdict.why}", flush=True)
            if show and sys.stderr.isatty():
                print(f"\r{len(self.outcomes)} cases", end="", file=sys.stderr, flush=True)
            if stop_at_first and self.bad:
                return

    def run_one(self, seed: int, ranks: int) -> Outcome:
        case = draw_case(seed, ranks)
        if ranks == 1:
            return Outcome(case, _verdict(case, _tried(case)))
        try:
            found = self._ranks.run(case, self._fault)
        except Exception as error:  # the ranks have ended
            line = str(error).splitlines()[0]
            later = _LATER in line
            return Outcome(case, Verdict("refused", line.split(_LATER)[1]) if later else Verdict("CRASH", line))
        return Outcome(case, _of_ranks(case, found))


def _of_ranks(case: Case, found: list[Any]) -> Verdict:
    crashed = [one for one in found if isinstance(one, Verdict)]
    refused = [one for one in found if isinstance(one, str)]
    if refused:  # the other rank then often says only that a peer has gone
        return Verdict("refused", refused[0])
    if crashed:
        return crashed[0]
    weights = [one.weights for one in found]
    for name, one in weights[0].items():
        if not torch.equal(one, weights[1][name]):
            return Verdict("DIFFERENT", f"{name} differs between ranks")
    return _verdict(case, found[0])


def _verdict(case: Case, found: Any) -> Verdict:
    return found if isinstance(found, Verdict) else verdict_of(case, found)
