"""Preemption and time limits: turns signals to a job into flags, and requeues the job. Imports no torch.

On preemption or at the time limit Slurm sends SIGUSR2 to every task. submitit would save on rank 0 inside its
handler, in the middle of a collective. Here the handler of every rank only raises a flag. The ranks agree on the
flags after a step (``flag_agreement``), save together and leave the process group (``run_on_rank``). Then rank 0 hands
over to submitit's handler, which requeues the job. A plain SIGTERM (scancel, or a preemption without the signal) makes
all ranks save and continue until they are killed: whoever sent it knows whether the job should run again.
"""

from __future__ import annotations

import signal
import types
from typing import Any

from submitit.core.utils import UncompletedJobError

from slurm.failures import GaveUp

#: What a rank was told: nothing; save and continue; save and stop. The larger one overrides the smaller.
NOTHING, SAVE, SAVE_AND_STOP = 0, 1, 2

#: Slurm sends the signal before a time limit up to this many seconds too early (``sbatch --signal``).
EARLY_S = 60.0


class Flag:
    """Raised by SIGTERM (save) and SIGUSR2 (save and stop); submitit's handler is kept for later."""

    def __init__(self) -> None:
        self._told = NOTHING
        self.submitit_handler: Any = signal.getsignal(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        self._told = max(self._told, SAVE_AND_STOP if number == signal.SIGUSR2 else SAVE)

    def take(self) -> int:
        """The largest flag since the last call."""
        told, self._told = self._told, NOTHING
        return told


def requeue(submitit_handler: Any, ran_s: float, time_s: float, signal_delay_s: float) -> None:
    """Hand over to submitit, which requeues the job and ends this rank. Raises GaveUp if it does not.

    ``ran_s``: seconds since this start of the job; ``time_s``, ``signal_delay_s``: its time limit, and how long before
    it the signal comes.
    """
    timed_out = ran_s >= time_s - signal_delay_s - EARLY_S

    def has_timed_out() -> bool:
        return timed_out

    # submitit takes every signal to a job of less than ten minutes for its time limit, even a preemption.
    submitit_handler.__self__.has_timed_out = has_timed_out
    try:
        submitit_handler(signal.SIGUSR2, None)
    except UncompletedJobError:
        raise GaveUp(
            f"gave up: its time limit of {time_s / 60:g} min ended it more often than max_timeouts allows; "
            "raise time, then 'nestpipe sweep resume' continues from what was saved"
        ) from None
