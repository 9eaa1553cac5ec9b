r"""How many labels are wrong, and which: a model of label noise fitted to what a network said before it was trained on them.

With the logits $z_i$ of examples at their *first* visit, nothing of their labels has been learned yet. If a label $y$ comes
from the true class $k$ with probability $Q_{ky}$ and the network, at a temperature $T$, knows the true class as well as it
says, then

$$\sum_i \log \sum_k \mathrm{softmax}(z_i / T)_k \, Q_{k y_i}$$

is the likelihood of the labels. It is maximised over $T$ (a search) and $Q$ (expectation-maximisation). By Bayes' rule the
label of an example is then right with probability $q_y Q_{yy} / \sum_k q_k Q_{ky}$, $q = \mathrm{softmax}(z / T)$.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .arguments import check_logits
from .evidence import above_chance

if TYPE_CHECKING:
    from .scores import ScoreStore

_ROWS = 10_000  # that the model is fitted to, at most; more make no figure better that is used
_ROWS_OF_TEMPERATURE = 4_000  # that one number is fitted to, twice a pass
_SEED = 0x5EED_0F_1ABE15  # of the rows that are used; 0 would be what others draw their wrong labels with
_CHUNK = 4_000_000  # numbers that are float64 at a time
_HELD = 8_000_000  # numbers of probabilities, of several temperatures, that are held for the next fit
_PER_CLASS = 50  # examples of a class that a full row of the matrix needs
_PRIOR = 5.0  # right labels of each class that are seen before any other
_ROUNDS = 15  # of expectation-maximisation for each temperature
_FLOOR = 1e-3  # share of labels that may be anything, so that no likelihood is zero
_ERRORS_ABOVE_CHANCE = 3.0  # standard errors by which a competent network's agreement is above chance
_ERRORS_ABOVE_CLEAN = 5.0  # standard deviations by which the gain of the likelihood is above that of clean labels
_LEAST_MORE = 0.01  # gain of a matrix over one rate: what a weak network confuses gains less than wrong labels do
_COARSE = tuple(10 ** (-1 + 0.2 * step) for step in range(11))  # temperatures, 0.1 to 10
_FINE = (10**-0.1, 10**-0.05, 1.0, 10**0.05, 10**0.1)
_HALVINGS = 40  # of the interval in which the factor of the odds is sought
_SUREST = 1e-7  # the least chance that a label is wrong, or right, and the least share; float32 has no numbers below

Fit = tuple[float, Tensor]  # a log likelihood and the noise matrix it belongs to
Probabilities = Callable[[float], Tensor]  # `(classes, n)` float64 by temperature: short rows are slow


@dataclass(frozen=True, eq=False)
class NoiseModel:
    """What became of the true classes.

    Args:
        temperature: that the logits are divided by.
        matrix: `(classes, classes)` float64; row `k` is how the examples of class `k` are labelled.
        rate: the estimated share of wrong labels.
        competent: whether the network agrees with the labels more often than by chance. If not, no label is doubted.
        gain: of the log likelihood an example over labels that are all right, less 1 per parameter (Akaike); 0 if none.
    """

    temperature: float
    matrix: Tensor
    rate: float
    competent: bool
    gain: float = 0.0


def noise_model(first_logits: Tensor, labels: Tensor) -> NoiseModel:
    """Fits temperature and noise matrix. Where nothing speaks against the labels, the matrix is the identity and `rate` 0.

    The matrix has one rate for all classes, and a wrong label is any class, by how common it is. That rate is found by weak
    networks too, if too low. Where it explains clearly more, by Akaike's criterion, there is a rate for each pair of
    classes. That needs 50 examples a class and a network that tells classes apart: what a weak one confuses looks the same.

    Args:
        first_logits: `(n, classes)`, of examples that the network was not trained on before, best those of the second
            half of the first pass. Rows that are not finite are left out: examples not seen.
        labels: `(n,)` int64, as given.

    Cost: at most 10,000 rows are used, a tenth of a second for 10 classes, seconds for hundreds. The same rows give the
    same model, whatever the random state.
    """
    check_logits("first_logits", first_logits, labels)
    classes = first_logits.shape[1]
    logits, labels = _some_rows(first_logits, labels)
    if not above_chance(logits.argmax(1), labels, _ERRORS_ABOVE_CHANCE):
        return NoiseModel(1.0, torch.eye(classes, dtype=torch.float64), 0.0, competent=False)
    shares = torch.bincount(labels, minlength=classes).double() / len(labels)
    at = _probabilities(logits)
    (clean, _), near = _best_temperature(at, lambda q: _loglik_clean(q, labels, shares))
    best = NoiseModel(near, torch.eye(classes, dtype=torch.float64), 0.0, competent=True)
    by_label = partial(_fit_matrix, by_label=labels.argsort(stable=True))
    for fit, parameters, least in ((_fit_background, 1, 0.0), (by_label, classes * (classes - 1), _LEAST_MORE)):
        if fit is by_label and len(labels) < _PER_CLASS * classes:
            break
        known = near if fit is by_label else None
        (noisy, matrix), near = _best_temperature(at, partial(fit, labels=labels, shares=shares), known)
        gain = (noisy - clean - parameters) / len(labels)
        of_clean = (parameters + _ERRORS_ABOVE_CLEAN * math.sqrt(2 * parameters)) / 2  # half a chi-squared, by Wilks
        if gain > best.gain + least and noisy - clean > of_clean:
            wrong = torch.sigmoid(-_odds(at(near), labels, matrix))
            best = NoiseModel(near, matrix, float(wrong.mean()), competent=True, gain=gain)
    return best


def label_odds(log_probabilities: Tensor, labels: Tensor, model: NoiseModel) -> Tensor:
    """The logarithm `(n,)` float64 of the odds that each label is right, by the mean of all that the network said of it.

    The noise matrix stays as it was found at first visits, since what is learned by heart later speaks for every label;
    the temperature is fitted anew. All are infinite where the model doubts none.

    Args:
        log_probabilities: `(n, classes)`, or logits: the mean over all visits. A row that is not finite (not seen)
            has infinite odds.
        labels: `(n,)` int64, as given.
        model: of `noise_model`.

    Cost: a softmax in float64 of all rows, in chunks; fewer than ten on at most 4,000 rows.
    """
    check_logits("log_probabilities", log_probabilities, labels)
    if log_probabilities.shape[1] != len(model.matrix):
        raise ValueError(
            f"log_probabilities must have a column for each of the model's {len(model.matrix)} classes, got "
            f"{log_probabilities.shape[1]}. Fit noise_model to logits of the same network."
        )
    odds = torch.full((len(labels),), torch.inf, dtype=torch.float64, device=log_probabilities.device)
    some, some_labels = _some_rows(log_probabilities, labels, _ROWS_OF_TEMPERATURE)
    if not model.competent or model.rate == 0 or not len(some):
        return odds
    likelihood = partial(_loglik, labels=some_labels, matrix=model.matrix)
    at = _probabilities(some)
    _, temperature = _best_temperature(at, lambda q: (likelihood(q), model.matrix), model.temperature)
    for rows in torch.arange(len(labels)).split(max(1, _CHUNK // len(model.matrix))):
        part, of = log_probabilities[rows], labels[rows].to(odds.device)
        found = _odds(_probabilities(part)(temperature), of, model.matrix.to(odds.device))
        odds[rows] = found.nan_to_num(torch.inf)
    return odds


def quality_of(store: ScoreStore, model: NoiseModel) -> Tensor:
    """The probability `(n,)` float32 that each label is right, by all that was seen; the mean is at most the model's share.

    Never seen: 1. Of projected scores only the label's own probability is known: whatever is not the label is taken to be
    any other class.

    Args:
        store: of a sampler that observes.
        model: of `noise_model`, such as that of its `first_visits`.
    """
    quality, seen = torch.ones(store.n, dtype=torch.float32), store.counts > 0
    if not model.competent or model.rate == 0 or not bool(seen.any()):
        return quality
    odds = _odds_by_own(store, model) if store.projected else label_odds(store.log_probabilities, store.labels, model)
    quality[seen] = lowered(odds[seen], 1 - model.rate).sigmoid().float()
    return quality


def lowered(odds: Tensor, most: float) -> Tensor:
    """Log odds `(n,)` in the same order whose probabilities have a mean of at most `most`: less one number for all.

    What a network has learned by heart speaks for wrong labels too. It still speaks more for right ones, so that the order
    is kept when their number is known. No label is surer than float32 can say, so that the surest count alike, unless more
    labels are that sure than can be right: then the order is in the odds alone.

    Example:
        >>> lowered(torch.tensor([0.9, 0.8]).double().logit(), 0.5).sigmoid()  # odds 9 and 4 become 1.5 and 0.67, a sixth
        tensor([0.6000, 0.4000], dtype=torch.float64)

    Args:
        odds: `(n,)` float64 logarithms, finite.
        most: share of right labels.
    """
    quality = odds.sigmoid().float().double()
    if not len(odds) or float(quality.mean()) <= most:
        return odds
    doubted = min(len(odds), max(1, round((1 - most) * len(odds))))
    if float(quality.kthvalue(doubted).values) < 1 - _SUREST:
        odds = quality.clamp(_SUREST, 1 - _SUREST).logit()
    low, high = math.log(max(most, _SUREST) / (1 - most)) - float(odds.max()), 0.0  # by low none is above `most`
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if float((odds + middle).sigmoid().mean()) > most else (middle, high)
    return odds + low


def _odds_by_own(store: ScoreStore, model: NoiseModel) -> Tensor:
    """By the mean probability of the label alone; NaN where never seen."""
    diagonal, labels, own = model.matrix.diag(), store.labels, store.label_probability.double()
    others = (model.matrix.sum(0) - diagonal) / (len(model.matrix) - 1)  # of each label, from any other class
    right, wrong = own * diagonal[labels], (1 - own) * others[labels]
    return (right.clamp(min=1e-300) / wrong.clamp(min=1e-300)).log()


def _probabilities(logits: Tensor) -> Probabilities:
    """`softmax(logits / temperature)` of each temperature asked for."""
    columns = logits.T.to(torch.float64, memory_format=torch.contiguous_format)
    return lru_cache(max(1, _HELD // columns.numel()))(lambda temperature: (columns / temperature).softmax(0))


def _best_temperature(
    probabilities: Probabilities, fit: Callable[[Tensor], Fit], near: float | None = None
) -> tuple[Fit, float]:
    """The best fit, and its temperature: a coarse search, then a climb over fine steps from its best.

    Where it is known to be `near` a temperature, the coarse search climbs from there: a few fits in place of all.
    """

    @cache
    def at(temperature: float) -> Fit:
        return fit(probabilities(temperature))

    def top(temperatures: Sequence[float], place: int) -> float:
        before = -1
        while place != before:
            around, before = range(max(0, place - 1), min(place + 2, len(temperatures))), place
            place = max(around, key=lambda place: at(temperatures[place])[0])
        return temperatures[place]

    if near is None:
        coarse = max(_COARSE, key=lambda temperature: at(temperature)[0])
    else:
        coarse = top(_COARSE, min(range(len(_COARSE)), key=lambda place: abs(math.log(_COARSE[place] / near))))
    found = top([coarse * factor for factor in _FINE], len(_FINE) // 2)
    return at(found), found


def _fit_matrix(q: Tensor, labels: Tensor, shares: Tensor, by_label: Tensor) -> Fit:
    """One rate for each pair of classes, by expectation-maximisation from 70 % right labels; `by_label` sorts these."""
    classes = len(q)
    matrix = torch.full((classes, classes), 0.3 / max(classes - 1, 1), dtype=torch.float64)
    matrix.fill_diagonal_(0.7)
    prior = _PRIOR * torch.eye(classes, dtype=torch.float64) + _FLOOR * shares
    labelled = q.gather(1, by_label.expand(classes, -1)).split(torch.bincount(labels, minlength=classes).tolist(), 1)
    for _ in range(_ROUNDS):  # with the examples of a label together, which takes half of the time
        columns = zip(labelled, matrix.unbind(1), strict=True)
        counts = matrix * torch.stack(
            [of @ (column @ of).clamp_(min=1e-300).reciprocal_() for of, column in columns], 1
        )
        matrix = (counts + prior) / (counts + prior).sum(1, keepdim=True)
    return _loglik(q, labels, matrix), matrix


def _fit_background(q: Tensor, labels: Tensor, shares: Tensor) -> Fit:
    """One rate for all classes, by expectation-maximisation from 30 % wrong labels; these have the labels' `shares`."""
    own, anything = _own(q, labels), shares.index_select(0, labels)
    rate = 0.3
    for _ in range(2 * _ROUNDS):
        other = rate * anything
        wrong = other / ((1 - rate) * own + other)
        rate = max(float(wrong.sum()) / (len(labels) + _PRIOR), _FLOOR)
    matrix = (1 - rate) * torch.eye(len(shares), dtype=torch.float64) + rate * shares
    return float(((1 - rate) * own + rate * anything).log().sum()), matrix


def _loglik_clean(q: Tensor, labels: Tensor, shares: Tensor) -> Fit:
    """Of labels that are all right, by what the network says or by that with each class at its share, whichever is more.

    Wrong labels of any class have the classes' shares. Without the same for right ones, weak networks would find the one
    where there is no more than the other.
    """
    at_share = q * (shares / q.mean(1).clamp(min=1e-300))[:, None]
    logliks, anything = [], shares.index_select(0, labels)
    for own in (_own(q, labels), _own(at_share, labels) / at_share.sum(0).clamp(min=1e-300)):
        logliks.append(float(((1 - _FLOOR) * own + _FLOOR * anything).log().sum()))
    return max(logliks), shares


def _own(q: Tensor, labels: Tensor) -> Tensor:
    """Of each label by the network: `(n,)`."""
    return q.gather(0, labels[None])[0]


def _loglik(q: Tensor, labels: Tensor, matrix: Tensor) -> float:
    """Of the labels, over the true classes."""
    return float(matrix.gather(1, labels.expand(len(q), -1)).mul_(q).sum(0).clamp_(min=1e-300).log().sum())


def _odds(q: Tensor, labels: Tensor, matrix: Tensor) -> Tensor:
    """Bayes' rule: the logarithm `(n,)` of the odds that a label is that of the true class."""
    ways = matrix.gather(1, labels.expand(len(q), -1)).mul_(q)  # to come by the label, from each true class
    right = ways.gather(0, labels[None])
    wrong = ways.scatter_(0, labels[None], 0.0).sum(0)
    return right[0].clamp(min=1e-300).log() - wrong.clamp(min=1e-300).log()


def _some_rows(values: Tensor, labels: Tensor, most: int = 10**9) -> tuple[Tensor, Tensor]:
    """At most 10,000 finite rows, and at most `most`, in float64, always the same, on the CPU."""
    rows, most = values[:, 0].isfinite().nonzero().flatten().cpu(), min(most, _ROWS)
    if len(rows) > most:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(_SEED))
        rows = rows[order[:most].sort().values]
    some, labels = values.index_select(0, rows.to(values.device)).to("cpu", torch.float64), labels.cpu()[rows]
    if bool(some.sum().isfinite()):  # no NaN is lost in a sum, and no infinity
        return some, labels
    finite = some.isfinite().all(1)
    return some[finite], labels[finite]
