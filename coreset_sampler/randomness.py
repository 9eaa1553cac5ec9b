"""Seeds made of seeds, and torch's global random state, seeded for a while and then as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

SELECT, ORDER, HEAD = 0, 1, 2  # streams of a sampler's epoch: every random decision has its own


def mixed_seed(*numbers: int) -> int:
    """One seed from several numbers; near numbers give seeds that are far apart."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def check_default_device() -> None:
    """Refuses a default device on which our own small tensors would not be where our generators are: on the CPU."""
    if (device := torch.get_default_device()).type != "cpu":
        raise RuntimeError(
            f"coreset_sampler, like torch's own samplers, needs the CPU as default device, got {device}. In place of "
            f'torch.set_default_device make the model, and nothing else, inside "with torch.device({str(device)!r}):".'
        )


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Seeds the generators of the CPU and of these devices; afterwards all are as they were, and no other is touched.

    `torch.manual_seed` would reseed every accelerator of the machine.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)
        for kind, numbers in accelerators(devices).items():
            stack.enter_context(torch.random.fork_rng(numbers, device_type=kind))
            for number in numbers:
                state = torch.Generator(f"{kind}:{number}").manual_seed(seed).get_state()
                torch.get_device_module(kind).set_rng_state(state, number)
        yield


def accelerators(devices: Iterable[torch.device]) -> dict[str, list[int]]:
    """Those that have a generator of their own, each once: numbers by kind."""
    found: dict[str, list[int]] = {}
    for kind, number in sorted({(device.type, device.index or 0) for device in devices}):
        if kind not in ("cpu", "meta"):
            found.setdefault(kind, []).append(number)
    return found
