"""Who asks a sampler for indices. Loaders and frameworks do not introduce themselves, so the call stack is searched."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler

from ..distributed import world
from .weighted import is_weighted, plain

if TYPE_CHECKING:
    from .epoch import Epoch
    from .sampler import CoresetSampler

ADAPTERS = {
    "accelerate.data_loader": "coreset_sampler.integrations.accelerate",
    "torchdata.stateful_dataloader": "coreset_sampler.integrations.torchdata",
}
"""A framework's module -> the module whose `FRAMEWORK` knows it. Imported only once the framework is."""


class Frame(NamedTuple):
    """A function that is running."""

    module: str
    function: str
    owner: Any
    """The object whose method it is, or None."""


@dataclass(frozen=True)
class Caller:
    """The functions that led to a sampler, from the inside out, and what they say about who reads it."""

    frames: tuple[Frame, ...]

    @property
    def loader(self) -> Any:
        """The iterator of the loader that reads the sampler, or None."""
        found = (frame.owner for frame in self.frames)
        return next((owner for owner in found if {"_index_sampler", "_dataset"} <= _attributes(owner)), None)

    @property
    def ahead(self) -> float:
        """The share of an epoch's batches that the loader's workers read before the loop needs them."""
        loader = self.loader
        batches = getattr(loader, "_prefetch_factor", None) or 0
        batches *= getattr(loader, "_num_workers", 0)
        return min(1.0, batches / max(1, len(loader))) if batches else 0.0

    @property
    def dataset(self) -> Any:
        """What the loader takes examples from."""
        return getattr(self.loader, "_dataset", None)

    @property
    def shards(self) -> bool:
        """Whether something on the way splits indices over processes."""
        wrapped = any(isinstance(frame.owner, DistributedSampler) for frame in self.frames)
        return wrapped or any(framework.shards(self) for framework in loaded_frameworks())

    def start_of_pass(self, sampler: CoresetSampler, epoch: Epoch) -> int:
        """Where the next pass starts; a framework that reads ahead or skips batches itself is asked."""
        epoch.loop_is_over = None
        for framework in loaded_frameworks():
            if framework.reads(self):
                return framework.start_of_pass(sampler, epoch, self)
        return epoch.start

    def share(self, sampler: CoresetSampler, order: list[int], start: int) -> list[int] | str | None:
        """Of a pass that begins at `start` the indices that this process trains on, or in words why they are not known.

        None where nothing on the way changes anything.
        """
        loader = self.loader
        if not getattr(loader, "_in_order", True) and loader._num_workers > 1:
            return "with in_order=False the DataLoader gives batches in the order in which its workers finish them"
        for framework in loaded_frameworks():
            if framework.reads(self):
                return framework.share(sampler, order, start, self)
        return unknown_order(sampler, getattr(loader, "_index_sampler", sampler))


@dataclass(frozen=True)
class Framework:
    """What a framework changes about a sampler that it reads. By default nothing; `integrations/` has those that do.

    Args:
        reads: whether this framework begins the pass; the first in `ADAPTERS` that says so is asked for its start.
        shards: whether it splits what the sampler yields over processes.
        start_of_pass: where the pass starts; it may set the epoch and `epoch.loop_is_over`, or raise.
        share: of the order of a pass, and where that starts, what this process trains on, see `Caller.share`.
        epoch_was_set: called by `set_epoch`.
        check_load: raises if a state with this position cannot be resumed from.
    """

    reads: Callable[[Caller], bool]
    shards: Callable[[Caller], bool] = lambda caller: False
    start_of_pass: Callable[[CoresetSampler, Epoch, Caller], int] = lambda sampler, epoch, caller: epoch.start
    share: Callable[[CoresetSampler, list[int], int, Caller], list[int] | str | None] = (
        lambda sampler, order, start, caller: None
    )
    epoch_was_set: Callable[[CoresetSampler, Caller], None] = lambda sampler, caller: None
    check_load: Callable[[CoresetSampler, int, Caller], None] = lambda sampler, position, caller: None


def unknown_order(sampler: CoresetSampler, read: Any, known: tuple[Any, ...] = (BatchSampler,)) -> str | None:
    """Why the order in which a loader reads the sampler is not known; None if it is.

    Args:
        sampler: whose indices they are.
        read: what the loader reads, the sampler itself or what makes batches of it.
        known: batch samplers that keep the order.
    """
    batched = getattr(type(read), "__iter__", None) in [kind.__iter__ for kind in known]
    between = read.sampler if batched else read
    if between is sampler:
        return None
    return f"the indices reach the DataLoader through a {type(between).__name__}, which may change their order"


def find_caller() -> Caller:
    """The one place that walks the call stack."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_method = code.co_varnames[:1] == ("self",) or "self" in code.co_freevars
        owner = frame.f_locals.get("self") if is_method else None
        frames.append(Frame(str(frame.f_globals.get("__name__")), code.co_name, owner))
        frame = frame.f_back  # type: ignore[assignment]
    return Caller(tuple(frames))


def check_caller(sampler: CoresetSampler, caller: Caller) -> str | None:
    """Raises if the loader would drop the weights; a warning if every process would be given the same indices."""
    given, weighted = caller.dataset, is_weighted(caller.dataset)
    if sampler.weighting == "loss" and not weighted and given is not None and plain(given) is plain(sampler.dataset):
        raise TypeError(
            'the DataLoader has the plain data set, so the weights of weighting="loss" would be dropped. Give it the same '
            "WeightedDataset(train_set) that the sampler has, and take (x, y, weight) batches."
        )
    processes = world()[1]
    if processes == 1 or isinstance(sampler, DistributedSampler) or caller.shards:
        return None
    return (
        f"all {processes} processes are given the same indices: nothing shares out what this CoresetSampler yields. Use "
        "DistributedCoresetSampler with torchrun, or prepare the loader with accelerate."
    )


def loaded_frameworks() -> list[Framework]:
    """The adapters of those frameworks that this process has imported."""
    adapters = [adapter for framework, adapter in ADAPTERS.items() if framework in sys.modules]
    return [importlib.import_module(adapter).FRAMEWORK for adapter in adapters]


def _attributes(owner: Any) -> Any:
    return getattr(owner, "__dict__", {}).keys()
