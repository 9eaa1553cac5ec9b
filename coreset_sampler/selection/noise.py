r"""How many labels are wrong, and which: a model of label noise fitted to what a network said before it was trained on them.

With the logits $z_i$ of examples at their *first* visit, nothing of their labels has been learned yet. If a label $y$ comes
from the true class $k$ with probability $Q_{ky}$ and the network, linearly calibrated (`calibration.py`), knows the true
class as well as it says, then

$$\sum_i \log \sum_k \mathrm{softmax}(W z_i + b)_k \, Q_{k y_i}$$

is the likelihood of the labels. It is maximised over the calibration (by L-BFGS) and $Q$ (by expectation-maximisation). By
Bayes' rule a label is then right with probability $q_y Q_{yy} / \sum_k q_k Q_{ky}$, where $q$ is what the network said over
all visits, at a temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .arguments import check_logits
from .calibration import Fit, centred, fit_calibration
from .evidence import above_chance

if TYPE_CHECKING:
    from .scores import ScoreStore

_ROWS = 10_000  # that the model is fitted to, at most; more make no figure better that is used
_ROWS_OF_TEMPERATURE = 4_000  # that one number is fitted to, twice a pass
_SEED = 0x5EED_0F_1ABE15  # of the rows that are used; 0 would be what others draw their wrong labels with
_CHUNK = 4_000_000  # numbers that are float64 at a time
_PER_CLASS = 50  # examples of a class that a full row of the matrix needs
_PRIOR = 5.0  # right labels of each class that are seen before any other
_BEGIN = 0.3  # wrong labels that a fit begins with
_ROUNDS = 4  # of a calibration and of expectation-maximisation, in turn; see _fit_matrix
_STEPS, _ITERATIONS = 8, 10  # of the latter in each, and of the former
_FLOOR = 1e-3  # share of labels that may be anything, so that no likelihood is zero
_ERRORS_ABOVE_CHANCE = 3.0  # standard errors by which a competent network's agreement is above chance
_KNOWN = 0.2  # of the number of its labels, as often a class is predicted that the network knows
_MOST_UNKNOWN = 0.08  # share of labels of other classes
_ERRORS_ABOVE_CLEAN = 5.0  # standard deviations by which the gain of the likelihood is above that of clean labels
_LEAST_MORE = 0.01  # gain an example of a matrix over one rate; what a weak network confuses gains less
_TIMES_AS_MUCH = 2.0  # as one rate gains over none: where labels of any class are wrong, confusions gain about as much
_TEMPERATURES = tuple(10 ** (0.05 * step) for step in range(-20, 21))  # 0.1 to 10
_STRIDE = 4  # temperatures that a climb begins with
_HALVINGS = 40  # of the interval in which the factor of the odds is sought
_LEAST = 1e-300  # likelihood
_SUREST = 1e-7  # the least chance that a label is wrong, or right, and the least share; float32 has no numbers below


@dataclass(frozen=True, eq=False)
class NoiseModel:
    """What became of the true classes.

    Args:
        matrix: `(classes, classes)` float64; row `k` is how the examples of class `k` are labelled.
        rate: the estimated share of wrong labels.
        competent: whether the network knows the classes, and agrees with labels more often than by chance. If not, no label
            is doubted.
    """

    matrix: Tensor
    rate: float
    competent: bool

    @property
    def coherence(self) -> float:
        """The share of wrong labels that are the most frequent wrong label of their class: 1 where it is always the same."""
        wrong = self.matrix * (1 - torch.eye(len(self.matrix), dtype=torch.float64))
        return float(wrong.amax(1).sum() / wrong.sum().clamp(min=_SUREST))


def noise_model(first_logits: Tensor, labels: Tensor) -> NoiseModel:
    """Fits calibration and noise matrix. Where nothing speaks against the labels, the matrix is the identity and `rate` 0.

    A wrong label is any class, by how common it is; that rate is found by weak networks too. Or, where it explains clearly
    more, a label is wrong as often in all classes, but some classes are taken for some others; or each class has a rate of
    its own. That needs 50 examples a class and a network that tells classes apart: what a weak one confuses looks the same.

    Args:
        first_logits: `(n, classes)`, of examples that the network was not trained on before, best those of the second
            half of the first pass. Rows that are not finite are left out: examples not seen.
        labels: `(n,)` int64, as given.

    Cost: at most 10,000 rows are used, a fifth of a second for 10 classes, seconds for hundreds. The same rows give the
    same model, whatever the random state.
    """
    check_logits("first_logits", first_logits, labels)
    classes = first_logits.shape[1]
    logits, labels = _some_rows(first_logits, labels)
    eye = torch.eye(classes, dtype=torch.float64)
    likeliest = logits.argmax(1)
    counts, predicted = (torch.bincount(of, minlength=classes).double() for of in (labels, likeliest))
    unknown = float(counts[predicted < _KNOWN * counts].sum())  # labels of classes that the network has not learned yet
    if not above_chance(likeliest, labels, _ERRORS_ABOVE_CHANCE) or unknown > _MOST_UNKNOWN * len(labels):
        return NoiseModel(eye, 0.0, competent=False)
    shares = counts / len(labels)
    columns, right = centred(logits), eye.index_select(1, labels)
    anything = shares.index_select(0, labels).expand(classes, -1)
    clean = fit_calibration(columns, torch.lerp(right, anything, _FLOOR))
    one = fit_calibration(columns, right, anything, rate=_BEGIN, numbers=clean.numbers)
    models = [_Model(clean, eye, 0, 0.0), _Model(one, torch.lerp(eye, shares.expand(classes, -1), one.rate), 1, 0.0)]
    if len(labels) >= _PER_CLASS * classes:
        least = max(_LEAST_MORE * len(labels), _TIMES_AS_MUCH * (one.loglik - clean.loglik))
        begin = eye * (1 - _BEGIN - _BEGIN / (classes - 1)) + _BEGIN / (classes - 1)
        models.append(_Model(*_fit_matrix(columns, labels, begin, one_rate=True), classes * (classes - 2) + 1, least))
        each = _fit_matrix(columns, labels, models[-1].matrix, one_rate=False)
        models.append(_Model(*each, classes * (classes - 1), least))
    best = models[0]
    for model in models[1:]:
        best = model if model.says_more_than(best) else best
    wrong = torch.sigmoid(-_odds(best.fit.probabilities, labels, best.matrix)).mean() if best.parameters else 0.0
    return NoiseModel(best.matrix, float(wrong), competent=True)


class _Model(NamedTuple):
    fit: Fit
    matrix: Tensor
    parameters: int
    least: float
    """That it has to gain beyond what chance gives."""

    def says_more_than(self, other: _Model) -> bool:
        """Whether it explains the labels better than it would if the simpler model were right.

        By chance it gains half a chi-squared (Wilks), or twice of that with few examples for each parameter (Akaike). A
        network's confusions gain more, if less than wrong labels.
        """
        more, free = self.fit.loglik - other.fit.loglik, self.parameters - other.parameters
        by_chance = max(free, (free + _ERRORS_ABOVE_CLEAN * math.sqrt(2 * free)) / 2)
        return more > max(by_chance, free / 2 + self.least)


def label_odds(log_probabilities: Tensor, labels: Tensor, model: NoiseModel) -> Tensor:
    """The logarithm `(n,)` float64 of the odds that each label is right, by the mean of all that the network said of it.

    The noise matrix stays as it was found at first visits, since what is learned by heart later speaks for every label; a
    temperature is fitted anew. All are infinite where the model doubts none.

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
    columns, ways = centred(some), model.matrix.index_select(1, some_labels)
    temperature = _best_temperature(
        lambda t: float((columns / t).softmax(0).mul_(ways).sum(0).clamp_(_LEAST).log_().sum())
    )
    matrix = model.matrix.to(odds.device)
    for rows in torch.arange(len(labels)).split(max(1, _CHUNK // len(matrix))):
        q = centred(log_probabilities[rows]).div_(temperature).softmax(0)
        odds[rows] = _odds(q, labels[rows].to(odds.device), matrix).nan_to_num(torch.inf)
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
    return (right.clamp(_LEAST) / wrong.clamp(_LEAST)).log()


def _best_temperature(loglik: Callable[[float], float]) -> float:
    """The best of `_TEMPERATURES`, by a climb from 1 in long strides and then in short ones."""

    @cache
    def at(place: int) -> float:
        return loglik(_TEMPERATURES[place])

    place = len(_TEMPERATURES) // 2
    for stride in (_STRIDE, 1):
        before = -1
        while place != before:
            before = place
            around = range(max(0, place - stride), min(place + stride + 1, len(_TEMPERATURES)), stride)
            place = max(around, key=at)
    return _TEMPERATURES[place]


def _fit_matrix(logits: Tensor, labels: Tensor, matrix: Tensor, *, one_rate: bool) -> tuple[Fit, Tensor]:
    """A calibration and a matrix, of a rate for each pair of classes or with `one_rate` the same in all rows.

    They are fitted in turn, from the given matrix and a few times only: a network that was trained on the labels says of a
    cat that it is a dog as often as cats are labelled so, and in the end labels would explain themselves.
    """
    eye, sizes = torch.eye(len(logits), dtype=torch.float64), torch.bincount(labels, minlength=len(logits))
    prior, order = _PRIOR * eye + _FLOOR * sizes / len(labels), labels.argsort(stable=True)
    fit = fit_calibration(logits, matrix.index_select(1, labels), iterations=_ITERATIONS)
    for _ in range(_ROUNDS):
        labelled = fit.probabilities.index_select(1, order).split(sizes.tolist(), 1)
        for _ in range(_STEPS):  # with the examples of a label together, which takes half of the time
            columns = zip(labelled, matrix.unbind(1), strict=True)
            counts = [of @ (column @ of).clamp_(_LEAST).reciprocal_() for of, column in columns]
            matrix = matrix * torch.stack(counts, 1) + prior
            if one_rate:
                right = matrix.diag().sum() / matrix.sum()
                wrong = matrix * (1 - eye)
                matrix = right * eye + (1 - right) * wrong / wrong.sum(1, keepdim=True)
            else:
                matrix = matrix / matrix.sum(1, keepdim=True)
        fit = fit_calibration(logits, matrix.index_select(1, labels), numbers=fit.numbers, iterations=_ITERATIONS)
    return fit, matrix


def _odds(q: Tensor, labels: Tensor, matrix: Tensor) -> Tensor:
    """Bayes' rule: the logarithm `(n,)` of the odds that a label is that of the true class."""
    ways = matrix.gather(1, labels.expand(len(q), -1)).mul_(q)  # to come by the label, from each true class
    right = ways.gather(0, labels[None])
    wrong = ways.scatter_(0, labels[None], 0.0).sum(0)
    return right[0].clamp(_LEAST).log() - wrong.clamp(_LEAST).log()


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
