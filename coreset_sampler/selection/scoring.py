"""The scoring pass: runs the user's model over candidates, under draws of a posterior; loading, devices, processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from .. import distributed
from ..layers import check_ready, device_of, innermost, is_sharded, matrix_layers, unwrapped
from .batch import copied, in_order, moved, regrouped
from .forward import default_forward, logits_of, precision
from .labels import WORKER_TIMEOUT, class_numbers, not_one_class
from .model_state import COPIED_WHOLE, ModelState, WriteGuard
from .reentrant import ReentrantError, noticing_checkpoints
from .scores import ScoreStore
from .shared_forward import CannotShareError, run_shared
from .types import Draw, Forward

T = TypeVar("T")

_WORTH_SHARING = 0.25  # of a network's operations; below that recording costs as much as it spares


class ScoringView:
    """The data seen through the current model; what strategies get as their `View`.

    Parameters are replaced for the time of a call and buffers by copies of themselves, so nothing that a forward does
    to them stays. Other tensors that a forward writes to are found at the first call, and from then on treated alike.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        model: nn.Module,
        labels: Tensor,
        *,
        forward_fn: Forward | None,
        lengths: Tensor | None = None,
        dtype: torch.dtype | None = None,
        collate_fn: Any,
        batch_size: int,
        num_workers: int,
        progress: bool,
        seed: int,
        before_use: Callable[[], object] | None = None,
    ) -> None:
        self._model, self._before_use = innermost(model), before_use
        self.labels = labels
        self.classes = int(labels.max()) + 1
        self.scores: ScoreStore | None = None
        self.figures: dict[str, float] = {}
        self.forward_examples = 0
        self._dataset, self._collate_fn = dataset, collate_fn
        self._batch_size, self._num_workers, self._progress, self._seed = (
            batch_size,
            num_workers,
            progress,
            seed,
        )
        self._forward = forward_fn or partial(default_forward, classes=self.classes)
        self._lengths, self._dtype = lengths, dtype
        if distributed.world()[1] > 1:
            _ = self._buffers  # which all processes find together, also those that will run nothing
        self._state: ModelState | None = None
        self._written: set[int] = set()  # ids of tensors that a forward writes to
        self._share, self._large = True, False
        self._width = 0  # of embeddings

    @property
    def model(self) -> nn.Module:
        """The model, looked after from its first use on."""
        if self._before_use is not None:
            self._before_use()
        return self._model

    # Found at the first use: a strategy that reads what training said of the examples runs nothing.
    @cached_property
    def _own(self) -> dict[str, Tensor]:
        return {
            **dict(self._model.named_parameters(remove_duplicate=False)),
            **dict(self._model.named_buffers(remove_duplicate=False)),
        }

    @cached_property
    def _buffers(self) -> dict[int, Tensor]:
        own = {} if is_sharded(self._model) else dict(self._model.named_buffers())
        return {id(self._own[name]): value for name, value in distributed.buffers_of_first(own).items()}

    @cached_property
    def _device(self) -> torch.device:
        return device_of(self._model)

    def gradients(self, groups: Iterable[Tensor], draws: Sequence[Draw] = ({},)) -> Iterator[Tensor]:
        """See `View.gradients`."""
        groups, draws = list(groups), list(draws)
        names = {name for draw in draws for name in draw}
        for name in names - self._own.keys():
            raise ValueError(f"a draw of the posterior names {name!r}, which {type(self.model).__name__} does not have")
        self.log(perturbed_parameters=sum(self._own[name].numel() for name in names))

        def run(asked: list[Tensor]) -> Iterator[Tensor]:
            return (self._gradients(batch, at, draws) for batch, at in self._batches(asked))

        yield from regrouped(in_order(run, groups, self._lengths), groups)

    def embeddings(self, groups: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `View.embeddings`."""
        groups = list(groups)
        self._width = 0

        def run(asked: list[Tensor]) -> Iterator[Tensor]:
            return (self._embeddings(batch, at)[None] for batch, at in self._batches(asked))

        yield from regrouped(in_order(run, groups, self._lengths), groups, squeeze=True)

    def fisher(self, names: Sequence[str], examples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """See `View.fisher`.

        With labels drawn from the model the gradients of different examples are uncorrelated and have mean zero, so the
        square of a batch's summed gradient is an unbiased estimate of the sum of squares; eight label draws a batch.
        """
        repeats = 8
        n = len(self.labels)
        chosen = torch.randperm(n, generator=generator)[:examples]
        values = {name: self._own[name].detach().clone().requires_grad_() for name in names}
        total = {name: torch.zeros_like(value, requires_grad=False) for name, value in values.items()}
        for batch, at in self._batches([chosen]):
            with torch.enable_grad():
                with noticing_checkpoints() as hidden:
                    logits, _ = self._run(batch, values, whole=True)  # gradients of float16 would vanish
                log_p = self._checked(logits, at).log_softmax(1)
                for repeat in range(repeats):
                    y = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
                    loss = -log_p.gather(1, y).sum()
                    more = repeat + 1 < repeats
                    with noticing_checkpoints():
                        parts = torch.autograd.grad(loss, list(values.values()), retain_graph=more, allow_unused=True)
                    if hidden and any(part is None for part in parts):
                        raise ReentrantError
                    if all(part is None for part in parts):
                        raise ValueError(
                            "the loss does not depend on the layers that the Laplace posterior is asked for; name others"
                        )
                    for name, part in zip(values, parts, strict=True):
                        if part is not None:  # else the network does not use it, and the prior is all there is
                            total[name] += part.detach() ** 2 / (repeats * len(chosen))
        return total

    def shard(self, items: Sequence[T]) -> list[T]:
        """See `View.shard`."""
        return distributed.share(items)

    def gather(self, shard: Sequence[T]) -> list[T]:
        """See `View.gather`."""
        return distributed.gather(shard)

    def log(self, **figures: float) -> None:
        """See `View.log`."""
        self.figures.update(figures)

    def _batches(self, groups: list[Tensor]) -> Iterator[tuple[Any, Tensor]]:
        """Batches of the groups' examples in order, on the model's device, with their indices."""
        check_ready(unwrapped(self.model))
        order = torch.cat(groups) if groups else torch.empty(0, dtype=torch.int64)
        loader = DataLoader(
            self._dataset,
            batch_size=self._batch_size,
            sampler=order.tolist(),
            num_workers=self._num_workers,
            collate_fn=self._collate_fn,
            generator=torch.Generator().manual_seed(self._seed),
            timeout=WORKER_TIMEOUT if self._num_workers else 0,
        )
        quiet = not self._progress or distributed.world()[0] != 0
        shown = tqdm(loader, "selecting", unit="batch", delay=2, disable=quiet, leave=False)
        for batch, at in zip(shown, order.split(self._batch_size), strict=True):
            yield moved(batch, self._device), at

    def _run(self, batch: Any, draw: Draw, whole: bool = False) -> tuple[Tensor, Tensor]:
        first = self._state is None
        state = self._state = self._state or ModelState(self.model)
        values = {key: value.clone() for key, value in self._buffers.items()}  # a forward may write into them
        drawn = {id(self._place(name, state)): value for name, value in draw.items()}
        values.update(drawn)
        values.update({key: values.get(key, state.tensors[key]).clone() for key in self._written})
        guard = WriteGuard([*state.tensors.items(), *drawn.items()]) if first or self._large else None
        try:
            with state.holding(values), guard or nullcontext(), precision(None if whole else self._dtype, self._device):
                return self._forward(self.model, batch)
        finally:
            if guard is not None:
                guard.undo()
                self._written |= guard.written
                self._large = guard.bytes > COPIED_WHOLE

    def _place(self, name: str, state: ModelState) -> Tensor:
        if not state.has_place(self._own[name]):
            raise ValueError(
                f"{name} of {type(self.model).__name__} cannot be replaced by a draw of the posterior, as the parameters of "
                "a scripted model cannot. Pass the model before torch.jit.script, or a strategy without draws, such as "
                "strategies.Crest()."
            )
        return self._own[name]

    def _run_draws(self, batch: Any, draws: list[Draw]) -> list[tuple[Tensor, Tensor]]:
        own = {**self._own, **draws[0]}  # a name that a draw leaves out keeps the model's value
        names = dict.fromkeys(name for draw in draws for name in draw)
        changed = [own[name] for name in names if any(d.get(name, self._own[name]) is not own[name] for d in draws[1:])]
        if len(draws) > 1 and not changed:
            return [self._run(batch, draws[0])] * len(draws)
        if len(draws) > 1 and self._share:
            try:
                given, written = copied(batch), len(self._written)
                outputs, spared = run_shared(lambda draw: self._run(given, draw), draws, changed)
                if len(self._written) > written:
                    raise CannotShareError("the network writes into its own parameters")
                self._share = spared > _WORTH_SHARING
                return outputs
            except CannotShareError:
                self._share = False  # separate runs give the same numbers, only later
        if len(draws) == 1:
            return [self._run(batch, draws[0])]
        return [self._run(copied(batch), draw) for draw in draws]  # a network may write into what it is given

    def _gradients(self, batch: Any, at: Tensor, draws: list[Draw]) -> Tensor:
        outputs = self._run_draws(batch, draws)
        self.forward_examples += len(at) * len(draws)
        expected = self.labels[at]
        found = class_numbers(torch.as_tensor(outputs[0][1]).to("cpu"))
        if found.is_floating_point() or found.shape != expected.shape:
            raise not_one_class(f"labels in a batch of {len(at)}", found)
        if not torch.equal(found.long(), expected):
            where = int((found != expected).nonzero()[0])
            raise ValueError(
                f"example {int(at[where])} comes with label {int(found[where])}, but the data set's stored labels say "
                f"{int(expected[where])}. If labels are changed on the way, pass labels= with those that training sees."
            )
        logits = torch.stack([self._checked(output, at) for output, _ in outputs])
        if self.classes > logits.shape[2]:
            way_out = "If they are not the classes, pass labels= and forward_fn=."
            if int(self.labels.min()) == 1 and self.classes - 1 == logits.shape[2]:
                way_out = "They count from 1 and must count from 0: let the data set return y - 1, labels= the same."
            raise ValueError(
                f"labels go up to {self.classes - 1}, but the model gives {logits.shape[2]} logits. {way_out}"
            )
        gradients = logits.softmax(2)
        gradients[:, torch.arange(len(at)), expected.to(logits.device)] -= 1
        return gradients.cpu()

    def _checked(self, logits: Tensor, at: Tensor) -> Tensor:
        logits = logits_of(logits, self.classes).float()
        if len(logits) != len(at):
            raise ValueError(f"the model gave {len(logits)} rows of logits for {len(at)} examples")
        if not bool(torch.isfinite(logits.detach().sum())):  # one pass without a copy; NaN and inf survive a sum
            bad = ~torch.isfinite(logits.detach()).all(1)
            if not bool(bad.any()):
                return logits  # only their sum is too large
            raise ValueError(
                f"the model gives NaN or infinite logits for {int(bad.sum())} of {len(at)} candidates (the first is example "
                f"{int(at[int(bad.nonzero()[0])])}). Has training diverged? If not, lower the posterior's scale."
            )
        return logits

    def _embeddings(self, batch: Any, at: Tensor) -> Tensor:
        """What the layer with a weight matrix that is called last receives: that one makes the logits."""
        received: list[Tensor] = []

        def note(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            received[:] = [v for v in (*inputs, *named.values()) if isinstance(v, Tensor)][:1]

        layers = [self.model.get_submodule(name) for name in matrix_layers(self.model)]
        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        try:
            self._checked(self._run(batch, {})[0], at)
        finally:
            for handle in handles:
                handle.remove()
        if not received or len(received[0]) != len(at):
            got = tuple(received[0].shape) if received else "nothing"
            raise ValueError(
                f"the last layer with a weight matrix received {got} for {len(at)} examples: no embeddings"
            )
        self.forward_examples += len(at)
        vectors = received[0].detach().flatten(1).float().cpu()
        self._width = self._width or vectors.shape[1]
        if vectors.shape[1] != self._width:
            raise ValueError(
                f"the head receives {self._width} numbers per example in one batch and {vectors.shape[1]} in another, so "
                "they cannot be compared. Pass a collate_fn= that pads to one length, or a strategy that reads gradients."
            )
        return vectors
