"""A pytest plugin that switches a feature off under the suites: another method runs under the feature's name.

``NESTPIPE_SWITCHED_OFF=nestpipe=fwp-only`` measures and simulates fwp-only wherever the suites ask for nestpipe, and
``clustering`` turns clustering off. Everything else is as it is without the plugin.
"""

from __future__ import annotations

import os
from dataclasses import replace

from baselines.simulated import METHODS
from nestpipe.simulator.scenario import simulate
from nestpipe.training.runs import run
from results.experiments.run_part import Runner
from suites.conftest import RUNNER_KEY

WHAT = os.environ["NESTPIPE_SWITCHED_OFF"]
NAME, _, INSTEAD = WHAT.partition("=")


def measured(config, progress=None):
    if WHAT == "clustering":
        return run(replace(config, clustering=False), progress)
    names = config.method_names
    if NAME not in names:
        return run(config, progress)
    others = ",".join(name for name in names if name != NAME)
    runs = {r.record.method: r for r in run(replace(config, methods=others), progress)} if others else {}
    (other,) = run(replace(config, methods=INSTEAD), progress)
    runs[NAME] = replace(other, record=replace(other.record, method=NAME))
    return [runs[name] for name in names]


def simulated(config):
    return simulate(config, {**METHODS, NAME: replace(METHODS[INSTEAD], name=NAME)} if INSTEAD in METHODS else METHODS)


def pytest_configure(config):
    config.stash[RUNNER_KEY] = Runner(measured, simulated)
