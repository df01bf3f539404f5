"""Measures nestpipe/simulator/workloads/kuairand27k.json again: ``python docs/make_key_statistics.py [FILE]``.

It routes the synthetic data at KuaiRand-27K's full size with the router that training uses. This takes some minutes
and 3 GB of memory. Without FILE it replaces the shipped statistics.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.simulator.calibrate.key_sampling import measure_keys

SHIPPED = Path(__file__).parents[1] / "nestpipe" / "simulator" / "workloads" / "kuairand27k.json"
DATA = DataConfig(data_scale=1.0, batch_size=512, negatives=64)
MODEL = ModelConfig(sequence_length=1024)


def main(path: Path) -> None:
    path.write_text(json.dumps(asdict(measure_keys(DATA, MODEL, seed=1)), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
