"""Put on PYTHONPATH of a job by tests: the task named by NESTPIPE_FAULT_RANK raises after a few steps."""

import os

if os.environ.get("SLURM_PROCID") == os.environ.get("NESTPIPE_FAULT_RANK", "none"):
    from slurm import signals

    calls = []

    def of_all(self, mine, original=signals.Agreement.of_all):
        calls.append(mine)
        if len(calls) == 3:
            raise ArithmeticError("a fault made by a test")
        return original(self, mine)

    signals.Agreement.of_all = of_all
