"""Counter-based random numbers: a draw depends only on its counters, never on earlier draws.

The hash is splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014), chained over the counters.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def bits(seed: int, *counters: int | np.ndarray) -> np.ndarray:
    """uint64 of the counters' broadcast shape (at least one axis), uniform over all 64-bit values."""
    state = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)
    for counter in counters:
        state = _mix((state ^ np.asarray(counter).astype(np.uint64)) + _GOLDEN)
    return state


def uniform(seed: int, *counters: int | np.ndarray) -> np.ndarray:
    """float64 in [0, 1) of the counters' broadcast shape."""
    return (bits(seed, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def integers(below: int, seed: int, *counters: int | np.ndarray) -> np.ndarray:
    """int64 in [0, below) of the counters' broadcast shape (the modulo's bias is below / 2**64)."""
    return (bits(seed, *counters) % np.uint64(below)).astype(np.int64)
