"""What selection costs, against the time of training epochs: evaluation, workers that read ahead, resume."""

import time

import pytest
from test_sampler import Recorded, sampler_of
from torch.utils.data import DataLoader

from coreset_sampler import strategies
from coreset_sampler.selection.budget import Budget

SELECTING, TRAINING, EVALUATING = 0.1, 0.3, 0.9


def slow(view, size, generator):
    time.sleep(SELECTING)
    return strategies.Uniform().select(view, size, None, generator)[0]


def run(sampler, *, epochs=2, **options):
    """A loop of six batches an epoch that takes `TRAINING` seconds for them and then evaluates."""
    loader = DataLoader(sampler.dataset, batch_size=15, sampler=sampler, **options)
    for _ in range(epochs):
        for _ in loader:
            time.sleep(TRAINING / 6)
        time.sleep(EVALUATING)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}]
)
def test_the_share_is_of_selection_and_training_and_not_of_the_users_evaluation(options):
    sampler = sampler_of(Recorded(), strategy=slow)
    run(sampler, **options)
    expected = SELECTING / (SELECTING + TRAINING)  # with evaluation it would be 0.08
    assert sampler.stats["share"] == pytest.approx(expected, abs=0.08)


def test_a_selection_in_the_middle_of_an_epoch_is_no_training():
    budget = Budget(None)
    budget.epoch_begins()
    time.sleep(0.05)
    budget.selected(0.03)
    budget.all_given_out()
    time.sleep(0.05)
    assert 0.015 < budget.training < 0.04


def test_an_epoch_that_was_broken_off_or_read_ahead_whole_lasts_until_the_next_begins():
    for ahead in (0.0, 1.0):
        budget = Budget(None)
        budget.epoch_begins(ahead)
        if ahead:
            budget.all_given_out()
        time.sleep(0.03)
        budget.epoch_begins()
        assert 0.03 <= budget.training < 0.06


def test_another_selection_is_allowed_once_training_has_paid_for_it():
    budget = Budget(0.25)
    budget.load_state_dict({"seconds": 1.0, "training": 5.9, "last": 1.0})
    assert not budget.allows()  # two seconds of 7.9
    budget.load_state_dict({"seconds": 1.0, "training": 6.0, "last": 1.0})
    assert budget.allows()
    assert budget.share == pytest.approx(1 / 7)


def test_a_budget_goes_on_from_its_state_and_a_bad_one_changes_nothing():
    budget = Budget(0.5)
    budget.load_state_dict({"seconds": 2.0, "training": 3.0, "last": 0.5})
    for bad in ({"seconds": 9.0, "training": 9.0}, {"seconds": 9.0, "training": "x", "last": 1.0}):
        with pytest.raises((KeyError, ValueError)):
            budget.load_state_dict(bad)
        assert budget.state_dict() == {"seconds": 2.0, "training": 3.0, "last": 0.5}


def test_time_between_a_stop_and_a_resume_does_not_count():
    first, second = sampler_of(strategy=slow), sampler_of(strategy=slow)
    list(first)
    state = first.state_dict()
    time.sleep(0.1)
    second.load_state_dict(state)
    assert second.stats["share"] == pytest.approx(first.stats["share"], abs=0.01)
