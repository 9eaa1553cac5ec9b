"""What a model gives for a batch: how it is called, and where the logits are in its output."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from .labels import LABEL_KEYS, class_numbers, label_of


def default_forward(model: nn.Module, batch: Any, *, classes: int = 0) -> tuple[Tensor, Tensor]:
    """Runs a model on `(x, y)` pairs, or on dicts with `labels` or `label` by keyword, as Hugging Face models like it."""
    labels = label_of(batch)
    if isinstance(batch, Mapping):
        accepted = inspect.signature(model.forward).parameters
        any_name = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        named = {k: v for k, v in batch.items() if k not in LABEL_KEYS and (any_name or k in accepted)}
        _check_call(model, f"{sorted(batch)} of a batch by name", 'model(batch["x"]), batch["label"]', **named)
        output = model(**named)
    else:
        found = class_numbers(labels) if isinstance(labels, Tensor) else None
        if len(batch) > 2 and found is not None and (found.is_floating_point() or found.ndim != 1):
            raise ValueError(
                f"of a batch's {len(batch)} fields the first is taken for the inputs, the second for the labels, which has "
                f"shape {tuple(labels.shape)} of {labels.dtype}: not one class per example. Pass labels= and forward_fn= to "
                "say which is which, such as forward_fn=lambda model, batch: (model(batch[1]), batch[2])."
            )
        try:
            output = model(batch[0])
        except TypeError:
            _check_call(model, "the first field of a batch alone", "model(*batch), batch[1]", batch[0])
            raise
    return logits_of(output, classes), labels


def _check_call(model: nn.Module, given: str, way_out: str, *args: Any, **named: Any) -> None:
    """Raises if the model does not take these; `given` and `way_out` are for the error."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(
            f"the model takes ({', '.join(signature.parameters)}) and cannot be given {given}: {error}. Pass forward_fn= to "
            f"say how, such as forward_fn=lambda model, batch: ({way_out})."
        ) from error


def check_scoring_dtype(dtype: Any) -> torch.dtype | None:
    """The precision of scoring passes, if autocast has such a one."""
    if dtype is None or dtype in (torch.bfloat16, torch.float16):
        return dtype  # type: ignore[no-any-return]
    rule = "scoring_dtype must be torch.bfloat16 or torch.float16, as in torch.autocast, or None for that of the model"
    raise ValueError(f"{rule}, got {dtype!r}")


def precision(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to that precision. Nothing is cached: the same parameter has another value in the next draw."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def logits_of(output: Any, classes: int = 0) -> Tensor:
    """The logits in a model's output: the tensor itself, `.logits`, `["logits"]`, or the first of a tuple after the loss.

    Not the first where it is wider than another with columns enough for the `classes`: then it is the head's input. One
    number an example is the logit of class 1, where there are two `classes`, so one column is enough for these.
    """
    if type(output) is Tensor and output.ndim == 2 and output.shape[1] > 1:
        return output  # as most models have it: the rest would take a third of the time of watching
    logits = getattr(output, "logits", output)
    if isinstance(logits, Mapping):
        logits = logits.get("logits")
    given = logits
    if isinstance(logits, (tuple, list)):
        logits = [part for part in logits if not isinstance(part, Tensor) or part.ndim] or [output]
        widths = [part.shape[1:].numel() for part in logits if isinstance(part, Tensor) and part.ndim in (1, 2)]
        logits = logits[0]
        wide = classes and isinstance(logits, Tensor) and logits.ndim == 2
        if wide and any(classes <= max(2, width) < logits.shape[1] for width in widths):
            raise ValueError(
                f"the model gives tensors of {', '.join(map(str, widths))} columns. Of a tuple the first is taken for the "
                f"logits of {classes} classes, and here it does not look like that. Return the logits first, or pass a "
                "forward_fn= that returns (logits, labels) and call sampler.observe(index, logits)."
            )
    if not (isinstance(given, (tuple, list)) and isinstance(logits, Tensor) and logits.ndim == 1):  # a loss per example
        logits = of_both_classes(logits, classes)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        raise ValueError(
            f"the model must give logits of shape (batch, classes), got {got}. Pass forward_fn=lambda model, batch: "
            "(logits, labels). This library is for single-label classification, not for a class per pixel (segmentation) or "
            "per word."
        )
    if logits.shape[1] == 1:
        known = f", and labels go up to {classes - 1}" if classes else ""
        raise ValueError(
            f"the model gives one logit per example, which can do for two classes only{known}. Give it a logit for each "
            "class. If it is a number to predict: this library is for single-label classification, not for regression."
        )
    return logits


def remark_on(logits: Tensor, labels: Tensor) -> str | None:
    """What to say of `(b, 2)` logits made of one number each, if these are probabilities: labels fit them better so."""
    if logits.shape[1] != 2 or len(logits) < 100 or bool(logits[:, 0].any()):
        return None
    one, labels = logits[:, 1].cpu(), labels.float()
    if not (0 <= float(one.min()) < 0.2 and 0.8 < float(one.max()) <= 1):
        return None
    fit = -binary_cross_entropy(one.clamp(1e-3, 1 - 1e-3), labels, reduction="none")
    gain = fit + binary_cross_entropy_with_logits(one, labels, reduction="none")
    chance = -float(torch.special.entr(torch.stack([labels.mean(), 1 - labels.mean()])).sum())
    if gain.mean() < 4 * gain.std() / len(gain) ** 0.5 or fit.mean() < chance:
        return None
    return (
        "the model's one output per example is a probability, as after a sigmoid, and was read as the logit of class 1: the "
        "scores are off. Return the logit and train with BCEWithLogitsLoss, or call sampler.observe(index, "
        "torch.logit(output, 1e-6))."
    )


def of_both_classes(logits: Any, classes: int) -> Any:
    """Two logits for the one of class 1, `(b,)` or `(b, 1)` as for `BCEWithLogitsLoss`, where there are two classes.

    Their softmax is the sigmoid of the one. Anything else is given back as it is.

    Example:
        >>> of_both_classes(torch.tensor([0.5, -2.0]), 2)
        tensor([[ 0.0000,  0.5000],
                [ 0.0000, -2.0000]])
    """
    if classes != 2 or not isinstance(logits, Tensor) or logits.ndim not in (1, 2) or logits.shape[1:].numel() != 1:
        return logits
    one = logits.reshape(-1, 1)
    return torch.cat([torch.zeros_like(one), one], 1)
