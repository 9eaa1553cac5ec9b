"""Lightning: the sampler's epoch, its state in every checkpoint, its figures in the logger."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DistributedSampler

from ..selection.batch_watch import BatchWatch
from ..selection.distributed_sampler import DistributedCoresetSampler
from ..selection.forward import default_forward
from ..selection.labels import label_of
from ..selection.sampler import CoresetSampler
from ..selection.types import Forward
from ..selection.watching import watched_module

__all__ = ["CoresetCallback"]

_WAY_OUT = (
    "Give the sampler the module that training_step calls: for self.net(x) CoresetSampler(train_set, module.net)."
)


class CoresetCallback(Callback):
    """Keeps a sampler in step with a Lightning `Trainer`, also over checkpoints and resume.

    Selection happens at the start of the epochs where it is due, in all processes, in the trainer's precision; its
    figures are logged as `coreset/...`.

    Lightning shares out what a `CoresetSampler` yields and leaves a `DistributedCoresetSampler` alone:
    with several processes take the latter, which resumes exactly from the middle of an epoch too.

    Where the sampler watches the model, the callback tells it which examples each batch of `training_step` holds.

    Example:
        >>> trainer = L.Trainer(callbacks=[CoresetCallback(sampler)])
    """

    def __init__(self, sampler: CoresetSampler) -> None:
        if not isinstance(sampler, CoresetSampler):
            raise TypeError(f"sampler must be a CoresetSampler, got {type(sampler).__name__}")
        self.sampler = sampler
        self._trainer: Any = None
        self._own_forward = sampler.forward_fn
        self._watch: BatchWatch | None = None
        self._shown: Tensor | None = None  # the indices that this process shows in the epoch

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Notes the trainer, whose progress goes into the state and whose precision selection runs in."""
        self._trainer = trainer
        run = self._own_forward or self._forward
        self.sampler.forward_fn = partial(_in_precision_of, trainer.precision_plugin, run)

    def _forward(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return default_forward(model, batch, classes=int(self.sampler.read_labels().max()) + 1)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gives the sampler its own `forward_fn` back."""
        self._let_go()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same where training ends with an error."""
        self._let_go()

    def _let_go(self) -> None:
        self.sampler.forward_fn = self._own_forward
        if self._watch is not None:
            self._watch.drop()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses loaders that the sampler is not part of, and those that begin it several times an epoch."""
        loader = self._loader()
        if len(loader) < trainer.num_training_batches:
            raise ValueError(
                f"the coreset's loader has {len(loader)} batches and the epoch {trainer.num_training_batches}, those of "
                "another loader: it would be begun again within the epoch, each time with a selection, and could not be "
                'resumed. Pass CombinedLoader(loaders, "min_size"), or a size= that makes the coreset\'s loader the longest.'
            )
        self._watch = BatchWatch(self.sampler, _WAY_OUT) if _has_known_batches(loader) else None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Selects if it is due and logs what selection has cost."""
        if self.sampler.epoch != trainer.current_epoch:
            self.sampler.set_epoch(trainer.current_epoch)
        self.sampler.select_if_due()
        figures = {f"coreset/{name}": float(value) for name, value in self.sampler.stats.items()}
        pl_module.log_dict(figures, on_step=False, on_epoch=True, rank_zero_only=True)
        self._shown = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Says which examples the batch holds, where the sampler watches the model."""
        if self._watch is None or batch is None or not self._watch.wanted:
            return
        size = _batch_size(self._loader())
        indices = self._order_of_epoch()[batch_idx * size : (batch_idx + 1) * size]
        labels = _labels_in(batch) if self._own_forward is None else None  # else only forward_fn knows where they are
        self._watch.begin(watched_module(self.sampler.model), indices, labels)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Takes what the model said of the batch."""
        if self._watch is not None:
            self._watch.end()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Notices a model that no training step has called."""
        if self._watch is not None:
            self._watch.drop()
            self._watch.end_of_pass()

    def _order_of_epoch(self) -> Tensor:
        """What this process shows, in order: the sampler's own order, or the part of it that Lightning makes its share."""
        if self._shown is None:
            order = torch.tensor(self.sampler._order()[0])
            split = [found for found in _samplers(self._loader()) if isinstance(found, DistributedSampler)]
            if split and split[0] is not self.sampler:
                order = order[list(DistributedSampler.__iter__(split[0]))]
            self._shown = order
        return self._shown

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, at the batch that the loop has come to: workers are ahead of it.

        After the last batch of an epoch, also of one cut short by `limit_train_batches`, the next epoch's beginning.
        """
        trainer = self._trainer
        self.sampler.sync_scores()  # every process is here, and the state holds what all have seen
        if trainer.fit_loop._combined_loader is None:
            return self.sampler.state_dict(position=0)
        done = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if done >= trainer.num_training_batches:
            return self.sampler.state_dict(position=len(self.sampler))
        return self.sampler.state_dict(position=done * _batch_size(self._loader()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state up again; Lightning itself does not skip batches that were done."""
        shared_out = self._trainer.world_size > 1 and not isinstance(self.sampler, DistributedCoresetSampler)
        if state_dict["position"] and shared_out:
            raise RuntimeError(
                "this checkpoint is from the middle of an epoch, and Lightning, which shares a CoresetSampler out, "
                "cannot go on from there. Use DistributedCoresetSampler, or a checkpoint from the end of an epoch."
            )
        self.sampler.load_state_dict(state_dict)

    def _loader(self) -> Any:
        """The one that draws from this sampler."""
        for loader in self._trainer.fit_loop._combined_loader.flattened:
            samplers = _samplers(loader)
            samplers += [getattr(getattr(found, "dataset", None), "_sampler", None) for found in samplers]
            if any(found is self.sampler for found in samplers):
                return loader
        if self._trainer.overfit_batches:
            raise ValueError(
                f"overfit_batches={self._trainer.overfit_batches} puts a sequential sampler of Lightning's in the place of "
                "the coreset's, so training would not be on its coreset. Leave overfit_batches out; to train on a few "
                "batches set size= of the sampler and reselect_every= beyond the number of epochs."
            )
        raise ValueError(
            "no training loader draws from the sampler that CoresetCallback was given, so training would not be on its "
            "coreset. Pass the same object: DataLoader(train_set, batch_size=..., sampler=sampler)."
        )


def _samplers(loader: Any) -> list[Any]:
    return [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]


def _has_known_batches(loader: Any) -> bool:
    """Whether batch after batch is as many of the sampler's indices."""
    return type(loader.batch_sampler).__iter__ is BatchSampler.__iter__


def _labels_in(batch: Any) -> Any:
    """The labels of a batch `(x, y)` or a dict, None in others."""
    try:
        return label_of(batch)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _batch_size(loader: Any) -> int:
    return int(getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size or 1)


def _in_precision_of(plugin: Any, run: Forward, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Runs the model as Lightning's training step does: with the batch's floats, and under autocast, as the plugin says."""
    with plugin.forward_context():
        return run(model, plugin.convert_input(batch))
