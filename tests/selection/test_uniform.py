from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from coreset_sampler import CoresetSampler, strategies
from coreset_sampler.selection.strategies.uniform import Place, next_of_pass


def sampler_of(n, size, strategy="uniform", seed=0):
    data = TensorDataset(torch.zeros(n, 2), torch.arange(n) % 2)
    return CoresetSampler(data, nn.Linear(2, 2), size=size, strategy=strategy, seed=seed, progress=False)


def shown(sampler, epochs, first=0):
    found = []
    for epoch in range(first, first + epochs):
        sampler.set_epoch(epoch)
        found.append(sampler.select().indices.tolist())
    return found


def test_ten_epochs_of_a_tenth_are_a_pass_and_the_next_pass_has_another_order():
    epochs = shown(sampler_of(200, 20), 20)
    for one_pass in (epochs[:10], epochs[10:]):
        assert sorted(chain(*one_pass)) == list(range(200))
    assert epochs[0] != epochs[10]
    assert epochs != shown(sampler_of(200, 20, seed=1), 20)


@pytest.mark.parametrize(("n", "size"), [(10, 3), (10, 7), (10, 9), (10, 10), (11, 1), (97, 60)])
def test_every_example_comes_as_often_as_any_other_and_never_twice_in_a_selection(n, size):
    """After any selection the most and the least shown differ by one, by two where a new pass delayed an example."""
    for seed in range(20):
        counts = torch.zeros(n, dtype=torch.int64)
        position = 0
        for epoch in shown(sampler_of(n, size, seed=seed), 12):
            assert len(set(epoch)) == size
            counts[epoch] += 1
            position += size
            passes, _ = divmod(position, n)
            assert passes <= int(counts.min()) + (position % n != 0 and position % n < size)
            assert int(counts.max()) <= passes + 1
        assert int(counts.sum()) == 12 * size


def test_what_is_left_of_a_pass_comes_first_in_the_next_selection():
    epochs = shown(sampler_of(10, 4), 5)  # 20 = two passes
    left = set(range(10)) - set(epochs[0] + epochs[1])
    assert set(epochs[2][:2]) == left
    assert sorted(epochs[2][2:] + epochs[3] + epochs[4]) == list(range(10))


def test_an_order_delays_the_late_as_the_docstring_says():
    generator = torch.Generator().manual_seed(0)
    plain = Place(3).order(5, 3)
    late = Place(3, 2, plain[1:2]).order(5, 3)
    assert late.tolist() == plain[[0, 2, 1, 3, 4]].tolist()
    picks, place = next_of_pass(5, 3, Place(3, 4), generator)
    assert picks[0] == plain[4]
    assert (place.position, place.late.tolist()) == (2, [int(plain[4])])


def test_positions_are_independent_of_indices():
    """Over many seeds each example is as often in the first selection, and in the third, which begins a new pass."""
    counts = torch.zeros(2, 7)
    for seed in range(700):
        generator, place = torch.Generator().manual_seed(seed), None
        for turn in range(3):
            picks, place = next_of_pass(7, 3, place, generator)
            counts[turn // 2, picks] += turn != 1
    assert float((counts - 300).abs().max()) < 4 * (700 * 3 / 7 * 4 / 7) ** 0.5


@pytest.mark.parametrize("strategy", ["uniform", strategies.WarmUp("crest", selections=9)])
def test_a_pass_goes_on_after_a_resume(strategy):
    whole = shown(sampler_of(50, 8, strategy), 8)
    first, second = sampler_of(50, 8, strategy), sampler_of(50, 8, strategy)
    shown(first, 7)
    second.load_state_dict(first.state_dict())
    assert shown(second, 1, first=7) == whole[7:]
    assert len(set(chain(*whole[:6]))) == 6 * 8  # a warm-up is a pass too
