"""For people's own strategies: does it behave? And labels made wrong on purpose, to see whether it finds them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..randomness import seeded
from .coreset import Coreset
from .sampler import CoresetSampler
from .types import Strategy


def check_strategy(strategy: str | Strategy | Callable[..., Coreset]) -> None:
    """Runs a strategy on small problems and raises an `AssertionError` that names the first rule it breaks.

    The rules: exactly `size` distinct indices of the data; weights finite, non-negative and summing to `n`; the same
    seed gives the same answer, whatever the global random state; the model, the labels and the state of the last selection
    stay as they are; a state can be saved and loaded; sizes from one per class up to everything work.

    Args:
        strategy: a name, a strategy with `select`, or a function `(view, size, generator) -> Coreset`.
    """
    for n, classes, size in ((60, 3, 3), (60, 3, 20), (60, 3, 60), (64, 2, 17)):
        where = f"with {n} examples of {classes} classes and size={size}"
        sampler = _small_problem(strategy, n, classes, size)
        before = {name: value.clone() for name, value in sampler.model.state_dict().items()}
        with seeded(1):
            first = sampler.select()
        assert isinstance(first, Coreset), f"a strategy must return a Coreset, got {type(first).__name__}"
        assert len(first) == size, f"a strategy must return exactly size indices, got {len(first)} {where}"
        total = float(first.weights.sum())
        assert abs(total - n) < 1e-6 * n, f"weights must sum to the number of examples, got {total} {where}"
        again = _small_problem(strategy, n, classes, size)
        with seeded(2):
            _check_equal(first, again.select(), f"the same seed must give the same {{}}, {where}")
        _check_state(sampler, again, where)
        after = sampler.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before), f"the model was changed {where}"
        labels = torch.arange(n) % classes
        assert torch.equal(labels, sampler.read_labels()), f"view.labels was changed {where}"


def _check_equal(first: Coreset, second: Coreset, rule: str) -> None:
    assert torch.equal(first.indices, second.indices), rule.format("indices")
    assert torch.allclose(first.weights, second.weights), rule.format("weights")


def _check_state(sampler: CoresetSampler, other: CoresetSampler, where: str) -> None:
    """Two samplers that have selected once: the second goes on from the saved state of the first, as the first does."""
    saved = sampler.state_dict()
    kept = copy.deepcopy(saved)
    third = sampler.select()
    for name, value in (saved["strategy_state"] or {}).items():
        good = not isinstance(value, Tensor) or torch.equal(value, kept["strategy_state"][name])
        assert good, f"a strategy must not write into its state, {name} was changed {where}"
    other.load_state_dict(kept)
    _check_equal(third, other.select(), f"after a resume a strategy must give the same {{}}, {where}")


def inject_label_noise(labels: Tensor, share: float, *, seed: int, num_classes: int | None = None) -> Tensor:
    """A copy in which `floor(share * n)` labels are replaced, each by one of the other classes at random.

    Args:
        labels: the right ones, `(n,)`, integers from 0.
        share: of them that become wrong, in [0, 1].
        seed: of the choice; the same seed gives the same labels.
        num_classes: if not the largest label plus one.
    """
    num_classes = int(labels.max()) + 1 if num_classes is None else num_classes
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}. For 30 % of wrong labels pass 0.3.")
    if share and num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, so that there is another label to put, got {num_classes}")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: int(share * len(labels))]
    offsets = torch.randint(1, max(num_classes, 2), (len(chosen),), generator=generator)
    return labels.scatter(0, chosen, (labels[chosen] + offsets) % num_classes)


def _small_problem(
    strategy: str | Strategy | Callable[..., Coreset], n: int, classes: int, size: int
) -> CoresetSampler:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 6, generator=generator)
    labels = torch.arange(n) % classes
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
    return CoresetSampler(
        TensorDataset(inputs, labels), model, size=size, strategy=strategy, labels=labels, progress=False
    )
