"""The command line. A command is imported when it runs: ``nestpipe --help`` needs neither torch nor other folders."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from nestpipe import __version__

#: name -> (module with ``main(arguments) -> int``, what it does).
COMMANDS = {
    "run": ("nestpipe.commands.run", "train one or several methods side by side on real processes"),
    "schedule": (
        "nestpipe.commands.schedule",
        "print a method's schedule as a grid, or check whether it is synchronous",
    ),
    "methods": ("nestpipe.commands.methods", "list the training methods that are installed"),
    "doctor": ("nestpipe.commands.doctor", "check versions, devices and tools, and say how to fix what is missing"),
    "simulate": ("nestpipe.commands.simulate", "predict step times on up to 8,192 workers, on virtual clocks"),
    "advise": (
        "nestpipe.commands.advise",
        "for a model and a cluster: the best method, how many micro-batches, what limits it",
    ),
    "fit": ("nestpipe.commands.fit", "fit the cost model to the published numbers; show errors in sample and held out"),
    "calibrate": (
        "nestpipe.commands.calibrate",
        "measure this machine for the simulator; --validate checks predictions",
    ),
    "sweep": ("nestpipe.commands.sweep", "run grids on a Slurm cluster or this machine: preview, submit, collect"),
    "report": ("nestpipe.commands.report", "make tables, figures and report.html from existing records"),
    "reproduce": ("nestpipe.commands.reproduce", "simulate and measure all that the report needs, then write it"),
    "converge": ("nestpipe.commands.converge", "record loss and accuracy curves over several seeds, for Fig. 6"),
    "testbed": ("nestpipe.commands.testbed", "set up several hosts with shaped links on this machine (needs root)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 success, 1 failure or the answer is no, 2 wrong command, 130 interrupted."""
    lines = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="nestpipe",
        description="Nested pipelining for recommendation training: run it, check it, time it.",
        epilog=f"commands:\n{lines}\n\n'nestpipe COMMAND --help' explains each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="nestpipe COMMAND [options]",
    )
    parser.add_argument("--version", action="version", version=f"nestpipe {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the locale lacks must not crash a run
            stream.reconfigure(errors="replace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    try:
        return _run(parser.parse_args(words[:1]).command, words[1:])
    except BrokenPipeError:
        # The reader of our output is gone. A message, or the flush at exit, would hit the same broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(name: str, arguments: Sequence[str]) -> int:
    try:
        command = importlib.import_module(COMMANDS[name][0])
    except KeyboardInterrupt:  # imports take seconds
        return _fail(name, "interrupted before anything had started", 130)
    except ModuleNotFoundError as error:
        return _fail(name, f"needs the package '{error.name}': pip install 'nestpipe[all]', or 'make setup'", 2)
    try:
        status = command.main(arguments)
        _flush()
        return status
    except SystemExit:  # --help and wrong options
        _flush()
        raise
    except KeyboardInterrupt:
        return _fail(name, "interrupted; all ranks have ended", 130)
    except BrokenPipeError:
        raise
    except MemoryError as error:
        return _fail(name, f"out of memory; choose smaller sizes ({' '.join(str(error).split())})", 1)
    except (ValueError, OSError, RuntimeError, OverflowError) as error:
        if os.environ.get("NESTPIPE_TRACEBACK"):
            raise
        return _fail(name, str(error) or repr(error), 2 if isinstance(error, ValueError | OverflowError) else 1)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _fail(command: str, text: str, status: int) -> int:
    print(f"nestpipe {command}: error: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
