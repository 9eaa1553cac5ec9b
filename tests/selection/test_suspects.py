"""Suspects among simulated predictions: which labels are wrong is known."""

import pytest
import torch
from simulated import area_under_curve, labelled, observed, pairs, predictions, symmetric

from coreset_sampler.selection.noise import NoiseModel, noise_model, quality_of
from coreset_sampler.selection.scores import ScoreStore
from coreset_sampler.selection.suspects import Suspect, chance_right, suspects


def half_clean(rate, classes):
    """Only the first half of the classes is taken for the next."""
    matrix = pairs(rate, classes)
    matrix[classes // 2 :] = torch.eye(classes, dtype=torch.float64)[classes // 2 :]
    return matrix


@pytest.mark.parametrize("matrix", [symmetric(0.4, 10), pairs(0.3, 10), half_clean(0.4, 10), symmetric(0.2, 100)])
def test_the_first_suspects_are_wrong_and_the_probabilities_add_up(matrix):
    classes = len(matrix)
    truth, logits = predictions(4000, classes, signal=3.0 if classes == 10 else 4.5)
    labels = labelled(truth, matrix)
    store, wrong = observed(logits, labels, visits=3, spread=0.5), labels != truth
    right = chance_right(store)
    assert area_under_curve(right, wrong) > 0.95
    assert float((1 - right).sum()) == pytest.approx(float(wrong.sum()), rel=0.15)
    first = suspects(store, 200)
    assert float(wrong[[suspect.index for suspect in first]].double().mean()) > 0.97
    doubts = [suspect.probability_wrong for suspect in first]
    assert doubts == sorted(doubts, reverse=True)
    assert all(suspect.label == int(labels[suspect.index]) for suspect in first)
    assert sum(suspect.predicted == int(truth[suspect.index]) for suspect in first) > 190


@pytest.mark.parametrize("classes", [10, 100])
def test_few_wrong_labels_that_no_rate_is_found_for_still_come_first(classes):
    truth, logits = predictions(3000, classes, signal=4.0)
    labels = truth.clone()
    labels[:10] = (labels[:10] + 1) % classes
    store = observed(logits, labels)
    assert noise_model(*reversed([store.labels[store.first_visits()[0]], store.first_visits()[1]])).rate == 0
    assert area_under_curve(chance_right(store), labels != truth) > 0.97
    assert sum(suspect.index < 10 for suspect in suspects(store, 20)) >= 8


def test_a_model_that_is_given_is_not_fitted_anew():
    truth, logits = predictions(1000, 5)
    store = observed(logits, truth)
    doubting = NoiseModel(pairs(0.3, 5), 0.3, competent=True)
    assert chance_right(store, doubting).equal(quality_of(store, doubting))
    assert not chance_right(store).equal(chance_right(store, doubting))


def test_what_was_never_seen_is_no_suspect_and_has_no_chance():
    truth, logits = predictions(600, 5)
    store = observed(logits, labelled(truth, symmetric(0.3, 5)), seen=500)
    right = chance_right(store)
    assert right[:500].isfinite().all()
    assert right[500:].isnan().all()
    found = suspects(store, 600)
    assert sorted(suspect.index for suspect in found) == list(range(500))
    assert isinstance(found[0], Suspect)
    assert suspects(ScoreStore(truth, 5), 3) == []


def test_of_equal_chances_the_smaller_margin_comes_first():
    logits = torch.tensor([[9.0, 0.0], [-60.0, 0.0], [-90.0, 0.0], [-70.0, 0.0]])
    found = suspects(observed(logits, torch.zeros(4, dtype=torch.int64)), 4)
    assert [suspect.index for suspect in found] == [2, 3, 1, 0]
    assert found[0].predicted == 1
    assert found[-1].predicted == 0


@pytest.mark.parametrize("k", [0, -3, 2.5, True, "5"])
def test_a_number_of_suspects_that_is_none_is_refused(k):
    store = observed(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"k must be a whole number of suspects, at least 1, got .*pass k=store\.n"):
        suspects(store, k)
