"""What a sampler knows of each example: its label, and what training said of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from .. import distributed
from ..randomness import mixed_seed
from .arguments import whole_number
from .labels import labels_of
from .observing import Observing
from .preserve import preserve_state
from .score_file import save_scores
from .scores import ScoreStore
from .weighted import plain

if TYPE_CHECKING:
    from .suspects import Suspect


class WatchingSampler(Sampler[int]):
    """The part of `CoresetSampler` that is about labels and scores. It watches the model train, or is told by `observe`."""

    _observing: Observing
    _labels: Tensor | None
    dataset: Dataset[Any]
    model: nn.Module
    seed: int
    num_workers: int
    progress: bool

    def read_labels(self) -> Tensor:
        """`(n,)` every example's class. The first call may read the whole data set, unless `labels` was passed."""
        if self._labels is None:
            with preserve_state(self.model, seed=mixed_seed(self.seed)):  # reading may go through random transforms
                self._labels = labels_of(plain(self.dataset), num_workers=self.num_workers, progress=self.progress)
        return self._labels

    @property
    def scores(self) -> ScoreStore:
        """What the training's own forward passes said of each example. An error before anything was observed.

        Under several processes it holds what they had seen when the last selection, or `sync_scores`, began.
        """
        return self._observing.scores

    def sync_scores(self) -> None:
        """Puts together what several processes have seen since the last selection. In one process there is nothing to do.

        Call it in every process, as a collective of torch.distributed, before one of them calls `state_dict`,
        `save_scores` or `suspects`. Those are local calls, and know of others only what was put together.

        Example:
            >>> sampler.sync_scores()
            >>> if rank == 0:
            ...     torch.save(sampler.state_dict(position=done), "checkpoint.pt")
        """
        with distributed.together():
            self._observing.gather()

    def observe(self, indices: Any, logits: Tensor) -> None:
        """Takes in what the model said of these examples, for loops in which watching the model is not possible.

        From the first call on the sampler relies on it, and does not watch the model any more.

        Example:
            >>> for x, y, index in DataLoader(IndexedDataset(train_set), batch_size=128, sampler=sampler):
            ...     logits = model(x)
            ...     sampler.observe(index, logits)

        Args:
            indices: `(b,)` places in the data set.
            logits: `(b, classes)` of any device and precision; gradients do not go through them.
        """
        self._observing.observe(indices, logits)

    def suspects(self, k: int = 50) -> list[Suspect]:
        """The labels that are most likely wrong, with the class that the model would give; the likeliest first.

        Args:
            k: how many of them.
        """
        from .suspects import suspects

        return suspects(self.scores, whole_number("k", k, 1))

    def save_scores(self, path: str | Path) -> None:
        """Saves the scores for `coreset-sampler audit`, as .safetensors.

        Args:
            path: of the file; one that exists is replaced at once, by a whole one.
        """
        save_scores(self.scores, path, self.dataset, self.stats.get("estimated_noise_rate"))

    @property
    def stats(self) -> dict[str, float]:
        """See `CoresetSampler.stats`."""
        raise NotImplementedError
