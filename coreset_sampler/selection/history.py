"""What a sampler's selections have given and cost so far: the coreset in use, the strategy's state, counts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .. import distributed
from . import strategies
from .arguments import whole_number
from .budget import Budget
from .coreset import Coreset
from .order import Weighting, distinct_share
from .selecting import Selection, check_coreset
from .types import Strategy

_COUNTS = ("selections", "put_off", "forward_examples")


class History:
    """The selections of one sampler. A new one is empty."""

    def __init__(self) -> None:
        self.coreset: Coreset | None = None
        self.state: Any = None  # of the strategy
        self.selected_epoch = -1  # that the coreset was selected for
        self.decided_epoch = -1  # the last for which it was decided whether to select
        self.counts: dict[str, float] = dict.fromkeys(_COUNTS, 0)
        self.last: dict[str, float] = {}

    def is_due(self, epoch: int, every: int, budget: Budget) -> bool:
        """Whether to select for `epoch`: if there is no coreset, or it has served `every` epochs and the budget allows it.

        It is decided once per epoch.
        """
        if self.coreset is None:
            return True
        if self.decided_epoch == epoch:
            return False
        due = not 0 <= epoch - self.selected_epoch < every
        if due and budget.max_overhead is not None:
            due = distributed.from_first(budget.allows())  # clocks differ, the decision must not
            self.counts["put_off"] += not due
        if not due:
            self.decided_epoch = epoch
        return due

    def add(self, selection: Selection, epoch: int, weighting: Weighting) -> float:
        """Puts the selection in the place of the last and gives the seconds that it took."""
        distinct = distinct_share(selection.coreset, weighting)
        overlap = {} if self.coreset is None else {"overlap": selection.coreset.overlap(self.coreset)}
        self.coreset, self.state = selection.coreset, selection.state
        self.selected_epoch = self.decided_epoch = epoch
        self.counts["selections"] += 1
        self.counts["forward_examples"] += selection.forward_examples
        seconds = time.perf_counter() - selection.began
        self.last = {"last_seconds": seconds, "distinct": distinct, **overlap, **selection.figures}
        return seconds

    def state_dict(self, strategy: Strategy) -> dict[str, Any]:
        """Everything but the counts, which are saved with the budget's."""
        return {
            "indices": None if self.coreset is None else self.coreset.indices,
            "weights": None if self.coreset is None else self.coreset.weights,
            "selected_epoch": self.selected_epoch,
            "decided_epoch": self.decided_epoch,
            "strategy_state": strategies.state_dict(strategy, self.state)["state"],
            "last": dict(self.last),
        }

    @classmethod
    def loaded(cls, state: Mapping[str, Any], strategy: Strategy, size: int, n: int) -> History:
        """The history that a sampler's state holds, or an error."""
        new = cls()
        if state["indices"] is not None:
            new.coreset = check_coreset(Coreset(state["indices"], state["weights"]), size, n)
        new.selected_epoch = whole_number("selected_epoch", state["selected_epoch"], -1)
        new.decided_epoch = whole_number("decided_epoch", state["decided_epoch"], -1)
        new.state = strategies.load_state(strategy, {"strategy": state["strategy"], "state": state["strategy_state"]})
        new.counts, new.last = {name: state["spent"][name] for name in _COUNTS}, dict(state["last"])
        return new
