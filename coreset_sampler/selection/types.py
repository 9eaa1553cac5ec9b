"""The protocols of the library. Read this first.

A `Strategy` reads a `View` (the data through the user's model, under draws of a `Posterior`) and returns a `Coreset`. A
sampler draws from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..layers import Layers as Layers
from .coreset import Coreset
from .scores import ScoreStore

T = TypeVar("T")

Draw = Mapping[str, Tensor]
"""Parameter or buffer name -> the value that one draw puts in its place. An empty one is the model as it is."""

Forward = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""`(model, batch) -> (logits (b, classes), labels (b,))`."""

Balance = Literal["equal", "proportional"]
"""How many examples of each class to keep: equally many, or in proportion to the class."""

State = Any
"""What a strategy keeps between selections: a frozen dataclass of tensors and numbers of its own, or None."""


class View(Protocol):
    """What a strategy may read: the labels, and the data through the current model.

    Under several processes a strategy runs in each of them. `shard` gives a process its share of the work and `gather`
    puts the shares together again, in order. A strategy that uses neither does all the work everywhere, and the answer of
    process 0 counts.
    """

    @property
    def model(self) -> nn.Module:
        """In eval mode; afterwards it is as it was."""
        ...

    labels: Tensor
    """`(n,)` int64: every example's class."""
    classes: int
    scores: ScoreStore | None
    """What training's own forward passes said of each example so far; None unless the strategy says that it `observes`."""

    def gradients(self, groups: Iterable[Tensor], draws: Sequence[Draw] = ({},)) -> Iterator[Tensor]:
        """For each group of indices `(k,)` the logit gradients `softmax - onehot` `(draws, k, classes)`."""
        ...

    def embeddings(self, groups: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each group of indices `(k,)` what the head receives `(k, features)`."""
        ...

    def fisher(self, names: Sequence[str], examples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The diagonal Fisher information of these parameters, per example, over so many random examples."""
        ...

    def shard(self, items: Sequence[T]) -> list[T]:
        """This process's share of the items."""
        ...

    def gather(self, shard: Sequence[T]) -> list[T]:
        """The results of all processes, in the order of the items that `shard` gave out."""
        ...

    def log(self, **figures: float) -> None:
        """Figures of this selection for `sampler.stats`, such as the covering cost."""
        ...


class Posterior(Protocol):
    """Where to score: draws of parameters around the current weights."""

    def draw(self, view: View, draws: int, generator: torch.Generator) -> list[Draw]:
        """`draws` sets of parameters. Values that draws share are the same tensor object in each of them."""
        ...


class Strategy(Protocol):
    """A way to choose. The settings are the fields of a frozen dataclass, and `select` changes none of them.

    A strategy that keeps something between selections says of which class it is: `State: ClassVar[type] = MyState`. One
    that reads `view.scores` says so: `observes: ClassVar[bool] = True`, or a property.
    """

    def select(self, view: View, size: int, state: State, generator: torch.Generator) -> tuple[Coreset, State]:
        """Exactly `size` examples, and the state for the next selection.

        `state` is what the last selection returned, None before the first. It is saved and resumed with the sampler, so
        return a new one instead of writing into it.
        """
        ...
