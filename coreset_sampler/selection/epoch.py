"""Where in which pass a sampler stands: it counts what it has yielded, and can be saved and taken up again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint


class Epoch:
    """The number of the epoch, whether its pass has begun, and how much of that pass has been yielded.

    A pass that has begun is followed by the next epoch, also when it was left early, unless `set` says otherwise.
    """

    def __init__(self) -> None:
        self.number = 0  # of the pass that has begun, or of the one to come
        self.begun = self.ended = False  # whether its pass has been asked for an index, and for one after its last
        self.start = 0  # where the pass to come begins: not at 0 after a resume from the middle
        self.loaded = 0  # no epoch before it may come right after a resume
        self.loop_is_over: Callable[[], bool] | None = None  # where a framework reads ahead: asked instead of counting
        self._end = 0
        self._left: Iterator[int] = iter(())  # what is still to be yielded of the pass

    @property
    def coming(self) -> int:
        """The epoch that the next pass is."""
        return self.number + 1 if self.begun else self.number

    @property
    def position(self) -> int:
        """The indices yielded, of a pass that has not begun those that it will leave out."""
        return self.yielded if self.begun else self.start

    @property
    def yielded(self) -> int:
        """The indices that the last pass has come to, also when `set` has said since which is the next."""
        return self._end - length_hint(self._left)

    def set(self, number: int) -> None:
        """Makes the next pass that of epoch `number`; a position that was loaded for this epoch is kept."""
        if number < self.loaded:
            raise ValueError(
                f"epoch must be {self.loaded} or later, where the loaded state stands, got {number}: something counts "
                "from 0 again. Start the loop at sampler.epoch, and call set_epoch on a loader that accelerate prepared."
            )
        if number != self.number or self.begun:
            self.start = 0
        self.number, self.begun = number, False

    def advance(self, start: int, resume: tuple[int, int] | None) -> int:
        """Makes the coming epoch the current one, or the one that `resume` says, and gives where its pass starts."""
        self.number, start = (self.coming, start) if resume is None else resume
        self.begun = False
        return start

    def begin(self, order: list[int], start: int) -> Iterator[int]:
        """The indices of the pass from `start` on. A list's iterator knows what is left, so that nobody has to count."""
        self.begun, self.ended, self.start, self.loaded = True, False, 0, 0
        self._end, self._left = len(order), iter(order[start:])
        return self._left

    def saved(self, position: int | None, length: int) -> tuple[int, int]:
        """`(epoch, position)` to go on from, after `position` of `length` indices or what was yielded, if that is None.

        At the end of a pass this is the beginning of the next epoch.
        """
        if position is not None:
            over, at = position >= length, position
        elif self.begun and self.loop_is_over is not None:
            over, at = self.loop_is_over(), self.position
        else:
            over, at = self.begun and self.ended, self.position
        return (self.number + 1, 0) if over else (self.number, at)

    def load(self, number: int, position: int) -> None:
        """Takes up what `saved` gave."""
        self.number, self.start, self.loaded = number, position, number
        self.begun, self.loop_is_over = False, None


class Pass(itertools.chain[int]):
    """One pass. It begins at the first `next`: DataLoaders with workers call `iter` twice and use one of the two.

    A chain of the one part that `begin` gives, so that no Python runs for an index. torchdata's StatefulDataLoader
    saves it beside the sampler, and so tells an epoch whose last batch was just handed out from one that is over.
    """

    _epoch: Epoch
    _begun: bool
    _resume: tuple[int, int] | None

    @classmethod
    def of(
        cls, epoch: Epoch, begin: Callable[[tuple[int, int] | None], Iterable[int]], end: Callable[[], None]
    ) -> Pass:
        """The pass that comes next.

        Args:
            epoch: what counts.
            begin: gives the indices, after `(epoch, position)` if that was loaded; called at the first `next`.
            end: called after the last index.
        """

        def parts() -> Iterator[Iterable[int]]:
            new._begun = True
            yield begin(new._resume)
            epoch.ended = True
            end()

        new: Pass = cls.from_iterable(parts())  # type: ignore[assignment]
        new._epoch, new._begun, new._resume = epoch, False, None
        return new

    def state_dict(self) -> dict[str, int]:
        """What StatefulDataLoader saves: the epoch, and what was yielded of it."""
        return {"epoch": self._epoch.number, "position": self._epoch.yielded} if self._begun else {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes this pass the rest of the one that was saved."""
        self._resume = (state["epoch"], state["position"]) if state else None
