"""Hugging Face: a `Trainer` on coresets, and synthetic coresets for `Trainer`, image processors and `datasets`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import Dataset

from ..extras import need
from ..synthetic.dataset import SyntheticCoreset
from ..synthetic.formats.hf_dataset import from_dataset, to_dataset
from ..synthetic.targets import Targets, loss_of, targets_as
from .image_processors import config_of
from .images import ImageConfig

if TYPE_CHECKING:
    from .huggingface_trainer import CoresetTrainer, CoresetTrainerMixin

__all__ = ["CoresetTrainer", "CoresetTrainerMixin", "for_huggingface", "from_hf", "to_hf"]


def __getattr__(name: str) -> Any:
    if name in ("CoresetTrainer", "CoresetTrainerMixin"):  # these import transformers, the rest of the file does not
        need("transformers", extra="huggingface", what=name)
        from . import huggingface_trainer

        return getattr(huggingface_trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def to_hf(coreset: SyntheticCoreset) -> Any:
    """A `datasets.Dataset` with columns `inputs` and `labels`; `from_hf` gives the coreset back equal."""
    return to_dataset(coreset)


def from_hf(dataset: Any) -> SyntheticCoreset:
    """The coreset that `to_hf` made a dataset of, also after `save_to_disk` and `load_from_disk`."""
    return from_dataset(dataset)


def for_huggingface(
    coreset: SyntheticCoreset, image_processor: Any, *, targets: Targets | None = None
) -> HuggingFaceDataset:
    """`{"pixel_values", "labels"}` for `Trainer`, sized and normalised once, as the processor does.

    The processor's settings are read; the coreset's images never go through it, because on floats it rescales without a
    word. One that does anything else to a test image of bytes than its settings say is refused.

    Args:
        coreset: its images are taken before its own preprocessing.
        image_processor: of the model.
        targets: class numbers (`"hard"`) by default, which a plain `Trainer` fits by cross-entropy. Learned sets do better
            with `"soft"` (probabilities), and labelled views need it: a class number says little of a mixture. Models take
            floats for a multi-label problem, so with these and with `"own"` (as stored) give the trainer the loss:
            `Trainer(..., compute_loss_func=train_set.compute_loss)`. `fit` knows which to use.

    Example:
        >>> train_set = for_huggingface(coreset, processor)
        >>> fit(model, train_set)  # as recipe_for(coreset, model) says, or
        >>> Trainer(model, arguments, train_dataset=train_set).train()
    """
    return HuggingFaceDataset(coreset, config_of(image_processor, tuple(coreset.stored.shape[-2:])), targets)


class HuggingFaceDataset(Dataset[dict[str, Tensor]]):
    """What `for_huggingface` gives: finished images and their targets, and the loss meant for them."""

    def __init__(self, coreset: SyntheticCoreset, config: ImageConfig, asked: Targets | None) -> None:
        self.coreset, self.asked = coreset, asked
        kind: Targets = asked or "hard"
        self.pixels, self.targets, self.config = coreset.exact_pixels(), targets_as(coreset, kind), config
        self.loss = partial(loss_of, coreset, kind)
        config(self.pixels[0])  # an image that does not fit is an error now, not in a worker

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.config(self.pixels[index]), "labels": self.targets[index]}

    def compute_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The loss of these targets, in the form that `Trainer(compute_loss_func=...)` calls.

        Class numbers, as evaluation sets have them, are judged by cross-entropy whatever the coreset's targets are.
        The trainer counts label entries over all accumulated batches and leaves dividing to this function.
        """
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        total = self.loss(logits, labels, reduction="sum")
        examples = len(labels) if num_items_in_batch is None else num_items_in_batch * len(labels) / labels.numel()
        return total / examples

    def set_transform(self, *_: Any, **__: Any) -> None:
        """Refuses: a processor set here would work on images that are done."""
        raise TypeError("for_huggingface's images are sized and normalised already; a transform would do it again")

    with_transform = map = set_transform
