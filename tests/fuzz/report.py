"""Says what a campaign found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from tests.fuzz.campaign import Outcome


def described(outcome: Outcome) -> str:
    """A case, field by field, and its verdict."""
    case = outcome.case
    lines = [f"  {field.name}: {getattr(case, field.name)}" for field in fields(case)]
    return "\n".join(
        [f"seed {case.seed} on {case.ranks} rank(s)", *lines, f"{outcome.verdict.kind}: {outcome.verdict.why}"]
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    """Numbers of cases by verdict, refusals by reason, and the seeds of what is wrong."""
    kinds = Counter(o.verdict.kind for o in outcomes)
    tried = len(outcomes) - kinds["skipped"]
    share = 100 * kinds["equal"] / max(1, tried)
    counted = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    lines = [f"{len(outcomes)} cases: {counted}; {share:.0f} % of those that a plain loop can run train"]
    for reason, number in Counter(
        _reason(o.verdict.why) for o in outcomes if o.verdict.kind == "refused"
    ).most_common():
        lines.append(f"  refused {number:5}  {reason}")
    needless = [o for o in outcomes if o.verdict.kind == "refused" and not o.case.may_be_refused]
    lines += [f"  needless? seed {o.case.seed} --ranks {o.case.ranks}: {o.verdict.why[:90]}" for o in needless[:20]]
    for kind in ("DIFFERENT", "CRASH"):
        lines += [
            f"  {kind} seed {o.case.seed} --ranks {o.case.ranks}: {o.verdict.why}"
            for o in outcomes
            if o.verdict.kind == kind
        ]
    return "\n".join(lines)


def _reason(sentence: str) -> str:
    """A refusal without its names and numbers."""
    sentence = re.sub(r"^rank \d+: ", "", sentence)
    sentence = re.sub(r"'[^']*'", "'...'", sentence)
    sentence = re.sub(r"\([^)]*\)", "(...)", sentence)
    return re.sub(r"-?\d[\d.e+-]*", "N", sentence)[:110]
