import math

import pytest
import torch

from coreset_sampler.synthetic.metrics import accuracy, brier, ece, nll

METRICS = [accuracy, nll, ece, brier]

PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.0, 0.05, 0.95]])
LABELS = torch.tensor([0, 2, 2, 2])


def test_metrics_are_those_computed_by_hand():
    assert accuracy(PROBABILITIES, LABELS) == 0.75
    assert nll(PROBABILITIES, LABELS) == pytest.approx(-math.log(0.7 * 0.3 * 0.4 * 0.95) / 4)
    # each confidence has a bin of its own: gaps 0.3, 0.6, 0.6, 0.05
    assert ece(PROBABILITIES, LABELS) == pytest.approx((0.3 + 0.6 + 0.6 + 0.05) / 4)
    assert ece(PROBABILITIES, LABELS, bins=1) == pytest.approx(abs(3 - 2.65) / 4)
    rows = [0.09 + 0.04 + 0.01, 0.01 + 0.36 + 0.49, 0.09 + 0.09 + 0.36, 0.0025 + 0.0025]
    assert brier(PROBABILITIES, LABELS) == pytest.approx(sum(rows) / 4)


def test_certainty_has_the_best_and_the_worst_values():
    sure = torch.eye(3)
    right, wrong = torch.arange(3), torch.tensor([1, 2, 0])
    assert [metric(sure, right) for metric in METRICS] == [1, 0, 0, 0]
    assert [metric(sure, wrong) for metric in (accuracy, ece, brier)] == [0, 1, 2]
    assert 80 < nll(sure, wrong) < 90


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(5))
def test_calibration_error_is_that_of_torchmetrics(seed):
    from torchmetrics.functional.classification import multiclass_calibration_error

    generator = torch.Generator().manual_seed(seed)
    probabilities = (3 * torch.randn(2000, 10, generator=generator)).softmax(1)
    labels = torch.randint(10, (2000,), generator=generator)
    theirs = multiclass_calibration_error(probabilities, labels, 10, n_bins=15, norm="l1")
    assert ece(probabilities, labels) == pytest.approx(float(theirs), abs=1e-6)


def test_calibration_error_of_parts_is_not_that_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(2000, 10, generator=generator).softmax(1)
    labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0]  # calibrated by construction
    parts = [ece(p, y) for p, y in zip(probabilities.split(50), labels.split(50), strict=True)]
    assert ece(probabilities, labels) < 0.05
    assert sum(parts) / len(parts) > 2 * ece(probabilities, labels)


def test_loss_of_the_model_average_is_not_the_average_loss_of_the_models():
    each = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]])
    label = torch.tensor([0])
    assert nll(each.mean(0), label) == pytest.approx(math.log(2))
    assert sum(nll(p, label) for p in each) / 2 == pytest.approx(-math.log(0.09) / 2)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), "least entry is -1"),
        (torch.tensor([[2.0, 3.0]]), torch.tensor([0]), "row 0 sums to 5"),
        (torch.tensor([[float("nan"), 1.0]]), torch.tensor([0]), "row 0 holds NaN"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), "classes 0..1, got 2..2"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), "classes 0..1, got -1..-1"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]), r"\(t,\), got \(1, 2\) and \(2,\)"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]), "labels"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), "got"),
    ],
)
def test_what_is_no_probability_or_no_class_is_refused(metric, probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(probabilities, labels)
