"""A pytest plugin that switches a feature off under the suites: another method runs under the feature's name.

``NESTPIPE_SWITCHED_OFF=nestpipe=fwp-only`` measures and simulates fwp-only wherever the suites ask for nestpipe, and
``clustering`` turns clustering off. Everything else is as it is without the plugin.
"""

from __future__ import annotations

import os
from dataclasses import replace

import results.measure as measure

_WHAT = os.environ["NESTPIPE_SWITCHED_OFF"]
_NAME, _, _INSTEAD = _WHAT.partition("=")
_run, _simulate = measure.run, measure.simulate


def run(config, progress=None):
    if _WHAT == "clustering":
        return _run(replace(config, clustering=False), progress)
    names = config.method_names
    if _NAME not in names:
        return _run(config, progress)
    others = ",".join(name for name in names if name != _NAME)
    runs = {r.record.method: r for r in _run(replace(config, methods=others), progress)} if others else {}
    (other,) = _run(replace(config, methods=_INSTEAD), progress)
    runs[_NAME] = replace(other, record=replace(other.record, method=_NAME))
    return [runs[name] for name in names]


def simulate(config, known):
    return _simulate(config, {**known, _NAME: replace(known[_INSTEAD], name=_NAME)} if _INSTEAD in known else known)


measure.run, measure.simulate = run, simulate
