"""What selection may cost, measured against the time of training epochs."""

from __future__ import annotations

import time
from collections.abc import Mapping

_MOST_READ_AHEAD = 0.9  # of an epoch; above that nothing is learned from when its last index was given out


class Budget:
    """The seconds of selection and of training, and whether another selection may be had.

    An epoch of training lasts from its first index to its last. What comes between epochs, such as the user's evaluation,
    does not count. A loader with workers asks for the last index some batches before the loop gets there: the time is
    scaled up by the share that was read ahead. An epoch that was broken off, or read ahead nearly whole, lasts until
    the next one begins.

    Args:
        max_overhead: the share of both that selection may take, in (0, 1); None for any.
    """

    def __init__(self, max_overhead: float | None) -> None:
        if max_overhead is not None and not 0 < max_overhead < 1:
            raise ValueError(
                f"max_overhead must be a share of the time of selection and training in (0, 1), got {max_overhead}"
            )
        self.max_overhead = max_overhead
        self.selecting = self.last = self._trained = 0.0
        self._began: float | None = None
        self._given_out: float | None = None
        self._ahead = 0.0

    def epoch_begins(self, ahead: float = 0.0) -> None:
        """The first index is asked for; `ahead` is the share of the epoch that is read before the loop needs it."""
        self._trained = self.training
        self._began, self._given_out, self._ahead = time.perf_counter(), None, ahead

    def all_given_out(self) -> None:
        """The last index was given out."""
        self._given_out = time.perf_counter()

    def selected(self, seconds: float) -> None:
        """A selection took place. Time of an epoch that it interrupted is not training."""
        self.selecting += seconds
        self.last = seconds
        if self._began is not None:
            self._began += seconds
            self._given_out = None if self._given_out is None else self._given_out + seconds

    @property
    def training(self) -> float:
        """Seconds of all epochs so far, the current one included."""
        if self._began is None:
            return self._trained
        elapsed = time.perf_counter() - self._began
        if self._given_out is None or self._ahead > _MOST_READ_AHEAD:
            return self._trained + elapsed
        return self._trained + min(elapsed, (self._given_out - self._began) / (1 - self._ahead))

    @property
    def share(self) -> float:
        """Of selection in the time of selection and training."""
        return self.selecting / (self.selecting + self.training) if self.selecting else 0.0

    @property
    def stats(self) -> dict[str, float]:
        """Figures for `CoresetSampler.stats`."""
        return {"seconds": self.selecting, "share": self.share}

    def allows(self) -> bool:
        """Whether one more selection, as long as the last, keeps within `max_overhead`."""
        if self.max_overhead is None:
            return True
        selecting = self.selecting + self.last
        return selecting <= self.max_overhead * (selecting + self.training)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run goes on counting from."""
        return {"seconds": self.selecting, "training": self.training, "last": self.last}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from there. Nothing changes if an entry is missing or no number."""
        selecting, trained, last = (float(state[name]) for name in ("seconds", "training", "last"))
        self.selecting, self._trained, self.last = selecting, trained, last
        self._began = self._given_out = None
