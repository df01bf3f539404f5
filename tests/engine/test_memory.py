"""The anonymous memory of a rank: the shard, its optimizer state, two buffers, and little else."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch, Jagged
from nestpipe.data.tables import TableConfig
from nestpipe.embedding.memory import Memory
from nestpipe.engine.engine import Engine
from nestpipe.schedule.templates import nestpipe
from nestpipe.trainer import ModelSpec, SparseOptimizer

ROWS, DIM = 8_000_000, 64  # 2.05 GB of float32
SAMPLES, KEYS, STEPS = 512, 50, 10
MEGABYTE = 1e6


class Mean(nn.Module):
    """Pools a sample's rows and scores them. The model is small compared with the table."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.score = nn.Linear(DIM, 1)

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch.sparse)["item"].values().view(len(batch), KEYS, DIM)
        return self.score(torch.tanh(rows.mean(1))).square().squeeze(1)


def anonymous_bytes() -> int:
    """RssAnon of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class WatchedMemory(Memory):
    """Knows how much memory of the buffers and received rows is still in use."""

    made: ClassVar[list[weakref.ref[Tensor]]] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor = super().empty(*shape, dtype=dtype)
        self.made.append(weakref.ref(tensor))
        return tensor

    def in_use(self) -> int:
        """Bytes of all tensors that still exist."""
        return sum(t.numel() * t.element_size() for ref in self.made if (t := ref()) is not None)


def batches():
    draw = torch.Generator().manual_seed(1)
    counts = torch.full((SAMPLES,), KEYS, dtype=torch.int64)
    for step in range(STEPS):
        keys = torch.randint(0, ROWS, (SAMPLES * KEYS,), generator=draw)
        yield Batch({"item": Jagged(keys, counts)}, torch.arange(SAMPLES) + SAMPLES * step, {})


def measure() -> dict[str, float]:
    """In megabytes: memory in use after imports, memory that training added, and how much of that is accounted for."""
    torch.set_num_threads(1)
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # imports much of torch
    before = anonymous_bytes()
    spec = ModelSpec((TableConfig("item", ROWS, DIM, ("item",), 0.1),), Mean)
    memory = WatchedMemory()
    engine = Engine(nestpipe(8), spec, SparseOptimizer(), lambda p: torch.optim.Adam(p), seed=1, memory=memory)
    built = anonymous_bytes()
    source = batches()
    for _ in range(STEPS):
        engine.progress(source)
    after = anonymous_bytes()

    def size(*tensors: torch.Tensor) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    state = engine.state_dict()
    values = {
        "imports": before,
        "building added": built - before,
        "all added": after - before,
        "shard": size(state["weight"]),
        "optimizer state": size(state["state"]),
        "two buffers": memory.in_use(),
    }
    engine.close()
    return {name: value / MEGABYTE for name, value in values.items()}


@pytest.mark.slow
def test_a_rank_holds_its_shard_two_buffers_and_little_else():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    megabytes = json.loads(done.stdout)
    print(megabytes)
    assert megabytes["shard"] > 2000
    accounted = megabytes["shard"] + megabytes["optimizer state"] + megabytes["two buffers"]
    assert megabytes["all added"] <= accounted + 100, megabytes


if __name__ == "__main__":
    print(json.dumps(measure()))
