"""Names of the parts of the plan. Each is also the name of the part's store under ``records/``."""

from __future__ import annotations

#: Real processes on this machine.
TWO = "two-hosts"
FOUR = "four-hosts"
MICRO_BATCHES = "micro-batches"
SIZES = "sizes"
CONVERGENCE = "convergence"
#: The paper's two clusters on virtual clocks.
NPU = "simulated"
GPU = "simulated-gpu"
NPU_MICRO_BATCHES = "simulated-micro-batches"
NPU_SIZES = "simulated-sizes"
