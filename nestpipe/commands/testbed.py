"""``nestpipe testbed up|down|status``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from nestpipe.testbed.testbed import testbed_down, testbed_status, testbed_up


@dataclass(frozen=True)
class Up:
    """Bring up hosts that stay until `nestpipe testbed down` (a run with --testbed netns:... makes its own)."""

    hosts: int = 2
    """Hosts, one network namespace each."""
    rate: str = "200mbit"
    """Bandwidth of each host's link, each way; `none` for no limit."""
    delay: str = "1ms"
    """One-way delay from a host to the switch."""


@dataclass(frozen=True)
class Down:
    """Remove the hosts, and also those whose owner has died."""


@dataclass(frozen=True)
class Status:
    """Show the hosts and their links."""


Command = (
    Annotated[Up, tyro.conf.subcommand("up")]
    | Annotated[Down, tyro.conf.subcommand("down")]
    | Annotated[Status, tyro.conf.subcommand("status")]
)


def main(arguments: Sequence[str]) -> int:
    command = tyro.cli(Command, prog="nestpipe testbed", args=arguments)
    if isinstance(command, Up):
        print(testbed_up(command.hosts, command.rate, command.delay))
    else:
        print(testbed_down() if isinstance(command, Down) else testbed_status())
    return 0
