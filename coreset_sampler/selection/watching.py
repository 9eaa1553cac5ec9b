"""Watches a model train: matches the rows of its forward passes to the indices of a pass, and checks that they do match."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.jit import ScriptModule
from torch.utils.data import DistributedSampler

from .. import distributed
from .evidence import Evidence
from .forward import logits_of
from .labels import LABEL_KEYS, are_mixed, class_numbers
from .observed import copied


class Hook:
    """A hook that calls a method as long as its object lives. In a copy of the model, or a saved one, it does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        bound: Any = method
        self._owner, self._function = weakref.ref(bound.__self__), bound.__func__  # a WeakMethod takes longer to call

    def __call__(self, *given: Any) -> None:
        """Hands on what torch gives a hook."""
        if torch.compiler.is_compiling():
            self._apart(*given)
        elif (owner := self._owner()) is not None:
            self._function(owner, *given)

    def _call(self, *given: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._function(owner, *given)

    # Of torch.compiler.disable the part that imports nothing. Where nothing is compiled it would be two fifths of the cost.
    _apart = _disable_dynamo(_call)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, gives None, and is found without this package


class Watch:
    """One pass over the data: hooks on the model, and how far its rows have come in the order of the indices.

    Args:
        model: what the training loop calls, or what is inside of that.
        labels: `(n,)` all labels.
        order: `(k,)` the indices of the pass.
        start: where the first row is in this order.
        yielded: how many of them were given out so far.
        evidence: what is known of the match, also from passes before.
        take: is given `(order, rows of it, logits)` of each batch that matches, and says what is wrong with it, if anything.
        mismatch: is given the reason when they do not; the hooks are off by then.
        loader: the iterator of the DataLoader that reads the indices from `first` on, if that is known. The hooks go as
            soon as the loop has run the model on all that it gives, or has let go of it after the last row that it gave.
        first: see `loader`.
        also_off: is called when the hooks are taken off.
    """

    def __init__(
        self,
        model: nn.Module,
        labels: Tensor,
        order: Tensor,
        start: int,
        *,
        yielded: Callable[[], int],
        evidence: Evidence,
        take: Callable[[Tensor, slice, Tensor], str | None],
        mismatch: Callable[[str], None],
        loader: Any = None,
        first: int = 0,
        also_off: Callable[[], object] | None = None,
    ) -> None:
        self.model, self.order, self.position, self.begin = model, order, start, start
        self.labels, self.rows = labels[order], len(order)
        self.largest, self._last_class = 0, int(labels.max())  # batch so far; label
        self._yielded, self._evidence, self._take, self._mismatch = yielded, evidence, take, mismatch
        self._depth, self._also_off = 0, also_off
        self._given = Given(loader, self.rows - first)
        self._last, self._in_step = first + self._given.all, False  # row; whether the loop has run all it was given
        self._first, self._loop_left = first, self._given.when_left(Hook(self._left))
        handles = [
            model.register_forward_pre_hook(Hook(self._enter), with_kwargs=True),
            model.register_forward_hook(Hook(self._leave), with_kwargs=True, always_call=True),
        ]
        self._off = weakref.finalize(self, remove, handles)

    @property
    def matched(self) -> int:
        """The rows that were seen in this pass."""
        return self.position - self.begin

    def off(self) -> None:
        """Takes the hooks off; more than once does no harm."""
        self._off()
        self._loop_left()
        if self._also_off is not None:
            self._also_off()

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, named: Mapping[str, Any], output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth or output is None or module is not self.model:
            return  # a call within a call, or one that failed
        if not module.training or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # evaluation, or a checkpoint that is computed again in backward
        reason = self._match(output, args, named)
        if reason is not None:
            self.off()
            self._mismatch(reason)
        elif self.position >= self._last:
            self.off()
        else:
            self._in_step = self.position - self._first >= self._given.so_far()

    def _left(self) -> None:
        """The loop has let go of its loader. A loop that holds batches back may still run the model on them."""
        if self._in_step:
            self.off()

    def _match(self, output: Any, args: Any, named: Mapping[str, Any]) -> str | None:
        """Takes the rows of a forward pass, or says why they cannot be matched."""
        try:
            logits = logits_of(output, self._last_class + 1)
        except ValueError:
            return "its output has no logits of shape (batch, classes)"
        (rows, classes), at = logits.shape, self.position
        left = min(self.rows, self._yielded(), self._first + self._given.so_far()) - at
        if not 0 < rows <= left:
            return f"it was given {rows} rows where {left} of the pass's examples were left"
        if classes <= self._last_class:
            return f"it gives {classes} logits, and labels go up to {self._last_class}"
        self.position, self.largest = at + rows, max(self.largest, rows)
        seen = visible_labels(args, named)
        if seen is not None and are_mixed(seen):
            return None  # mixed examples: the rows belong to no single one, and are left out
        logits = copied(logits)
        seen = None if seen is None else class_numbers(seen)
        if seen is not None and seen.shape == (rows,) and not seen.is_floating_point():
            if not torch.equal(seen.to("cpu", torch.int64), self.labels[at : at + rows]):
                return "the labels that it was given are not those of the matched examples"
        elif self._evidence.is_wanted():
            reason = self._evidence.add(logits, self.labels[at : at + rows], self._neighbours(at, rows))
            if reason is not None:
                return reason
        return self._take(self.order, slice(at, at + rows), logits)

    def _neighbours(self, at: int, rows: int) -> list[Tensor]:
        """The labels of as many examples before and after, where there are as many."""
        parts = [self.labels[max(0, at - rows) : at], self.labels[at + rows : at + 2 * rows]]
        return [part for part in parts if len(part) == rows]


class Given:
    """The rows that a DataLoader gives to a loop.

    Args:
        loader: its iterator, or None.
        rows: the indices that it reads.
    """

    def __init__(self, loader: Any, rows: int) -> None:
        self._size = getattr(getattr(loader, "_index_sampler", None), "batch_size", None) or 0
        self._loader = weakref.ref(loader) if self._size and hasattr(loader, "_num_yielded") else _nobody
        dropped = rows % self._size if self._size and getattr(loader, "_drop_last", False) else 0
        self.all = rows - dropped
        """Of the pass; without those that `drop_last` leaves out."""

    def so_far(self) -> float:
        """As many as the loop may have; any number where that is not known."""
        loader = self._loader()
        return math.inf if loader is None else min(self.all, loader._num_yielded * self._size)

    def when_left(self, call: Callable[[], object]) -> Callable[[], object]:
        """Calls this when the loop, and everybody else, has let go of the loader. Gives what calls that off."""
        loader = self._loader()
        if loader is None:
            return _nobody
        finalizer = weakref.finalize(loader, call)
        finalizer.atexit = False
        return finalizer.detach


def _nobody() -> None:
    return None


def visible_labels(args: Any, named: Mapping[str, Any]) -> Tensor | None:
    """Labels among what a model is called with: by keyword, or in a dict."""
    for given in (named, *args):
        if given is named or (type(given) is not Tensor and isinstance(given, Mapping)):  # asking a tensor takes longer
            for key in LABEL_KEYS if given else ():
                if isinstance(given.get(key), Tensor):
                    return given[key]  # type: ignore[no-any-return]
    return None


def watched_module(model: nn.Module) -> nn.Module:
    """The module to hook: of a compiled model its wrapper, since a hook inside may be compiled away; else the innermost."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module  # of a compiled model it is the one in `_orig_mod` that is inside
    return model


def cannot_watch(model: nn.Module, sampler: Any, share: list[int] | str | None) -> str:
    """Why a model cannot be watched at all; "" if it can. `share` is what a framework makes of the indices, or why not."""
    if isinstance(share, str):
        return share
    if isinstance(watched_module(model), ScriptModule):
        return "a scripted model takes no hooks"
    if share is None and distributed.world()[1] > 1 and not isinstance(sampler, DistributedSampler):
        return "a framework splits the indices over processes, and only DistributedCoresetSampler knows which are whose"
    return ""


def remove(handles: list[Any]) -> None:
    """Takes hooks off."""
    for handle in handles:
        handle.remove()
