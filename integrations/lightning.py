"""Lightning: the sampler's epoch, its state in every checkpoint, its figures in the logger."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from ..sampler import CoresetSampler, DistributedCoresetSampler

__all__ = ["CoresetCallback"]


class CoresetCallback(Callback):
    """Keeps a sampler in step with a Lightning `Trainer`, also over checkpoints and resume.

    Selection happens at the start of the epochs where it is due, in all processes; its figures are logged as
    `coreset/...`. Lightning shares out what a `CoresetSampler` yields and leaves a `DistributedCoresetSampler` alone:
    with several processes take the latter, which resumes exactly from the middle of an epoch too.

    Example:
        >>> trainer = L.Trainer(callbacks=[CoresetCallback(sampler)])
    """

    def __init__(self, sampler: CoresetSampler) -> None:
        if not isinstance(sampler, CoresetSampler):
            raise TypeError(f"sampler must be a CoresetSampler, got {type(sampler).__name__}")
        self.sampler = sampler
        self._trainer: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Notes the trainer, whose progress goes into the state."""
        self._trainer = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses loaders that the sampler is not part of."""
        self._batch_size()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Selects if it is due and logs what selection has cost."""
        if self.sampler.epoch != trainer.current_epoch:
            self.sampler.set_epoch(trainer.current_epoch)
        with trainer.precision_plugin.forward_context():
            self.sampler.select_if_due()
        figures = {f"coreset/{name}": float(value) for name, value in self.sampler.stats.items()}
        pl_module.log_dict(figures, on_step=False, on_epoch=True, rank_zero_only=True)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, at the batch that the loop has come to: workers are ahead of it."""
        trainer = self._trainer
        done = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        within = trainer.fit_loop._combined_loader is not None and done < trainer.num_training_batches
        return self.sampler.state_dict(position=done * self._batch_size() if within else 0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state up again; Lightning itself does not skip batches that were done."""
        shared_out = self._trainer.world_size > 1 and not isinstance(self.sampler, DistributedCoresetSampler)
        if state_dict["position"] and shared_out:
            raise RuntimeError(
                "this checkpoint is from the middle of an epoch, and Lightning, which shares a CoresetSampler out, "
                "cannot go on from there. Use DistributedCoresetSampler, or a checkpoint from the end of an epoch."
            )
        self.sampler.load_state_dict(state_dict)

    def _batch_size(self) -> int:
        """Of the loader that draws from this sampler."""
        loaders = self._trainer.fit_loop._combined_loader.flattened
        for loader in loaders:
            batches = getattr(loader, "batch_sampler", None)
            samplers = [getattr(loader, "sampler", None), getattr(batches, "sampler", None)]
            samplers += [getattr(getattr(found, "dataset", None), "_sampler", None) for found in samplers]
            if any(found is self.sampler for found in samplers):
                return int(getattr(batches, "batch_size", None) or loader.batch_size or 1)
        raise ValueError(
            "no training loader draws from the sampler that CoresetCallback was given, so training would not be on its "
            "coreset. Pass the same object: DataLoader(train_set, batch_size=..., sampler=sampler)."
        )
