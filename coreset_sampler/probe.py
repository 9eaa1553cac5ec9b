"""The one place that runs the user's model for selection: loading, draws, devices, processes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from . import ranks
from .labels import LABEL_KEYS, label_of
from .layers import matrix_layers, unwrapped
from .replay import CannotShareError, run_shared
from .types import Draw, Forward

T = TypeVar("T")

_WORTH_SHARING = 0.25  # of a network's operations; below that recording costs as much as it spares


def default_forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Runs a model on `(x, y)` pairs, or on dicts with `labels` or `label` by keyword, as Hugging Face models like it."""
    labels = label_of(batch)
    if isinstance(batch, Mapping):
        accepted = inspect.signature(model.forward).parameters
        any_name = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        named = {k: v for k, v in batch.items() if k not in LABEL_KEYS and (any_name or k in accepted)}
        try:
            inspect.signature(model.forward).bind(**named)
        except TypeError as error:
            raise TypeError(
                f"the model takes ({', '.join(accepted)}) and cannot be given {sorted(batch)} of a batch by name: {error}. "
                'Pass forward= to say how, such as forward=lambda model, batch: (model(batch["image"]), batch["label"]).'
            ) from error
        output = model(**named)
    else:
        if len(batch) > 2 and isinstance(labels, Tensor) and (labels.is_floating_point() or labels.ndim != 1):
            raise ValueError(
                f"of a batch's {len(batch)} fields the first is taken for the inputs, the second for the labels, which has "
                f"shape {tuple(labels.shape)} of {labels.dtype}: not one class an example. Pass labels= and forward= to say "
                "which is which, such as forward=lambda model, batch: (model(batch[1]), batch[2])."
            )
        output = model(batch[0])
    return logits_of(output), labels


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: the tensor itself, `.logits`, `["logits"]`, or the first of a tuple."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Mapping):
        logits = logits.get("logits")
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        raise ValueError(
            f"the model must give logits of shape (batch, classes), got {got}. "
            "Pass forward=lambda model, batch: (logits, labels)."
        )
    if logits.shape[1] == 1:
        raise ValueError(
            "the model gives one logit an example; selection needs one for each class. Pass a forward= that returns "
            "torch.cat([torch.zeros_like(z), z], 1) as logits."
        )
    return logits


class _Runner(nn.Module):
    """The user's model and `forward` as one module, whose parameters a draw can replace for the time of a call."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = forward
        self.training = False

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.run(self.model, batch)


class Probe:
    """The data seen through the current model; what strategies get as their `View`.

    Parameters are replaced for the time of a call and buffers by copies of themselves, so nothing that a forward does
    to them stays.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        model: nn.Module,
        labels: Tensor,
        *,
        forward: Forward | None,
        collate_fn: Any,
        batch_size: int,
        num_workers: int,
        progress: bool,
        memory: dict[str, Tensor],
        seed: int,
    ) -> None:
        self.model = unwrapped(model)
        self.labels = labels
        self.classes = int(labels.max()) + 1
        self.memory = memory
        self.figures: dict[str, float] = {}
        self.forward_examples = 0
        self._dataset, self._collate_fn = dataset, collate_fn
        self._batch_size, self._num_workers, self._progress, self._seed = (
            batch_size,
            num_workers,
            progress,
            seed,
        )
        self._runner = _Runner(self.model, forward or default_forward)
        self._own = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        buffers = ranks.buffers_of_first(dict(self.model.named_buffers()))
        self._buffers = {f"model.{name}": value for name, value in buffers.items()}
        first = next(self.model.parameters(), None)
        self._device = first.device if first is not None else torch.device("cpu")
        self._share = True
        self._width = 0  # of embeddings

    def gradients(self, groups: Iterable[Tensor], draws: Sequence[Draw] = ({},)) -> Iterator[Tensor]:
        """See `View.gradients`."""
        groups, draws = list(groups), list(draws)
        yield from _regroup((self._gradients(batch, at, draws) for batch, at in self._batches(groups)), groups)

    def embeddings(self, groups: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `View.embeddings`."""
        groups = list(groups)
        self._width = 0
        vectors = (self._embeddings(batch, at)[None] for batch, at in self._batches(groups))
        yield from _regroup(vectors, groups, squeeze=True)

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
                logits, _ = self._run(batch, values)
                log_p = self._checked(logits, at).log_softmax(1)
                for repeat in range(repeats):
                    y = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
                    loss = -log_p.gather(1, y).sum()
                    more = repeat + 1 < repeats
                    parts = torch.autograd.grad(loss, list(values.values()), retain_graph=more, allow_unused=True)
                    if all(part is None for part in parts):
                        raise ValueError(
                            "the loss does not depend on the layers that the Laplace posterior is asked for; name others, "
                            "or switch reentrant activation checkpointing off, which hides them"
                        )
                    for name, part in zip(values, parts, strict=True):
                        if part is not None:  # else the network does not use it, and the prior is all there is
                            total[name] += part.detach() ** 2 / (repeats * len(chosen))
        return total

    def mine(self, items: Sequence[T]) -> list[T]:
        """See `View.mine`."""
        return ranks.share(items)

    def gather(self, mine: Sequence[T]) -> list[T]:
        """See `View.gather`."""
        return ranks.gather(mine)

    def report(self, **figures: float) -> None:
        """See `View.report`."""
        self.figures.update(figures)

    def _batches(self, groups: list[Tensor]) -> Iterator[tuple[Any, Tensor]]:
        """Batches of the groups' examples in order, on the model's device, with their indices."""
        order = torch.cat(groups) if groups else torch.empty(0, dtype=torch.int64)
        loader = DataLoader(
            self._dataset,
            batch_size=self._batch_size,
            sampler=order.tolist(),
            num_workers=self._num_workers,
            collate_fn=self._collate_fn,
            generator=torch.Generator().manual_seed(self._seed),
        )
        quiet = not self._progress or ranks.world()[0] != 0
        shown = tqdm(loader, "selecting", unit="batch", delay=2, disable=quiet, leave=False)
        for batch, at in zip(shown, order.split(self._batch_size), strict=True):
            yield _to(batch, self._device), at

    def _run(self, batch: Any, draw: Draw) -> tuple[Tensor, Tensor]:
        buffers = {name: value.clone() for name, value in self._buffers.items()}  # a forward may write into them
        values = {**buffers, **{f"model.{name}": value for name, value in draw.items()}}
        logits, labels = functional_call(self._runner, values, (batch,))
        return logits, labels

    def _run_draws(self, batch: Any, draws: list[Draw]) -> list[tuple[Tensor, Tensor]]:
        own = {**self._own, **draws[0]}  # a name that a draw leaves out keeps the model's value
        names = dict.fromkeys(name for draw in draws for name in draw)
        changed = [own[name] for name in names if any(d.get(name, self._own[name]) is not own[name] for d in draws[1:])]
        if len(draws) > 1 and not changed:
            return [self._run(batch, draws[0])] * len(draws)
        if len(draws) > 1 and self._share:
            try:
                given = _copied(batch)
                outputs, spared = run_shared(lambda draw: self._run(given, draw), draws, changed)
                self._share = spared > _WORTH_SHARING
                return outputs
            except CannotShareError:
                self._share = False  # separate runs give the same numbers, only later
        if len(draws) == 1:
            return [self._run(batch, draws[0])]
        return [self._run(_copied(batch), draw) for draw in draws]  # a network may write into what it is given

    def _gradients(self, batch: Any, at: Tensor, draws: list[Draw]) -> Tensor:
        outputs = self._run_draws(batch, draws)
        self.forward_examples += len(at) * len(draws)
        expected = self.labels[at]
        found = torch.as_tensor(outputs[0][1]).to("cpu")
        if found.is_floating_point() or found.shape != expected.shape:
            raise ValueError(
                f"labels in a batch must be one whole number an example, got shape {tuple(found.shape)} of {found.dtype} "
                f"for {len(at)} examples"
            )
        if not torch.equal(found.long(), expected):
            where = int((found != expected).nonzero()[0])
            raise ValueError(
                f"example {int(at[where])} comes with label {int(found[where])}, but the data set's stored labels say "
                f"{int(expected[where])}. If labels are changed on the way, pass labels= with those that training sees."
            )
        logits = torch.stack([self._checked(output, at) for output, _ in outputs])
        if self.classes > logits.shape[2]:
            raise ValueError(f"labels go up to {self.classes - 1}, but the model gives {logits.shape[2]} logits")
        gradients = logits.softmax(2)
        gradients[:, torch.arange(len(at)), expected.to(logits.device)] -= 1
        return gradients.cpu()

    def _checked(self, logits: Tensor, at: Tensor) -> Tensor:
        logits = logits_of(logits).float()
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
            self._run(batch, {})
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
                f"the head receives {self._width} numbers an example in one batch and {vectors.shape[1]} in another, so "
                "they cannot be compared. Pass a collate_fn= that pads to one length, or a strategy that looks at gradients."
            )
        return vectors


def _regroup(batches: Iterable[Tensor], groups: list[Tensor], squeeze: bool = False) -> Iterator[Tensor]:
    """Cuts a stream of `(draws, b, d)` batches into one tensor `(draws, k, d)` a group."""
    waiting: list[Tensor] = []
    have = 0
    stream = iter(batches)
    for group in groups:
        while have < len(group):
            waiting.append(next(stream))
            have += waiting[-1].shape[1]
        joined = torch.cat(waiting, 1) if len(waiting) != 1 else waiting[0]
        part, rest = joined[:, : len(group)], joined[:, len(group) :]
        waiting, have = ([rest], rest.shape[1]) if rest.shape[1] else ([], 0)
        yield part[0] if squeeze else part


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if hasattr(value, "to") else _mapped(lambda v: _to(v, device), value)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else _mapped(_copied, value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A batch of the same kind (dict, `BatchEncoding`, named tuple, tuple, list) with its entries changed."""
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        new.update({key: change(v) for key, v in value.items()})
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    return type(value)(map(change, value)) if isinstance(value, (tuple, list)) else value
