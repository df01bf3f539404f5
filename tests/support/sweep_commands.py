"""A small grid, ``nestpipe sweep`` in this process, and results that no run has made."""

from __future__ import annotations

from nestpipe.cli import main
from nestpipe.measurement.record import METRICS, Record
from tests.support.fake_slurm import FakeSlurm

GRID = """\
[base]
batch_size = 8
negatives = 4
sequence_length = 8
dense_layers = 1
width = 8
data_scale = 0.0001
steps = 2
micro_batch = 4

[[sweep]]
method = ["serial", "nestpipe"]
workers = [2, 4]
embedding_dim = [8, 16]

[cluster]
tasks_per_node = 2
parallelism = 2
partition = "debug"
"""


def nestpipe(capsys, *words: str) -> tuple[int, str, str]:
    status = main(["sweep", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def submit(capsys, *words: str) -> str:
    status, out, err = nestpipe(capsys, "submit", "grid.toml", "--executor", "slurm", *words)
    assert status == 0, err
    return out


def record(seed: int = 1) -> Record:
    metrics = {name: [1.0, 2.0] for name in METRICS}
    config = {"steps": 2, "micro_batches": 8, "data": {}, "model": {}}
    return Record("measured", "nestpipe", "NestPipe", 2, seed, config, [4, 5], metrics, [3.0] * 6)


def finish(slurm: FakeSlurm, folder, seed: int) -> None:
    folder.write_result(record(seed))
    slurm.set(folder.submission["job"], "")
