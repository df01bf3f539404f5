"""What is run for the tables and figures: parts, each a store of its own, and what each takes.

``make reproduce`` and ``pytest suites/ --benchmark`` run the same plan; the suites without the flag run it tiny.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nestpipe.config import DataConfig, ModelConfig, RunConfig
from nestpipe.measurement.record import Record
from nestpipe.methods import find_method, known_methods
from nestpipe.simulator.scenario import SimulateConfig
from nestpipe.training.convergence import ConvergenceConfig
from results.experiments.part_names import (
    CONVERGENCE,
    FOUR,
    GPU,
    MICRO_BATCHES,
    NPU,
    NPU_MICRO_BATCHES,
    NPU_SIZES,
    SIZES,
    TWO,
)

SHAPED = "netns:200mbit,1ms"
TINY = RunConfig(
    data=DataConfig(data_scale=0.0002, batch_size=16, negatives=8),
    model=ModelConfig(embedding_dim=16, dense_layers=1, heads=1, width=16, sequence_length=10),
    steps=3,
    rounds=1,
)
#: Communication of a step is near its paced dense time, so that there is something to hide and something to hide it in.
FULL = RunConfig(
    data=DataConfig(batch_size=64, negatives=64),
    model=ModelConfig(embedding_dim=128, dense_layers=1, heads=1, width=16, sequence_length=20),
)
#: For the sweeps over the model's sizes, whose dense time must follow them: not paced.
SIZE_SWEEP = RunConfig(
    data=DataConfig(batch_size=32, negatives=32),
    model=ModelConfig(embedding_dim=64, dense_layers=2, heads=2, width=64, sequence_length=40),
)
PACE_MS = 150.0
TWO_METHODS = (
    "serial", "serial(8)", "torchrec", "torchrec-dedup", "uniemb", "dbp-only", "fwp-only", "nestpipe",
)  # fmt: skip
FOUR_METHODS = ("serial", "torchrec", "2d-sp", "uniemb", "nestpipe", "nestpipe+2d-sp")
#: Further representatives of the families of Table I, and NestPipe combined with them.
TABLE1_METHODS = ("torchrec-bf16", "torchrec-planner", "nestpipe+bf16")


@dataclass(frozen=True)
class Options:
    """How the plan is run. ``workers``: ranks of the small runs, the large have twice as many; ``testbed``:
    loopback or netns:RATE,DELAY; ``hardware``: profile of the simulated tables; ``rounds``: interleaved."""

    size: Literal["full", "tiny"] = "full"
    workers: int = 2
    testbed: str = SHAPED
    hardware: str = "npu-1536-industrial"
    rounds: int = 3
    seed: int = 1


Planned = RunConfig | SimulateConfig | ConvergenceConfig


@dataclass(frozen=True)
class Part:
    """``name``: of the store; ``feeds``: artefacts that are made from it; ``runs``: what is measured or simulated."""

    name: str
    title: str
    feeds: tuple[str, ...]
    runs: tuple[Planned, ...]

    @property
    def kind(self) -> str:
        return "simulated" if isinstance(self.runs[0], SimulateConfig) else "measured"


def all_parts(options: Options) -> list[Part]:
    """All parts, cheapest first."""
    return [*simulated_parts(options), *measured_parts(options)]


def find_part(name: str, options: Options) -> Part:
    """Raises ValueError, listing the parts."""
    parts = {part.name: part for part in all_parts(options)}
    if name not in parts:
        raise ValueError(f"no part '{name}': one of {', '.join(parts)}")
    return parts[name]


def simulated_parts(options: Options) -> list[Part]:
    """The paper's clusters on virtual clocks: the same in every size, for it takes seconds."""
    main = SimulateConfig(hardware=options.hardware)
    sweep = replace(main, methods="serial,nestpipe", workers="1536")
    sizes = (512, 256, 128, 64, 32, 16)
    micro = [
        replace(sweep, micro_batch=size, clustering=clustering) for clustering in ("profile", "off") for size in sizes
    ]
    models = [
        *(replace(sweep, embedding_dim=dim) for dim in (512, 768, 1024)),
        *(replace(sweep, dense_layers=layers) for layers in (2, 4, 8)),
        *(replace(sweep, sequence_length=length) for length in (512, 1024, 2048)),
    ]
    return [
        Part(
            NPU,
            "the NPU cluster, 128 to 1,536 workers",
            ("table1", "table2", "table3", "table4", "ladder", "fig2", "fig7", "fig8"),
            (main,),
        ),
        Part(GPU, "the GPU cluster, 128 workers", ("table2",), (replace(main, hardware="gpu-128-kuairand"),)),
        Part(NPU_MICRO_BATCHES, "micro-batch sizes, with and without clustering", ("fig9",), tuple(micro)),
        Part(NPU_SIZES, "embedding dim, dense layers, sequence length", ("fig10",), tuple(models)),
    ]


def measured_parts(options: Options) -> list[Part]:
    """Real processes on this machine."""
    paced, unpaced = _base(options, paced=True), _base(options, paced=False)
    bases = (paced, unpaced) if options.size == "full" else (paced,)
    more = {paced: TABLE1_METHODS, unpaced: ()}
    two = [
        replace(base, methods=_available(methods), clustering=clustering)
        for base in bases
        for methods, clustering in (((*TWO_METHODS, *more[base]), False), (("serial", "nestpipe"), True))
    ]
    four = [
        replace(base, methods=_available((*FOUR_METHODS, *more[base])), workers=2 * options.workers) for base in bases
    ]
    n = paced.data.batch_size
    by_count = ",".join(f"nestpipe({count})" for count in (2, 4, 8, 16, 32) if count <= n)
    micro = [replace(paced, methods=f"serial,{by_count}", clustering=clustering) for clustering in (False, True)]
    return [
        Part(
            TWO,
            f"{options.workers} ranks, every method, paced and unpaced",
            ("table1", "table2", "table3", "ladder", "fig2", "fig7", "fig8", "timeline"),
            tuple(two),
        ),
        Part(
            FOUR,
            f"{2 * options.workers} ranks",
            ("table1", "table3", "table4", "fig2", "fig7", "fig8"),
            tuple(four),
        ),
        Part(MICRO_BATCHES, "NestPipe by number of micro-batches", ("fig9",), tuple(micro)),
        Part(CONVERGENCE, "loss and accuracy over three seeds, short", ("fig6",), (_convergence(options),)),
        Part(SIZES, "embedding dim, dense layers, sequence length", ("fig10",), tuple(_models(options))),
    ]


def _convergence(options: Options) -> ConvergenceConfig:
    """Short: Fig. 6 with its default of steps and users takes an hour (`nestpipe converge`)."""
    usual = ConvergenceConfig()
    methods = _available(("torchrec", "2d-sp", "uniemb", "nestpipe"))
    twin = "torchrec~ulp," if "torchrec" in methods else ""
    if options.size == "tiny":
        few = replace(TINY.data, users=200)
        return replace(usual, methods=methods, seeds=1, steps=4, evaluations=1, data=few, model=TINY.model)
    return replace(usual, methods=twin + methods, steps=150, evaluations=2, data=replace(usual.data, users=6000))


def _base(options: Options, paced: bool) -> RunConfig:
    if options.size == "tiny":
        base = replace(TINY, pace_dense=5.0 if paced else 0.0)
    else:
        base = replace(FULL, pace_dense=PACE_MS if paced else 0.0, steps=5 * options.rounds, rounds=options.rounds)
    return replace(base, workers=options.workers, testbed=options.testbed, seed=options.seed)


def _models(options: Options) -> Iterator[RunConfig]:
    """One dimension at a time around a base, each configuration once."""
    tiny = options.size == "tiny"
    base = _base(options, paced=False)
    if not tiny:
        rounds = min(2, options.rounds)  # many configurations, so few rounds of each
        base = replace(base, data=SIZE_SWEEP.data, model=SIZE_SWEEP.model, steps=4 * rounds, rounds=rounds)
    base = replace(base, methods="serial,nestpipe", micro_batches=4)
    sweeps: dict[str, tuple[int, ...]] = {
        "embedding_dim": (8, 16) if tiny else (32, 64, 128),
        "dense_layers": (1, 2) if tiny else (1, 2, 4),
        "sequence_length": (5, 10) if tiny else (20, 40, 80),
    }
    seen = []
    for name, values in sweeps.items():
        for value in values:
            config = replace(base, model=replace(base.model, **{name: value}))  # type: ignore[arg-type]
            if config not in seen:
                seen.append(config)
                yield config


def is_tiny(config: Mapping[str, Any]) -> bool:
    """Whether the configuration of a measured record or a curve has the data of ``--size tiny``."""
    data = config.get("data", {})
    return all(data.get(name) == getattr(TINY.data, name) for name in ("data_scale", "batch_size", "negatives"))


def _available(methods: Sequence[str]) -> str:
    """Those that are installed here with the packages that they need, as text."""
    known = known_methods()
    installed = [name for name in methods if name.split("(")[0] in known]
    return ",".join(name for name in installed if not find_method(name).missing_packages())


def has_record(records: Sequence[Record], config: RunConfig, method: str) -> bool:
    """One of ``records`` is of this method under this configuration."""
    facts = (config.workers, config.seed, config.testbed, config.pace_dense > 0)
    want = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return any(
        r.method == method
        and (r.workers, r.seed, r.testbed, r.paced) == facts
        and all(want.get(name) == value for name, value in _comparable(r.config).items())
        for r in records
    )


def _comparable(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "micro_batches"}


def command(config: Planned, store: str) -> str:
    """The command line that does the same as one run of the plan, defaults left out."""
    name = {SimulateConfig: "simulate", RunConfig: "run", ConvergenceConfig: "converge"}[type(config)]
    words = [f"nestpipe {name}"]
    for option, value in _changed(config, type(config)()):
        flag = "--" + option.replace("_", "-")
        text = f"'{value}'" if isinstance(value, str) and set(value) & set("(),") else str(value)
        words.append(flag if value is True else f"{flag} {text}")
    if name == "converge":
        return " ".join([*words, f"--folder {store.split('/records/')[0]}"])
    return " ".join([*words, f"--store {store}"])


def _changed(config: Any, default: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            yield from _changed(value, usual)
        elif value != usual:
            yield field.name, value
