"""One rank process: joins the process group, runs the launcher's jobs, and never outlives the launcher.

A rank that ``nestpipe.ranks.pool.RankPool`` starts talks to it over one Unix socket. Frames in both directions
are an 8-byte big-endian length and a pickle. A thread reads the socket all the time, so end of file (the launcher
has ended, however it ended) ends the rank and everything it started, even in the middle of a collective.

Ranks that Slurm or torchrun start use ``nestpipe.ranks.process_group`` instead.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any

try:
    from cloudpickle import dumps
except ImportError:
    from pickle import dumps

from nestpipe.testbed.namespaces import enter_network_namespace

FRAME_HEADER = struct.Struct(">Q")

_launcher: Connection | None = None


@dataclasses.dataclass(frozen=True)
class RankConfig:
    """What the launcher tells a rank before anything is imported; it is passed as JSON in argv."""

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
    """A rank's end of the control socket; ``send`` may be called from any thread."""

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._lock = threading.Lock()

    def send(self, *message: Any) -> None:
        payload = dump(message)
        with self._lock:
            self._socket.sendall(FRAME_HEADER.pack(len(payload)) + payload)

    def receive(self) -> tuple[Any, ...] | None:
        """The next message, whose parts are still pickled; None at end of file."""
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
    """Pickle ``value``, with cloudpickle if it is installed (for functions of ``__main__`` and closures)."""
    return dumps(value, protocol=5)


def send_to_launcher(message: Any) -> None:
    """Stream ``message`` to the ``on_message`` callback of the running ``RankPool.run``.

    Does nothing in a rank that no RankPool started, so code under torchrun or Slurm may call it too.
    """
    if _launcher is not None:
        _launcher.send("message", dump(message))


def _watch_launcher(connection: Connection, jobs: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    while (message := connection.receive()) is not None:
        jobs.put(message)
        if message[0] == "close":
            return
    # The rank leads its own process group: data loader workers end with it.
    os.killpg(0, signal.SIGKILL)


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
    """Entry point of a rank process; argv[1] is a RankConfig as JSON."""
    global _launcher
    config = RankConfig.from_json(sys.argv[1])
    stack_file = os.fdopen(os.dup(config.stack_fd), "w")
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    connection = Connection(socket.socket(fileno=config.control_fd))
    jobs: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    try:
        # Before any thread exists: entering a namespace moves only one thread.
        if config.network_namespace:
            enter_network_namespace(config.network_namespace)
        threading.Thread(target=_watch_launcher, args=(connection, jobs), daemon=True, name="launcher").start()
        # torch starts threads, so it is imported only now, inside the namespace.
        from nestpipe.ranks.process_group import join_by_store, leave_process_group

        join_by_store(
            config.store_fd,
            config.rank,
            config.world_size,
            config.local_rank,
            config.backend,
            config.timeout_s,
            config.interface,
        )
    except BaseException as error:
        _report(connection, error)
        sys.exit(1)
    _launcher = connection
    connection.send("ready")
    _serve(connection, jobs)
    leave_process_group()
    sys.stdout.flush()
