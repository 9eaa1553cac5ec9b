"""How good predictive probabilities are: accuracy, log-likelihood, calibration. Each over all examples given, at once.

For several samples or networks pass the mean of their probabilities: the model average is what is judged.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    """The share of examples `(t,)` whose own class has the largest probability `(t, k)`."""
    _check(probabilities, labels)
    return float((probabilities.argmax(1) == labels).double().mean())


def nll(probabilities: Tensor, labels: Tensor) -> float:
    r"""$-\frac1t \sum_i \log p_i(y_i)$; for a model average $p_i$ is the mean over models, taken before the logarithm.

    A probability that rounds to 0 counts as the smallest positive number of its dtype, about 87 nats in float32.
    """
    _check(probabilities, labels)
    own = probabilities.gather(1, labels[:, None].long())[:, 0]
    return float(-own.clamp_min(torch.finfo(own.dtype).tiny).double().log().mean())


def ece(probabilities: Tensor, labels: Tensor, *, bins: int = 15) -> float:
    r"""Expected calibration error: $\sum_b \frac{t_b}{t} |\mathrm{accuracy}_b - \mathrm{confidence}_b|$.

    Confidence is the largest probability, in `bins` of equal width, each open on the left. Guo et al. 2017. Computed
    over parts of a test set and averaged it comes out larger: pass the whole.
    """
    _check(probabilities, labels)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    confidence, predicted = probabilities.max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)
    place = (torch.bucketize(confidence, edges) - 1).clamp(0, bins - 1)
    gap = (predicted == labels).double() - confidence.double()
    return float(gap.new_zeros(bins).index_add_(0, place, gap).abs().sum() / len(labels))


def brier(probabilities: Tensor, labels: Tensor) -> float:
    r"""$\frac1t \sum_i \sum_j (p_{ij} - [j = y_i])^2$, summed over classes: 0 is perfect, 2 is sure and always wrong."""
    _check(probabilities, labels)
    p = probabilities.double()
    return float((p.square().sum(1) - 2 * p.gather(1, labels[:, None].long())[:, 0] + 1).mean())


def _check(probabilities: Tensor, labels: Tensor) -> None:
    shapes = f"{tuple(probabilities.shape)} and {tuple(labels.shape)}"
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or len(labels) == 0:
        raise ValueError(f"probabilities must be (t, k) and labels (t,), got {shapes}")
    if not probabilities.is_floating_point() or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"probabilities must be floats, labels integers, got {probabilities.dtype}, {labels.dtype}")
    if not bool(torch.isfinite(probabilities).all()):
        where = int((~torch.isfinite(probabilities).all(1)).nonzero()[0])
        raise ValueError(f"probabilities must be finite; row {where} holds NaN or infinity")
    off = (probabilities.double().sum(1) - 1).abs()
    if float(off.max()) > 1e-3 or float(probabilities.min()) < 0:
        worst = int(off.argmax())
        raise ValueError(
            "probabilities must be at least 0, each row with sum 1; "
            f"row {worst} sums to {float(probabilities[worst].double().sum()):.4g}, the least entry is "
            f"{float(probabilities.min()):.4g}. For logits pass logits.softmax(-1)."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= probabilities.shape[1]:
        raise ValueError(f"labels must be classes 0..{probabilities.shape[1] - 1}, got {low}..{high}")
