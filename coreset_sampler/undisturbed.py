"""Leaves no trace: modes, buffers and random states are afterwards what they were before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module, *, seed: int) -> Iterator[None]:
    """Eval mode and random states seeded with `seed` inside; everything as before outside, however it ends.

    Gradients are off with `no_grad` and not with `inference_mode`: modules that cache a tensor at their first call
    (rotary embeddings, attention masks) would keep an inference tensor, on which the next training step fails.
    """
    modes = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - it is the user's global state
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type != "cpu"})
    kinds = {p.device.type for p in model.parameters()} - {"cpu", "meta"}
    cache = torch.is_autocast_cache_enabled()
    kind = next(iter(kinds), None)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind or "cuda"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        try:
            torch.set_autocast_cache_enabled(False)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every accelerator of the machine
            for device in devices:
                with torch.get_device_module(kind).device(device):
                    torch.get_device_module(kind).manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            model.eval()
            yield
        finally:
            torch.set_autocast_cache_enabled(cache)
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            for module, mode in modes:
                module.training = mode
