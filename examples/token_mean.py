"""A loss that is a mean over tokens, not over samples. Start it with python, or with torchrun for more ranks."""

import os

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nestpipe.adoption import NestPipeline, Summed
from nestpipe.ranks.process_group import join_process_group, leave_process_group
from nestpipe.trainer import SparseOptimizer

ITEMS, DIM = 50, 8


class NextItem(nn.Module):
    """Predicts each item of a sequence from the one before it. Sequences have different lengths."""

    def __init__(self):
        super().__init__()
        config = EmbeddingConfig(num_embeddings=ITEMS, embedding_dim=DIM, name="item", feature_names=["history"])
        self.items = EmbeddingCollection(tables=[config])
        self.score = nn.Linear(DIM, ITEMS)

    def forward(self, batch):
        rows = self.items(batch["history"])["history"].values()
        losses = nn.functional.cross_entropy(self.score(rows), batch["next"].values(), reduction="none")
        return Summed(losses.sum(), len(losses))  # in a loop of your own: losses.mean()


def batches(rank, steps, samples=32):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        lengths = torch.randint(1, 10, (samples,), generator=generator)
        history = torch.randint(0, ITEMS, (int(lengths.sum()),), generator=generator)
        following = (history + 1) % ITEMS
        values, lengths = torch.cat([history, following]), lengths.repeat(2)
        keyed = KeyedJaggedTensor(keys=["history", "next"], values=values, lengths=lengths)
        yield {"history": keyed, "next": keyed["next"]}


def main(rank=0, steps=60, micro_batches=4):
    """Prints the loss of some steps, and returns those of all."""
    torch.manual_seed(1)
    model = NextItem()
    pipeline = NestPipeline(
        model, lambda p: torch.optim.SGD(p, lr=1.0), SparseOptimizer("sgd", lr=1.0), micro_batches=micro_batches
    )
    source, losses = batches(rank, steps), []
    for step in range(steps):
        losses.append(pipeline.progress(source).global_loss)
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    pipeline.detach()
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(join_process_group("gloo").rank)
        leave_process_group()
    else:
        main()
