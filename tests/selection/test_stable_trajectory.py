"""Stable over the trajectory: pools covered by the store's mean gradients, no forward pass."""

import pytest
import torch
from simulated import predictions
from test_due import Run, uniform_picks, view_of

from coreset_sampler import SphericalGaussian, Trajectory, strategies
from coreset_sampler.selection.facility_location import cover
from coreset_sampler.selection.testing import check_strategy


@pytest.mark.parametrize("classes", [4, 100])
def test_it_is_uniform_until_everything_was_seen_and_runs_no_forward(classes):
    truth, logits = predictions(2000, classes)
    strategy = strategies.Stable(posterior=Trajectory(), pool_size=50, keep=10)
    run = Run(truth, lambda at, epoch: logits[at].float(), strategy, classes=classes).go(14)  # which checks forwards
    assert all(map(torch.equal, run.picks[:10], uniform_picks(truth, 10)))
    assert not torch.equal(run.picks[10], uniform_picks(truth, 11)[10])
    assert run.weights[10].unique().numel() > 1
    assert run.figures["covering_cost"] >= 0
    assert all(float(weights.sum()) == pytest.approx(2000) for weights in run.weights)


def test_one_pool_of_everything_is_covered_class_by_class_by_the_mean_gradients():
    truth, logits = torch.arange(120) % 4, predictions(120, 4, signal=1.0)[1]
    strategy = strategies.Stable(posterior=Trajectory(), pool_size=120, keep=20)
    run = Run(truth, lambda at, epoch: logits[at].float() + epoch, strategy, size=20, classes=4).go(7)
    chosen = run.picks[6]
    for c in range(4):
        members, mine = (truth == c).nonzero().flatten(), chosen[truth[chosen] == c]
        gradients = run.store.gradients(members)
        expected = members[cover(gradients, len(mine)).indices]
        distances = torch.cdist(run.store.gradients(members), run.store.gradients(torch.cat([mine, expected])))
        ours, best = (part.amin(1).sum() for part in distances.split(len(mine), 1))
        assert float(ours) == pytest.approx(float(best), rel=1e-3)


def test_it_keeps_the_rules_and_goes_on_from_a_saved_place():
    strategy = strategies.Stable(posterior=Trajectory())
    check_strategy(strategy)
    labels = torch.arange(100) % 2
    _, state = strategy.select(view_of(labels), 20, None, torch.Generator().manual_seed(0))
    assert strategies.load_state(strategy, strategies.state_dict(strategy, state)).place.position == 20
    assert strategies.Stable(posterior=Trajectory(SphericalGaussian(0.1, "head")), draws=4).observes
    assert not strategies.Stable().observes


@pytest.mark.parametrize("settings", [dict(rescore_every=2), dict(confidence_exponent=1.0)])
def test_settings_of_scoring_passes_are_refused(settings):
    with pytest.raises(ValueError, match=rf"{next(iter(settings))} must be left out with posterior=Trajectory\(\)"):
        strategies.Stable(posterior=Trajectory(), **settings)
