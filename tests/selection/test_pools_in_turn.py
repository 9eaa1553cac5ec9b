"""Pools go through the data without replacement over selections, class by class."""

import io
from itertools import chain

import pytest
import torch
from scenarios import digits, trained_net
from test_due import Run

from coreset_sampler import CoresetSampler, PointMass, Trajectory, strategies

LABELS = torch.arange(400) % 4
UNEVEN = torch.cat([torch.full((k,), c) for c, k in enumerate((250, 97, 41, 12))])


def sampler_of(strategy, labels=LABELS, size=40):
    data = torch.utils.data.TensorDataset(digits().tensors[0][: len(labels)], labels)
    return CoresetSampler(data, trained_net(), size=size, strategy=strategy, progress=False)


def shown(sampler, epochs):
    return [list(sampler) for _ in range(epochs)]


@pytest.mark.parametrize("rescore_every", [1, 3, 10])
@pytest.mark.parametrize("balance", ["equal", "proportional"])
def test_ten_epochs_of_a_tenth_are_a_pass_if_pools_keep_all(rescore_every, balance):
    strategy = strategies.Crest(pool_size=20, keep=20, balance=balance, rescore_every=rescore_every)
    epochs = shown(sampler_of(strategy), 20)
    for one_pass in (epochs[:10], epochs[10:]):
        assert sorted(chain(*one_pass)) == list(range(400))
    assert epochs[0] != epochs[10]


@pytest.mark.parametrize("balance", ["equal", "proportional"])
@pytest.mark.parametrize("settings", [{}, {"rescore_every": 2}, {"rescore_every": 7}, {"confidence_exponent": 2}])
def test_no_example_is_a_candidate_again_before_all_others_of_its_class_were(balance, settings):
    """A scoring pass for several selections may have one candidate of a class less than these deal, by rounding."""
    strategy = strategies.Stable(PointMass(), 1, pool_size=12, keep=5, balance=balance, **settings)
    sampler = sampler_of(strategy, UNEVEN, size=30)
    for epoch in range(12):
        before = sampler._history.state
        sampler.set_epoch(epoch)
        sampler.select()
        times = sampler._history.state.times
        new = times if before is None else times - before.times
        assert int(new.max()) == 1  # pools are disjoint
        for c in range(4):
            spread = times[c == UNEVEN].aminmax()
            assert int(spread.max - spread.min) <= 1 + ("rescore_every" in settings), (epoch, c)
    assert int(times.max()) > int(times.min()) if balance == "equal" else int(times.min()) >= 1


def test_selections_of_one_scoring_pass_share_its_candidates_out():
    sampler = sampler_of(strategies.Crest(pool_size=5, keep=1, rescore_every=2), size=40)
    sampler.select()
    half = sampler._history.state.times.clone()
    assert int(half.sum()) == 200
    sampler.set_epoch(1)
    sampler.select()
    assert sampler._history.state.times.tolist() == [1] * 400
    assert sampler.stats["forward_examples"] == 400


def test_pools_by_the_trajectory_go_through_the_data_too():
    strategy = strategies.Stable(posterior=Trajectory(), pool_size=40, keep=20)
    run = Run(LABELS, lambda at, epoch: torch.randn(len(at), 4), strategy, size=40, classes=4).go(10)
    assert int(run.state.times.sum()) == 0  # uniform so far
    assert run.go(5).state.times.tolist() == [1] * 400


@pytest.mark.parametrize("settings", [{}, {"rescore_every": 3}])
@pytest.mark.parametrize("stop", [2, 4])
def test_a_resumed_run_goes_on_in_the_same_pass(settings, stop):
    strategy = strategies.Stable(pool_size=10, keep=5, draws=1, **settings)
    through = shown(sampler_of(strategy), 8)
    first = sampler_of(strategy)
    assert shown(first, stop) == through[:stop]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = sampler_of(strategy)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert shown(second, 8 - stop) == through[stop:]
