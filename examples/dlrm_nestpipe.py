"""DLRM, unmodified. Start this file with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from dlrm_common import CPU, criteo, dense_optimizer, dlrm, sharded, torchrec_optimizer  # noqa: F401

from nestpipe.adoption import NestPipeline
from nestpipe.ranks.process_group import join_process_group, leave_process_group
from nestpipe.trainer import SparseOptimizer

STEPS = 50
SPARSE = SparseOptimizer("rowwise_adagrad", lr=0.02, eps=1e-8)

place = join_process_group("gloo")
torch.manual_seed(1)
pipeline = NestPipeline(dlrm(), dense_optimizer, SPARSE, micro_batches=8)
batches = criteo(place.rank, place.world_size, STEPS)
for step in range(STEPS):
    result = pipeline.progress(batches)
    loss = torch.tensor(result.loss)
    dist.all_reduce(loss)
    if place.rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.4f}")
pipeline.detach()
leave_process_group()
