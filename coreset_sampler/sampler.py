"""The samplers: they decide when to select, draw from the coreset, and can be saved and resumed at any index."""

from __future__ import annotations

import hashlib
import inspect
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler, Sampler

from . import ranks, strategies
from .arguments import length_of, size_of, whole_number
from .coreset import Coreset
from .epoch import Epoch, Pass
from .labels import check_labels, labels_of
from .layers import unwrapped
from .probe import Probe
from .types import Forward, Strategy
from .undisturbed import undisturbed
from .weighted import Weighted, WeightedIndex

_WEIGHTS = ("draw", "loss", "none")
_SELECT, _ORDER = 0, 1  # streams of random numbers


class CoresetSampler(Sampler[int]):
    """Draws each epoch from a small subset that the current model would learn the same things from.

    At the start of every `reselect_every`-th epoch the strategy looks at candidates through the model, keeps `size` of
    them and weighs each by the examples it stands for. The order depends only on the coreset, `seed` and the epoch,
    never on global random state, and the length is `size` from the start.

    Epochs count themselves, one a pass, unless `set_epoch` says otherwise. With `max_overhead` a selection that would
    bring selection over that share of the run's wall time is put off to a later epoch; the first always takes place.
    What is selected when then depends on the clock: leave it out where runs must repeat bit for bit.

    `weights`: `"draw"` draws examples in proportion to their weights, so a loop needs no change; `"loss"` yields each
    once, its weight (of mean one) to be read by `Weighted(train_set)` and multiplied into the loss; `"none"` yields
    each once.

    In a process group every process must have the sampler: selection is shared out, and all get the same coreset.
    Frameworks that split a sampler's indices over processes (Hugging Face Trainer, accelerate, Lightning) take this
    class; where the sampler itself has to (torchrun, timm, Ray) use `DistributedCoresetSampler`.

    Example:
        >>> sampler = CoresetSampler(train_set, model, fraction=0.1)
        >>> loader = DataLoader(train_set, batch_size=128, sampler=sampler)
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        model: nn.Module,
        *,
        fraction: float | None = None,
        size: int | None = None,
        seed: int = 0,
        strategy: Strategy | None = None,
        reselect_every: int = 1,
        max_overhead: float | None = None,
        weights: str = "draw",
        selection_set: Dataset[Any] | None = None,
        labels: Any = None,
        forward: Forward | None = None,
        collate_fn: Any = None,
        batch_size: int = 128,
        num_workers: int = 0,
        progress: bool = True,
    ) -> None:
        n = length_of(dataset)
        self.dataset, self.model = dataset, model
        self.size = size_of(n, fraction, size)
        self.seed = whole_number("seed", seed, 0)
        self.strategy = strategies.stable() if strategy is None else strategy
        self.reselect_every = whole_number("reselect_every", reselect_every, 1)
        self.max_overhead = max_overhead
        self.weights = weights
        self.selection_set = dataset if selection_set is None else selection_set
        self.forward, self.collate_fn = forward, collate_fn
        self.batch_size, self.num_workers = (
            whole_number("batch_size", batch_size, 1),
            whole_number("num_workers", num_workers, 0),
        )
        self.progress = progress
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        unwrapped(model)
        if not callable(self.strategy):
            raise TypeError(f"strategy must be a function, such as strategies.stable(), got {strategy!r}")
        try:
            inspect.signature(self.strategy).bind(None, 0, None)
        except TypeError as error:
            raise TypeError(
                f"strategy must take (view, size, generator); {strategy} does not ({error}). "
                "Those of the library are built by a call: strategies.stable(), with parentheses."
            ) from error
        if weights not in _WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(map(repr, _WEIGHTS))}, got {weights!r}")
        if weights == "loss" and not isinstance(dataset, Weighted):
            raise TypeError(
                'weights="loss" needs a data set that hands the weights on: pass Weighted(train_set) to the sampler and '
                "to the DataLoader, and take (x, y, weight) batches"
            )
        if max_overhead is not None and not 0 < max_overhead < 1:
            raise ValueError(f"max_overhead must be a share of the wall time in (0, 1), got {max_overhead}")
        if length_of(self.selection_set) != n:
            raise ValueError(f"selection_set must have the same {n} examples, got {length_of(self.selection_set)}")
        self._n = n
        self._labels = None if labels is None else check_labels(labels, n)
        self._label_hash: str | None = None
        self._coreset: Coreset | None = None
        self._selected_epoch = self._decided_epoch = -1
        self._memory: dict[str, Tensor] = {}
        self._epoch = Epoch()
        self._clock_start: float | None = None
        self._spent: dict[str, float] = dict.fromkeys(
            ("selections", "put_off", "seconds", "wall", "forward_examples"), 0
        )
        self._last: dict[str, float] = {}

    @property
    def epoch(self) -> int:
        """The epoch whose pass has begun, or that comes next: where a resumed loop starts."""
        return self._epoch.number

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def labels(self) -> Tensor:
        """`(n,)` every example's class; found at first use."""
        if self._labels is None:
            plain = self.dataset.dataset if isinstance(self.dataset, Weighted) else self.dataset
            with undisturbed(self.model, seed=_mixed(self.seed)):  # reading may go through random transforms
                self._labels = labels_of(plain, num_workers=self.num_workers, progress=self.progress)
        return self._labels

    @property
    def coreset(self) -> Coreset:
        """The examples in use; selects them if that has not happened yet."""
        if self._coreset is None:
            self.select()
        assert self._coreset is not None
        return self._coreset

    @property
    def stats(self) -> dict[str, float]:
        """What selection has cost so far and what the last one gave, as plain numbers to log.

        `selections` and those `put_off` by `max_overhead`; `seconds` selecting and its `share` of the wall time since
        the first; `forward_examples`: examples times draws that went through the model; of the last selection:
        `last_seconds`, `overlap` with the coreset before, `covering_cost`: mean distance to the nearest kept example, and
        `distinct`: the share of an epoch's draws that show another example than those before, on average.
        """
        wall = self._wall()
        share = self._spent["seconds"] / wall if wall > 0 else 0.0
        totals = {key: value for key, value in self._spent.items() if key != "wall"}
        return {**totals, "share": min(share, 1.0), **self._last}

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is; calling it more than once does no harm, nor does it after a resume."""
        self._epoch.set(whole_number("epoch", epoch, 0))
        if "accelerate.data_loader" in sys.modules:
            from .integrations import accelerate

            accelerate.select_everywhere(self)

    def select(self) -> Coreset:
        """Selects now, for the epoch that comes next, whether it is due or not. The model comes back as it was."""
        return self._select(self._epoch.coming)

    def select_if_due(self) -> Coreset:
        """Selects for the epoch that comes next if `reselect_every` and `max_overhead` say so."""
        epoch = self._epoch.coming
        if self._decided_epoch != epoch or self._coreset is None:
            if self._due(epoch):
                return self._select(epoch)
            self._decided_epoch = epoch
        assert self._coreset is not None
        return self._coreset

    def __iter__(self) -> Iterator[int]:
        return Pass.of(self)

    def _begin_pass(self, resume: tuple[int, int] | None) -> Iterable[int]:
        """What is left of the pass that comes next, or of the one that `resume` says, `(epoch, position)`."""
        epoch = self._epoch
        start = self._start_of_pass()
        epoch.number, start = (epoch.coming, start) if resume is None else resume
        epoch.begun = False
        self.select_if_due()
        order, weights = self._order()
        left = epoch.begin(order, start)
        return left if weights is None else map(WeightedIndex, left, weights[start:])

    def _start_of_pass(self) -> int:
        """Where the next pass begins; frameworks that read ahead or skip batches themselves are asked."""
        start, self._epoch.loop_is_over = self._epoch.start, None
        if "torchdata.stateful_dataloader" in sys.modules:
            from .integrations import torchdata

            torchdata.check_that_state_is_seen(self)
        if "accelerate.data_loader" in sys.modules:
            from .integrations import accelerate

            start = accelerate.start_of_pass(self, start)
        return start

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Everything needed to go on with exactly the indices that were still to come.

        A DataLoader with workers draws indices ahead of the loop: pass `position`, the examples that this epoch's loop
        has consumed (batches times batch size), or use torchdata's StatefulDataLoader, which keeps count. Where all are
        consumed, a partial last batch included, the state is the next epoch's beginning. `position=0` is right for
        frameworks that skip batches themselves.
        """
        if position is not None:
            whole_number("position", position, 0)
        epoch, position = self._epoch.saved(position, len(self))
        return {
            "version": 1,
            "n": self._n,
            "size": self.size,
            "length": len(self),
            "seed": self.seed,
            "labels": self._fingerprint(),
            "epoch": epoch,
            "position": position,
            "indices": None if self._coreset is None else self._coreset.indices,
            "weights": None if self._coreset is None else self._coreset.weights,
            "selected_epoch": self._selected_epoch,
            "decided_epoch": self._decided_epoch,
            "memory": dict(self._memory),
            "spent": {**self._spent, "wall": self._wall()},
            "last": dict(self._last),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where `state_dict` was called. A state of another data set or size is refused and nothing changes."""
        if state.get("version") != 1:
            raise ValueError(
                f"this is not a state of CoresetSampler that this version reads: version {state.get('version')}"
            )
        own = {"n": self._n, "size": self.size, "seed": self.seed, "labels": self._fingerprint()}
        own["length"] = len(self)  # of one process's share: a position means nothing among another number of them
        for key, value in own.items():
            if state.get(key) != value:
                what = "other labels" if key == "labels" else f"{key}={state.get(key)}, here it is {value}"
                raise ValueError(f"the state was saved with {what}; it belongs to another data set or setting")
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(f"the state lacks {sorted(missing)}; it was not made by state_dict()")
        if not 0 <= state["position"] <= len(self):
            raise ValueError(f"position must be between 0 and {len(self)}, got {state['position']}")
        if "accelerate.data_loader" in sys.modules:
            from .integrations import accelerate

            accelerate.check_load(self, state["position"])
        coreset = None if state["indices"] is None else self._checked(Coreset(state["indices"], state["weights"]))
        self._coreset, self._memory = coreset, dict(state["memory"])
        self._epoch.load(state["epoch"], state["position"])
        self._selected_epoch, self._decided_epoch = state["selected_epoch"], state["decided_epoch"]
        self._spent, self._last = dict(state["spent"]), dict(state["last"])
        self._clock_start = time.perf_counter() if coreset is not None else None

    def _fingerprint(self) -> str:
        if self._label_hash is None:
            self._label_hash = hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()[:16]
        return self._label_hash

    def _wall(self) -> float:
        return self._spent["wall"] + (time.perf_counter() - self._clock_start if self._clock_start else 0.0)

    def _due(self, epoch: int) -> bool:
        if self._coreset is None:
            return True
        if 0 <= epoch - self._selected_epoch < self.reselect_every:
            return False
        if self.max_overhead is None:
            return True
        cost = self._last["last_seconds"]
        affordable = self._spent["seconds"] + cost <= self.max_overhead * (self._wall() + cost)
        affordable = ranks.from_first(affordable)  # clocks differ, the decision must not
        self._spent["put_off"] += not affordable
        return affordable

    def _select(self, epoch: int) -> Coreset:
        labels, began = self.labels, time.perf_counter()
        for name, dataset in (("dataset", self.dataset), ("selection_set", self.selection_set)):
            if length_of(dataset) != self._n:
                raise ValueError(
                    f"{name} had {self._n} examples when the sampler was made and has {length_of(dataset)} now"
                )
        plain = self.selection_set.dataset if isinstance(self.selection_set, Weighted) else self.selection_set
        seed = _mixed(self.seed, epoch, _SELECT)
        memory = dict(self._memory)
        with undisturbed(self.model, seed=seed):
            probe = Probe(
                plain,
                self.model,
                labels,
                forward=self.forward,
                collate_fn=self.collate_fn,
                batch_size=self.batch_size,
                num_workers=self.num_workers,
                progress=self.progress,
                memory=memory,
                seed=seed,
            )
            chosen = self.strategy(probe, self.size, torch.Generator().manual_seed(seed))
        coreset = self._checked(ranks.from_first(chosen))
        overlap = {} if self._coreset is None else {"overlap": coreset.overlap(self._coreset)}
        # Nothing above has changed the sampler: a selection that fails leaves the last coreset in use.
        self._coreset, self._memory = coreset, memory
        self._selected_epoch = self._decided_epoch = epoch
        seconds = time.perf_counter() - began
        if self._clock_start is None:
            self._clock_start = began
        self._spent["selections"] += 1
        self._spent["seconds"] += seconds
        self._spent["forward_examples"] += probe.forward_examples
        self._last = {"last_seconds": seconds, "distinct": self._distinct(coreset), **overlap, **probe.figures}
        return coreset

    def _distinct(self, coreset: Coreset) -> float:
        if self.weights != "draw":
            return 1.0
        times = coreset.weights * (self.size / coreset.weights.sum())  # that each is drawn, on average
        return float(times.clamp(max=1).sum()) / self.size

    def _checked(self, coreset: Coreset) -> Coreset:
        if not isinstance(coreset, Coreset):
            raise TypeError(f"a strategy must return a Coreset, got {type(coreset).__name__}")
        if len(coreset) != self.size or int(coreset.indices.max()) >= self._n or float(coreset.weights.sum()) <= 0:
            raise ValueError(
                f"a strategy must return {self.size} indices below {self._n} and weights with a positive sum, got "
                f"{len(coreset)} indices up to {int(coreset.indices.max()) if len(coreset) else None} "
                f"and weights that sum to {float(coreset.weights.sum())}; testing.check_strategy says more"
            )
        return coreset

    def _order(self) -> tuple[list[int], list[float] | None]:
        """The epoch's indices, the same in every process, and what they weigh, if that is to be handed on."""
        coreset = self.coreset
        generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch, _ORDER))
        if self.weights == "draw":
            return systematic_draw(coreset, self.size, generator).tolist(), None
        order = torch.randperm(self.size, generator=generator)
        indices = coreset.indices[order].tolist()
        if self.weights == "none":
            return indices, None
        return indices, (coreset.weights[order] * self.size / coreset.weights.sum()).tolist()


class DistributedCoresetSampler(CoresetSampler, DistributedSampler):
    """The same, each process drawing its own equal share: for torchrun, timm and Ray, which leave sharding to the sampler.

    Shares are made equal by repeating a few indices, or with `drop_last` by leaving a few out. `num_replicas` and `rank`
    are those of the process group if not given, also of one that is set up after the sampler is made (Lightning).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        model: nn.Module,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        **settings: Any,
    ) -> None:
        CoresetSampler.__init__(self, dataset, model, **settings)
        self.drop_last, self.shuffle = drop_last, True
        self._given_rank, self._given_replicas = rank, num_replicas
        self._check_share()

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The processes that share the coreset out."""
        return ranks.world()[1] if self._given_replicas is None else self._given_replicas

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process among them."""
        return ranks.world()[0] if self._given_rank is None else self._given_rank

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The indices of one process's share."""
        rounded = self.size if self.drop_last else self.size + self.num_replicas - 1
        return rounded // self.num_replicas

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The indices of all shares together."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def _check_share(self) -> None:
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank must be in [0, num_replicas={self.num_replicas}), got {self.rank}")
        if self.drop_last and self.size < self.num_replicas:
            raise ValueError(f"size={self.size} leaves nothing for {self.num_replicas} processes with drop_last")

    def _order(self) -> tuple[list[int], list[float] | None]:
        self._check_share()
        order, weights = super()._order()
        repeats = -(-self.total_size // len(order))
        mine = slice(self.rank, self.total_size, self.num_replicas)
        return (order * repeats)[mine], None if weights is None else (weights * repeats)[mine]


def systematic_draw(coreset: Coreset, size: int, generator: torch.Generator) -> Tensor:
    """`(size,)` indices in random order, each as often as its weight says, rounded up or down at random.

    Systematic resampling: one uniform number places an even comb over the cumulated weights. Unbiased, and with less
    variance than independent draws.
    """
    shuffled = torch.randperm(len(coreset), generator=generator)
    edges = torch.cumsum(coreset.weights[shuffled], 0)
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    teeth = torch.ceil(edges * (size / edges[-1]) - offset).clamp_(0, size).long()  # of the comb, below each edge
    teeth[-1] = size
    times = teeth.diff(prepend=teeth.new_zeros(1))
    drawn = coreset.indices[shuffled].repeat_interleave(times, output_size=size)
    return drawn[torch.randperm(size, generator=generator)]


def _mixed(*numbers: int) -> int:
    """One seed out of several numbers, far apart for near ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
