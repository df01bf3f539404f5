"""The launcher's side of one rank process: its messages, how it failed, and how it is ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from nestpipe.ranks.rank import FRAME_HEADER, dump

SEND_TIMEOUT_S = 60.0
# Errors of gloo and NCCL on a rank whose peer is gone: an effect of the failure, never its cause.
CONSEQUENCE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|"
    r"Socket closed|Socket Timeout|remote process exited|NCCL communicator was aborted|"
    r"DistNetworkError|ncclRemoteError|Connection closed",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """How one rank failed. ``when_ns`` is on the clock of time.perf_counter_ns."""

    rank: int
    what: str
    details: str  # traceback or stacks, or ""
    when_ns: int

    @property
    def is_consequence(self) -> bool:
        return CONSEQUENCE.search(self.what) is not None


class RankError(RuntimeError):
    """A rank failed. The message is the first failure in one line, then that rank's traceback.

    ``failures`` holds every failure seen, causes before consequences, both in order of time.
    """

    def __init__(self, failures: list[RankFailure], headline: str = "") -> None:
        self.failures = sorted(failures, key=lambda failure: (failure.is_consequence, failure.when_ns))
        if not failures:
            super().__init__(headline)
            return
        first, *rest = self.failures
        lines = [f"rank {first.rank}: {first.what}"]
        if first.details:
            lines += ["", first.details.rstrip()]
        if rest:
            lines += ["", "after that:", *(f"  rank {failure.rank}: {failure.what}" for failure in rest)]
        super().__init__("\n".join(lines))


@dataclasses.dataclass
class RankProcess:
    """The launcher's side of one rank process."""

    rank: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    stack_fd: int
    pid_fd: int
    received: bytearray = dataclasses.field(default_factory=bytearray)
    stack_read: int = 0

    def send(self, *message: Any) -> None:
        payload = dump(message)
        # A rank that has died is found and explained by the event loop, not here.
        with contextlib.suppress(OSError):
            self.control.settimeout(SEND_TIMEOUT_S)  # a stopped rank does not read
            self.control.sendall(FRAME_HEADER.pack(len(payload)) + payload)
        self.control.setblocking(False)

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """Messages that have arrived so far; does not block."""
        while True:
            try:
                part = self.control.recv(1 << 20)
            except OSError:
                break
            if not part:
                break
            self.received += part
        while len(self.received) >= FRAME_HEADER.size:
            end = FRAME_HEADER.size + FRAME_HEADER.unpack_from(self.received)[0]
            if len(self.received) < end:
                return
            payload = bytes(self.received[FRAME_HEADER.size : end])
            del self.received[:end]
            yield pickle.loads(payload)

    def has_stacks(self) -> bool:
        return self.ended() or os.fstat(self.stack_fd).st_size > self.stack_read

    def stacks(self) -> str:
        """What faulthandler has written since the last call: stacks on a timeout or a crash."""
        text = os.pread(self.stack_fd, 1 << 20, self.stack_read)
        self.stack_read += len(text)
        return text.decode(errors="replace")

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether the process has ended, without reaping it: its id and group id stay its own."""
        return bool(select.select([self.pid_fd], [], [], within_s)[0])

    def kill(self) -> int:
        """Kill the rank and everything it started, and reap it. Returns its exit code, negative for a signal."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def death(self) -> RankFailure:
        """Explain the end of a process that has ended without a message."""
        code = self.kill()  # the code is that of the rank itself; only processes that it left behind are killed
        if code < 0:
            what = f"was killed by {signal.Signals(-code).name} (process {self.process.pid})"
            if code == -signal.SIGKILL:
                what += "; if nobody did that, the machine may have run out of memory"
        else:
            what = f"exited with code {code} in the middle of its work (process {self.process.pid})"
        return RankFailure(self.rank, what, self.stacks(), time.perf_counter_ns())


def start_guardian(pids: list[int]) -> Callable[[], None]:
    """Start a shell that kills the process groups ``pids`` once this process has ended. Returns its dismissal.

    The kernel's parent-death signal is not a substitute: it does not reach what a rank has started, and it fires when
    the launching *thread* ends.
    """
    groups = " ".join(f"-{pid}" for pid in pids)
    guardian = subprocess.Popen(
        ["/bin/sh", "-c", f"read -r _ || true; kill -9 {groups} 2>/dev/null"],
        stdin=subprocess.PIPE,
        process_group=0,
    )

    def dismiss() -> None:
        guardian.kill()
        guardian.wait()
        if guardian.stdin is not None:
            guardian.stdin.close()

    return dismiss
