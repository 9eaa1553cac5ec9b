"""Any loop: workers, early break, set_epoch once, twice or never, and exact resume."""

import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from scenarios import digits, train, trained_net
from torch.utils.data import DataLoader, Dataset

from coreset_sampler import Coreset, CoresetSampler, DistributedCoresetSampler, WeightedDataset, strategies
from coreset_sampler.selection.order import comb, systematic_draw


class Recorded(Dataset):
    """Digits whose examples are their own indices, so that a loop shows what it was given."""

    targets = digits().tensors[1]

    def __len__(self):
        return 1797

    def __getitem__(self, i):
        return int(i), int(self.targets[i])


def sampler_of(dataset=None, **settings):
    settings = {"size": 90, "strategy": strategies.Uniform(), "progress": False, **settings}
    return CoresetSampler(dataset if dataset is not None else Recorded(), trained_net(), **settings)


def seen(loader):
    return [index for batch in loader for index in batch[0].tolist()]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_each_epoch_is_a_new_coreset_and_the_length_never_changes(options):
    sampler = sampler_of()
    loader = DataLoader(sampler.dataset, batch_size=16, sampler=sampler, **options)
    assert len(sampler) == 90
    assert len(loader) == 6
    epochs = [seen(loader) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [90] * 3
    assert sampler.stats["selections"] == 3
    assert len({frozenset(epoch) for epoch in epochs}) == 3
    plain = sampler_of()
    assert epochs == [list(plain) for _ in range(3)]


def test_an_early_break_still_ends_the_epoch():
    sampler, whole = sampler_of(), sampler_of()
    loader = DataLoader(sampler.dataset, batch_size=16, sampler=sampler)
    expected = [list(whole) for _ in range(3)]
    for epoch in range(3):
        batch = next(iter(loader))[0].tolist()
        assert batch == expected[epoch][:16]


def test_set_epoch_once_twice_or_never_gives_the_same_epochs():
    never, once, twice = sampler_of(), sampler_of(), sampler_of()
    for epoch in range(3):
        once.set_epoch(epoch)
        twice.set_epoch(epoch)
        twice.set_epoch(epoch)
        assert list(never) == list(once) == list(twice)
    assert never.stats["selections"] == once.stats["selections"] == twice.stats["selections"] == 3
    once.set_epoch(1)
    assert list(once) != list(never)


def test_the_same_epoch_again_is_the_same_order_without_another_selection():
    sampler = sampler_of()
    sampler.set_epoch(4)
    first = list(sampler)
    sampler.set_epoch(4)
    assert list(sampler) == first
    assert sampler.stats["selections"] == 1


def test_reselect_every_keeps_the_coreset_and_changes_the_order():
    sampler = sampler_of(reselect_every=3)
    epochs = [list(sampler) for _ in range(6)]
    assert sampler.stats["selections"] == 2
    assert set(epochs[0]) == set(epochs[2]) != set(epochs[3])
    assert epochs[0] != epochs[1]


def test_the_order_does_not_depend_on_global_random_state():
    torch.manual_seed(1)
    first = list(sampler_of())
    torch.manual_seed(2)
    assert list(sampler_of()) == first
    assert list(sampler_of(seed=1)) != first


def test_select_by_hand_serves_the_next_epoch():
    sampler = sampler_of()
    kept = sampler.select()
    assert set(sampler) == set(kept.indices.tolist())
    assert sampler.stats["selections"] == 1
    list(sampler)
    assert sampler.stats["selections"] == 2


def test_a_coreset_is_there_after_the_first_selection_and_asking_for_it_selects_nothing():
    sampler = sampler_of()
    with pytest.raises(RuntimeError, match=r"call sampler.select\(\)"):
        sampler.coreset  # noqa: B018
    assert sampler.stats["selections"] == 0
    assert sampler.select() is sampler.coreset


def test_the_repr_says_size_strategy_with_settings_and_epoch():
    sampler = sampler_of(strategy=strategies.Crest(pool_size=50, keep=10))
    sampler.set_epoch(3)
    assert re.fullmatch(r"CoresetSampler\(90 of 1797, strategy=Crest\(.*pool_size=50.*\), epoch=3\)", repr(sampler))


def test_a_strategy_can_be_named_and_an_unknown_name_lists_the_known_ones():
    assert list(sampler_of(strategy="uniform")) == list(sampler_of(strategy=strategies.Uniform()))
    with pytest.raises(ValueError, match="label_confidence.*got 'unifrom'"):
        sampler_of(strategy="unifrom")


def test_the_distributed_sampler_takes_all_that_the_plain_one_takes():
    plain, shared = (inspect.signature(cls).parameters for cls in (CoresetSampler, DistributedCoresetSampler))
    assert shared.keys() - plain.keys() == {"num_replicas", "rank", "drop_last"}
    assert all(str(shared[name]) == str(plain[name]) for name in plain)


@pytest.mark.parametrize("weight", [1.0, 10.0, 50_000 / 7])
def test_equal_weights_are_drawn_once_each_in_the_order_that_a_comb_gives(weight):
    coreset = Coreset(torch.arange(1, 300, 3), torch.full((100,), weight))
    for seed in range(20):
        drawn, generator = (systematic_draw(coreset, 100, g := torch.Generator().manual_seed(seed)), g)
        after, again = torch.rand(1, generator=generator), torch.Generator().manual_seed(seed)
        shuffled = torch.randperm(100, generator=again)
        times = comb(coreset.weights[shuffled], 100, again)
        by_comb = coreset.indices[shuffled].repeat_interleave(times)[torch.randperm(100, generator=again)]
        assert drawn.equal(by_comb)
        assert after.equal(torch.rand(1, generator=again)), "as many random numbers"


def test_drawing_in_proportion_is_unbiased_and_never_off_by_more_than_one():
    weights = torch.tensor([1.0, 2.5, 0.0, 6.5])
    coreset = Coreset([3, 5, 8, 9], weights)
    counts = Counter()
    for seed in range(4000):
        drawn = Counter(systematic_draw(coreset, 5, torch.Generator().manual_seed(seed)).tolist())
        assert sum(drawn.values()) == 5
        for index, weight in zip([3, 5, 8, 9], weights.tolist(), strict=True):
            assert abs(drawn[index] - weight / 2) < 1
        counts.update(drawn)
    for index, weight in zip([3, 5, 8, 9], weights.tolist(), strict=True):
        assert counts[index] / 4000 == pytest.approx(weight / 2, abs=0.04)


def test_weighting_none_yields_each_example_once():
    sampler = sampler_of(weighting="none", strategy=strategies.Crest(), dataset=digits())
    order = list(sampler)
    assert sorted(order) == sorted(sampler.coreset.indices.tolist())


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_loss_weights_arrive_with_their_examples_in_every_epoch(options):
    data = WeightedDataset(Recorded())

    def lopsided(view, size, generator):
        indices = torch.randperm(len(view.labels), generator=generator)[:size]
        return Coreset(indices, (indices + 1.0) * len(view.labels) / (indices + 1.0).sum())

    sampler = sampler_of(data, weighting="loss", strategy=lopsided)
    loader = DataLoader(data, batch_size=16, sampler=sampler, **options)
    for _ in range(2):
        index, _, weight = (torch.cat(column) for column in zip(*loader, strict=True))
        assert weight.dtype == torch.float32
        assert float(weight.mean()) == pytest.approx(1.0, abs=1e-5)
        expected = (index + 1.0) / (index + 1.0).mean()
        assert torch.allclose(weight, expected.float(), atol=1e-5)


def test_weighted_passes_dicts_and_batched_fetches_on():
    class Rows(Dataset):
        def __len__(self):
            return 4

        def __getitems__(self, indices):
            return [{"x": i} for i in indices]

        def __getitem__(self, i):
            return {"x": i}

    batch = next(iter(DataLoader(WeightedDataset(Rows()), batch_size=4)))
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert batch["weight"].tolist() == [1.0] * 4


def test_resume_gives_exactly_the_indices_still_to_come():
    whole, first, second = sampler_of(), sampler_of(), sampler_of()
    expected = [list(whole) for _ in range(3)]
    list(first)
    iterator = iter(first)
    head = [next(iterator) for _ in range(37)]
    assert head == expected[1][:37]
    second.load_state_dict(first.state_dict())
    second.set_epoch(1)  # as loops under torchrun do, also when they resume
    assert list(second) == expected[1][37:]
    assert list(second) == expected[2]


def test_a_state_saved_between_epochs_starts_the_next_one():
    whole, first, second = sampler_of(), sampler_of(), sampler_of()
    expected = [list(whole) for _ in range(2)]
    list(first)
    second.load_state_dict(first.state_dict())
    assert list(second) == expected[1]


def test_a_loop_with_workers_says_how_far_it_has_come():
    whole, first, second = sampler_of(), sampler_of(), sampler_of()
    expected = list(whole)
    loader = iter(DataLoader(first.dataset, batch_size=16, sampler=first, num_workers=2))
    next(loader), next(loader)
    second.load_state_dict(first.state_dict(position=32))
    assert list(second) == expected[32:]


def test_a_position_after_the_last_batch_is_the_next_epoch_and_below_0_an_error():
    whole, first, second = sampler_of(), sampler_of(), sampler_of()
    expected = [list(whole) for _ in range(2)]
    for batch, _ in enumerate(DataLoader(first.dataset, batch_size=16, sampler=first, num_workers=2), 1):
        state = first.state_dict(position=batch * 16)  # 96 after the last, partial one
    second.load_state_dict(state)
    assert second.epoch == 1
    assert list(second) == expected[1]
    with pytest.raises(ValueError, match="position"):
        first.state_dict(position=-1)


@pytest.mark.integration
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop_after", [1, 4, 6, None])
def test_stateful_data_loader_resumes_exactly(workers, stop_after):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader_of(sampler):
        return torchdata.StatefulDataLoader(sampler.dataset, batch_size=16, sampler=sampler, num_workers=workers)

    reference = loader_of(sampler_of())
    expected = [seen(reference) for _ in range(3)]
    first = loader_of(sampler_of())
    seen(first)
    taken = []
    for step, batch in enumerate(first, 1):
        taken += batch[0].tolist()
        if step == stop_after:
            break
    state = first.state_dict()
    second = loader_of(sampler_of())
    second.load_state_dict(state)
    rest = seen(second)
    if stop_after is None:
        assert rest == expected[2]
    else:
        assert taken + rest == expected[1]
        assert seen(second) == expected[2]


def test_the_state_of_a_strategy_survives_a_resume():
    settings = {"dataset": digits(), "strategy": strategies.Stable(rescore_every=3, pool_size=50, keep=10)}
    whole, first, second = (sampler_of(**settings) for _ in range(3))
    expected = [list(whole) for _ in range(3)]
    list(first)
    second.load_state_dict(first.state_dict())
    assert [list(second), list(second)] == expected[1:]
    assert second.stats["forward_examples"] == first.stats["forward_examples"]


KILLED = """
    import sys, time, torch
    torch.set_num_threads(1)  # as the process that compares: more would train the scenario's network to other bits
    sys.path[:0] = {tests!r}
    from test_sampler import sampler_of
    from scenarios import digits
    from coreset_sampler import strategies
    from torch.utils.data import DataLoader
    sampler = sampler_of(digits(), strategy=strategies.Stable(), size=96)
    loader = DataLoader(digits(), batch_size=16, sampler=sampler)
    for epoch in range(3):
        for step, batch in enumerate(loader):
            torch.save(sampler.state_dict(), {path!r} + ".part")
            import os; os.replace({path!r} + ".part", {path!r})
            print(epoch, step, flush=True)
            if (epoch, step) == (1, 2):
                time.sleep(60)
"""


@pytest.mark.integration
def test_after_sigkill_in_mid_epoch_the_remaining_indices_are_the_same(tmp_path):
    path = str(tmp_path / "state.pt")
    script = textwrap.dedent(KILLED.format(tests=[str(parent) for parent in Path(__file__).parents[:2]], path=path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.strip() == "1 2":
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    settings = {"dataset": digits(), "strategy": strategies.Stable(), "size": 96}
    whole, resumed = sampler_of(**settings), sampler_of(**settings)
    expected = [list(whole), list(whole)]
    resumed.load_state_dict(torch.load(path, weights_only=True))
    assert list(resumed) == expected[1][48:]


def test_max_overhead_holds_a_measured_budget():
    def slow(view, size, generator):
        time.sleep(0.02)
        return strategies.Uniform().select(view, size, None, generator)[0]

    sampler = sampler_of(strategy=slow, max_overhead=0.25)
    for _ in range(40):
        for i, _ in enumerate(sampler):
            if i == 0:
                time.sleep(0.01)
    stats = sampler.stats
    assert stats["share"] <= 0.27
    assert stats["selections"] >= 3
    assert stats["put_off"] == 40 - stats["selections"]


@pytest.mark.parametrize("weighting", ["resample", "none"])
def test_stats_say_how_many_different_examples_an_epoch_shows(weighting):
    sampler = CoresetSampler(
        digits(), trained_net(), size=200, strategy=strategies.Stable(), weighting=weighting, reselect_every=30
    )
    shown = [len(set(sampler)) / 200 for _ in range(30)]
    assert sampler.stats["selections"] == 1
    assert sum(shown) / 30 == pytest.approx(sampler.stats["distinct"], abs=0.01)
    assert (sampler.stats["distinct"] < 1) == (weighting == "resample")


def test_stats_say_what_was_spent():
    sampler = sampler_of(digits(), strategy=strategies.Stable(draws=3, pool_size=60, keep=30), size=90)
    list(sampler)
    list(sampler)
    stats = sampler.stats
    assert stats["selections"] == 2
    assert stats["forward_examples"] == pytest.approx(2 * 180 * 3, abs=60)
    assert 0 < stats["last_seconds"] <= stats["seconds"]
    assert 0 < stats["share"] <= 1
    assert 0 <= stats["overlap"] <= 1
    assert stats["covering_cost"] > 0
    assert all(isinstance(value, (int, float)) for value in stats.values())


def test_training_on_a_coreset_learns():
    data = digits()
    model = trained_net()
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    sampler = CoresetSampler(data, model, fraction=0.1, strategy="stable")
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for _ in range(20):
        train(model, list(loader), lr=0.05)
    accuracy = (model.eval()(data.tensors[0]).argmax(1) == data.tensors[1]).double().mean()
    assert accuracy > 0.85


def test_a_distributed_sampler_deals_equal_shares_of_the_same_order():
    settings = {"size": 91, "strategy": strategies.Uniform()}
    whole = list(CoresetSampler(digits(), trained_net(), **settings))
    shares = [
        list(DistributedCoresetSampler(digits(), trained_net(), num_replicas=3, rank=rank, **settings))
        for rank in range(3)
    ]
    assert [len(share) for share in shares] == [31, 31, 31]
    dealt = [index for step in zip(*shares, strict=True) for index in step]
    assert dealt[:91] == whole
    assert dealt[91:] == whole[:2]
    dropped = [
        list(DistributedCoresetSampler(digits(), trained_net(), num_replicas=3, rank=r, drop_last=True, **settings))
        for r in range(3)
    ]
    assert [len(share) for share in dropped] == [30, 30, 30]
    assert isinstance(
        DistributedCoresetSampler(digits(), trained_net(), size=9, strategy="stable"),
        torch.utils.data.distributed.DistributedSampler,
    )
