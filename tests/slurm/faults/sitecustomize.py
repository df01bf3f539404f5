"""Put on PYTHONPATH of a job by tests: the task named by NESTPIPE_FAULT_RANK raises after a few steps."""

import os

if os.environ.get("SLURM_PROCID") == os.environ.get("NESTPIPE_FAULT_RANK", "none"):
    from slurm.preemption import Flag

    calls = []

    def take(self, original=Flag.take):
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("a fault made by a test")
        return original(self)

    Flag.take = take
