"""A faked Slurm: sbatch, squeue, scancel and srun as scripts that keep their state in a folder and run nothing."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

SBATCH = """#!/bin/bash
# Takes the file and prints a number; every element of the array is then pending.
[[ -e {folder}/refuse ]] && {{ cat {folder}/refuse >&2; exit 1; }}
n=$(($(cat {folder}/last 2>/dev/null || echo 100) + 1)); echo $n > {folder}/last
cp "${{@: -1}}" {folder}/$n.sh
last=$(sed -nE 's/^#SBATCH --array=0-([0-9]+).*/\\1/p' {folder}/$n.sh)
if [[ -n $last ]]; then for ((i = 0; i <= last; i++)); do echo "${{n}}_$i|PENDING|Priority" >> {folder}/queue; done
else echo "$n|PENDING|Priority" >> {folder}/queue; fi
echo "Submitted batch job $n"
"""
SQUEUE = """#!/bin/bash
[[ -e {folder}/down ]] && {{ echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }}
cat {folder}/queue 2>/dev/null
exit 0
"""
SCANCEL = """#!/bin/bash
for job in "$@"; do sed -i "/^$job|/d" {folder}/queue; done
"""


@dataclass(frozen=True)
class FakeSlurm:
    folder: Path

    def scripts(self) -> list[str]:
        """sbatch files in order of submission."""
        return [path.read_text() for path in sorted(self.folder.glob("[0-9]*.sh"), key=lambda p: int(p.stem))]

    def queue(self) -> list[str]:
        """Jobs that wait or run."""
        path = self.folder / "queue"
        return [line.split("|")[0] for line in path.read_text().splitlines()] if path.exists() else []

    def set(self, job: str, state: str, reason: str = "None") -> None:
        """Set a job's state; "" removes it from the queue."""
        lines = [line for line in (self.folder / "queue").read_text().splitlines() if not line.startswith(f"{job}|")]
        lines += [f"{job}|{state}|{reason}"] if state else []
        (self.folder / "queue").write_text("".join(f"{line}\n" for line in lines))

    def stop_answering(self, down: bool = True) -> None:
        if down:
            (self.folder / "down").touch()
        else:
            (self.folder / "down").unlink()

    def refuse(self, words: str) -> None:
        (self.folder / "refuse").write_text(words)


def install(folder: Path) -> tuple[FakeSlurm, Path]:
    """The fake Slurm, and the folder of its scripts, to be put first in PATH."""
    state, scripts = folder / "state", folder / "bin"
    state.mkdir()
    scripts.mkdir()
    texts = {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": SCANCEL, "srun": "#!/bin/bash\nexit 1\n"}
    for name, text in texts.items():
        path = scripts / name
        path.write_text(text.format(folder=state))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return FakeSlurm(state), scripts
