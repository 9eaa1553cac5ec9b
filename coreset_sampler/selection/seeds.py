"""Seeds made of seeds: every random decision of a sampler has its own, and none is taken from the global state."""

from __future__ import annotations

import numpy as np

SELECT, ORDER, HEAD = 0, 1, 2  # streams of one epoch


def mixed_seed(*numbers: int) -> int:
    """One seed from several numbers; near numbers give seeds that are far apart."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
