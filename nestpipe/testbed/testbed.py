"""Several hosts on one machine: network namespaces with shaped links, so that communication takes real time.

A testbed is written as text: "loopback" or "netns:200mbit,1ms" (rate of each host's full-duplex link and one-way
delay between hosts). The second needs Linux, root, iproute2 and a C compiler. Each host is a network namespace
with the interface eth0 and the address 10.77.0.(host + 1); a bridge connects the hosts. tc's htb sets the rate.
``switch.c`` makes the delay, since not every kernel has netem. Its process holds the (nameless) namespaces and ends
with its owner. So the kernel removes a testbed however its owner ended, and any number may exist at the same time.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import time
import types

from nestpipe.testbed.namespaces import enter_network_namespace
from nestpipe.testbed.switch import (
    FALL_BACK,
    GSO_BYTES,
    SWITCH,
    TestbedUnavailable,
    host_paths,
    require_switch,
    run_batch,
    running_switches,
    shape_lines,
)

__all__ = [
    "Testbed",
    "TestbedUnavailable",
    "parse_delay",
    "parse_rate",
    "parse_testbed",
    "running_switches",
    "testbed_down",
    "testbed_status",
    "testbed_up",
]

SUBNET = "10.77.0"
MAX_HOSTS = 250
RATE_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
MIN_RATE, MAX_RATE = 1e3, 1e12
MAX_DELAY_S = 10.0
DELAY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclasses.dataclass
class Testbed:
    """A testbed. ``up`` creates it and ``down`` removes it; as a context manager it exists for the length of the block.

    rate_bit_s: rate of each host's link in each direction, bit/s; 0 for no limit. delay_s: one-way delay
    between two hosts, seconds. hosts: number of hosts, 0 for one per worker. If there are more workers than hosts,
    the workers share the hosts in blocks of equal size.
    """

    __test__ = False  # pytest would look for tests in it because of its name

    kind: str = "loopback"
    rate_bit_s: float = 0.0
    delay_s: float = 0.0
    hosts: int = 0
    _switch: subprocess.Popen[str] | None = dataclasses.field(default=None, repr=False)
    _namespaces: tuple[int, ...] = dataclasses.field(default=(), repr=False)

    @property
    def is_up(self) -> bool:
        return self.kind == "loopback" or (self._switch is not None and self._switch.poll() is None)

    @property
    def interface(self) -> str:
        """Name of the network interface that ranks use."""
        return "lo" if self.kind == "loopback" else "eth0"

    def hosts_for(self, workers: int) -> int:
        """How many hosts a run of ``workers`` ranks needs."""
        return min(self.hosts, workers) if self.hosts else workers

    def host_of(self, rank: int, workers: int) -> int:
        """The host of ``rank`` out of ``workers`` ranks: neighbouring ranks share a host, as in Slurm."""
        return rank * self.hosts_for(workers) // workers

    def __str__(self) -> str:
        if self.kind == "loopback":
            return "loopback"
        hosts = f",hosts={self.hosts}" if self.hosts else ""
        return f"netns:{_rate_text(self.rate_bit_s)},{_delay_text(self.delay_s)}{hosts}"

    def up(self, hosts: int) -> None:
        """Create ``hosts`` hosts. Raises TestbedUnavailable."""
        if self.kind != "loopback":
            self._make(hosts, owned=True)

    def down(self) -> None:
        """Remove the testbed. Does nothing if it is not up."""
        if self._switch is None:
            return
        if self._switch.stdin is not None:
            self._switch.stdin.close()
        try:
            self._switch.wait(2.0)
        except subprocess.TimeoutExpired:
            self._switch.kill()
            self._switch.wait()
        if self._switch.stdout is not None:
            self._switch.stdout.close()
        self._switch, self._namespaces = None, ()

    def namespace(self, host: int) -> str:
        """Path of the network namespace of ``host``, "" on loopback; valid for processes of this machine."""
        if self._switch is None:
            return ""
        return f"/proc/{self._switch.pid}/fd/{self._namespaces[host + 1]}"

    def enter(self, host: int) -> None:
        """Move the calling thread, and what it starts later, to ``host``. For processes that no RankPool starts."""
        if self.kind != "loopback":
            enter_network_namespace(self.namespace(host))

    def address(self, host: int) -> str:
        """IPv4 address of ``host``."""
        return "127.0.0.1" if self.kind == "loopback" else f"{SUBNET}.{host + 1}"

    def status(self) -> str:
        """One line for people."""
        if self.kind == "loopback":
            return "loopback: all ranks on this machine, links not shaped"
        if not self.is_up:
            return f"{self}: not up"
        return f"{self}: {len(self._namespaces) - 1} hosts up (process {self._switch.pid if self._switch else 0})"

    def __enter__(self) -> Testbed:
        if not self.is_up:
            self.up(self.hosts or 2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.down()

    def _make(self, hosts: int, owned: bool) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"a testbed has 1 to {MAX_HOSTS} hosts, not {hosts}")
        program = require_switch(self.delay_s)
        delay_us = round(self.delay_s * 1e6)
        owner = str(os.getpid()) if owned else "persistent"
        description = [str(hosts), str(delay_us), str(int(owned)), _rate_text(self.rate_bit_s), owner]
        self._switch = subprocess.Popen(
            [SWITCH, *description],
            executable=program,
            stdin=subprocess.PIPE if owned else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if owned else subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # only the owner handles Ctrl-C
        )
        try:
            answer = self._switch.stdout.readline().split() if self._switch.stdout else []
            if answer[:1] != ["ready"]:
                why = self._switch.stderr.read().strip() if self._switch.stderr else "no reason given"
                raise TestbedUnavailable(
                    f"cannot create network namespaces ({why}): run where root may create them (a container needs "
                    f"CAP_SYS_ADMIN, CAP_NET_ADMIN and /dev/net/tun), {FALL_BACK}"
                )
            self._namespaces = tuple(int(descriptor) for descriptor in answer[1:])
            self._connect(hosts)
        except BaseException:
            self._switch.kill()
            self.down()
            raise

    def _connect(self, hosts: int) -> None:
        """Addresses, bridge and link rates."""
        switch = self.namespace(-1)
        links = ["link set lo up", "link add bridge type bridge stp_state 0 forward_delay 0"]
        for host in range(hosts):
            inside = self.namespace(host)
            if self.delay_s > 0:
                links += [f"link set host{host} netns {inside}"]
            else:
                links += [f"link add port{host} type veth peer name host{host} netns {inside}"]
            links += [f"link set port{host} master bridge up"]
        links += ["link set bridge up"]
        run_batch(switch, "ip", links)
        for host in range(hosts):
            run_batch(
                self.namespace(host),
                "ip",
                [
                    "link set lo up",
                    f"link set host{host} name {self.interface}",
                    f"addr add {self.address(host)}/24 dev {self.interface}",
                    f"link set {self.interface} gso_max_size {GSO_BYTES} up",
                ],
            )
        if self.rate_bit_s > 0:
            run_batch(
                switch, "tc", [line for host in range(hosts) for line in shape_lines(f"port{host}", self.rate_bit_s)]
            )
            for host in range(hosts):
                run_batch(self.namespace(host), "tc", shape_lines(self.interface, self.rate_bit_s))


def parse_testbed(text: str) -> Testbed:
    """Read "loopback" or "netns:RATE[,DELAY][,hosts=N]", e.g. "netns:200mbit,1ms".

    RATE in kbit, mbit, gbit (per second) or "none"; DELAY in us, ms, s. Raises ValueError.
    """
    if text == "loopback":
        return Testbed()
    kind, _, options = text.partition(":")
    if kind != "netns" or not options:
        raise ValueError(f"testbed {text!r}: write loopback or netns:RATE,DELAY, e.g. netns:200mbit,1ms")
    rate, *rest = options.split(",")
    hosts = [int(option.removeprefix("hosts=")) for option in rest if re.fullmatch(r"hosts=[1-9]\d*", option)]
    delays = [option for option in rest if not option.startswith("hosts=")]
    if len(hosts) + len(delays) != len(rest) or len(hosts) > 1 or len(delays) > 1:
        raise ValueError(f"testbed {text!r}: after the rate comes at most one delay and one hosts=N")
    return Testbed("netns", parse_rate(rate), parse_delay(delays[0]) if delays else 0.0, hosts[0] if hosts else 0)


def parse_rate(text: str) -> float:
    """Bit/s of "200mbit"; 0 for "none". Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.strip().lower())
    if text == "none":
        return 0.0
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate {text!r}: write a number with kbit, mbit or gbit, e.g. 200mbit, or none")
    rate_bit_s = float(match[1]) * RATE_UNITS[match[2]]
    if not MIN_RATE <= rate_bit_s <= MAX_RATE:
        raise ValueError(f"rate {text!r}: write one from 1kbit to 1000gbit, or none")
    return rate_bit_s


def parse_delay(text: str) -> float:
    """Seconds of "1ms". Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip().lower())
    if text == "0":
        return 0.0
    if match is None:
        raise ValueError(f"delay {text!r}: write a number with us, ms or s, e.g. 1ms")
    delay_s = float(match[1]) * DELAY_UNITS[match[2]]
    if delay_s > MAX_DELAY_S:
        raise ValueError(f"delay {text!r}: write at most {MAX_DELAY_S:g}s; ranks give up on a slower link")
    return delay_s


def _rate_text(rate_bit_s: float) -> str:
    if rate_bit_s <= 0:
        return "none"
    unit = next((unit for unit in ("gbit", "mbit") if rate_bit_s % RATE_UNITS[unit] == 0), "kbit")
    return f"{rate_bit_s / RATE_UNITS[unit]:g}{unit}"


def _delay_text(delay_s: float) -> str:
    micros = round(delay_s * 1e6)
    return f"{micros // 1000}ms" if micros % 1000 == 0 else f"{micros}us"


# Testbeds that outlive the command that created them, for the command line


def testbed_up(hosts: int, rate: str = "200mbit", delay: str = "1ms") -> str:
    """Create a testbed that stays until ``testbed_down``; returns its status. Raises TestbedUnavailable, ValueError."""
    if any(switch["owner"] == "persistent" for switch in running_switches()):
        raise TestbedUnavailable("a testbed is up already: `nestpipe testbed status` shows it, `down` removes it")
    testbed = Testbed("netns", parse_rate(rate), parse_delay(delay), hosts)
    testbed._make(hosts, owned=False)
    return testbed_status()


def testbed_down() -> str:
    """Remove testbeds made by ``testbed_up``; those of runs in progress stay until their run ends."""
    switches = [switch for switch in running_switches() if switch["owner"] == "persistent"]
    for switch in switches:
        os.kill(switch["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    gone = {switch["pid"] for switch in switches}
    while time.monotonic() < deadline and gone & {switch["pid"] for switch in running_switches()}:
        time.sleep(0.02)
    return f"removed {len(switches)} testbed{'s' * (len(switches) != 1)}" if switches else "no testbed was up"


def testbed_status() -> str:
    """Which testbeds are up, and how to enter their hosts."""
    lines = []
    for switch in running_switches():
        link = f"netns:{switch['rate']},{_delay_text(switch['delay_s'])}"
        owner = "persistent" if switch["owner"] == "persistent" else f"of process {switch['owner']}"
        lines.append(f"{link}: {switch['hosts']} hosts, {owner}")
        lines += [
            f"  host {host} ({SUBNET}.{host + 1}): nsenter --net={path} COMMAND"
            for host, path in enumerate(host_paths(switch))
        ]
    return "\n".join(lines) or "no testbed is up"
