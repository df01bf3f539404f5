"""Joins torch.distributed, from our own launcher or from the environment of torchrun or Slurm, and leaves it."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """A rank's place: global rank, number of ranks, rank on its host."""

    rank: int
    world_size: int
    local_rank: int


def set_one_thread() -> None:
    """Set one intra-op thread, for every method: otherwise each lane thread would open an OpenMP pool."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # MKL loads parts of itself at its first use. That has failed when several threads were running.
    torch.ones(32, 32) @ torch.ones(32, 32)


def join_process_group(backend: str | None = None, timeout_s: float = 1800.0) -> RankPlace:
    """Join ``torch.distributed`` from the environment of torchrun or Slurm and set one intra-op thread.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or else SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID,
    SLURM_JOB_NODELIST and SLURM_JOB_ID. ``backend`` defaults to gloo, with NCCL for CUDA tensors if there is a GPU.
    Raises RuntimeError that names the missing variables.
    """

    def setting(*names: str) -> str:
        for name in names:
            if name in os.environ:
                return os.environ[name]
        raise RuntimeError(
            f"cannot join a process group: none of {', '.join(names)} is set. "
            "Start the ranks with torchrun or srun, or use nestpipe.ranks.pool.RankPool."
        )

    rank, world_size = int(setting("RANK", "SLURM_PROCID")), int(setting("WORLD_SIZE", "SLURM_NTASKS"))
    local_rank = int(setting("LOCAL_RANK", "SLURM_LOCALID"))
    if world_size == 1:
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    elif "MASTER_ADDR" not in os.environ and "SLURM_JOB_NODELIST" in os.environ:
        address = first_slurm_host(os.environ["SLURM_JOB_NODELIST"])
    else:
        address = setting("MASTER_ADDR")
    # Ports derived from the job id keep two jobs on one host apart.
    port = os.environ.get("MASTER_PORT") or str(20000 + int(setting("SLURM_JOB_ID")) % 20000)
    set_one_thread()
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if "nccl" in backend:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return RankPlace(rank, world_size, local_rank)


def first_slurm_host(nodelist: str) -> str:
    """First host of a Slurm node list: "n[3-5,9],m1" -> "n3". Parsed here, since compute nodes may lack scontrol."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise RuntimeError(f"SLURM_JOB_NODELIST {nodelist!r} names no host; set MASTER_ADDR")
    return "".join(part for part in match.groups() if part)


def leave_process_group() -> None:
    """Barrier, then destroy every process group: a rank that exits with live groups may abort."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def join_by_store(
    store_fd: int, rank: int, world_size: int, local_rank: int, backend: str, timeout_s: float, interface: str
) -> None:
    """Join the group of a ``RankPool`` through the file that its ranks share, and set one intra-op thread.

    The store is an unlinked file that all ranks share by descriptor: there is no port to collide
    on, nothing to reach over the network from a namespace, and nothing left behind after a crash.
    """
    set_one_thread()
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if "nccl" in backend:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"/proc/self/fd/{store_fd}", world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
