"""Leaves no trace: the model and the random states are afterwards what they were before."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..layers import back_through_train, devices_of, is_sharded, unwrapped
from ..randomness import seeded
from .model_state import COPIED_WHOLE, ModelState

_ONE_AT_A_TIME = threading.RLock()  # for all models: the random states are those of the whole process


@contextmanager
def preserve_state(model: nn.Module, *, seed: int, lazily: bool = False) -> Iterator[Callable[[], None]]:
    """Eval mode and random states seeded with `seed` inside; everything as before outside, however it ends.

    `lazily` it leaves the model alone until what it gives is called: for those who will hardly run the model.

    Gradients are off with `no_grad` and not with `inference_mode`: modules that cache a tensor at their first call
    (rotary embeddings, attention masks) would keep an inference tensor, on which the next training step fails.
    """
    with ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        stack.enter_context(_seeded(model, seed))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())

        @cache
        def look_after() -> None:
            if not is_sharded(model):  # else nothing can run it
                stack.enter_context(_for_this_thread(model))
                stack.enter_context(_in_eval(model))

        if not lazily:
            look_after()
        yield look_after


@contextmanager
def _seeded(model: nn.Module, seed: int) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - it is the user's global state
    with seeded(seed, devices_of(model)):
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def _for_this_thread(model: nn.Module) -> Iterator[None]:
    """Refuses what other threads do to the model meanwhile: they would see, and train, the values of a draw."""
    us, ours = threading.get_ident(), {id(p) for p in model.parameters()}

    def check(what: str) -> None:
        if threading.get_ident() != us:
            raise RuntimeError(
                f"{what} while another thread selects a coreset with this model, whose weights are replaced meanwhile. "
                "Train and select one after the other, or give the sampler a copy of the model."
            )

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            check("an optimizer step")

    handles = [register_optimizer_step_pre_hook(before_step)]
    if not isinstance(unwrapped(model), torch.jit.ScriptModule):  # which takes no hooks
        handles.append(unwrapped(model).register_forward_pre_hook(lambda *_: check("the model was called")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; attributes, modes and bits as before outside."""
    state = ModelState(model)
    guard = state.guard()
    if guard.bytes <= COPIED_WHOLE:
        guard.copy_all()
    modes = [(module, module.training) for module in model.modules()]
    caches = torch.is_autocast_cache_enabled(), parametrize._cache_enabled
    try:
        torch.set_autocast_cache_enabled(False)
        parametrize._cache_enabled = 0
        with guard:
            model.eval()
        for module in state.modules:
            if module._compiled_call_impl is not None:
                module._compiled_call_impl = None  # hooks do not fire in a compiled call
        yield
    finally:
        try:
            with guard:
                back_through_train(modes)
        finally:
            state.restore()
            guard.undo()
            for module, mode in modes:
                if module.training != mode:
                    module.training = mode
            torch.set_autocast_cache_enabled(caches[0])
            parametrize._cache_enabled = caches[1]
