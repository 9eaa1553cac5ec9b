"""The door: strategies by name, and their states saved with name and settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_args, get_type_hints

import torch
from torch import Tensor

from ..coreset import Coreset, own_storage
from ..describe import describe
from ..types import State, Strategy, View
from .craig import Craig
from .crest import Crest
from .forgetting import Forgetting
from .herding import Herding
from .k_center import KCenter
from .label_confidence import LabelConfidence
from .loss_pruning import LossPruning
from .stable import Stable
from .uniform import Uniform

_BY_NAME: dict[str, type[Any]] = {
    "stable": Stable,
    "crest": Crest,
    "label_confidence": LabelConfidence,
    "loss_pruning": LossPruning,
    "craig": Craig,
    "k_center": KCenter,
    "herding": Herding,
    "forgetting": Forgetting,
    "uniform": Uniform,
}


@dataclasses.dataclass(frozen=True, repr=False)
class Function:
    """A plain function `(view, size, generator) -> Coreset` as a strategy; it keeps nothing between selections."""

    function: Callable[[View, int, torch.Generator], Coreset]

    State: ClassVar[type | None] = None

    def select(self, view: View, size: int, state: None, generator: torch.Generator) -> tuple[Coreset, None]:
        """What the function returns."""
        return self.function(view, size, generator), None

    def __repr__(self) -> str:
        return describe(self)


def available() -> dict[str, str]:
    """The names that `strategy=` takes, with one line each."""
    return {name: (strategy.__doc__ or "").strip().splitlines()[0] for name, strategy in _BY_NAME.items()}


def resolve(strategy: str | Strategy | Callable[..., Coreset]) -> Strategy:
    """The strategy that a name, an instance or a plain function stands for.

    Args:
        strategy: a name of `available()`, which gives the strategy with its defaults; an instance such as
            `strategies.Stable(draws=2)`; or a function `(view, size, generator) -> Coreset`.
    """
    if isinstance(strategy, str):
        if strategy not in _BY_NAME:
            raise ValueError(f"strategy must be one of {_known()}, got {strategy!r}")
        return _BY_NAME[strategy]()  # type: ignore[no-any-return]
    if isinstance(strategy, type):
        raise TypeError(
            f"strategy must be an instance, got the class {strategy.__qualname__}: write it with parentheses, "
            f"{strategy.__qualname__}(). A name will do too: {_known()}."
        )
    select = getattr(strategy, "select", None)
    if callable(select):
        _check_signature(select, "(view, size, state, generator)", strategy)
        return strategy  # type: ignore[return-value]
    if not callable(strategy):
        raise TypeError(
            f"strategy must be a name ({_known()}), an instance such as strategies.Stable(), or a function (view, size, "
            f"generator) -> Coreset, got {strategy!r}"
        )
    _check_signature(strategy, "(view, size, generator)", strategy)
    return Function(strategy)


def _known() -> str:
    return ", ".join(map(repr, _BY_NAME))


def _check_signature(function: Callable[..., Any], arguments: str, strategy: Any) -> None:
    try:
        inspect.signature(function).bind(*[None] * len(arguments.split(",")))
    except TypeError as error:
        raise TypeError(f"strategy must take {arguments}; {describe(strategy)} does not ({error})") from error


def state_dict(strategy: Strategy, state: State) -> dict[str, Any]:
    """The state with the name and settings of its strategy, as plain values to save.

    Args:
        strategy: what `state` belongs to.
        state: what its last `select` returned, or None.
    """
    return {"strategy": describe(strategy), "state": _values(state)}


def load_state(strategy: Strategy, saved: Mapping[str, Any]) -> State:
    """The state that `state_dict` saved, if it is of a strategy of this name and these settings.

    Args:
        strategy: what is to go on from it.
        saved: what `state_dict` returned.
    """
    if not isinstance(saved, Mapping) or saved.keys() != {"strategy", "state"}:
        raise ValueError(f"the state of the strategy is damaged; it was not made by state_dict(): {saved!r:.200}")
    if saved["strategy"] != describe(strategy):
        raise ValueError(
            f"the state was saved with strategy={saved['strategy']}, here it is {describe(strategy)}. Make the sampler with "
            "the settings of the run that is to go on, or begin a new run."
        )
    return _state_of(strategy, saved["state"])


def _values(state: State) -> dict[str, Any] | None:
    if state is None:
        return None
    found = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: _value(value) for name, value in found.items()}


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return own_storage(value)
    return _values(value) if dataclasses.is_dataclass(value) else value


def _state_of(strategy: Strategy, values: Any) -> State:
    """The state of a strategy, or of one around another, whose state it has in a field called `inner`."""
    if values is None:
        return None
    kind = getattr(strategy, "State", None)
    if kind is None:
        raise _damaged(strategy, values)
    return _built(strategy, kind, values)


def _built(strategy: Strategy, kind: type, values: Any) -> Any:
    """The dataclass `kind` of these values, and of the dataclasses in its fields."""
    hints = _hints(kind)
    if not isinstance(values, Mapping) or values.keys() != hints.keys():
        raise _damaged(strategy, values)
    found = {}
    for name, hint in hints.items():
        value, inner = values[name], next(filter(dataclasses.is_dataclass, (hint, *get_args(hint))), None)
        if hint is State:
            found[name] = _state_of(strategy.strategy, value)  # type: ignore[attr-defined]
        elif inner is not None and value is not None:
            found[name] = _built(strategy, inner, value)  # type: ignore[arg-type]
        elif isinstance(value, (hint, int) if hint is float else hint):
            found[name] = _value(value)
        else:
            raise _damaged(strategy, {name: value})
    return kind(**found)


def _hints(kind: type) -> dict[str, Any]:
    """The type of each field; `object` where annotations cannot be evaluated, as of what is imported for checkers only."""
    try:
        found = get_type_hints(kind)
    except NameError:
        found = {}
    return {field.name: found.get(field.name, object) for field in dataclasses.fields(kind)}


def _damaged(strategy: Strategy, values: Any) -> ValueError:
    return ValueError(
        f"the state of {type(strategy).__qualname__} is damaged; it was not made by state_dict(): {values!r:.200}"
    )
