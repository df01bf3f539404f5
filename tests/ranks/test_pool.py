"""Whatever ends a rank or the launcher, every rank ends soon and the first error is on top."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from nestpipe.measurement import clock
from nestpipe.ranks.pool import RankPool
from nestpipe.ranks.process import RankError
from nestpipe.ranks.process_group import first_slurm_host, join_process_group, leave_process_group
from nestpipe.ranks.rank import send_to_launcher

END_WITHIN_S = 10.0


def gone(pids: list[int], within_s: float = END_WITHIN_S) -> bool:
    """True once none of ``pids`` runs (a zombie that nobody reaps does not run)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.02)
    return False


# Jobs


def rank_sum(addend: int) -> tuple[int, float, int]:
    values = torch.full((4,), float(dist.get_rank() + addend))
    dist.all_reduce(values)
    return dist.get_rank(), values[0].item(), torch.get_num_threads()


def stream(count: int) -> None:
    for step in range(count):
        send_to_launcher((dist.get_rank(), step))


def collectives_until_killed() -> None:
    values = torch.ones(100_000)
    while True:
        dist.all_reduce(values)


def raise_on(rank: int, error: BaseException) -> None:
    if dist.get_rank() == rank:
        raise error
    dist.barrier()


def exit_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def crash() -> None:
    import ctypes

    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def start_grandchild() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def pretend_two_hosts() -> float:
    # A monotonic clock that is 5 s ahead on rank 1, as on another host.
    if dist.get_rank() == 1:
        clock.boot_id = lambda: "another host"
        original = time.perf_counter_ns
        time.perf_counter_ns = lambda: original() + 5_000_000_000
    return clock.clock_offset()


# Jobs that run


def test_results_come_in_rank_order(pool2):
    assert pool2.run(rank_sum, 10) == [(0, 21.0, 1), (1, 21.0, 1)]


def test_four_ranks_and_a_pool_next_to_another(pool2, pool4):
    assert [result[:2] for result in pool4.run(rank_sum, 0)] == [(rank, 6.0) for rank in range(4)]
    assert pool2.run(rank_sum, 0)[1] == (1, 1.0, 1)


def test_messages_stream_during_a_job(pool2):
    messages = []
    pool2.run(stream, 50, on_message=lambda rank, message: messages.append((rank, message)))
    for rank in range(2):
        assert [message for sender, message in messages if sender == rank] == [(rank, n) for n in range(50)]


def test_clock_offset_is_zero_on_one_host(pool2):
    assert pool2.run(clock.clock_offset) == [0.0, 0.0]


def test_clock_offset_between_hosts(pool2):
    with RankPool(2) as pool:  # its own pool: the job replaces the ranks' clock
        first, second = pool.run(pretend_two_hosts)
    assert first == 0.0
    assert second == pytest.approx(-5.0, abs=0.02)


def test_close_ends_ranks_and_their_children():
    with RankPool(2) as pool:
        pids = pool.pids + pool.run(start_grandchild)
        assert not pool.broken
    assert gone(pids, 2.0)
    assert pool.broken
    with pytest.raises(RankError, match="it is closed"):
        pool.run(rank_sum, 0)


def test_join_from_environment():
    """Ranks that torchrun starts."""
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
         "--rdzv-endpoint=127.0.0.1:0", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == ["joined-0-of-2", "joined-1-of-2"]


def test_join_without_environment_says_what_is_missing(monkeypatch):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="none of RANK, SLURM_PROCID is set"):
        join_process_group()


@pytest.mark.parametrize(
    ("nodelist", "host"), [("n1", "n1"), ("n[3-5,9],m1", "n3"), ("gpu-a[01-04]-ib,x", "gpu-a01-ib"), ("a,b", "a")]
)
def test_first_slurm_host(nodelist, host):
    assert first_slurm_host(nodelist) == host


# Ranks that fail


@pytest.mark.parametrize(
    ("job", "args", "first_line"),
    [
        (raise_on, (1, ValueError("table 3\nhas no rows")), "rank 1: ValueError: table 3"),
        (raise_on, (0, SystemExit(3)), r"rank 0: called sys.exit\(3\) inside a job"),
        (exit_on, (1, 7), "rank 1: exited with code 7 in the middle of its work"),
        (crash, (), "rank 1: was killed by SIGSEGV"),
    ],
)
def test_first_error_is_on_top(pool2, job, args, first_line):
    pool, pids, begin = pool2.pool, pool2.pool.pids, time.monotonic()
    with pytest.raises(RankError, match=f"^{first_line}") as caught:
        pool.run(job, *args)
    assert time.monotonic() - begin < END_WITHIN_S
    assert gone(pids, 1.0)
    assert pool.broken
    if job is not exit_on:
        assert f"in {job.__name__}" in str(caught.value)  # the traceback, or the stack at the crash
    with pytest.raises(RankError, match="out of use: rank"):
        pool.run(rank_sum, 0)


@pytest.mark.parametrize("seed", range(3))
def test_rank_killed_inside_a_collective(pool2, seed):
    chance = random.Random(seed)
    pool, victim = pool2.pool, chance.randrange(2)
    pids = pool.pids
    timer = threading.Timer(chance.uniform(0.0, 0.4), os.kill, (pids[victim], signal.SIGKILL))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(collectives_until_killed)
    assert str(caught.value).startswith(f"rank {victim}: was killed by SIGKILL")
    assert time.monotonic() - begin < END_WITHIN_S
    assert gone(pids, 1.0)


def test_rank_killed_between_jobs(pool2):
    pool = pool2.pool
    pool.run(rank_sum, 0)
    os.kill(pool.pids[0], signal.SIGKILL)
    deadline = time.monotonic() + END_WITHIN_S
    while not pool.broken and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RankError, match=r"^rank 0: was killed by SIGKILL"):
        pool.run(rank_sum, 0)


@pytest.mark.parametrize("seed", range(2))
def test_rank_killed_at_start(seed):
    chance = random.Random(seed)
    pool, killed = RankPool(2), []

    def kill_one_soon() -> None:
        while len(pool.pids) < 2:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.8))
        killed.extend(pool.pids)
        os.kill(killed[1], signal.SIGKILL)

    threading.Thread(target=kill_one_soon).start()
    with pytest.raises(RankError, match=r"^rank 1: was killed by SIGKILL"), pool:
        pool.run(collectives_until_killed)  # if it was killed late
    assert gone(killed, 1.0)


def test_timeout_shows_the_stacks(pool2):
    pool, pids = pool2.pool, pool2.pool.pids
    with pytest.raises(RankError, match=r"^rank 0: not done with hang after 2 s") as caught:
        pool.run(hang, timeout_s=2.0)
    assert "stacks of rank 1" in str(caught.value) and "in hang" in str(caught.value)
    assert gone(pids, 1.0)


# Launchers that end

LAUNCHER = """
import os, sys, time
from nestpipe.ranks import RankPool
from test_pool import collectives_until_killed, stream, start_grandchild
with RankPool(2) as pool:
    print(*pool.pids, *pool.run(start_grandchild), flush=True)
    if sys.argv[1] == "SIGPIPE":
        while True:
            pool.run(stream, 10, on_message=lambda *message: print(message, flush=True))
    pool.run(collectives_until_killed)
"""


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", -signal.SIGINT), ("SIGTERM", 143), ("SIGKILL", -9), ("SIGPIPE", 1)]
)
def test_ranks_end_with_the_launcher(name, code):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    assert len(pids) == 4
    time.sleep(0.3)
    if name == "SIGPIPE":
        launcher.stdout.close()
    else:
        launcher.send_signal(getattr(signal, name))
    assert gone(pids)
    assert launcher.wait(END_WITHIN_S) == code


if __name__ == "__main__":  # as a rank of torchrun
    place = join_process_group()
    leave_process_group()
    print(f"joined-{place.rank}-of-{place.world_size}\n", end="", flush=True)
