"""A small grid, and ``nestpipe sweep`` in this process."""

from __future__ import annotations

from nestpipe.cli import main

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
