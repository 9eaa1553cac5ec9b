"""Watches one batch at a time, for frameworks that know which examples a batch holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .forward import logits_of
from .labels import are_mixed, class_numbers
from .watching import Hook

if TYPE_CHECKING:
    from .sampler import CoresetSampler


class BatchWatch:
    """Takes the logits of batches whose indices are known, and hands both to `sampler.observe`.

    Of each batch the first forward pass counts that is in training mode, with gradients, and gives one row per example. So
    nothing is counted, and a step that runs the model twice, skips a batch or evaluates in between changes nothing.

    Example:
        >>> watch.begin(model, indices, labels)
        >>> loss = training_step(model, batch)
        >>> watch.end()

    Args:
        sampler: is told, unless the loop calls `observe` itself.
        way_out: what to do if the model turns out not to be what a training step calls.
    """

    def __init__(self, sampler: CoresetSampler, way_out: str) -> None:
        self.sampler, self.way_out = sampler, way_out
        self._observing = sampler._observing
        self._told = self._observing.told
        self._handle: Any = None
        self._indices = torch.empty(0, dtype=torch.int64)
        self._logits: Tensor | None = None
        self._begun = self._seen = 0  # batches of this pass
        if self.wanted:
            self._observing.rely_on_observe()

    @property
    def wanted(self) -> bool:
        """Whether to watch: somebody reads the scores, nobody else fills them, and logits are all that they need."""
        noise = getattr(getattr(self.sampler.strategy, "posterior", None), "noise", None)  # needs the head's input too
        own = self._observing.told == self._told
        return own and noise is None and self._observing.wanted and not self._observing.off

    def begin(self, model: nn.Module, indices: Tensor, labels: Any = None) -> None:
        """The model is given this batch next.

        Args:
            model: what the training step calls.
            indices: `(b,)` the examples of the batch.
            labels: its labels, where they can be seen: they must be those of the examples. Mixed ones, `(b, classes)`,
                leave the batch out, since its rows belong to no single example.
        """
        self.drop()
        if not self.wanted or are_mixed(labels):
            return
        self._indices, self._begun = indices.to("cpu", torch.int64), self._begun + 1
        if not self._fits(labels):
            self._observing.give_up("the labels of a batch are not those of its examples: something reorders them")
            return
        self._handle = model.register_forward_hook(Hook(self._leave))

    def _fits(self, labels: Any) -> bool:
        labels = class_numbers(labels) if isinstance(labels, Tensor) else None
        if labels is None or labels.shape != self._indices.shape or labels.is_floating_point():
            return True  # nothing to compare
        return torch.equal(labels.to("cpu", torch.int64), self.sampler.read_labels()[self._indices])

    def end(self) -> None:
        """The batch is done: the sampler is told what the model said of it."""
        logits = self._logits
        self.drop()
        if logits is not None and self.wanted:
            self._seen += 1
            self.sampler.observe(self._indices, logits)
            self._told = self._observing.told

    def drop(self) -> None:
        """The batch was left: what the model said of it does not count."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._logits = None

    def leave(self) -> None:
        """The batches do not say which examples they hold: from the next pass on forward passes are counted."""
        if self.wanted:
            self._observing.explicit = False

    def end_of_pass(self) -> None:
        """Gives up if the model was in none of the batches, so that scoring passes take over."""
        if self._begun and not self._seen and self.wanted:
            self._observing.give_up(
                f"no training step called it with the rows of its batch. {self.way_out.rstrip('.')}"
            )
        self._begun = self._seen = 0

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._logits is not None or not module.training or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint that is computed again in backward
        classes = int(self.sampler.read_labels().max()) + 1
        try:
            logits = logits_of(output, classes)
        except ValueError:
            return  # a loss, or what another part of the step gives
        if len(logits) == len(self._indices) and logits.shape[1] >= classes:
            self._logits = logits.detach().to(torch.float32, copy=True)  # a step may write into its own
