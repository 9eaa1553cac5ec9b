"""The samplers: they decide when to select, draw from the coreset, and can be saved and resumed at any index."""

from __future__ import annotations

import hashlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler, Sampler

from .. import distributed as ranks
from ..layers import unwrapped
from . import strategies
from .arguments import length_of, size_of, whole_number
from .budget import Budget
from .caller import Caller, find_caller
from .coreset import Coreset
from .describe import describe
from .epoch import Epoch, Pass
from .labels import check_labels, labels_of
from .preserve import undisturbed
from .scoring import ScoringView
from .types import Forward, State, Strategy
from .weighted import Weighted, WeightedIndex

_WEIGHTS = ("draw", "loss", "none")
_SELECT, _ORDER = 0, 1  # streams of random numbers


class CoresetSampler(Sampler[int]):
    """Draws each epoch from a small subset that the current model would learn the same things from.

    At the start of every `reselect_every`-th epoch the strategy looks at candidates through the model, keeps `size` of
    them and weighs each by the examples it stands for. The order depends only on the coreset, `seed` and the epoch,
    never on global random state, and the length is `size` from the start.

    Epochs count themselves, one a pass, unless `set_epoch` says otherwise. With `max_overhead` a selection that would
    bring selection over that share of the time of selection and training is put off; the first always takes place.
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
        strategy: str | Strategy | Callable[..., Coreset] = "stable",
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
        self.strategy = strategies.resolve(strategy)
        self.reselect_every = whole_number("reselect_every", reselect_every, 1)
        self._budget = Budget(max_overhead)
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
        if weights not in _WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(map(repr, _WEIGHTS))}, got {weights!r}")
        if weights == "loss" and not isinstance(dataset, Weighted):
            raise TypeError(
                'weights="loss" needs a data set that hands the weights on: pass Weighted(train_set) to the sampler and '
                "to the DataLoader, and take (x, y, weight) batches"
            )
        if length_of(self.selection_set) != n:
            raise ValueError(f"selection_set must have the same {n} examples, got {length_of(self.selection_set)}")
        self._n = n
        self._labels = None if labels is None else check_labels(labels, n)
        self._label_hash: str | None = None
        self._coreset: Coreset | None = None
        self._selected_epoch = self._decided_epoch = -1
        self._state: State = None  # of the strategy
        self._epoch = Epoch()
        self._compared = False  # whether all processes are known to have the same settings
        self._said: set[str] = set()  # warnings that were given
        self._spent: dict[str, float] = dict.fromkeys(("selections", "put_off", "forward_examples"), 0)
        self._last: dict[str, float] = {}

    @property
    def max_overhead(self) -> float | None:
        """The share of the time that selection may take."""
        return self._budget.max_overhead

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

        `selections` and those `put_off` by `max_overhead`; `seconds` selecting and its `share` of the time of selection
        and training epochs, what passes between epochs not counted; `forward_examples`: examples times draws that went
        through the model; of the last selection: `last_seconds`, `overlap` with the coreset before, `covering_cost`: mean
        distance to the nearest kept example, and `distinct`: the share of an epoch's draws that show another example
        than those before, on average.
        """
        return {**self._spent, "seconds": self._budget.selecting, "share": self._budget.share, **self._last}

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is; calling it more than once does no harm, nor does it after a resume."""
        self._epoch.set(whole_number("epoch", epoch, 0))
        if "accelerate.data_loader" in sys.modules:
            from ..integrations import accelerate

            accelerate.select_everywhere(self)

    def select(self) -> Coreset:
        """Selects now, for the epoch that comes next, whether it is due or not. The model comes back as it was."""
        return self._select(self._epoch.coming)

    def select_if_due(self) -> Coreset:
        """Selects for the epoch that comes next if `reselect_every` and `max_overhead` say so."""
        epoch = self._epoch.coming
        self._compare_processes()
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
        caller, epoch = find_caller(), self._epoch
        self._check_caller(caller)
        start = self._start_of_pass()
        epoch.number, start = (epoch.coming, start) if resume is None else resume
        epoch.begun = False
        self.select_if_due()
        order, weights = self._order()
        left = epoch.begin(order, start)
        self._budget.epoch_begins(caller.ahead)
        return left if weights is None else map(WeightedIndex, left, weights[start:])

    def _end_pass(self) -> None:
        self._epoch.ended = True
        self._budget.all_given_out()

    def _start_of_pass(self) -> int:
        """Where the next pass begins; frameworks that read ahead or skip batches themselves are asked."""
        start, self._epoch.loop_is_over = self._epoch.start, None
        if "torchdata.stateful_dataloader" in sys.modules:
            from ..integrations import torchdata

            torchdata.check_that_state_is_seen(self)
        if "accelerate.data_loader" in sys.modules:
            from ..integrations import accelerate

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
            **self._settings(),
            "epoch": epoch,
            "position": position,
            "indices": None if self._coreset is None else self._coreset.indices,
            "weights": None if self._coreset is None else self._coreset.weights,
            "selected_epoch": self._selected_epoch,
            "decided_epoch": self._decided_epoch,
            "strategy_state": strategies.state_dict(self.strategy, self._state)["state"],
            "spent": {**self._spent, **self._budget.state_dict()},
            "last": dict(self._last),
        }

    def _settings(self) -> dict[str, Any]:
        """What a state and the sampler that loads it must have in common, and all processes of a run."""
        return {
            "version": 2,
            "n": self._n,
            "size": self.size,
            "length": len(self),  # of one process's share: a position means nothing among another number of them
            "seed": self.seed,
            "labels": self._fingerprint(),
            "strategy": describe(self.strategy),
            "weighting": self.weights,
            "reselect_every": self.reselect_every,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where `state_dict` was called. A state of another data set, strategy or setting changes nothing."""
        self._check_state(state)
        coreset = None if state["indices"] is None else self._checked(Coreset(state["indices"], state["weights"]))
        epoch, position = whole_number("epoch", state["epoch"], 0), whole_number("position", state["position"], 0)
        selected, decided = (whole_number(name, state[name], -1) for name in ("selected_epoch", "decided_epoch"))
        strategy_state = strategies.load_state(
            self.strategy, {"strategy": state["strategy"], "state": state["strategy_state"]}
        )
        if position > len(self):
            raise ValueError(f"position must be between 0 and {len(self)}, got {position}")
        if "accelerate.data_loader" in sys.modules:
            from ..integrations import accelerate

            accelerate.check_load(self, position)
        # Nothing above has changed the sampler, nor can anything below fail.
        self._budget.load_state_dict(state["spent"])
        self._coreset, self._state = coreset, strategy_state
        self._spent, self._last = {name: state["spent"][name] for name in self._spent}, dict(state["last"])
        self._epoch.load(epoch, position)
        self._compared = False
        self._selected_epoch, self._decided_epoch = selected, decided

    def _check_state(self, state: Mapping[str, Any]) -> None:
        own = self._settings()
        if state.get("version") != own["version"]:
            raise ValueError(
                f"this is not a state of CoresetSampler that this version reads: version {state.get('version')}"
            )
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(f"the state lacks {sorted(missing)}; it was not made by state_dict()")
        for key, value in own.items():
            if state[key] != value:
                what = "other labels" if key == "labels" else f"{key}={state[key]}, here it is {value}"
                raise ValueError(f"the state was saved with {what}; it belongs to another data set or setting")
        kinds: dict[str, Any] = {"spent": (int, float), "last": (int, float)}
        needed = {"spent": {*self._spent, *self._budget.state_dict()}}
        for key, kind in kinds.items():
            found = state[key]
            good = isinstance(found, Mapping) and all(isinstance(value, kind) for value in found.values())
            if not good or needed.get(key, set()) - found.keys():
                raise ValueError(f"the state's {key} is damaged; it was not made by state_dict(): {found!r:.200}")

    def _fingerprint(self) -> str:
        if self._label_hash is None:
            self._label_hash = _short_hash(self.labels.numpy().tobytes())
        return self._label_hash

    def _due(self, epoch: int) -> bool:
        if self._coreset is None:
            return True
        if 0 <= epoch - self._selected_epoch < self.reselect_every:
            return False
        if self.max_overhead is None:
            return True
        affordable = ranks.from_first(self._budget.allows())  # clocks differ, the decision must not
        self._spent["put_off"] += not affordable
        return affordable

    def _select(self, epoch: int) -> Coreset:
        self._compare_processes()
        with ranks.together():
            labels, began = self.labels, time.perf_counter()
            chosen, strategy_state, probe = self._chosen(labels, epoch)
            coreset = ranks.from_first(chosen)
        coreset = self._checked(coreset)
        self._warn_of_left_out_classes(labels)
        overlap = {} if self._coreset is None else {"overlap": coreset.overlap(self._coreset)}
        # Nothing above has changed the sampler: a selection that fails leaves the last coreset in use.
        self._coreset = coreset
        self._state = strategy_state
        self._selected_epoch = self._decided_epoch = epoch
        seconds = time.perf_counter() - began
        self._budget.selected(seconds)
        self._spent["selections"] += 1
        self._spent["forward_examples"] += probe.forward_examples
        self._last = {"last_seconds": seconds, "distinct": self._distinct(coreset), **overlap, **probe.figures}
        return coreset

    def _chosen(self, labels: Tensor, epoch: int) -> tuple[Coreset, State, ScoringView]:
        """What the strategy chooses in this process, its new state, and the view that it read."""
        for name, dataset in (("dataset", self.dataset), ("selection_set", self.selection_set)):
            if length_of(dataset) != self._n:
                raise ValueError(
                    f"{name} had {self._n} examples when the sampler was made and has {length_of(dataset)} now"
                )
        plain = self.selection_set.dataset if isinstance(self.selection_set, Weighted) else self.selection_set
        seed = _mixed(self.seed, epoch, _SELECT)
        with undisturbed(self.model, seed=seed):
            probe = ScoringView(
                plain,
                self.model,
                labels,
                forward_fn=self.forward,
                collate_fn=self.collate_fn,
                batch_size=self.batch_size,
                num_workers=self.num_workers,
                progress=self.progress,
                seed=seed,
            )
            generator = torch.Generator().manual_seed(seed)
            return *self.strategy.select(probe, self.size, self._state, generator), probe

    def _compare_processes(self) -> None:
        """Once a run: processes that were given different things would choose different things, or wait for ever."""
        if self._compared or ranks.world()[1] == 1:
            return
        with ranks.together():
            shapes = [(name, *value.shape) for name, value in unwrapped(self.model).named_parameters()]
            loaded = None if self._coreset is None else self._coreset.indices.numpy().tobytes()
            ranks.compare(
                {
                    "class": type(self).__name__,
                    **self._settings(),
                    "max_overhead": self.max_overhead,
                    "model": f"{type(unwrapped(self.model)).__name__} {_short_hash(repr(shapes).encode())}",
                    "epoch": self._epoch.coming,
                    "coreset": None if loaded is None else _short_hash(loaded),
                }
            )
        self._compared = True

    def _warn_of_left_out_classes(self, labels: Tensor) -> None:
        classes = len(labels.unique()) if self.size <= int(labels.max()) else 0
        if self.size < classes:
            self._warn_once(
                f"size={self.size} is below the number of classes, {classes}: at every selection {classes - self.size} or "
                "more of them get no example. Pass a larger size."
            )

    def _check_caller(self, caller: Caller) -> None:
        if self.weights == "loss" and isinstance(self.dataset, Weighted) and caller.dataset is self.dataset.dataset:
            raise TypeError(
                'the DataLoader has the plain data set, so the weights of weights="loss" would be dropped. Give it the same '
                "Weighted(train_set) that the sampler has, and take (x, y, weight) batches."
            )
        if ranks.world()[1] > 1 and not caller.shares_out and not isinstance(self, DistributedSampler):
            self._warn_once(
                f"all {ranks.world()[1]} processes are given the same indices: nothing shares out what this "
                "CoresetSampler yields. Use DistributedCoresetSampler with torchrun, or prepare the loader with accelerate."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._said and ranks.world()[0] == 0:
            warnings.warn(message, stacklevel=3)
        self._said.add(message)

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


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _mixed(*numbers: int) -> int:
    """One seed out of several numbers, far apart for near ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
