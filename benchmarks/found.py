"""How well wrong labels are found: area under the curve, and the share of wrong ones among the first suspects."""

from __future__ import annotations

import torch
from harness import Row
from torch import Tensor, nn

from coreset_sampler import CoresetSampler

FIRST = (100, 500, 1000)


def auc(suspicion: Tensor, wrong: Tensor) -> float:
    """The chance that a wrong label is more suspicious than a right one; ties count half."""
    values, order = suspicion.double().sort()
    _, group, sizes = values.unique_consecutive(return_inverse=True, return_counts=True)
    ranks = torch.empty_like(values)
    ranks[order] = (sizes.cumsum(0) - (sizes - 1) / 2)[group].double()
    n_wrong, n_right = int(wrong.sum()), int((~wrong).sum())
    return float((ranks[wrong].sum() - n_wrong * (n_wrong + 1) / 2) / (n_wrong * n_right)) if n_wrong * n_right else 0.5


def found(sampler: CoresetSampler, wrong: Tensor, now: Tensor | None = None) -> Row:
    """Figures of the examples that were seen, by mean probability, mean margin, the library's suspects, and `now` `(n,)`,
    the probability of each label at the end. Nothing where nothing was observed or no label is wrong."""
    if not sampler.stats.get("coverage") or not bool(wrong.any()):
        return {}
    scores = sampler.scores
    seen = scores.counts > 0
    rules = {"probability": -scores.label_probability, "margin": -scores.margin} | (
        {} if now is None else {"now": -now}
    )
    figures = {f"auc_{name}": auc(rule[seen], wrong[seen]) for name, rule in rules.items()}
    most = min(FIRST[-1], int(seen.sum()))
    for name, rule in rules.items():
        order = rule.masked_fill(~seen, -torch.inf).argsort(descending=True)
        figures |= {f"precision_{k}_{name}": float(wrong[order[:k]].double().mean()) for k in FIRST if k <= most}
    suspects = torch.tensor([suspect.index for suspect in sampler.suspects(most)])
    return figures | {f"precision_{k}": float(wrong[suspects[:k]].double().mean()) for k in FIRST if k <= most}


@torch.no_grad()
def label_probability_now(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """`(n,)` at the current weights, in evaluation mode."""
    model.eval()
    parts = [
        model(rows).softmax(1).gather(1, y[:, None])[:, 0]
        for rows, y in zip(x.split(500), labels.split(500), strict=True)
    ]
    return torch.cat(parts)
