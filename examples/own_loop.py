"""NestPipe in your own training loop: in one process, or ``torchrun --nproc-per-node 2 examples/own_loop.py``."""

import os

import torch

from nestpipe.data import Batch, Jagged
from nestpipe.engine import Engine
from nestpipe.ranks.process_group import join_process_group, leave_process_group
from nestpipe.schedule import nestpipe
from nestpipe.trainer import ModelSpec, SparseOptimizer, TableConfig


class Clicks(torch.nn.Module):
    """Predicts whether a user clicks on an item. The trainer injects the embedding module.

    ``forward`` returns one loss per sample.
    """

    def __init__(self, embeddings: torch.nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        torch.manual_seed(0)  # the same dense weights on every rank
        self.score = torch.nn.Linear(16, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = self.embeddings(batch.sparse)
        scores = self.score(rows["user"].values() * rows["item"].values()).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, batch.extra["clicked"], reduction="none")


def batches(rank: int, count: int = 50, samples: int = 256):
    """Made-up clicks: users with even numbers like items with even numbers, and odd users like odd items."""
    draw = torch.Generator().manual_seed(rank)
    one_each = torch.ones(samples, dtype=torch.int64)
    for step in range(count):
        user, item = (torch.randint(0, 1000, (samples,), generator=draw) for _ in range(2))
        clicked = (user % 2 == item % 2).float()
        ids = torch.arange(samples) + samples * step
        yield Batch({"user": Jagged(user, one_each), "item": Jagged(item, one_each)}, ids, {"clicked": clicked})


def main() -> None:
    rank = join_process_group().rank if "RANK" in os.environ else 0
    tables = tuple(TableConfig(name, rows=1000, dim=16, features=(name,), scale=0.1) for name in ("user", "item"))
    trainer = Engine(
        nestpipe(micro_batches=4),
        ModelSpec(tables, build=Clicks),
        SparseOptimizer("rowwise_adagrad", lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        seed=1,
    )
    source = batches(rank)
    try:
        while True:
            result = trainer.progress(source)  # StopIteration once every rank's data has ended
            if rank == 0 and result.step % 10 == 0:
                print(f"step {result.step}: loss {result.loss:.4f} (this rank's share), {result.samples} samples")
    except StopIteration:
        print(f"rank {rank}: user table {tuple(trainer.table('user').shape)} after {result.step + 1} steps")
    finally:
        trainer.close()
    leave_process_group()


if __name__ == "__main__":
    main()
