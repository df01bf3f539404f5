"""Testbeds: their text form, the rate and delay of their links, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from nestpipe.ranks.pool import RankPool
from nestpipe.testbed import switch as switch_module
from nestpipe.testbed.testbed import (
    TestbedUnavailable,
    parse_delay,
    parse_rate,
    parse_testbed,
    running_switches,
    testbed_down,
    testbed_status,
    testbed_up,
)

for function in (testbed_up, testbed_down, testbed_status):
    function.__test__ = False  # type: ignore[attr-defined]

RATE_BIT_S = 200e6
DELAY_S = 1e-3
BYTES = 4_000_000


def owned_by(pid: int) -> list[int]:
    return [switch["pid"] for switch in running_switches() if switch["owner"] == str(pid)]


def until(condition, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def all_to_all_seconds(repeats: int) -> list[float]:
    sent, received = torch.ones(BYTES // 4), torch.empty(BYTES // 4)
    dist.all_to_all_single(received, sent)
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_to_all_single(received, sent)
        seconds.append(time.perf_counter() - begin)
    return seconds


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def round_trip_s(enter: list[str], address: str) -> float:
    """Shortest time of a refused TCP connection to ``address``: one round trip, no program at the far end."""
    code = (
        "import socket, sys, time\n"
        "for _ in range(6):\n"
        "    begin = time.perf_counter()\n"
        "    assert socket.socket().connect_ex((sys.argv[1], 9)) == 111\n"
        "    print(time.perf_counter() - begin)"
    )
    command = [*enter, sys.executable, "-c", code, address]
    return min(map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))


@pytest.mark.parametrize("text", ["loopback", "netns:200mbit,1ms", "netns:1gbit,250us,hosts=2", "netns:none,0ms"])
def test_text_form_survives(text):
    assert str(parse_testbed(text)) == text


def test_units():
    assert (parse_rate("1.5gbit"), parse_rate("none"), parse_rate("64kbit")) == (1.5e9, 0.0, 64e3)
    assert (parse_delay("250us"), parse_delay("0"), parse_delay("2s")) == (pytest.approx(250e-6), 0.0, 2.0)


@pytest.mark.parametrize(
    "text", ["", "netns", "netns:", "netns:fast", "netns:200mbit,1", "netns:0mbit,1ms", "netns:1gbit,1ms,2ms",
             "netns:1gbit,hosts=0"]
)  # fmt: skip
def test_bad_text_is_explained(text):
    with pytest.raises(ValueError, match=r"e\.g\. |at most one|rate '"):
        parse_testbed(text)


def test_ranks_fill_hosts_in_blocks():
    testbed = parse_testbed("netns:1gbit,hosts=2")
    assert [testbed.host_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert testbed.hosts_for(1) == 1


def test_without_root_one_line_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TestbedUnavailable, match=r"needs root.*--testbed loopback") as caught:
        parse_testbed("netns:200mbit,1ms").up(2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("tool", "package"), [("ip", "iproute2"), ("gcc", "gcc libc6-dev")])
def test_missing_tools_name_their_package(monkeypatch, tmp_path, tool, package):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lacking = {tool, "cc", "clang"}
    monkeypatch.setattr(switch_module.shutil, "which", lambda name: None if name in lacking else f"/bin/{name}")
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    with pytest.raises(TestbedUnavailable, match=f"apt install {package}"):
        parse_testbed("netns:200mbit,1ms").up(2)


def test_a_home_that_cannot_be_written_is_one_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr(switch_module.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    with pytest.raises(
        TestbedUnavailable, match=r"/proc/none/nestpipe cannot be written .*XDG_CACHE_HOME, or use --testbed"
    ):
        parse_testbed("netns:200mbit,1ms").up(2)


def test_pool_on_loopback_testbed_has_no_namespace():
    testbed = parse_testbed("loopback")
    assert testbed.is_up and testbed.namespace(0) == ""


@pytest.mark.root
def test_links_have_the_rate_and_delay_asked_for():
    with RankPool(2, testbed=parse_testbed("netns:200mbit,1ms"), timeout_s=120) as pool:
        [switch] = owned_by(os.getpid())
        assert pool.run(interfaces) == [["eth0", "lo"]] * 2
        enter = ["nsenter", f"--net={pool.testbed.namespace(0)}"]
        measured_s = round_trip_s(enter, pool.testbed.address(1))
        seconds = sorted(max(pair) for pair in zip(*pool.run(all_to_all_seconds, 5), strict=True))
    assert until(lambda: not owned_by(os.getpid()))
    assert not os.path.exists(f"/proc/{switch}")
    assert measured_s >= 2 * DELAY_S
    print(f"round trip {measured_s * 1e3:.2f} ms, all-to-all {[round(s * 1e3) for s in seconds]} ms")
    # half of the bytes cross the link in each direction; headers and latency come on top
    ideal_s = BYTES / 2 * 8 / RATE_BIT_S + DELAY_S
    # Never faster than the link. How much slower depends on the machine's load: only a loose bound on the best holds.
    assert 0.9 * ideal_s < seconds[0] < 10 * ideal_s, f"{seconds}, ideal {ideal_s}"


@pytest.mark.root
def test_two_testbeds_exist_side_by_side():
    with parse_testbed("netns:1gbit,hosts=2") as first, parse_testbed("netns:none,2ms,hosts=3") as second:
        assert len(owned_by(os.getpid())) == 2
        for testbed in (first, second):
            enter = ["nsenter", f"--net={testbed.namespace(0)}"]
            assert round_trip_s(enter, testbed.address(1)) >= 2 * testbed.delay_s
    assert until(lambda: not owned_by(os.getpid()))


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_testbed_ends_with_its_owner(number):
    code = (
        "import time\nfrom nestpipe.testbed.testbed import parse_testbed\n"
        "with parse_testbed('netns:200mbit,1ms'):\n    print('up', flush=True)\n    time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert owner.stdout is not None and owner.stdout.readline() == "up\n"
    assert len(owned_by(owner.pid)) == 1
    owner.send_signal(number)
    owner.wait(10)
    assert until(lambda: not owned_by(owner.pid))


@pytest.mark.root
def test_persistent_testbed():
    if any(switch["owner"] == "persistent" for switch in running_switches()):
        pytest.skip("a persistent testbed of somebody else is up")
    try:
        assert "netns:200mbit,1ms: 2 hosts, persistent" in testbed_up(2, "200mbit", "1ms")
        with pytest.raises(TestbedUnavailable, match="up already"):
            testbed_up(2)
        enter = re.search(r"host 0 \(10.77.0.1\): (nsenter \S+) COMMAND", testbed_status())[1].split()
        assert round_trip_s(enter, "10.77.0.2") >= 2e-3
    finally:
        assert testbed_down() == "removed 1 testbed"
    assert testbed_down() == "no testbed was up"
