"""Believed: random examples, in turn, the less often the less the model believes their labels."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..coreset import Coreset
from ..posterior import PointMass
from ..types import Posterior, Strategy, View
from .belief import Said, knows_labels, label_belief, wrong_share
from .look import ROWS_A_SHARE, check_settings, random_of_each_class
from .pools import quotas

_LEAST_CHANCE = 1e-6  # of an example whose label the model finds impossible


def believed(
    *,
    doubt: float = 2.0,
    candidates: int = 4,
    reuse: int = 1,
    posterior: Posterior | None = None,
    draws: int = 1,
    balance: str = "equal",
) -> Strategy:
    r"""Keeps random examples, each class's own in turn, with chances that go by how far the model believes their labels.

    A label that is right with probability $r$, by what the model says (see `belief.py`), has a chance in proportion to
    $r^{\text{doubt}}$: 0 trusts all labels, 1 goes by the odds, 2 allows for a model that already believes some of the
    wrong ones. While the model knows nothing, all have the same chance. What was kept goes to the end of the queue, so that
    as long as a look serves, examples of equal belief are shown equally often: where no label is doubted, that is a pass
    over the data. The share of wrong labels is estimated on the way (`wrong_labels` in the sampler's stats), unless the
    model cannot tell.

    A look takes `candidates` examples for each one to keep and serves `reuse` selections. `posterior` and `draws` say at
    which weights to look, by default the current ones. Cost: `min(n, reuse * size * candidates)` examples through the
    model, `draws` times, and two numbers each between selections.
    """
    check_settings(draws=draws, balance=balance, doubt=doubt, reuse=reuse)
    if candidates < 1:
        raise ValueError(f"candidates must be at least 1 for each example to keep, got {candidates}")
    return partial(
        in_turn,
        doubt=doubt,
        candidates=candidates,
        reuse=reuse,
        posterior=PointMass() if posterior is None else posterior,
        draws=draws,
        balance=balance,
    )


def in_turn(
    view: View,
    size: int,
    generator: torch.Generator,
    *,
    doubt: float,
    candidates: int,
    reuse: int,
    posterior: Posterior,
    draws: int,
    balance: str,
) -> Coreset:
    """The selection itself. An example comes up again after a time that is the inverse of its chance."""
    memory = view.memory
    left = int(memory.get("uses_left", torch.zeros(())))
    if left == 0:
        memory.pop("wrong_labels", None)
        wanted = min(len(view.labels), reuse * size * candidates)
        chosen = random_of_each_class(view.labels, wanted, balance, generator)
        right, wrong = _belief(view, chosen, posterior, draws, generator)
        chance = (right**doubt).clamp(min=_LEAST_CHANCE)
        first_time = torch.rand(len(chosen), generator=generator, dtype=torch.float64) / chance
        memory.update(candidates=chosen, chance=chance, due=first_time)
        if wrong is not None:
            memory["wrong_labels"] = torch.tensor(wrong, dtype=torch.float64)
        left = reuse
    memory["uses_left"] = torch.tensor(left - 1)
    if "wrong_labels" in memory:
        view.report(wrong_labels=float(memory["wrong_labels"]))
    labels = view.labels[memory["candidates"]]
    counts = torch.bincount(view.labels)
    looked = torch.bincount(labels, minlength=len(counts))
    quota = quotas(view.labels, size, balance, generator, at_most=looked)
    first = torch.argsort(memory["due"], stable=True)
    first = first[torch.argsort(labels[first], stable=True)]
    rank = torch.arange(len(first)) - (torch.cumsum(looked, 0) - looked)[labels[first]]
    picks = first[rank < quota[labels[first]]]
    memory["due"] = memory["due"].index_add(0, picks, 1 / memory["chance"][picks])
    weights = (counts / quota.clamp(min=1).double())[labels[picks]]
    return Coreset(memory["candidates"][picks], weights * len(view.labels) / weights.sum())


def _belief(
    view: View, chosen: Tensor, posterior: Posterior, draws: int, generator: torch.Generator
) -> tuple[Tensor, float | None]:
    """How likely each candidate's label is right `(k,)`, and the share of wrong ones, if the model can tell."""
    samples = posterior.draw(view, draws, generator)
    mine = view.mine(list(chosen.split(ROWS_A_SHARE)))
    seen = zip(mine, view.gradients(mine, samples), strict=True)
    parts = view.gather([(Said.of(g, view.labels[rows]), g.shape[-1]) for rows, g in seen])
    said, classes = Said.joined([part for part, _ in parts]), parts[0][1]  # of the model, not only of the labels
    if not knows_labels(said, view.labels[chosen]):
        return torch.ones_like(said.label), None
    right = label_belief(said.label, torch.tensor([len(chosen)]), classes)
    return right, wrong_share(float(1 - right.mean()), said, view.labels[chosen])
