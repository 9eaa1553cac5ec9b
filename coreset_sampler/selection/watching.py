"""Watches a model train: matches the rows of its forward passes to the indices of a pass, and checks that they do match."""

from __future__ import annotations

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
from .forward import logits_of
from .labels import LABEL_KEYS

_ONCE_CONFIRMED = 8  # batches, of which one is looked at
_WINDOW = 20  # batches that are judged together
_MOST_WINDOWS = 3  # that are undecided, after which the evidence is collected anew
_CLEARLY = 3.0, -4.0  # standard errors: of a match, of a mismatch
_SURE = 0.5  # nats that a network which knows its classes should gain from the right labels; a fresh one is below that


class Hook:
    """A hook that calls a method as long as its object lives. In a copy of the model, or a saved one, it does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    @_disable_dynamo  # of torch.compiler.disable the part that imports nothing
    def __call__(self, *given: Any) -> None:
        """Hands on what torch gives a hook."""
        method = self._method()
        if method is not None:
            method(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, gives None, and is found without this package


class Evidence:
    """Whether labels fit the predictions better than those of the batches before and after.

    Matched labels have a lower loss than shifted ones as soon as the network knows something. A paired test over 20
    batches tells. Where shifted ones are clearly better, or no labels fit a network that is sure of itself, rows and
    indices do not belong together. While the network knows nothing there is no verdict.

    Args:
        labels: `(n,)` all labels; predicting their frequencies is to know nothing.
    """

    def __init__(self, labels: Tensor) -> None:
        share = torch.bincount(labels).double() / max(1, len(labels))
        self.chance = float(torch.special.entr(share).sum())  # the loss of who knows the frequencies only
        self.confirmed = False
        self._batches = 0
        self._clear()

    def is_wanted(self) -> bool:
        """Whether to take in the next batch: each, and once the match was confirmed every eighth, to cost little."""
        self._batches += 1
        return not self.confirmed or self._batches % _ONCE_CONFIRMED == 0

    def add(self, logits: Tensor, labels: Tensor, others: list[Tensor]) -> str | None:
        """Takes in a batch and says what is wrong, if that is plain by now.

        Args:
            logits: `(b, classes)`.
            labels: `(b,)` matched.
            others: `(b,)` each, of the batches before and after.
        """
        log_p = logits.log_softmax(1)
        if len(others) < 2 or not bool(torch.isfinite(log_p).all()):
            return None
        loss, *shifted = [-float(log_p.gather(1, y[:, None]).mean()) for y in (labels, *others)]
        p = log_p.exp()
        self._expected.append(float(((p - p.mean(0)) * log_p).sum(1).mean()))
        self._gains.append([other - loss for other in shifted])
        self._shifted.append(shifted)
        return self._verdict() if len(self._gains) % _WINDOW == 0 else None

    def _verdict(self) -> str | None:
        gains, shifted = torch.tensor(self._gains).double(), torch.tensor(self._shifted).double().mean(0)
        z = gains.mean(0) / (gains.std(0) / len(gains) ** 0.5).clamp(min=1e-9)
        if bool((z > _CLEARLY[0]).all()):
            self.confirmed = True
            self._clear()
        elif bool(((z < _CLEARLY[1]) & (shifted < self.chance)).any()):
            return "the labels of another batch fit its predictions better than those of the matched examples"
        elif len(gains) >= _MOST_WINDOWS * _WINDOW:
            expected, gain = sum(self._expected) / len(gains), float(gains.mean())
            self._clear()
            if expected > _SURE and gain < 0.1 * expected:
                return "the labels of the matched examples do not fit its predictions, although it is sure of these"
        return None

    def _clear(self) -> None:
        self._gains: list[list[float]] = []
        self._shifted: list[list[float]] = []
        self._expected: list[float] = []


class Watch:
    """One pass over the data: hooks on the model, and how far its rows have come in the order of the indices.

    Args:
        model: what the training loop calls, or what is inside of that.
        labels: `(n,)` all labels.
        order: `(k,)` the indices of the pass.
        start: where the first row is in this order.
        yielded: how many of them were given out so far.
        evidence: what is known of the match, also from passes before.
        take: is given `(indices, logits, position)` of each batch that matches, and says what is wrong with it, if anything.
        mismatch: is given the reason when they do not; the hooks are off by then.
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
        take: Callable[[Tensor, Tensor, int], str | None],
        mismatch: Callable[[str], None],
        also_off: Callable[[], object] | None = None,
    ) -> None:
        self.model, self.labels, self.order, self.position, self.begin = model, labels, order, start, start
        self.largest, self._last_class = 0, int(labels.max())  # batch so far; label
        self._yielded, self._evidence, self._take, self._mismatch = yielded, evidence, take, mismatch
        self._depth, self._also_off = 0, also_off
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
        with torch.no_grad():
            reason = self._match(output, args, named)
        if reason is not None:
            self.off()
            self._mismatch(reason)
        elif self.position == len(self.order):
            self.off()

    def _match(self, output: Any, args: Any, named: Mapping[str, Any]) -> str | None:
        """Takes the rows of a forward pass, or says why they cannot be matched."""
        try:
            logits = logits_of(output).detach()
        except ValueError:
            return "its output has no logits of shape (batch, classes)"
        rows, at = len(logits), self.position
        if rows == 0 or at + rows > min(len(self.order), self._yielded()):
            left = min(len(self.order), self._yielded()) - at
            return f"it was given {rows} rows where {left} of the pass's examples were left"
        if logits.shape[1] <= self._last_class:
            return f"it gives {logits.shape[1]} logits, and labels go up to {self._last_class}"
        self.position, self.largest = at + rows, max(self.largest, rows)
        indices = self.order[at : at + rows]
        seen, labels = visible_labels(args, named), self.labels[indices]
        if seen is not None and seen.is_floating_point() and seen.ndim == 2:
            return None  # mixed examples: the rows belong to no single one, and are left out
        logits = logits.to(torch.float32, copy=True)  # a loop may write into its own
        if seen is not None and seen.shape == labels.shape and not seen.is_floating_point():
            if not torch.equal(seen.to("cpu", torch.int64), labels):
                return "the labels that it was given are not those of the matched examples"
        elif self._evidence.is_wanted():
            reason = self._evidence.add(logits.cpu(), labels, self._neighbours(at, rows))
            if reason is not None:
                return reason
        return self._take(indices, logits, at)

    def _neighbours(self, at: int, rows: int) -> list[Tensor]:
        """The labels of as many examples before and after, where there are as many."""
        parts = [self.order[max(0, at - rows) : at], self.order[at + rows : at + 2 * rows]]
        return [self.labels[part] for part in parts if len(part) == rows]


def visible_labels(args: Any, named: Mapping[str, Any]) -> Tensor | None:
    """Labels among what a model is called with: by keyword, or in a dict."""
    for given in (named, *(arg for arg in args if isinstance(arg, Mapping))):
        for key in LABEL_KEYS:
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
