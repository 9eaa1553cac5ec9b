"""Hugging Face's Trainer on a coreset. Imported by `integrations.huggingface` when one of these names is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..selection.batch_watch import BatchWatch
from ..selection.forward import logits_of
from ..selection.labels import class_numbers
from ..selection.sampler import CoresetSampler
from ..selection.watching import watched_module
from ..selection.weighted import WeightedDataset
from .huggingface_indices import INDEX, CarriedIndices, with_indices

STATE_FILE = "coreset_sampler.pt"
_WAY_OUT = "Let compute_loss call the model that it is given, whose output has logits."
_SETTINGS = [name for name in inspect.signature(CoresetSampler).parameters if name not in ("dataset", "model")]


if TYPE_CHECKING:
    _Trainer = Trainer  # whose methods a mixin may count on
else:
    _Trainer = object


class CoresetTrainerMixin(_Trainer):
    """Makes one's own `Trainer` train on a coreset: `class Mine(CoresetTrainerMixin, MyTrainer)`.

    `coreset` holds settings of `CoresetSampler`. What the training arguments say already is taken from them: the seed,
    the workers, the progress bar; the collator is the trainer's. The sampler in use is `trainer.coreset_sampler`, its
    figures are in the logs as `coreset_...`, its state is in every checkpoint, and resuming from any of them gives the
    batches that were still to come. With `weighting="loss"` the loss is each example's cross-entropy times its weight; a
    `compute_loss` of one's own may change it, but has to call `super().compute_loss`.
    """

    coreset_sampler: CoresetSampler | None = None
    _batch_weight: Tensor | None = None
    _weighed = False  # whether the weights of the batch were used
    _batch_watch: BatchWatch | None = None  # of a run whose batches carry their indices
    _carries = False  # while a loader is made whose batches shall

    def __init__(self, *args: Any, coreset: Mapping[str, Any], **settings: Any) -> None:
        self.coreset = _checked(coreset)
        super().__init__(*args, **settings)
        self._latest_sampler: CoresetSampler | None = None
        if self.coreset.get("weighting") == "loss":
            self._weigh_the_loss()
        if self.train_dataset is not None:
            self._get_train_sampler()  # a wrong setting is an error now, not after the model is on its device
        self.add_callback(_AtEpochs(self))

    def _weigh_the_loss(self) -> None:
        if self.compute_loss_func is not None:
            raise ValueError(
                'coreset=dict(weighting="loss") computes the loss itself and got compute_loss_func too; leave one of them '
                'out (weighting="resample" needs no change to the loss)'
            )
        self.compute_loss_func = self._weighted_loss
        if self.train_dataset is not None:
            self.train_dataset = WeightedDataset(self.train_dataset)

    def get_train_dataloader(self) -> Any:
        """The trainer's own loader around the coreset. Where the model is watched, batches carry their indices."""
        _check_possible(self)  # an IterableDataset never asks for a sampler
        if not self._get_train_sampler()._observing.wanted:
            return super().get_train_dataloader()
        plain: Any = self.train_dataset
        self._carries = True
        try:
            self.train_dataset = with_indices(self, plain)
            return super().get_train_dataloader()
        finally:
            self.train_dataset, self._carries = plain, False

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        collator = super()._get_collator_with_removed_columns(data_collator, description=description)
        return CarriedIndices(collator) if self._carries and description != "selection" else collator

    def _get_train_sampler(self, train_dataset: Any = None) -> CoresetSampler:
        _check_possible(self)
        collator = self._get_collator_with_removed_columns(self.data_collator, description="selection")
        args: Any = self.args
        settings = {
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "num_workers": args.dataloader_num_workers,
            "progress": not args.disable_tqdm,
            "collate_fn": collator,
            **self.coreset,
        }
        data = self.train_dataset if train_dataset is None else train_dataset
        self._latest_sampler = CoresetSampler(data, self.model, **settings)
        return self._latest_sampler

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: Any = self._signature_columns
        if self.coreset.get("weighting") == "loss" and "weight" not in columns:
            columns.append("weight")  # else remove_unused_columns drops it without a word

    def num_examples(self, dataloader: Any) -> int:
        """Examples an epoch, from which the trainer works out its speed: for the training loader the coreset's."""
        sampler = self._latest_sampler
        own = sampler is not None and getattr(dataloader, "dataset", None) is sampler.dataset
        return len(sampler) if own and sampler is not None else super().num_examples(dataloader)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **settings: Any) -> Tensor:
        """The trainer's step, watched; with `weighting="loss"` an error if the weights had no part in the loss."""
        index = inputs.pop(INDEX, None)
        watch = self._batch_watch if index is not None else None
        if index is None:
            self._watch_by_counting()
        if watch is not None:
            called = model if isinstance(model, nn.DataParallel) else watched_module(model)
            watch.begin(called, index, inputs.get("labels"))
        try:
            loss = self._weighted_step(model, inputs, *args, **settings)
        except BaseException:
            if watch is not None:
                watch.drop()
            raise
        if watch is not None:
            watch.end()
        return loss

    def _watch_by_counting(self) -> None:
        """For examples that are no dicts, or become no dict."""
        if self._batch_watch is not None:
            self._batch_watch.leave()
        self._batch_watch = None

    def _weighted_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **settings: Any) -> Tensor:
        if self.coreset.get("weighting") != "loss":
            return super().training_step(model, inputs, *args, **settings)
        inputs = dict(inputs)
        self._batch_weight, self._weighed = inputs.pop("weight", None), False
        if self._batch_weight is None:
            raise ValueError(
                'coreset=dict(weighting="loss"), but the batch has no "weight" entry: the data collator drops it. Let '
                'data_collator keep the entry "weight" of the examples, or use weighting="resample", which needs none.'
            )
        try:
            loss = super().training_step(model, inputs, *args, **settings)
        finally:
            self._batch_weight = None  # evaluation is not weighted
        if not self._weighed:
            raise TypeError(
                f'coreset=dict(weighting="loss"), but compute_loss of {type(self).__name__} leaves the weights out: it '
                "never comes to Trainer.compute_loss, which multiplies them into the loss. Let it call super().compute_loss"
                ', or use weighting="resample", which draws in proportion to the weights and needs no change to the loss.'
            )
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **settings: Any) -> Any:
        """The trainer's loss; with `weighting="loss"` each example's part times its weight."""
        own = {name: value for name, value in inputs.items() if name != "weight"}  # of a train set that is evaluated
        return super().compute_loss(
            model, own if self.coreset.get("weighting") == "loss" else inputs, *args, **settings
        )

    def _weighted_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        sampler, smoothing = self._latest_sampler, self.args.label_smoothing_factor
        logits = logits_of(outputs, 0 if sampler is None else int(sampler.read_labels().max()) + 1)
        classes = class_numbers(labels).view(-1)
        losses = functional.cross_entropy(logits, classes, reduction="none", label_smoothing=smoothing)
        self._weighed = True
        if self._batch_weight is not None:
            losses = losses * self._batch_weight.to(losses)
        return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch

    def log(self, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        """The trainer's logs with what selection has cost."""
        if self.coreset_sampler is not None and "loss" in logs:
            logs.update({f"coreset_{name}": value for name, value in self.coreset_sampler.stats.items()})
        super().log(logs, *args, **settings)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._latest_sampler is not None:
            path = Path(checkpoint) / STATE_FILE
            if not path.exists():
                raise FileNotFoundError(
                    f"{checkpoint} has no {STATE_FILE}: it was saved without a coreset, or saving was interrupted. Resume "
                    "from another checkpoint, or load the model from this one and train without resume_from_checkpoint."
                )
            self._latest_sampler.load_state_dict(torch.load(path, weights_only=True))


class CoresetTrainer(CoresetTrainerMixin, Trainer):
    """A `Trainer` that trains each epoch on the part of the data that the current model would learn the same from.

    Example:
        >>> trainer = CoresetTrainer(model=model, args=args, train_dataset=train, coreset=dict(fraction=0.1))
        >>> trainer.train()
    """


class _AtEpochs(TrainerCallback):
    """Tells the sampler its epoch and selects, in every process, before the trainer asks for batches; saves its state."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.next_epoch = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Takes the sampler of the loader that this run uses, and the epoch that the trainer begins or resumes with."""
        trainer = self.trainer
        trainer.coreset_sampler, self.next_epoch = trainer._latest_sampler, int(state.epoch or 0)
        carried = isinstance(getattr(train_dataloader, "collate_fn", None), CarriedIndices)
        trainer._batch_watch = BatchWatch(trainer.coreset_sampler, _WAY_OUT) if carried else None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All processes select here: with `dispatch_batches` only the first of them would come to read the sampler."""
        sampler = self.trainer.coreset_sampler
        sampler.set_epoch(self.next_epoch)
        sampler.select_if_due()
        self.next_epoch += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notices a model that was not in any batch."""
        if self.trainer._batch_watch is not None:
            self.trainer._batch_watch.end_of_pass()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Without the position: on resume the trainer skips the batches of the epoch that it has done."""
        self.trainer.coreset_sampler.sync_scores()  # every process is here, and the state holds what all have seen
        if args.should_save:
            run = self.trainer._get_output_dir(trial=getattr(self.trainer, "_trial", None))
            folder = Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.trainer.coreset_sampler.state_dict(position=0), folder / STATE_FILE)


def _checked(coreset: Any) -> dict[str, Any]:
    if not isinstance(coreset, Mapping):
        raise TypeError(f"coreset must be a dict of settings such as dict(fraction=0.1), got {type(coreset).__name__}")
    unknown = sorted(set(coreset) - set(_SETTINGS))
    if unknown:
        raise TypeError(f"coreset has unknown settings {unknown}; those of CoresetSampler are {', '.join(_SETTINGS)}")
    return dict(coreset)


def _check_possible(trainer: Any) -> None:
    """Refuses what would leave the coreset out without a word."""
    data, args = trainer.train_dataset, trainer.args
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise TypeError(
            f"train_dataset must have a length and take indices, got {type(data).__name__}; a stream has no coreset. "
            "Load it as a map-style datasets.Dataset, for instance without streaming=True."
        )
    grouped = "group_by_length" if getattr(args, "group_by_length", False) else "random"  # before transformers 5
    order = getattr(args, "train_sampling_strategy", grouped)
    if order != "random":
        raise ValueError(
            f"train_sampling_strategy must stay 'random' with a coreset, which decides the order itself, got {order!r}. "
            "A data collator that pads each batch to its longest example saves most of what grouping by length would."
        )
    if trainer.is_fsdp_enabled or (trainer.is_deepspeed_enabled and _zero_stage(args) == 3):
        raise ValueError(
            "the model's parameters are sharded (FSDP, or DeepSpeed stage 3): no process can look at its candidates alone. "
            "Train with DDP or DeepSpeed up to stage 2."
        )


def _zero_stage(args: Any) -> int:
    config = getattr(args, "hf_deepspeed_config", None)
    return 0 if config is None else int(config.config.get("zero_optimization", {}).get("stage", 0))
