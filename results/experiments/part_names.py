"""Names of the parts of the plan, which are those of their stores under ``records/``."""

from __future__ import annotations

#: Real processes on this machine.
TWO = "two-hosts"
FOUR = "four-hosts"
MICRO_BATCHES = "micro-batches"
SIZES = "sizes"
CONVERGENCE = "convergence"
#: The two clusters of the paper on virtual clocks.
NPU = "simulated"
GPU = "simulated-gpu"
NPU_MICRO_BATCHES = "simulated-micro-batches"
NPU_SIZES = "simulated-sizes"
