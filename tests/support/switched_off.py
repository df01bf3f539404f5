"""A pytest plugin that switches a feature off under the suites: another method runs under the feature's name.

``NESTPIPE_SWITCHED_OFF=nestpipe=fwp-only`` measures and simulates fwp-only wherever the suites ask for nestpipe, and
``clustering`` turns clustering off. Everything else is as it is without the plugin.
"""

from __future__ import annotations

import os
from dataclasses import replace

from nestpipe.simulator.scenario import ALL, simulate
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
    records = simulate(config)
    if INSTEAD not in ALL or NAME not in {record.method for record in records}:
        return records
    others = {r.workers: r for r in simulate(replace(config, methods=f"serial,{INSTEAD}")) if r.method == INSTEAD}
    return [replace(others[r.workers], method=NAME) if r.method == NAME else r for r in records]


def pytest_configure(config):
    config.stash[RUNNER_KEY] = Runner(measured, simulated)
