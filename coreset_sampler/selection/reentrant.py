"""Notices reentrant activation checkpointing, which hides parameters from `torch.autograd.grad`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_HIDING = "None of the inputs have requires_grad"  # torch's warning: what is inside then gets no gradient
_REFUSING = "use_reentrant=True"  # torch's error: it has to be backward()


class ReentrantError(ValueError):
    """A gradient was asked for through a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__(
            "the Laplace posterior needs the gradient of layers that the model runs in a reentrant checkpoint, which "
            "hides it. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint, name layers outside of it with "
            "layers=, or use SphericalGaussian."
        )


@contextmanager
def noticing_checkpoints() -> Iterator[list[str]]:
    """The list is not empty afterwards if a checkpoint inside hid its parameters; one that torch refuses is an error."""
    noticed: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.filterwarnings("always", message=_HIDING)
            yield noticed
    except RuntimeError as error:
        if _REFUSING in str(error):
            raise ReentrantError from error
        raise
    finally:
        for warning in said:
            if _HIDING in str(warning.message):
                noticed.append(str(warning.message))
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
