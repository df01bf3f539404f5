"""Runs of methods side by side: the loop, checkpoints, records, convergence."""
