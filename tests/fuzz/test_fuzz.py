"""The fuzzer finds nothing, and would find it: a short campaign, and known faults put back."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torchrec")

from tests.fuzz.campaign import Campaign, Ranks
from tests.fuzz.faults import FAULTS
from tests.fuzz.report import described, summary

SECONDS = 45


def test_nothing_is_silently_wrong() -> None:
    """Every case equals a plain loop or is refused in one line, and most of them train."""
    with Ranks() as ranks:
        campaign = Campaign(ranks, "both")
        campaign.run(0, SECONDS, None)
    kinds = Counter(outcome.verdict.kind for outcome in campaign.outcomes)
    assert not campaign.bad, "\n\n".join([summary(campaign.outcomes), *map(described, campaign.bad[:3])])
    assert kinds["equal"] >= 0.7 * (len(campaign.outcomes) - kinds["skipped"]) > 10, summary(campaign.outcomes)


@pytest.mark.parametrize(
    "fault", ["only lengths of ids are compared", "constants are the first batch's", "a sum is divided by samples"]
)
def test_a_known_fault_is_found_if_it_is_put_back(fault: str) -> None:
    campaign = Campaign(Ranks(), "1")
    with FAULTS[fault]():
        campaign.run(0, 0, 40, stop_at_first=True)
    assert campaign.bad


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_known_fault_is_found_in_two_minutes(fault: str) -> None:
    with Ranks() as ranks:
        campaign = Campaign(ranks, "both", fault)
        with FAULTS[fault]():
            campaign.run(0, 120, None, stop_at_first=True)
    assert campaign.bad
