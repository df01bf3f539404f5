"""What a stage still lacks: the list to work off when a stage is added (CONTRIBUTING, "Add a stage")."""

from __future__ import annotations

import torch

from nestpipe.checker.staleness import RULES
from nestpipe.embedding.host_table import host_table, shard_layout
from nestpipe.embedding.memory import HOST
from nestpipe.engine.dense_part import DensePart
from nestpipe.engine.exchanges import open_exchanges
from nestpipe.engine.source import Source
from nestpipe.engine.stage_functions import StageFunctions
from nestpipe.ranks.collectives import Exchange
from nestpipe.schedule.stages import STAGES
from nestpipe.schedule.templates import serial
from nestpipe.simulator.calibrate.measure import RATES
from nestpipe.simulator.cost import Cluster, stage_seconds
from nestpipe.simulator.profile import load_profile
from nestpipe.trainer import SparseOptimizer
from tests.support.engine_runs import SPEC, TABLES


def engine_functions() -> set[str]:
    """Letters of the stages that the engine has a function for."""
    table = host_table(shard_layout(TABLES, 1), 0, 1, 0)
    dense = DensePart(SPEC, lambda parameters: torch.optim.SGD(parameters, lr=0.1), HOST, Exchange())
    sgd = SparseOptimizer("sgd")
    return set(StageFunctions(serial(), sgd, table, dense, "samples", open_exchanges(1), Source(), HOST).functions)


def prices() -> set[str]:
    """Letters of the stages that the simulator has a price for."""
    profile = load_profile("h100-ib")
    return set(stage_seconds(Cluster(profile.hardware, 8), profile.workload, 1))


def what_stages_lack() -> list[str]:
    """One line for each thing that a stage of STAGES lacks, or that is there for a letter that is not a stage."""
    places = {
        "a rule for the checker, in RULES of nestpipe/checker/staleness.py": set(RULES),
        "a function of the engine, in nestpipe/engine/stage_functions.py": engine_functions(),
        "a price, in stage_seconds of nestpipe/simulator/cost.py": prices(),
        "a rate (or None), in RATES of nestpipe/simulator/calibrate/measure.py": set(RATES),
    }
    lines = [f"{letter} lacks {what}" for letter in STAGES for what, there in places.items() if letter not in there]
    lines += [
        f"{letter} is not a stage but has {what}" for what, there in places.items() for letter in there - {*STAGES}
    ]
    return lines
