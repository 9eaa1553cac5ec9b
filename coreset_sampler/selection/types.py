"""The protocols of the library. Read this first.

choose:  a `Strategy` looks at a `View` (data seen through the user's model, under draws of a `Posterior`) and
returns a `Coreset`; a sampler draws from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..layers import Layers as Layers
from .coreset import Coreset

T = TypeVar("T")

Draw = Mapping[str, Tensor]
"""Parameter or buffer name -> the value that one draw puts in its place. An empty one is the model as it is."""

Forward = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""`(model, batch) -> (logits (b, classes), labels (b,))`."""


class View(Protocol):
    """What a strategy may look at: the labels, and the data through the current model.

    Under several processes a strategy runs on each of them. `mine` gives this process its share of the work and
    `gather` puts the shares together again, in order. A strategy that uses neither does all the work everywhere,
    and the answer of process 0 counts.
    """

    model: nn.Module
    labels: Tensor
    """`(n,)` int64: every example's class."""
    classes: int
    memory: dict[str, Tensor]
    """What a strategy wants to find again at the next selection; saved and resumed with the sampler."""

    def gradients(self, groups: Iterable[Tensor], draws: Sequence[Draw] = ({},)) -> Iterator[Tensor]:
        """For each group of indices `(k,)` the logit gradients `softmax - onehot` `(draws, k, classes)`."""
        ...

    def embeddings(self, groups: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each group of indices `(k,)` what the head receives `(k, features)`."""
        ...

    def fisher(self, names: Sequence[str], examples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The diagonal Fisher information of these parameters, per example, over so many random examples."""
        ...

    def mine(self, items: Sequence[T]) -> list[T]:
        """This process's share."""
        ...

    def gather(self, mine: Sequence[T]) -> list[T]:
        """The results of all processes, in the order of the items that `mine` shared out."""
        ...

    def report(self, **figures: float) -> None:
        """Figures of this selection for `sampler.stats`, such as the covering cost."""
        ...


class Posterior(Protocol):
    """Where to look: draws of parameters around the current weights."""

    def draw(self, view: View, draws: int, generator: torch.Generator) -> list[Draw]:
        """`draws` sets of parameters. Values that draws share are the same tensor object in each of them."""
        ...


class Strategy(Protocol):
    """How to choose. A plain function `(view, size, generator) -> Coreset` will do, see `strategies.resolve`."""

    def select(self, view: View, size: int, state: Any, generator: torch.Generator) -> tuple[Coreset, Any]:
        """A coreset of exactly `size` examples, and the state for the next selection; the first gets None."""
        ...
