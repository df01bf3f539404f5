"""Run a Python function on several real rank processes, and end all of them whatever happens.

>>> with RankPool(workers=2) as pool:            # doctest: +SKIP
...     losses = pool.run(train, config)         # [result of rank 0, result of rank 1]

Each rank is a fresh interpreter in its own process group, joined to ``torch.distributed``. If one raises, is
killed or exits, the others (which may wait for it inside a collective) are killed, and ``run`` raises
``RankError`` with the first error on top. If the launcher ends in any way, its ranks end too: each sees end
of file on its control socket, and a guardian process kills those that do not (a rank stuck in C code).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nestpipe.ranks.process import RankError, RankFailure, RankProcess, start_guardian
from nestpipe.ranks.rank import RankConfig, dump
from nestpipe.ranks.sigterm import sigterm_unwinds

if TYPE_CHECKING:
    from nestpipe.testbed.testbed import Testbed


# How long to wait after the first failure for an earlier or better explained one from another rank.
SETTLE_S = 0.4
STACK_DUMP_S = 0.3
STACK_LIMIT_S = 3.0
CLOSE_GRACE_S = 8.0
START_CODE = "import sys, json; sys.path[:] = json.loads(sys.argv[2]); from nestpipe.ranks.rank import main; main()"


class RankPool:
    """``workers`` rank processes that run one job after another. Use it as a context manager.

    testbed: the hosts of the ranks; None is this machine's loopback. A testbed that is not up yet is brought up
        for the pool and taken down with it.
    timeout_s: limit in seconds for one job (``run`` may set another) and for one collective. After a timeout
        the error has the stacks of all ranks that have not finished.
    backend: the backend of torch.distributed, e.g. "gloo" or "cpu:gloo,cuda:nccl".

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
        self._ranks: list[RankProcess] = []
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
            self._cleanup.enter_context(sigterm_unwinds())
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
            self._cleanup.callback(start_guardian(self.pids))
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
        """Call ``function(*args, **kwargs)`` on every rank. Returns the results in rank order.

        ``on_message(rank, object)`` is called here for each object that a rank passes to ``send_to_launcher``.
        Raises RankError if a rank fails or the time limit is over; the pool is broken after that.
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
        except BaseException as error:  # Ctrl-C and a failing callback leave ranks in the middle of a job too
            self._failure = self._failure or f"{type(error).__name__} {str(error).splitlines()[:1]}"
            self._kill_all()
            raise

    def _start(self, rank: int, store_fd: int) -> RankProcess:
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
                process_group=0,  # Ctrl-C reaches only the launcher, and a rank's own children die with it
            )
        return RankProcess(rank, process, ours, stack_fd, os.pidfd_open(process.pid))

    def _collect(
        self, wanted: str, limit_s: float, on_message: Callable[[int, Any], None] | None, doing: str
    ) -> list[tuple[Any, ...]]:
        """Wait until every rank has sent a ``wanted`` message; raise RankError on the first failure."""
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

    def _timeout(self, missing: list[RankProcess], limit_s: float, doing: str) -> list[RankFailure]:
        for rank in missing:
            if not rank.ended():
                os.kill(rank.process.pid, signal.SIGUSR1)
        asked = time.monotonic()
        while not all(rank.has_stacks() for rank in missing) and time.monotonic() < asked + STACK_LIMIT_S:
            time.sleep(0.02)
        time.sleep(STACK_DUMP_S)  # time to write the stacks
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
