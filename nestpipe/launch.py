"""Run a Python function on several real rank processes, and end all of them whatever happens.

>>> with RankPool(workers=2) as pool:            # doctest: +SKIP
...     losses = pool.run(train, config)         # [result of rank 0, result of rank 1]

Each rank is a fresh interpreter in a process group of its own, joined to `torch.distributed`. If one raises, is
killed or exits, the others (which may wait for it inside a collective) are killed, and `run` raises
`RankError` with the first error on top. If the launcher ends in any way, its ranks end with it: each sees end
of file on its control socket, and a guardian process kills what does not (a rank stuck in C code).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nestpipe.rank import (
    FRAME_HEADER,
    RankConfig,
    RankPlace,
    dump,
    join_process_group,
    leave_process_group,
    send_to_launcher,
)

if TYPE_CHECKING:
    from nestpipe.testbed import Testbed

__all__ = [
    "RankError",
    "RankFailure",
    "RankPlace",
    "RankPool",
    "join_process_group",
    "leave_process_group",
    "send_to_launcher",
]

# After a first failure: how long to listen for an earlier or better explained one of another rank.
SETTLE_S = 0.4
STACK_DUMP_S = 0.5
CLOSE_GRACE_S = 8.0
SEND_TIMEOUT_S = 60.0
# What gloo and NCCL say on a rank whose peer has gone: an effect of the failure, never its cause.
CONSEQUENCE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|"
    r"Socket closed|Socket Timeout|remote process exited|NCCL communicator was aborted|"
    r"DistNetworkError|ncclRemoteError|Connection closed",
    re.IGNORECASE,
)
START_CODE = "import sys, json; sys.path[:] = json.loads(sys.argv[2]); from nestpipe.rank import main; main()"


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """How one rank failed. `when_ns` is on the clock of time.perf_counter_ns."""

    rank: int
    what: str
    details: str  # traceback or stacks, "" where there is none
    when_ns: int

    @property
    def is_consequence(self) -> bool:
        return CONSEQUENCE.search(self.what) is not None


class RankError(RuntimeError):
    """A rank failed. The message is the first failure in one line, then that rank's traceback.

    `failures` holds every failure seen, causes before consequences, each by time.
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
class _Rank:
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

    def stacks(self) -> str:
        """What faulthandler has written since the last call: stacks on a timeout or a crash."""
        text = os.pread(self.stack_fd, 1 << 20, self.stack_read)
        self.stack_read += len(text)
        return text.decode(errors="replace")

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether the process has ended, without reaping it: its id and group id stay its own."""
        return bool(select.select([self.pid_fd], [], [], within_s)[0])

    def kill(self) -> int:
        """Kill the rank and everything it started, reap it; its exit code, negative for a signal."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def death(self) -> RankFailure:
        """Explain the end of a process that has ended without a word."""
        code = self.kill()  # the code is of its own end; killed is what it may have left behind
        if code < 0:
            what = f"was killed by {signal.Signals(-code).name} (process {self.process.pid})"
            if code == -signal.SIGKILL:
                what += "; if nobody did that, the machine may have run out of memory"
        else:
            what = f"exited with code {code} in the middle of its work (process {self.process.pid})"
        return RankFailure(self.rank, what, self.stacks(), time.perf_counter_ns())


class RankPool:
    """`workers` rank processes that run one job after another. Use as a context manager.

    testbed: where the ranks live; None is this machine's loopback. A testbed that is not up yet is brought up
        for the pool and taken down with it.
    timeout_s: limit of one job in seconds (`run` may set its own), and of one collective. On a timeout
        the stacks of all ranks are in the error.
    backend: of torch.distributed, e.g. "gloo" or "cpu:gloo,cuda:nccl".

    Entering raises RankError when a rank cannot start, TestbedUnavailable when the testbed cannot.
    """

    def __init__(
        self,
        workers: int,
        testbed: Testbed | None = None,
        timeout_s: float = 1800.0,
        start_timeout_s: float = 180.0,
        backend: str = "gloo",
    ) -> None:
        if workers < 1:
            raise ValueError(f"a pool needs at least one worker, not {workers}")
        self.workers = workers
        self.testbed = testbed
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.backend = backend
        self._ranks: list[_Rank] = []
        self._failure: str | None = "it was not started: use it as a context manager"
        self._cleanup = contextlib.ExitStack()

    @property
    def broken(self) -> bool:
        """True when no further job can run (a rank failed, or the pool is closed)."""
        return self._failure is not None or any(rank.ended() for rank in self._ranks)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def __enter__(self) -> RankPool:
        try:
            self._cleanup.enter_context(_sigterm_raises())
            if self.testbed is not None and not self.testbed.is_up:
                self._cleanup.callback(self.testbed.down)
                self.testbed.up(self.testbed.hosts_for(self.workers))
            store_fd = os.memfd_create("nestpipe-store")
            self._failure = None
            try:
                for rank in range(self.workers):
                    self._ranks.append(self._start(rank, store_fd))
            finally:
                os.close(store_fd)
            self._cleanup.callback(_start_guardian(self.pids))
            self._collect("ready", self.start_timeout_s, None, "joining the process group")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        try:
            if kind is None and not self.broken:
                self._close_gracefully()
        finally:
            self._end()

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        on_message: Callable[[int, Any], None] | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; the results in rank order.

        `on_message(rank, object)` is called here for each object that a rank gives to `send_to_launcher`.
        Raises RankError when a rank fails or the time is over; the pool is broken after that.
        """
        if self._failure is not None:
            raise RankError([], f"cannot run a job, the rank pool is out of use: {self._failure}")
        job = dump((function, args, kwargs))
        try:
            for rank in self._ranks:
                rank.send("job", job)
            limit = self.timeout_s if timeout_s is None else timeout_s
            results = self._collect("result", limit, on_message, getattr(function, "__name__", "a job"))
            return [pickle.loads(result[0]) for result in results]
        except BaseException as error:  # Ctrl-C and a failing callback leave ranks in mid-job as well
            self._failure = self._failure or f"{type(error).__name__} {str(error).splitlines()[:1]}"
            self._kill_all()
            raise

    def _start(self, rank: int, store_fd: int) -> _Rank:
        ours, theirs = socket.socketpair()
        stack_fd = os.memfd_create(f"nestpipe-stacks-{rank}")
        testbed = self.testbed
        config = RankConfig(
            rank=rank,
            world_size=self.workers,
            control_fd=theirs.fileno(),
            store_fd=store_fd,
            stack_fd=stack_fd,
            backend=self.backend,
            timeout_s=self.timeout_s,
            interface=testbed.interface if testbed else "lo",
            network_namespace=testbed.namespace(testbed.host_of(rank, self.workers)) if testbed else "",
            local_rank=rank,
        )
        ours.setblocking(False)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", START_CODE, config.to_json(), json.dumps(sys.path)],
                pass_fds=(theirs.fileno(), store_fd, stack_fd),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches the launcher alone, and a rank's own children die with it
            )
        return _Rank(rank, process, ours, stack_fd, os.pidfd_open(process.pid))

    def _collect(
        self, wanted: str, limit_s: float, on_message: Callable[[int, Any], None] | None, doing: str
    ) -> list[tuple[Any, ...]]:
        """Wait until every rank has sent a `wanted` message; raise RankError on the first failure."""
        answers: dict[int, tuple[Any, ...]] = {}
        failures: dict[int, RankFailure] = {}
        settling, deadline = False, time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.control, selectors.EVENT_READ, rank)
                selector.register(rank.pid_fd, selectors.EVENT_READ, rank)
            while len(answers) < self.workers or failures:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                for rank in {id(key.data): key.data for key, _ in selector.select(left_s)}.values():
                    ended = rank.ended()
                    for kind, *body in rank.messages():
                        if kind == "message" and on_message is not None:
                            on_message(rank.rank, pickle.loads(body[0]))
                        elif kind == wanted:
                            answers[rank.rank] = tuple(body)
                        elif kind == "error":
                            when, what, details = body
                            failures.setdefault(rank.rank, RankFailure(rank.rank, what, details, when))
                    if ended:
                        failures.setdefault(rank.rank, rank.death())
                        selector.unregister(rank.control)
                        selector.unregister(rank.pid_fd)
                    if failures and not settling:
                        settling, deadline = True, time.monotonic() + SETTLE_S
                if len(failures) == self.workers:
                    break
        if not failures and len(answers) < self.workers:
            missing = [rank for rank in self._ranks if rank.rank not in answers]
            failures = {failure.rank: failure for failure in self._timeout(missing, limit_s, doing)}
        if failures:
            error = RankError(list(failures.values()))
            self._failure = str(error).splitlines()[0]
            raise error
        return [answers[rank] for rank in range(self.workers)]

    def _timeout(self, missing: list[_Rank], limit_s: float, doing: str) -> list[RankFailure]:
        for rank in missing:
            if not rank.ended():
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(STACK_DUMP_S)
        what = f"not done with {doing} after {limit_s:g} s"
        stacks = "\n".join(f"stacks of rank {rank.rank}:\n{rank.stacks()}" for rank in missing)
        now = time.perf_counter_ns()
        return [
            RankFailure(rank.rank, what, stacks if index == 0 else "", now + index)
            for index, rank in enumerate(missing)
        ]

    def _close_gracefully(self) -> None:
        for rank in self._ranks:
            rank.send("close")
        deadline = time.monotonic() + CLOSE_GRACE_S
        for rank in self._ranks:
            rank.ended(max(0.0, deadline - time.monotonic()))

    def _kill_all(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def _end(self) -> None:
        """Kill what still runs and release everything; safe to call twice."""
        self._failure = self._failure or "it is closed"
        try:
            self._kill_all()
            for rank in self._ranks:
                rank.control.close()
                os.close(rank.pid_fd)
                os.close(rank.stack_fd)
            self._ranks.clear()
        finally:
            self._cleanup.close()


def _start_guardian(pids: list[int]) -> Callable[[], None]:
    """A shell that kills the process groups `pids` once this process has ended; returns its dismissal.

    The kernel's parent-death signal is no substitute: it spares what a rank has started, and fires when the
    launching *thread* ends.
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


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the launcher like Ctrl-C does, so that `with` blocks clean up; exit code 143."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
