"""Hashes that decide the order of the data: a seed must always give the same order.

All arithmetic is modulo 2^64. splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014. Golden values are in `tests/unit/test_hashing.py`.
"""

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def splitmix64(x: int) -> int:
    """Compute one step of splitmix64 from state `x` (any integer, taken modulo 2^64)."""
    z = (x + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def mix(*xs: int) -> int:
    """Fold integers into one 64-bit key."""
    h = 0
    for x in xs:
        h = splitmix64(h ^ (x & _MASK))
    return h


def permutation(n: int, key: int) -> np.ndarray:
    """Return the permutation of 0 … n − 1 that belongs to `key`, as int64 (n,)."""
    z = np.arange(n, dtype=np.uint64) + np.uint64(key & _MASK)
    z += np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return np.argsort(z, kind="stable")
