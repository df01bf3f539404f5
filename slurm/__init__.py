"""Sweeps on a Slurm cluster, or without one: grids of points, jobs run by submitit, results found by a point's hash."""
