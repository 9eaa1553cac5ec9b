"""The calibration of logits on simulated predictions, against autograd and known distortions."""

import pytest
import torch
from simulated import labelled, pairs, predictions, symmetric

from coreset_sampler.selection import calibration
from coreset_sampler.selection.calibration import centred, fit_calibration


def objective(numbers, logits, ways, others=None, rate=None):
    """The log likelihood with the prior, written for autograd."""
    classes = len(logits)
    t, b, turn = numbers[0], numbers[1 : 1 + classes], numbers[1 + classes :].view(classes, classes)
    q = (t.exp() * (logits + turn @ logits) + b[:, None]).softmax(0)
    ways = ways if others is None else (1 - rate) * ways + rate * others
    return (q * ways).sum(0).log().sum() - numbers[1:].square().sum() / (2 * calibration._SPREAD**2)


def problem(matrix, n=2000, classes=4, signal=1.5):
    truth, logits = predictions(n, classes, signal=signal)
    labels = labelled(truth, matrix)
    return centred(logits), matrix.index_select(1, labels)


def test_the_gradient_is_that_of_autograd():
    logits, ways = problem(pairs(0.3, 4))
    others = torch.full_like(ways, 0.25)
    at = (0.1 * torch.randn(22, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).requires_grad_()
    value = objective(at[:-1], logits, ways, others, at[-1].sigmoid())
    value.backward()
    fit, slope = calibration._evaluated(logits, ways, others, at.detach(), 21)
    assert fit.loglik == pytest.approx(float(value.detach()))
    assert fit.rate == pytest.approx(float(at[-1].detach().sigmoid()))
    assert slope.allclose(at.grad)


def test_the_fit_is_a_maximum_and_does_not_depend_on_where_it_begins():
    logits, ways = problem(pairs(0.3, 4))
    fit = fit_calibration(logits, ways)
    numbers = fit.numbers.clone().requires_grad_()
    value = objective(numbers, logits, ways)
    value.backward()
    assert fit.loglik == pytest.approx(float(value.detach()))
    assert float(numbers.grad.abs().max()) < 0.01 * logits.shape[1]
    begin = 0.1 * torch.randn(21, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    again = fit_calibration(logits, ways, numbers=begin, iterations=100)
    assert again.loglik == pytest.approx(fit.loglik, abs=0.05)
    assert (again.numbers - fit.numbers).abs().max() < 0.02


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_calibrated_network_needs_a_temperature_and_no_more(temperature):
    truth, logits = predictions(4000, 4, temperature=temperature)
    fit = fit_calibration(centred(logits), torch.eye(4, dtype=torch.float64)[:, truth])
    assert float(fit.numbers[0].neg().exp()) == pytest.approx(temperature, rel=0.15)
    assert float(fit.numbers[1:].abs().max()) < 0.1


def test_a_network_that_favours_a_class_and_takes_one_for_another_is_put_right():
    truth, logits = predictions(6000, 4, signal=1.5)
    right, honest = torch.eye(4, dtype=torch.float64)[:, truth], logits.softmax(1).T
    wrong = logits.clone()
    wrong[:, 1] += 0.5
    wrong[:, 2] += 0.3 * logits[:, 3]
    fit = fit_calibration(centred(wrong), right)

    def apart(q):
        return float((q - honest).abs().sum(0).mean() / 2)

    assert apart(fit.probabilities) < 0.4 * apart(wrong.softmax(1).T)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5])
def test_the_rate_of_wrong_labels_is_found_with_the_calibration(rate):
    truth, logits = predictions(6000, 10, signal=1.5, temperature=2.0)
    labels = labelled(truth, symmetric(rate, 10))
    fit = fit_calibration(
        centred(logits), torch.eye(10, dtype=torch.float64)[:, labels], torch.full((10, 6000), 0.1, dtype=torch.float64)
    )
    assert 0.9 * fit.rate == pytest.approx(rate, abs=0.03)  # a tenth of labels at random is right


def test_of_many_classes_only_temperature_and_bias_are_calibrated():
    truth, logits = predictions(1000, 33, signal=4.0)
    fit = fit_calibration(centred(logits), torch.eye(33, dtype=torch.float64)[:, truth])
    assert len(fit.numbers) == 34
    assert fit.probabilities.sum(0).allclose(torch.ones(1000, dtype=torch.float64))
