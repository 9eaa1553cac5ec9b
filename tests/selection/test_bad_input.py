"""Bad input gets an error that names argument, rule, value and way out, and nothing is lost."""

import os
import warnings

import pytest
import torch
from scenarios import conv_net, digits, trained_net
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from coreset_sampler import (
    Coreset,
    CoresetSampler,
    DistributedCoresetSampler,
    PointMass,
    SphericalGaussian,
    WeightedDataset,
    strategies,
)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Shrinking(Dataset):
    targets = digits().tensors[1]
    length = 1797

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return digits()[i]


class Dying(Shrinking):
    def __getitem__(self, i):
        if i % 100 == 7:
            os._exit(3)
        return digits()[i]


class Lying(Shrinking):
    """Noise that is in the examples but not in `targets`."""

    def __getitem__(self, i):
        x, y = digits()[i]
        return x, (y + 1) % 10


class Fields(Dataset):
    """Examples of a shape of their own, without stored labels."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 1797

    def __getitem__(self, i):
        return self.make(i, *digits()[i])


def counted_from(least):
    return TensorDataset(digits().tensors[0], digits().tensors[1] + least)


def soft():
    return TensorDataset(digits().tensors[0], torch.rand(1797, 10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fraction": 10},
            r"fraction must be in \(0, 1\], got 10\. To keep 10 examples pass size=10; to keep 10 %",
        ),
        ({"fraction": 0.0}, "fraction must be"),
        ({"fraction": float("nan")}, "fraction must be"),
        ({"size": 1798}, "between 1 and the data set's 1797 examples, got 1798"),
        ({"size": 0}, "size must be"),
        ({"size": 2.5}, "size must be a whole number"),
        ({}, "either fraction or size"),
        ({"size": 5, "fraction": 0.1}, "either fraction or size"),
        ({"size": 50, "weighting": "draws"}, "weighting must be one of 'resample', 'loss', 'none', got 'draws'"),
        (
            {"size": 50, "max_overhead": 25},
            r"max_overhead must be a share of the time of selection and training in \(0, 1\), got 25",
        ),
        ({"size": 50, "reselect_every": 0}, "reselect_every must be"),
        ({"size": 50, "scoring_batch_size": 0}, "batch_size must be"),
        ({"size": 50, "seed": -1}, "seed must be"),
        (
            {"size": 50, "selection_dataset": TensorDataset(torch.zeros(3))},
            "selection_dataset must have the same 1797",
        ),
        ({"size": "abc"}, "size must be a whole number"),
        ({"size": 50, "seed": None}, "seed must be a whole number"),
        ({"size": 50, "labels": ["cat"] * 1797}, "Number the classes"),
        ({"size": 50, "labels": torch.zeros(1797, 1, dtype=torch.int64)}, "squeeze"),
        ({"size": 50, "labels": [0, 1]}, "one entry for each of the 1797 examples, got 2"),
        ({"size": 50, "labels": torch.rand(1797)}, "whole number.*single-label classification.*regression"),
        ({"size": 50, "labels": torch.randint(0, 2, (1797, 4))}, "single-label classification.*multi-label"),
        ({"size": 50, "labels": torch.zeros(1797, 4, 4)}, "single-label classification.*segmentation"),
        (
            {"size": 50, "labels": torch.arange(1797).index_fill(0, torch.tensor(7), 10**9)},
            "labels must be below 17970 for 1797 examples, got 1000000000 at example 7",
        ),
        ({"size": 50, "labels": torch.full((1797,), -1)}, "0 or more, got -1"),
    ],
)
def test_settings_are_checked_when_the_sampler_is_made(settings, message):
    with pytest.raises(ValueError, match=message):
        CoresetSampler(digits(), conv_net(), **settings)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CoresetSampler(Stream(), conv_net(), size=5, strategy="stable"), "iterable only"),
        (lambda: CoresetSampler(digits(), lambda x: x, size=5, strategy="stable"), "torch.nn.Module"),
        (lambda: CoresetSampler(conv_net(), digits(), size=5), "data set comes first"),
        (lambda: CoresetSampler(digits(), conv_net(), fraction="1e-1"), r"fraction must be .*float\('1e-1'\)"),
        (lambda: CoresetSampler(digits(), conv_net(), size=5, max_overhead="0.2"), "max_overhead must be .*'0.2'"),
        (lambda: CoresetSampler(digits(), conv_net(), size=5, strategy=3), "must be a name .*or a function"),
        (lambda: CoresetSampler(digits(), conv_net(), size=5, weighting="loss", strategy="stable"), "WeightedDataset"),
        (lambda: CoresetSampler(digits(), conv_net(), size=5, strategy=strategies.Stable), "with parentheses"),
        (lambda: CoresetSampler(digits(), conv_net(), size=5, sise=5, strategy="stable"), "sise"),
        (lambda: strategies.Stable(posterior="head"), r"posterior must be .*PointMass\(\).*got 'head'"),
        (lambda: strategies.LabelConfidence(posterior=PointMass), r"posterior must be .*got <class"),
        (
            lambda: CoresetSampler(digits(), conv_net(), size=5, strategy=lambda v, s, g: [1]).select(),
            "Coreset",
        ),
    ],
)
def test_wrong_kinds_are_named(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def broken_net(how):
    model = trained_net()
    if how == "nan":
        model[9].weight.data[0] = float("nan")
    if how == "inf":
        model[9].bias.data[0] = float("inf")
    return model


class Reshaped(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.net, self.change = trained_net(), change

    def forward(self, x):
        return self.change(self.net(x))


@pytest.mark.parametrize(
    ("dataset", "model", "message"),
    [
        (digits, lambda: broken_net("nan"), "NaN or infinite logits"),
        (digits, lambda: broken_net("inf"), "NaN or infinite logits"),
        (digits, lambda: Reshaped(lambda z: {"features": z}), "logits of shape"),
        (digits, lambda: Reshaped(lambda z: z[:, :, None]), r"logits of shape \(batch, classes\), got shape"),
        (digits, lambda: Reshaped(lambda z: z[:, :1]), "one logit per example.*regression"),
        (digits, lambda: Reshaped(lambda z: z[:, :, None, None]), r"\(segmentation\)"),
        (lambda: counted_from(1), trained_net, "count from 1 and must count from 0"),
        (lambda: Fields(lambda i, x, y: (i, x, y)), trained_net, "have 3 fields, of which the second was read"),
        (lambda: Fields(lambda i, x, y: (x, x[0], y)), trained_net, "segmentation.*3 fields, of which the second"),
        (
            lambda: TensorDataset(digits().tensors[0], torch.rand(1797), digits().tensors[1]),
            trained_net,
            "regression.*3 fields, of which the second",
        ),
        (lambda: Fields(lambda i, x, y: (x, torch.rand(()))), trained_net, "regression"),
        (lambda: Fields(lambda i, x, y: (x, torch.randint(0, 2, (5,)))), trained_net, "multi-label"),
        (digits, lambda: Reshaped(lambda z: z[:, :5]), "labels go up to 9, but the model gives 5 logits"),
        (digits, lambda: Reshaped(lambda z: z[:3]), "3 rows of logits"),
        (soft, trained_net, "Soft labels"),
        (lambda: TensorDataset(digits().tensors[0]), trained_net, "no label found"),
        (Lying, trained_net, "pass labels="),
    ],
)
def test_what_shows_only_at_selection_is_named_and_the_sampler_goes_on_as_before(dataset, model, message):
    sampler = CoresetSampler(dataset(), model(), size=100, strategy="stable")
    with pytest.raises(ValueError, match=message):
        sampler.select()
    assert sampler.stats["selections"] == 0


def test_after_a_failed_selection_the_last_coreset_and_state_are_still_there():
    model = trained_net()
    sampler = CoresetSampler(digits(), model, size=100, strategy="stable")
    first = sampler.select()
    kept = model[9].weight.data.clone()
    model[9].weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        sampler.select()
    assert torch.equal(sampler.coreset.indices, first.indices)
    assert sampler.stats["selections"] == 1
    model[9].weight.data = kept
    assert len(sampler.select()) == 100


def test_a_scale_that_blows_the_network_up_is_said_to_be_too_large():
    strategy = strategies.Stable(posterior=SphericalGaussian(1e38))
    with pytest.raises(ValueError, match="lower the posterior's scale"):
        CoresetSampler(digits(), trained_net(), size=50, strategy=strategy).select()


def test_a_data_set_that_shrank_is_noticed():
    data = Shrinking()
    sampler = CoresetSampler(data, trained_net(), size=100, strategy="stable")
    data.length = 1000
    with pytest.raises(ValueError, match="had 1797 examples when the sampler was made and has 1000 now"):
        sampler.select()


def test_workers_that_die_end_the_selection_with_an_error():
    model = trained_net().train()
    sampler = CoresetSampler(Dying(), model, size=100, num_workers=1, strategy="stable")
    with pytest.raises(RuntimeError, match="worker"):
        sampler.select()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": TensorDataset(digits().tensors[0], (digits().tensors[1] + 1) % 10)}, "other labels"),
        ({"dataset": TensorDataset(*(t[:900] for t in digits().tensors))}, "n=1797, here it is 900"),
        ({"size": 60}, "size=50, here it is 60"),
        ({"seed": 1}, "seed=0, here it is 1"),
        ({"strategy": strategies.Uniform()}, "strategy=Stable.*here it is Uniform"),
        ({"strategy": strategies.Stable(draws=5)}, "draws=4.*here it is .*draws=5"),
        ({"strategy": strategies.Stable(posterior=SphericalGaussian(0.2))}, "scale=0.1.*here it is .*scale=0.2"),
        (
            {"strategy": strategies.WarmUp(strategies.Stable(), selections=2)},
            "here it is WarmUp.*selections=2",
        ),
        ({"reselect_every": 3}, "reselect_every=1, here it is 3"),
        ({"weighting": "none"}, "weighting=resample, here it is none"),
    ],
)
def test_a_state_of_another_data_set_is_refused_and_changes_nothing(change, message):
    state = CoresetSampler(digits(), trained_net(), size=50, strategy="stable")
    state.select()
    settings = {"dataset": digits(), "size": 50, "strategy": "stable", **change}
    other = CoresetSampler(model=trained_net(), **settings)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state.state_dict())
    assert other.stats["selections"] == 0
    with pytest.raises(ValueError, match="version"):
        other.load_state_dict({})


def test_a_damaged_state_is_refused_and_changes_nothing():
    source, sampler = (CoresetSampler(digits(), trained_net(), size=50, strategy="stable") for _ in range(2))
    source.select()
    good = source.state_dict()
    lacking = {key: value for key, value in good.items() if key != "spent"}
    before = sampler.state_dict()
    for bad, message in (
        (lacking, "spent"),
        ({**good, "indices": good["indices"] + 5000}, "below 1797"),
        ({**good, "position": 51}, "position must be between 0 and 50, got 51"),
        ({**good, "position": "x"}, "position must be a whole number"),
        ({**good, "strategy_state": {"uses_left": "x"}}, "state of Stable is damaged"),
        ({**good, "spent": {**good["spent"], "seconds": None}}, "spent"),
        ({**good, "spent": {"selections": 3}}, "spent"),
        ({**good, "last": None}, "last"),
        ({**good, "selected_epoch": "x"}, "selected_epoch"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.load_state_dict({**bad, "epoch": 77})
        assert sampler.state_dict() == before


def test_a_strategy_of_ones_own_that_returns_too_few_is_told_so():
    sampler = CoresetSampler(
        digits(), trained_net(), size=50, strategy=lambda v, s, g: Coreset(torch.arange(3), torch.ones(3))
    )
    with pytest.raises(ValueError, match="must return 50 indices below 1797.*got 3 indices"):
        sampler.select()


def test_more_ranks_than_examples_and_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match="rank must be"):
        DistributedCoresetSampler(digits(), trained_net(), size=5, num_replicas=2, rank=2, strategy="stable")
    with pytest.raises(ValueError, match="leaves nothing"):
        DistributedCoresetSampler(
            digits(), trained_net(), size=5, num_replicas=9, rank=0, drop_last=True, strategy="stable"
        )


def test_weighted_examples_that_are_no_tuples_are_refused():
    with pytest.raises(TypeError, match="tuples or dicts"):
        WeightedDataset(digits().tensors[0])[0]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_a_loader_without_weighted_would_drop_the_weights_and_is_refused(options):
    plain = digits()
    sampler = CoresetSampler(
        WeightedDataset(plain), trained_net(), size=50, strategy=strategies.Uniform(), weighting="loss"
    )
    with pytest.raises(TypeError, match="the DataLoader has the plain data set"):
        next(iter(DataLoader(plain, batch_size=10, sampler=sampler, **options)))
    assert len(next(iter(DataLoader(sampler.dataset, batch_size=10, sampler=sampler, **options)))) == 3


def test_a_size_below_the_number_of_classes_is_said_once():
    sampler = CoresetSampler(digits(), trained_net(), size=5, strategy=strategies.Craig())
    with pytest.warns(UserWarning, match="size=5 is below the number of classes, 10: at every selection 5 or more"):
        sampler.select()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.select()


@pytest.mark.parametrize(
    "strategy",
    [
        strategies.Uniform(),
        strategies.Forgetting(),
        strategies.LabelConfidence(posterior=PointMass(), rescore_every=4, warm_up=0),
    ],
)
def test_a_saved_state_holds_no_more_than_the_numbers_in_it(strategy):
    sampler = CoresetSampler(digits(), trained_net(), size=5 * 10, strategy=strategy)
    sampler.select()
    state = sampler.state_dict()
    kept = [value for value in (state["strategy_state"] or {}).values() if isinstance(value, torch.Tensor)]
    for tensor in (state["indices"], state["weights"], *kept):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
