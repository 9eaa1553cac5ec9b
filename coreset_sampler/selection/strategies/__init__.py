"""Ways to choose: each is a function that builds a `Strategy`, one file each.

This file is a stand-in until the strategies are dataclasses: it gives the functions the shape that the sampler needs.
"""

import dataclasses
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..coreset import own_storage
from .believed import believed
from .craig import craig
from .crest import crest
from .forgetting import forgetting
from .herding import herding
from .k_center import k_center
from .stable import stable
from .uniform import uniform
from .warm_up import warm_up

__all__ = ["believed", "craig", "crest", "forgetting", "herding", "k_center", "stable", "uniform", "warm_up"]

_WORDS = {"rescore_every": "reuse", "confidence_exponent": "doubt", "exponent": "doubt"}


@dataclass(frozen=True)
class Function:
    """A plain function as a strategy."""

    function: Any
    name: str = ""

    def __repr__(self) -> str:
        return self.name or f"Function({describe(self.function)})"

    def select(self, view: Any, size: int, state: Any, generator: Any) -> Any:
        """Calls it; what it puts into `view.memory` is its state."""
        view.memory = dict(state or {})
        coreset = self.function(view, size, generator)
        return coreset, {name: own_storage(value) for name, value in view.memory.items()} or None

    def __call__(self, view: Any, size: int, generator: Any) -> Any:
        """As the functions are called."""
        return self.function(view, size, generator)


def _named(name: str, build: Any, **settings: Any) -> Function:
    function = build(**{_WORDS.get(key, key): value for key, value in settings.items()})
    known = function.keywords if isinstance(function, partial) else {}
    said = ", ".join(f"{key}={describe(value)}" for key, value in known.items())
    return Function(function, f"{name}({said})")


Stable, Crest, Craig = (partial(_named, n, f) for n, f in (("Stable", stable), ("Crest", crest), ("Craig", craig)))
KCenter, Herding = partial(_named, "KCenter", k_center), partial(_named, "Herding", herding)
Forgetting, Uniform = partial(_named, "Forgetting", forgetting), partial(_named, "Uniform", uniform)


def LabelConfidence(*, warm_up: int = 10, **settings: Any) -> Function:  # noqa: N802
    inner = _named("LabelConfidence", believed, **{"rescore_every": 10, **settings})
    return inner if warm_up == 0 else WarmUp(inner, selections=warm_up)


def WarmUp(strategy: Any, *, selections: int) -> Function:  # noqa: N802
    return _named("WarmUp", partial(_warm_up, strategy), selections=selections)


_warm_up = warm_up
_BY_NAME = {
    "stable": Stable,
    "crest": Crest,
    "craig": Craig,
    "k_center": KCenter,
    "herding": Herding,
    "forgetting": Forgetting,
    "uniform": Uniform,
    "label_confidence": LabelConfidence,
}


def available() -> dict[str, str]:
    """Names of strategies, with a line each."""
    return dict.fromkeys(_BY_NAME, "")


def resolve(strategy: Any) -> Any:
    """A strategy from a name, a strategy or a plain function."""
    if isinstance(strategy, str):
        if strategy not in _BY_NAME:
            raise ValueError(f"strategy must be one of {', '.join(_BY_NAME)}, got {strategy!r}")
        return _BY_NAME[strategy]()
    if hasattr(strategy, "select"):
        return strategy
    check_strategy_kind(strategy)
    return Function(strategy)


def state_dict(strategy: Any, state: Any) -> dict[str, Any]:
    """The strategy in words, and its state."""
    return {"strategy": repr(strategy), "state": None if state is None else dict(state)}


def load_state(strategy: Any, saved: Any) -> Any:
    """What `state_dict` saved."""
    state = saved["state"]
    if saved["strategy"] != repr(strategy) or not all(isinstance(value, Tensor) for value in (state or {}).values()):
        raise ValueError(f"the strategy's state is damaged or of another: {saved!r:.200}")
    return None if state is None else {name: own_storage(value) for name, value in state.items()}


def check_strategy_kind(strategy: Any) -> None:
    """Raises if this cannot be called as a strategy is."""
    if not callable(strategy):
        raise TypeError(f"strategy must be a function, such as strategies.stable(), got {strategy!r}")
    try:
        inspect.signature(strategy).bind(None, 0, None)
    except TypeError as error:
        raise TypeError(
            f"strategy must take (view, size, generator); {strategy} does not ({error}). "
            "Those of the library are built by a call: strategies.stable(), with parentheses."
        ) from error


def describe(strategy: Any) -> str:
    """Name and settings of a strategy, or of a setting of one, the same in every run and process.

    What a function of one's own has closed over is not seen, nor what an object may change as it goes.
    """
    if isinstance(strategy, partial):
        settings = [*map(describe, strategy.args), *(f"{k}={describe(v)}" for k, v in strategy.keywords.items())]
        return f"{describe(strategy.func)}({', '.join(settings)})"
    if dataclasses.is_dataclass(strategy) and not isinstance(strategy, type):
        frozen = type(strategy).__dataclass_params__.frozen  # type: ignore[attr-defined]
        fields = dataclasses.fields(strategy) if frozen else ()
        settings = [f"{field.name}={describe(getattr(strategy, field.name))}" for field in fields]
        return f"{type(strategy).__qualname__}({', '.join(settings)})"
    if strategy is None or isinstance(strategy, (bool, int, float, str)):
        return repr(strategy)
    if isinstance(strategy, (tuple, list)):
        return f"[{', '.join(map(describe, strategy))}]"
    return getattr(strategy, "__qualname__", type(strategy).__qualname__)
