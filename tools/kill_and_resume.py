"""Kill runs at random moments and while they write checkpoints, resume them, and compare with a run never killed.

    python tools/kill_and_resume.py --kills 20 --writes 5 --out counts.json

A run is ``nestpipe run`` with checkpoints; SIGKILL goes to the launcher, whose ranks end with it. A chain of runs is
resumed until it has reached its last step; chains repeat until enough kills have landed. A kill counts as inside a
write if it left a half-written checkpoint behind. Losses must be those of the run that was never killed: bit for bit
on this engine, to 1e-6 for TorchRec and 2D-SP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

#: Methods that run interleaved, so that a kill may hit any of them; ranks; how far losses may differ.
FAMILIES = {
    "engine": (("nestpipe", "uniemb", "nestpipe+2d-sp", "nestpipe+bf16", "serial"), 2, 0.0),
    "torchrec": (("torchrec", "torchrec-bf16"), 2, 1e-6),
    "2d-sp": (("2d-sp",), 4, 1e-6),
}
SIZE = "--data-scale 0.0001 --batch-size 8 --negatives 8 --embedding-dim 16 --width 16 --dense-layers 1 "
SIZE += "--sequence-length 10 --micro-batches 3 --pace-dense 3 --sync-interval 3 --rounds 6"


@dataclass
class Counts:
    """Counts of one family: kills at random, kills inside a write, chains run to the end, largest difference of a loss.

    ``crashes``: runs that a library ended by itself; they are resumed like killed ones.
    """

    kills: int = 0
    writes: int = 0
    chains: int = 0
    crashes: int = 0
    steps_killed_at: list[int] = field(default_factory=list)
    largest_difference: float = 0.0


def command(methods: tuple[str, ...], ranks: int, steps: int, json_path: Path, checkpoints: Path | None) -> list[str]:
    words = [sys.executable, "-m", "nestpipe.cli", "run", "--methods", ",".join(methods), "--workers", str(ranks)]
    words += ["--steps", str(steps), "--json", str(json_path), *SIZE.split()]
    if checkpoints:
        words += ["--checkpoint", str(checkpoints), "--checkpoint-every", "5", "--resume"]
    return words


def losses(path: Path) -> dict[str, list[float]]:
    return {name: record["losses"] for name, record in json.loads(path.read_text())["methods"].items()}


def half_written(folder: Path) -> set[tuple[str, int]]:
    """Checkpoints being written or left half-written, each with the time of its last change."""
    found = set()
    for path in folder.glob("*/.step-*.writing"):
        with contextlib.suppress(FileNotFoundError):
            found.add((str(path), path.stat().st_mtime_ns))
    return found


def saved_steps(folder: Path) -> int:
    return sum(max((int(p.name[5:13]) for p in m.glob("step-*")), default=0) for m in folder.glob("*"))


def killed(process: subprocess.Popen, folder: Path, in_write: bool, draw: random.Random) -> bool:
    """Kill the run, in a write or after a random time of training. False if it ended before that."""
    start, left = saved_steps(folder), half_written(folder)
    until = None
    while process.poll() is None:
        if in_write:
            if half_written(folder) - left:
                break
        elif until is None:  # training has begun once something new is saved or being written
            if saved_steps(folder) > start or half_written(folder) - left:
                until = time.monotonic() + draw.uniform(0.0, 1.2)
        elif time.monotonic() > until:
            break
        time.sleep(0.0005 if in_write else 0.01)
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.5)  # time for the ranks to see that their launcher has ended
    return True


def family(name: str, kills: int, writes: int, steps: int, seed: int, folder: Path) -> Counts:
    methods, ranks, tolerance = FAMILIES[name]
    draw, counts = random.Random(seed), Counts()
    subprocess.run(command(methods, ranks, steps, folder / "whole.json", None), check=True, stdout=subprocess.DEVNULL)
    whole = losses(folder / "whole.json")
    while counts.kills < kills or counts.writes < writes:
        checkpoints, result = folder / f"chain{counts.chains}", folder / f"chain{counts.chains}.json"
        log = folder / "log.txt"
        while True:
            with log.open("w") as output:
                process = subprocess.Popen(
                    command(methods, ranks, steps, result, checkpoints), stdout=output, stderr=output
                )
            enough = counts.kills >= kills and counts.writes >= writes
            in_write = counts.writes < writes and (counts.kills >= kills or draw.random() < writes / (kills + writes))
            if enough:
                process.wait()
            left = half_written(checkpoints)
            if enough or not killed(process, checkpoints, in_write, draw):
                if process.returncode and "oneMKL FATAL ERROR" in log.read_text():
                    counts.crashes += 1
                    print(f"{name}: crash {counts.crashes}: {log.read_text().strip().splitlines()[0]}", flush=True)
                    continue
                break
            if half_written(checkpoints) - left:
                counts.writes += 1
            else:
                counts.kills += 1
            counts.steps_killed_at.append(saved_steps(checkpoints))
            print(
                f"{name}: {counts.kills} kills, {counts.writes} in a write, saved {counts.steps_killed_at[-1]}",
                flush=True,
            )
        if process.returncode != 0:
            raise SystemExit(f"{name}: a resumed run failed:\n{log.read_text()[-3000:]}")
        counts.chains += 1
        for method, values in losses(result).items():
            gaps = [abs(a - b) for a, b in zip(values, whole[method], strict=True)]
            counts.largest_difference = max(counts.largest_difference, *gaps)
            if max(gaps) > tolerance:
                raise SystemExit(f"{name}, {method}: step {gaps.index(max(gaps))} differs by {max(gaps):.3g}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated, of " + ", ".join(FAMILIES))
    parser.add_argument("--kills", type=int, default=20, help="kills outside a write, per family")
    parser.add_argument("--writes", type=int, default=5, help="kills inside a write, per family")
    parser.add_argument("--steps", type=int, default=60, help="steps of each method")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments at which runs are killed")
    parser.add_argument("--out", type=Path, help="write the counts here as JSON")
    options = parser.parse_args()
    counts = {}
    for name in options.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found = family(name, options.kills, options.writes, options.steps, options.seed, Path(folder))
        counts[name] = vars(found)
        print(
            f"{name}: {found.kills} kills at random, {found.writes} inside a write, {found.chains} chains to the end, "
            f"{found.crashes} crashes; "
            f"largest difference of a loss from the run never killed: {found.largest_difference:.3g}",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
