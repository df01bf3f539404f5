"""Random models, batches and loops, trained by NestPipeline and by a plain loop: equal, or refused in one line.

python -m tests.fuzz                        # two minutes, on 1 and on 2 ranks
python -m tests.fuzz --seconds 3600         # longer; --cases 2000 for a number of cases
python -m tests.fuzz --seed 17 --ranks 2    # one case again, with what it is
python -m tests.fuzz --faults               # how soon known faults are found if they are put back
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import torch

from tests.fuzz.campaign import Campaign, Ranks
from tests.fuzz.faults import FAULTS
from tests.fuzz.report import described, summary


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, help="how long (120)")
    parser.add_argument("--cases", type=int, help="stop after so many cases, whatever the time")
    parser.add_argument("--ranks", choices=["1", "2", "both"], default="both", help="a third of the cases on 2 (both)")
    parser.add_argument("--seed", type=int, help="run this case only, and say what it is")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--faults", nargs="*", help="put known faults back, one at a time (all, or those named)")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with Ranks() as ranks:
        if options.faults is not None:
            return _faults(options, ranks)
        campaign = Campaign(ranks, options.ranks)
        if options.seed is not None:
            outcome = campaign.run_one(options.seed, 2 if options.ranks == "2" else 1)
            print(described(outcome))
            return outcome.verdict.kind in ("DIFFERENT", "CRASH")
        campaign.run(options.first, options.seconds, options.cases, show=True)
    print(summary(campaign.outcomes))
    return 0 if campaign.is_good else 1


def _faults(options: argparse.Namespace, ranks: Ranks) -> int:
    missed = 0
    for name, put_back in FAULTS.items():
        if options.faults and name not in options.faults:
            continue
        began = time.monotonic()
        campaign = Campaign(ranks, options.ranks, fault=name)
        with put_back():
            campaign.run(options.first, options.seconds, options.cases, stop_at_first=True)
        bad = campaign.bad
        missed += not bad
        found = f"found after {len(campaign.outcomes)} cases ({bad[0].verdict.why[:90]})" if bad else "NOT FOUND"
        print(f"{name}: {found}, {time.monotonic() - began:.0f} s", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
