"""One rank process: joins the process group, serves the launcher's jobs, never outlives the launcher.

A rank that `nestpipe.ranks.pool.RankPool` starts talks to it over one Unix socket. Frames both ways are an
8-byte big-endian length and a pickle. A thread reads the socket all the time, so end of file (the launcher
died, however it died) ends the rank and everything the rank started, also in the middle of a collective.

Ranks that Slurm or torchrun start call `join_process_group` and `leave_process_group` instead.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import faulthandler
import json
import os
import pickle
import queue
import re
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any

CLONE_NEWNET = 0x40000000
FRAME_HEADER = struct.Struct(">Q")

_launcher: Connection | None = None


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """Where a rank stands: global rank, number of ranks, rank on its host."""

    rank: int
    world_size: int
    local_rank: int


@dataclasses.dataclass(frozen=True)
class RankConfig:
    """What the launcher tells a rank before anything is imported; travels as JSON in argv."""

    rank: int
    world_size: int
    control_fd: int
    store_fd: int
    stack_fd: int
    backend: str
    timeout_s: float
    interface: str
    network_namespace: str  # path of a namespace to enter, "" for the launcher's own
    local_rank: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankConfig:
        return cls(**json.loads(text))


class Connection:
    """A rank's end of the control socket; `send` may be called from any thread."""

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        payload = dump(message)
        with self._lock:
            self._socket.sendall(FRAME_HEADER.pack(len(payload)) + payload)

    def receive(self) -> tuple[Any, ...] | None:
        """Next message, still holding pickled parts; None at end of file."""
        header = self._read(FRAME_HEADER.size)
        if header is None:
            return None
        payload = self._read(FRAME_HEADER.unpack(header)[0])
        return None if payload is None else pickle.loads(payload)

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(size - len(parts), 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


def dump(value: Any) -> bytes:
    """Pickle `value`, by cloudpickle where it is installed (functions of `__main__`, closures)."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value, protocol=5)
    return cloudpickle.dumps(value, protocol=5)


def send_to_launcher(message: Any) -> None:
    """Stream `message` to the `on_message` callback of the running `RankPool.run`.

    Does nothing in a rank that no RankPool started, so code under torchrun or Slurm may call it too.
    """
    if _launcher is not None:
        _launcher.send("message", dump(message))


def set_one_thread() -> None:
    """One intra-op thread, for every method alike: lane threads would each open an OpenMP pool."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    # MKL loads parts of itself at its first use, and was seen to fail when that came amid several threads.
    torch.ones(32, 32) @ torch.ones(32, 32)


def join_process_group(backend: str | None = None, timeout_s: float = 1800.0) -> RankPlace:
    """Join `torch.distributed` from the environment of torchrun or Slurm and set one intra-op thread.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID,
    SLURM_JOB_NODELIST and SLURM_JOB_ID in their place. `backend` defaults to gloo, with NCCL for CUDA tensors where
    there is one. Raises RuntimeError that names the missing variables.
    """
    import torch
    import torch.distributed as dist

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
    """First host of a Slurm node list: "n[3-5,9],m1" -> "n3". Written out, as compute nodes may lack scontrol."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise RuntimeError(f"SLURM_JOB_NODELIST {nodelist!r} names no host; set MASTER_ADDR")
    return "".join(part for part in match.groups() if part)


def leave_process_group() -> None:
    """Barrier, then destroy every process group: a rank that exits with live groups may abort."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def enter_network_namespace(path: str) -> None:
    """Move the calling thread, and threads it starts later, into the network namespace at `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter network namespace {path}: {os.strerror(code)}")
    finally:
        os.close(descriptor)


def _watch_launcher(connection: Connection, jobs: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    while (message := connection.receive()) is not None:
        jobs.put(message)
        if message[0] == "close":
            return
    # The rank leads a process group of its own: data loader workers go with it.
    os.killpg(0, signal.SIGKILL)


def _init_process_group(config: RankConfig) -> None:
    import torch
    import torch.distributed as dist

    if config.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = config.interface
    if "nccl" in config.backend:
        torch.cuda.set_device(config.local_rank % torch.cuda.device_count())
    # The store is an unlinked file that all ranks share by descriptor: no port to collide on, nothing to
    # reach over the network from a namespace, nothing left behind after a crash.
    store = dist.FileStore(f"/proc/self/fd/{config.store_fd}", config.world_size)
    dist.init_process_group(
        config.backend,
        store=store,
        rank=config.rank,
        world_size=config.world_size,
        timeout=datetime.timedelta(seconds=config.timeout_s),
    )


def _first_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}) inside a job"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _report(connection: Connection, error: BaseException) -> None:
    when = time.perf_counter_ns()
    text = "".join(traceback.format_exception(error))
    connection.send("error", when, _first_line(error), text)


def _serve(connection: Connection, jobs: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    while True:
        kind, *body = jobs.get()
        if kind == "close":
            return
        try:
            function, args, kwargs = pickle.loads(body[0])
            result = dump(function(*args, **kwargs))
        except BaseException as error:  # SystemExit and KeyboardInterrupt end a job too
            _report(connection, error)
            continue
        connection.send("result", result)


def main() -> None:
    """Entry of a rank process; argv[1] is a RankConfig as JSON."""
    global _launcher
    config = RankConfig.from_json(sys.argv[1])
    stack_file = os.fdopen(os.dup(config.stack_fd), "w")
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    connection = Connection(socket.socket(fileno=config.control_fd))
    jobs: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    try:
        # Before any thread exists: entering a namespace moves one thread only.
        if config.network_namespace:
            enter_network_namespace(config.network_namespace)
        threading.Thread(target=_watch_launcher, args=(connection, jobs), daemon=True, name="launcher").start()
        set_one_thread()
        _init_process_group(config)
    except BaseException as error:
        _report(connection, error)
        sys.exit(1)
    _launcher = connection
    connection.send("ready")
    _serve(connection, jobs)
    leave_process_group()
    sys.stdout.flush()
