import dataclasses
import functools
import io
import warnings
from typing import ClassVar

import pytest
import torch
from scenarios import conv_net, digits, train, trained_net
from torch.utils._python_dispatch import TorchDispatchMode

from coreset_sampler import CoresetSampler, PointMass, Snapshots, SphericalGaussian, Trajectory, cover, strategies
from coreset_sampler.selection.coreset import Coreset
from coreset_sampler.selection.strategies.confidence import label_confidence, label_probability
from coreset_sampler.selection.strategies.herding import match_mean
from coreset_sampler.selection.strategies.k_center import farthest_first
from coreset_sampler.selection.strategies.pools import Pools, draw_pools, quotas
from coreset_sampler.selection.testing import check_strategy

EVERY = {
    **{name: name for name in strategies.available()},
    "stable after a warm-up": strategies.WarmUp(strategies.Stable(), selections=1),
    "stable, by label confidence": strategies.Stable(confidence_exponent=2, pool_size=20, keep=5),
    "stable, scoring every fourth time": strategies.Stable(rescore_every=4, pool_size=20, keep=5),
    "stable, pools of three": strategies.Stable(pool_size=3, keep=1),
    "label confidence without a warm-up": strategies.LabelConfidence(
        posterior=PointMass(), rescore_every=4, exponent=1, warm_up=0
    ),
    "stable, proportional": strategies.Stable(balance="proportional"),
}


@pytest.mark.parametrize("name", EVERY)
def test_every_strategy_keeps_the_rules(name):
    check_strategy(EVERY[name])


def select(strategy, *, size=100, seed=0, dataset=None, model=None):
    sampler = CoresetSampler(dataset or digits(), model or trained_net(), size=size, strategy=strategy, seed=seed)
    return sampler.select(), sampler


@pytest.mark.parametrize(
    ("rule", "strategy"),
    [
        ("exactly size", lambda v, s, g: Coreset(torch.arange(s - 1), torch.ones(s - 1))),
        ("sum to", lambda v, s, g: Coreset(torch.arange(s), torch.ones(s) * 7)),
        (
            "same seed",
            lambda v, s, g: Coreset(torch.randperm(len(v.labels))[:s], torch.full((s,), len(v.labels) / s)),
        ),
    ],
)
def test_the_public_check_names_the_rule_that_is_broken(rule, strategy):
    broken = strategy
    if rule == "same seed":  # not from the generator: from a state that goes on from call to call
        state = torch.Generator().manual_seed(0)

        def broken(view, size, generator):
            n = len(view.labels)
            return Coreset(torch.randperm(n, generator=state)[:size], torch.full((size,), n / size))

    with pytest.raises((AssertionError, ValueError), match=rule if rule != "exactly size" else "indices"):
        check_strategy(broken)


def test_a_plain_function_is_a_strategy():
    def least_sure(view, size, generator):
        gradients = torch.cat([g[0] for g in view.gradients(torch.arange(len(view.labels)).split(500))])
        picks = gradients.norm(dim=1).argsort(descending=True)[:size]
        return Coreset(picks, torch.full((size,), len(view.labels) / size))

    check_strategy(least_sure)


@dataclasses.dataclass(frozen=True)
class Turns:
    scores: torch.Tensor


@dataclasses.dataclass(frozen=True)
class OnesOwn:
    """Keeps what it has kept least often."""

    in_place: bool = False
    State: ClassVar[type] = Turns

    def select(self, view, size, state, generator):
        turns = torch.zeros(len(view.labels)) if state is None else state.scores
        turns = turns if self.in_place else turns.clone()
        picks = (turns + torch.rand(len(turns), generator=generator)).argsort()[:size]
        turns[picks] += 1
        return Coreset(picks, torch.full((size,), len(turns) / size)), Turns(turns)


def test_a_class_with_a_state_is_a_strategy_and_must_not_write_into_it():
    check_strategy(OnesOwn())
    with pytest.raises(AssertionError, match="must not write into its state, scores was changed"):
        check_strategy(OnesOwn(in_place=True))


def test_strategies_are_known_by_name_with_a_line_each():
    names = strategies.available()
    assert set(names) == {
        "stable", "crest", "label_confidence", "loss_pruning", "craig", "k_center", "herding", "forgetting", "uniform"
    }  # fmt: skip
    assert all(line.startswith("Keeps ") and line.endswith(".") for line in names.values())
    assert strategies.resolve("stable") == strategies.Stable()
    assert strategies.resolve(strategies.Crest(keep=3)) == strategies.Crest(keep=3)


def least(view, size, generator):
    return Coreset(torch.arange(size), torch.ones(size))


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        ("k-center", ValueError, "one of 'stable', .*'k_center'.* got 'k-center'"),
        (strategies.Stable, TypeError, r"the class Stable: write it with parentheses, Stable\(\).*'crest'"),
        (3, TypeError, r"a name .*'crest'.*strategies.Stable\(\), or a function .*got 3"),
        (lambda view, size: None, TypeError, r"must take \(view, size, generator\)"),
    ],
)
def test_what_is_no_strategy_is_told_what_is(strategy, error, message):
    with pytest.raises(error, match=message):
        strategies.resolve(strategy)


def test_a_strategy_says_its_settings_the_same_in_every_process():
    assert repr(strategies.resolve(least)) == "Function(function=least)"
    by_function = strategies.Stable(posterior=SphericalGaussian(0.1, is_norm_layer), draws=2)
    assert "posterior=SphericalGaussian(scale=0.1, layers=is_norm_layer, redraw=None), draws=2" in repr(by_function)
    assert repr(Snapshots([trained_net().state_dict()])) == "Snapshots()"
    assert strategies.state_dict(by_function, None) == {"strategy": repr(by_function), "state": None}


def is_norm_layer(name, module):
    return "norm" in name


STATEFUL = [
    strategies.Stable(rescore_every=3, pool_size=50, keep=10),
    strategies.Crest(rescore_every=3, pool_size=50, keep=10),
    strategies.Forgetting(),
    strategies.Uniform(),
    strategies.LabelConfidence(),
    strategies.LossPruning(),
    strategies.LabelConfidence(posterior=PointMass(), warm_up=1, rescore_every=3),
    strategies.WarmUp(strategies.Stable(rescore_every=3, pool_size=50, keep=10), selections=1),
]


@pytest.mark.parametrize("strategy", STATEFUL)
def test_a_state_is_saved_with_its_strategy_and_loaded_by_an_equal_one_alone(strategy):
    sampler = CoresetSampler(digits(), trained_net(), size=50, strategy=strategy)
    epochs_of(sampler, 2)
    state = strategies.load_state(
        strategy, {"strategy": repr(strategy), "state": sampler.state_dict()["strategy_state"]}
    )
    saved = strategies.state_dict(strategy, state)
    assert isinstance(state, strategy.State)
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == saved.keys()
    for other in STATEFUL:
        if other != strategy:
            with pytest.raises(ValueError, match="saved with strategy=.*here it is") as told:
                strategies.load_state(other, saved)
            assert repr(strategy) in str(told.value)
            assert repr(other) in str(told.value)
    lacking = dict(list(saved["state"].items())[1:])
    wrong = {**saved["state"], next(iter(saved["state"])): "x"}
    for damaged in (lacking, wrong, {**saved["state"], "more": 1}, 3):
        with pytest.raises(ValueError, match=f"the state of {type(strategy).__name__} is damaged"):
            strategies.load_state(strategy, {**saved, "state": damaged})
    with pytest.raises(ValueError, match="the state of the strategy is damaged"):
        strategies.load_state(strategy, saved["state"])


def test_label_confidence_warms_up_as_warm_up_does():
    settings = dict(rescore_every=2, candidates=3)
    alone = strategies.LabelConfidence(posterior=PointMass(), warm_up=2, **settings)
    wrapped = strategies.WarmUp(strategies.LabelConfidence(posterior=PointMass(), warm_up=0, **settings), selections=2)
    kept = [
        epochs_of(CoresetSampler(digits(), trained_net(), size=50, strategy=strategy), 5)
        for strategy in (alone, wrapped)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))


def test_a_warm_up_is_uniform_at_first_and_then_what_it_was_given():
    warmed = CoresetSampler(
        digits(), trained_net(), size=100, strategy=strategies.WarmUp(strategies.Crest(), selections=2)
    )
    plain = {name: CoresetSampler(digits(), trained_net(), size=100, strategy=name)
             for name in ("uniform", "crest")}  # fmt: skip
    for epoch, name in enumerate(("uniform", "uniform", "crest", "crest")):
        for sampler in (warmed, plain[name]):
            sampler.set_epoch(epoch)
        assert torch.equal(warmed.select().indices, plain[name].select().indices)
        assert warmed.stats["forward_examples"] == (0 if epoch < 2 else plain["crest"].stats["forward_examples"])


def test_a_warm_up_that_was_saved_does_not_begin_again():
    first, second = (
        CoresetSampler(digits(), trained_net(), size=50, strategy=strategies.WarmUp(strategies.Crest(), selections=1))
        for _ in range(2)
    )
    first.select()
    second.load_state_dict(first.state_dict())
    second.set_epoch(1)
    second.select()
    assert second.stats["forward_examples"] > 0


@pytest.mark.parametrize(
    ("strategy", "selections", "message"),
    [
        (None, 1, "strategy must be a name.*or a function"),
        ("crst", 1, "strategy must be one of .*'crest'.*got 'crst'"),
        (strategies.Crest(), -1, "selections must be 0 or more, got -1"),
        (strategies.LabelConfidence, 1, "with parentheses"),
    ],
)
def test_a_warm_up_says_what_is_wrong(strategy, selections, message):
    with pytest.raises((TypeError, ValueError), match=message):
        strategies.WarmUp(strategy, selections=selections)


def test_zero_scale_equals_crest():
    zero, _ = select(strategies.Stable(posterior=SphericalGaussian(0.0), draws=3))
    crest, _ = select(strategies.Crest())
    assert torch.equal(zero.indices, crest.indices)
    assert torch.equal(zero.weights, crest.weights)


def test_a_perturbation_changes_the_choice():
    stable, _ = select(strategies.Stable(posterior=SphericalGaussian(0.3)))
    crest, _ = select(strategies.Crest())
    assert not torch.equal(stable.indices, crest.indices)


def test_one_kept_of_a_class_is_a_median_and_two_stand_for_wrong_labels_too():
    """Of ten candidates, four with another gradient: the one that is kept is among the six, two are one of each."""
    majority = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) * 0.1
    minority = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)) * 0.1 + 2
    vectors = torch.cat([majority, minority])
    one, two = cover(vectors, 1), cover(vectors, 2)
    assert int(one.indices) < 6
    assert sorted(zip((two.indices < 6).tolist(), two.weights.tolist(), strict=True)) == [(False, 4.0), (True, 6.0)]


def naive_greedy(distances, size):
    picks = []
    nearest = torch.full((len(distances),), torch.inf, dtype=torch.float64)
    for _ in range(size):
        totals = torch.minimum(nearest, distances).sum(1)
        totals[picks] = torch.inf
        picks.append(int(totals.argmin()))
        nearest = torch.minimum(nearest, distances[picks[-1]])
    return picks, torch.bincount(distances[picks].argmin(0), minlength=size)


def test_stable_minimises_the_expected_norm_as_naive_greedy_does():
    """Every draw by a perturbed copy of the model, distances in float64, greedy by brute force, class by class.

    All examples are candidates. Examples of equal gradient may be picked one for the other, so it is the objective that
    is compared, and the number each pick stands for.
    """
    y = torch.arange(120) % 4
    data = torch.utils.data.TensorDataset(digits().tensors[0][:120], y)
    seen = {}

    class Remember(SphericalGaussian):
        def draw(self, view, draws, generator):
            seen["draws"] = super().draw(view, draws, generator)
            return seen["draws"]

    strategy = strategies.Stable(posterior=Remember(0.3), draws=3, keep=20, pool_size=120)
    coreset, sampler = select(strategy, dataset=data, size=20)
    proxies = []
    for draw in seen["draws"]:
        copy = trained_net().eval()
        copy.load_state_dict({**copy.state_dict(), **draw})
        with torch.no_grad():
            proxies.append((copy(data.tensors[0]).softmax(1) - torch.nn.functional.one_hot(y, 10)).double())
    stack = torch.stack(proxies)
    norms = torch.cdist(stack, stack, compute_mode="donot_use_mm_for_euclid_dist")
    distances = norms.mean(0)
    total = 0.0
    for c in range(4):
        members = (y == c).nonzero().flatten()
        picks, counts = naive_greedy(distances[members][:, members], 5)
        mine = y[coreset.indices] == c
        best = float(distances[members[picks]][:, members].min(0).values.sum())
        ours = float(distances[coreset.indices[mine]][:, members].min(0).values.sum())
        assert ours == pytest.approx(best, rel=1e-4)
        assert coreset.weights[mine].round().long().sort().values.tolist() == counts.sort().values.tolist()
        total += ours
    assert sampler.stats["covering_cost"] == pytest.approx(total / 120, rel=1e-4)


def test_craig_covers_each_class_by_its_own_examples():
    coreset, _ = select(strategies.Craig(), size=50)
    model, (x, y) = trained_net().eval(), digits().tensors
    with torch.no_grad():
        gradients = model(x).softmax(1) - torch.nn.functional.one_hot(y, 10)
    for c in range(10):
        members = (y == c).nonzero().flatten()
        expected = cover(gradients[members], 5)
        mine = coreset.indices[y[coreset.indices] == c]
        assert set(mine.tolist()) == set(members[expected.indices].tolist())
        assert float(coreset.weights[y[coreset.indices] == c].sum()) == len(members)


def test_k_center_is_within_twice_the_best_radius():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        vectors = torch.randn(9, 2, generator=generator)
        distances = torch.cdist(vectors, vectors)
        best = min(
            float(distances[list(s)].min(0).values.max()) for s in torch.combinations(torch.arange(9), 3).tolist()
        )
        coreset = farthest_first(vectors, 3)
        assert float(distances[coreset.indices].min(0).values.max()) <= 2 * best + 1e-6
        owners = torch.bincount(distances[coreset.indices].argmin(0), minlength=3)
        assert coreset.weights.tolist() == owners.tolist()


def test_k_center_of_duplicates_still_keeps_distinct_examples():
    assert farthest_first(torch.ones(6, 3), 6).indices.unique().numel() == 6


def test_herding_copies_the_vectors_once_and_not_at_each_pick():
    class Sizes(TorchDispatchMode):
        whole = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            self.whole += isinstance(output, torch.Tensor) and output.numel() == 200 * 5
            return output

    made = []
    for size in (2, 50):
        with Sizes() as sizes:
            match_mean(torch.randn(200, 5), size)
        made.append(sizes.whole)
    assert made[0] == made[1]


def test_herding_matches_the_mean_better_than_chance_and_each_pick_is_the_best():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(200, 5, generator=generator).double()
    coreset = match_mean(vectors, 10)
    error = float((vectors[coreset.indices].mean(0) - vectors.mean(0)).norm())
    chance = [
        float((vectors[torch.randperm(200, generator=generator)[:10]].mean(0) - vectors.mean(0)).norm())
        for _ in range(50)
    ]
    assert error < min(chance)
    picks = coreset.indices.tolist()
    for k in range(10):
        rest = [i for i in range(200) if i not in picks[:k]]
        errors = [float((vectors[[*picks[:k], i]].mean(0) - vectors.mean(0)).norm()) for i in rest]
        assert rest[min(range(len(rest)), key=errors.__getitem__)] == picks[k]


def test_forgetting_prefers_what_was_never_learned_then_what_was_forgotten():
    data, model = digits(), trained_net()
    sampler = CoresetSampler(data, model, size=200, strategy=strategies.Forgetting())
    sampler.select()
    with torch.no_grad():
        right = model.eval()(data.tensors[0]).argmax(1) == data.tensors[1]
        model[9].bias[3] -= 50  # the model forgets every 3
    now = model(data.tensors[0]).argmax(1) == data.tensors[1]
    coreset = sampler.select()
    lost = right & ~now
    assert lost.sum() > 100
    never = ~right & ~now
    chosen = torch.zeros(len(data), dtype=torch.bool)
    chosen[coreset.indices] = True
    assert chosen[never].all()
    assert chosen[lost].sum() == 200 - never.sum()
    assert not chosen[now].any()


def test_rescore_every_scores_once_and_draws_new_pools_every_time():
    strategy = strategies.Stable(rescore_every=3, pool_size=50, keep=10)
    sampler = CoresetSampler(digits(), trained_net(), size=100, strategy=strategy)
    looked = []
    coresets = []
    for _ in range(4):
        coresets.append(sampler.select())
        looked.append(sampler.stats["forward_examples"])
        list(sampler)
    assert looked[0] == looked[1] == looked[2] == 1500 * 4
    assert looked[3] == 2 * looked[0]
    assert coresets[0].overlap(coresets[1]) < 0.6


def digits_with_wrong_labels(share):
    x, y = digits().tensors
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(1797, generator=generator) < share
    noisy = torch.where(wrong, (y + torch.randint(1, 10, (1797,), generator=generator)) % 10, y)
    return torch.utils.data.TensorDataset(x, noisy), wrong


def test_a_confidence_exponent_sets_aside_wrong_labels_and_tells_their_share():
    data, wrong = digits_with_wrong_labels(0.4)
    clean = {}
    for exponent in (0, 1, 2):
        coreset, sampler = select(
            strategies.Stable(confidence_exponent=exponent, pool_size=100, keep=20), dataset=data, size=200
        )
        clean[exponent] = float((coreset.weights * ~wrong[coreset.indices]).sum() / 1797)
    assert clean[0] < 0.75
    assert clean[1] > 0.85
    assert clean[2] > 0.92
    assert sampler.stats["estimated_noise_rate"] == pytest.approx(0.4, abs=0.05)


def test_where_no_label_is_wrong_it_sets_next_to_nothing_aside():
    _, sampler = select(strategies.Stable(confidence_exponent=2, pool_size=100, keep=20), size=200)
    assert sampler.stats["estimated_noise_rate"] < 0.05


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.7])
def test_label_confidence_is_the_exact_posterior_of_labels_that_were_replaced_at_random(share):
    """The true class is drawn from the model's own probabilities, so Bayes' rule must be calibrated."""
    generator = torch.Generator().manual_seed(1)
    k, classes = 40_000, 5
    probabilities = torch.softmax(3 * torch.randn(k, classes, generator=generator, dtype=torch.float64), -1)
    true = torch.multinomial(probabilities, 1, generator=generator).flatten()
    wrong = torch.rand(k, generator=generator) < share
    labels = torch.where(wrong, (true + torch.randint(1, classes, (k,), generator=generator)) % classes, true)
    gradients = probabilities - torch.nn.functional.one_hot(labels, classes)
    asked = label_probability(gradients[None], labels)
    assert torch.allclose(asked, probabilities.gather(1, labels[:, None])[:, 0])
    right = label_confidence(asked, torch.tensor([k // 2, k // 2]), classes)
    assert float(1 - right.mean()) == pytest.approx(share, abs=0.02)
    for low in (0.1, 0.3, 0.5, 0.7, 0.9):
        some = (right - low).abs() < 0.1
        if some.sum() > 500:
            assert float((~wrong[some]).double().mean()) == pytest.approx(float(right[some].mean()), abs=0.05)


def test_label_confidence_of_a_pool_does_not_depend_on_the_pools_beside_it():
    asked = torch.rand(90, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = label_confidence(asked, torch.tensor([30, 60]), 4)
    assert torch.equal(together[:30], label_confidence(asked[:30], torch.tensor([30]), 4))
    assert torch.equal(together[30:], label_confidence(asked[30:], torch.tensor([60]), 4))


def epochs_of(sampler, count):
    """The examples that each of so many selections keeps."""
    kept = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        kept.append(sampler.select().indices)
    return kept


def test_label_confidence_is_a_pass_over_the_data_where_all_labels_are_trusted():
    data = torch.utils.data.TensorDataset(digits().tensors[0][:1200], torch.arange(1200) % 10)
    sampler = CoresetSampler(
        data,
        trained_net(),
        size=120,
        strategy=strategies.LabelConfidence(posterior=PointMass(), exponent=0, rescore_every=10, warm_up=0),
    )
    kept = epochs_of(sampler, 20)
    for scored in (kept[:10], kept[10:]):
        assert torch.equal(torch.cat(scored).sort().values, torch.arange(1200))
    assert not torch.equal(kept[0].sort().values, kept[10].sort().values)
    assert sampler.stats["forward_examples"] == 2 * 1200


def test_label_confidence_shows_examples_in_proportion_to_their_chance():
    """Within a class an example's times are those that its chance entitles it to, rounded up or down."""
    x, y = digits().tensors[0], digits().tensors[1].clone()
    y[::4] = (y[::4] + 3) % 10
    data = torch.utils.data.TensorDataset(x, y)
    sampler = CoresetSampler(
        data,
        trained_net(),
        size=100,
        strategy=strategies.LabelConfidence(posterior=PointMass(), exponent=1, rescore_every=60, warm_up=0),
    )
    times = torch.bincount(torch.cat(epochs_of(sampler, 60)), minlength=len(y)).double()
    queue = sampler.state_dict()["strategy_state"]
    chance = torch.zeros(len(y), dtype=torch.float64).scatter(0, queue["candidates"], queue["chance"])
    for c in range(10):
        own = y == c
        served = times[own].sum() / chance[own].sum()
        assert float((times[own] - served * chance[own]).abs().max()) < 1.5
    wrong = torch.zeros(len(y), dtype=torch.bool)
    wrong[::4] = True
    assert float(times[wrong].sum() / times.sum()) < 0.06  # of a quarter
    assert sampler.stats["estimated_noise_rate"] == pytest.approx(0.25, abs=0.05)


def test_label_confidence_saved_between_two_scoring_passes_goes_on_as_it_would_have():
    def sampler():
        return CoresetSampler(
            digits(),
            trained_net(),
            size=100,
            strategy=strategies.LabelConfidence(posterior=PointMass(), rescore_every=5, warm_up=0),
        )

    whole, first, second = sampler(), sampler(), sampler()
    expected = epochs_of(whole, 4)
    epochs_of(first, 2)
    second.load_state_dict(first.state_dict())
    for epoch in (2, 3):
        second.set_epoch(epoch)
        assert torch.equal(second.select().indices, expected[epoch])
    assert second.stats["forward_examples"] == whole.stats["forward_examples"]


def test_label_confidence_keeps_classes_equal_or_in_proportion_and_weighs_them_by_their_size():
    y = torch.cat([torch.zeros(900), torch.ones(300)]).long()
    data = torch.utils.data.TensorDataset(digits().tensors[0][:1200], y)
    for balance, quota in (("equal", [50, 50]), ("proportional", [75, 25])):
        strategy = strategies.LabelConfidence(posterior=PointMass(), balance=balance, rescore_every=3, warm_up=0)
        coreset = CoresetSampler(data, trained_net(), size=100, strategy=strategy).select()
        own = y[coreset.indices]
        assert torch.bincount(own).tolist() == quota
        assert [float(coreset.weights[own == c].sum()) for c in (0, 1)] == pytest.approx([900, 300])


@pytest.mark.parametrize(
    "settings",
    [
        dict(exponent=-1),
        dict(candidates=0),
        dict(rescore_every=0),
        dict(draws=0),
        dict(balance="no"),
        dict(exponent=float("nan")),
        dict(warm_up=-1),
    ],
)
def test_label_confidence_says_what_is_wrong(settings):
    for posterior in (PointMass(), Trajectory()):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
            strategies.LabelConfidence(posterior=posterior, **settings)


def test_pools_are_disjoint_balanced_and_of_the_size_asked_for():
    labels = torch.arange(5000) % 10
    pools = draw_pools(
        labels,
        500,
        times=torch.zeros_like(labels),
        keep=100,
        pool_size=400,
        balance="equal",
        generator=torch.Generator().manual_seed(0),
    )
    assert pools.lengths.tolist() == [400] * 5
    assert pools.indices.unique().numel() == 2000
    for pool, _ in pools.batches(1):
        assert pool.sizes.tolist() == [10] * 10
        assert labels[pool.indices].tolist() == sorted(labels[pool.indices].tolist())
        assert pool.starts.diff().tolist() == [40] * 10


def test_with_more_classes_than_places_each_pool_takes_some_classes_in_turn():
    labels = torch.arange(20_000) % 1000
    pools = draw_pools(
        labels,
        2000,
        times=torch.zeros_like(labels),
        keep=128,
        pool_size=640,
        balance="equal",
        generator=torch.Generator().manual_seed(0),
    )
    assert int(pools.sizes.sum()) == 2000
    kept = torch.zeros(1000, dtype=torch.int64)
    for pool, _ in pools.batches(1):
        kept[labels[pool.indices[pool.starts[:-1]]]] += pool.sizes
    assert kept.tolist() == [2] * 1000
    assert int(pools.starts.diff().min()) >= 5


EXAMPLE = Pools(*map(torch.tensor, ([3, 8, 5, 1, 2, 4, 7, 9], [0, 2, 5, 8], [1, 1, 2], [6.0, 5.0, 6.0], [0, 2, 3])))
"""That of the docstring."""


def columns(pools):
    return [getattr(pools, field.name).tolist() for field in dataclasses.fields(pools)]


def test_pools_are_taken_and_batched_as_the_docstring_says():
    assert EXAMPLE.lengths.tolist() == [5, 3]
    second, rows = EXAMPLE.take([1])
    assert columns(second) == [[4, 7, 9], [0, 3], [2], [6.0], [0, 1]]
    assert rows.tolist() == [5, 6, 7]
    (one, where), (two, rest) = EXAMPLE.batches(5)
    assert columns(one) == [[3, 8, 5, 1, 2], [0, 2, 5], [1, 1], [6.0, 5.0], [0, 2]]
    assert columns(two) == columns(second)
    assert (where, rest) == (slice(0, 5), slice(5, 8))
    assert [columns(batch) for batch, _ in EXAMPLE.batches(6)] == [columns(EXAMPLE)]
    assert one.indices.untyped_storage().data_ptr() == EXAMPLE.indices.untyped_storage().data_ptr()


@pytest.mark.parametrize("world", [1, 2, 3, 40])
def test_pools_shared_out_over_processes_are_the_same_pools(world):
    labels = torch.arange(2000) % 7
    times = torch.zeros_like(labels)
    pools = draw_pools(
        labels, 300, times=times, keep=20, pool_size=60, balance="equal", generator=torch.Generator().manual_seed(0)
    )
    whole = [columns(pool) for pool, _ in pools.batches(1)]
    for rank in range(world):
        shard, rows = pools.take(range(len(pools))[rank::world])
        assert torch.equal(pools.indices[rows], shard.indices)
        assert [columns(pool) for pool, _ in shard.batches(1)] == whole[rank::world]


def test_imbalanced_classes_keep_their_share_of_the_weight():
    y = torch.cat([torch.full((1000,), 0), torch.full((100,), 1), torch.full((40,), 2)])
    x = digits().tensors[0][torch.arange(1140)]
    data = torch.utils.data.TensorDataset(x, y)
    for changes in (
        {"balance": "equal"},
        {"balance": "proportional"},
        {"rescore_every": 2},
        {"rescore_every": 5},
        {"rescore_every": 2, "balance": "proportional"},
        {"confidence_exponent": 2},
        {"confidence_exponent": 2, "rescore_every": 2},
    ):
        coreset, _ = select(strategies.Stable(pool_size=60, keep=30, **changes), dataset=data, size=60)
        shares = torch.stack([coreset.weights[y[coreset.indices] == c].sum() for c in range(3)])
        assert torch.allclose(shares, torch.tensor([1000.0, 100.0, 40.0], dtype=torch.float64))


def test_quotas_that_can_be_met_are_met_in_proportion():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        counts = torch.randint(0, 12, (5,), generator=generator)
        labels = torch.repeat_interleave(torch.arange(5), counts)
        if len(labels) == 0:
            continue
        size = int(torch.randint(1, len(labels) + 1, (), generator=generator))
        quota = quotas(labels, size, "proportional", generator)
        assert quota.sum() == size
        assert (quota <= counts[: len(quota)]).all()


def test_rescore_every_never_asks_for_more_of_a_class_than_there_is():
    for size in (100, 226, 700):
        coreset, _ = select(strategies.Stable(rescore_every=2), size=size)
        assert len(coreset) == size


def test_quotas_add_up_and_give_rare_classes_one():
    labels = torch.cat([torch.zeros(990, dtype=torch.int64), torch.tensor([1] * 8 + [3] * 2)])
    generator = torch.Generator().manual_seed(0)
    quota = quotas(labels, 50, "proportional", generator)
    assert quota.sum() == 50
    assert quota[2] == 0
    assert quota[1] >= 1
    assert quota[3] >= 1


@pytest.mark.parametrize(
    "strategy",
    [
        *("stable", "crest", "craig", "k_center", "herding"),
        strategies.LabelConfidence(posterior=PointMass(), rescore_every=1, warm_up=0),
        strategies.Stable(rescore_every=3),
        strategies.LabelConfidence(posterior=PointMass(), rescore_every=3, candidates=1, warm_up=0),
    ],
)
def test_a_class_with_fewer_examples_than_its_equal_share_gives_all_and_the_others_make_up_for_it(strategy):
    y = torch.cat([torch.zeros(300), torch.ones(7), torch.full((200,), 2)]).long()
    data = torch.utils.data.TensorDataset(digits().tensors[0][:507], y)
    coreset, _ = select(strategy, dataset=data, size=100)
    kept = torch.bincount(y[coreset.indices])
    assert kept[1] == 7
    assert kept[[0, 2]].sort().values.tolist() == [46, 47]
    shares = torch.stack([coreset.weights[y[coreset.indices] == c].sum() for c in range(3)])
    assert shares.tolist() == pytest.approx([300, 7, 200])


def test_equal_quotas_are_a_water_level_and_never_more_than_a_class_has():
    """Against one at a time to a class that has least and still something to give."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        counts = torch.randint(0, 12, (5,), generator=generator)
        labels = torch.repeat_interleave(torch.arange(5), counts)
        if len(labels) == 0:
            continue
        size = int(torch.randint(1, len(labels) + 1, (), generator=generator))
        dealt = torch.zeros(5, dtype=torch.int64)
        for _ in range(size):
            dealt[torch.where(dealt < counts, dealt, 999).argmin()] += 1
        quota = quotas(labels, size, "equal", generator)
        counts, dealt = counts[: len(quota)], dealt[: len(quota)]
        assert (quota <= counts).all()
        assert quota.sort().values.tolist() == dealt.sort().values.tolist()


@pytest.mark.parametrize(
    ("classes", "size", "settings"),
    [
        (100, 20, {}),
        (300, 20, {"rescore_every": 10, "candidates": 1}),
        (100, 120, {"candidates": 1}),
        (100, 20, {"balance": "proportional"}),
    ],
)
def test_label_confidence_with_fewer_candidates_than_classes_takes_the_classes_in_turn(classes, size, settings):
    n = 1500
    x = digits().tensors[0][:n]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))
    data = torch.utils.data.TensorDataset(x, torch.arange(n) % classes)
    sampler = CoresetSampler(
        data,
        model,
        size=size,
        strategy=strategies.LabelConfidence(posterior=PointMass(), **{"rescore_every": 1, **settings}, warm_up=0),
        progress=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that classes are left out
        kept = [set((c % classes).tolist()) for c in epochs_of(sampler, 40)]
    assert len(set().union(*kept)) > 0.9 * classes


@pytest.mark.parametrize("strategy", [strategies.Herding(), strategies.KCenter(), strategies.Craig()])
@pytest.mark.parametrize("layer", [0, 9])
def test_nan_is_noticed_by_strategies_that_look_at_embeddings_too(strategy, layer):
    model = trained_net()
    model[layer].weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        select(strategy, model=model)


def test_embeddings_that_are_not_finite_are_noticed_where_logits_are():
    class Blind(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(64, 10)

        def forward(self, x):
            x = x.flatten(1)
            return self.head(torch.where(x > 0.9, torch.inf, x)).nan_to_num(0, 1, -1)

    for strategy in (strategies.Herding(), strategies.KCenter()):
        with pytest.raises(ValueError, match=r"NaN or infinite.*example \d+"):
            select(strategy, model=Blind())


BY_CONFIDENCE = [
    strategies.LabelConfidence(posterior=PointMass(), rescore_every=10, warm_up=0),
    strategies.Stable(confidence_exponent=2, pool_size=100, keep=20, rescore_every=2),
    strategies.Stable(confidence_exponent=2, pool_size=100, keep=20),
]


@pytest.mark.parametrize("strategy", BY_CONFIDENCE)
def test_a_model_that_knows_nothing_is_not_asked_how_many_labels_are_wrong(strategy):
    for seed in range(3):
        _, sampler = select(strategy, model=conv_net(seed), size=200)
        assert "estimated_noise_rate" not in sampler.stats


def test_as_long_as_the_model_knows_nothing_all_labels_have_the_same_chance():
    _, sampler = select(strategies.LabelConfidence(posterior=PointMass(), rescore_every=1, warm_up=0), model=conv_net())
    assert sampler.state_dict()["strategy_state"]["chance"].unique().tolist() == [1.0]


@functools.cache
def trained_on_wrong_labels():
    data, _ = digits_with_wrong_labels(0.3)
    model, generator = conv_net(), torch.Generator().manual_seed(0)
    for _ in range(10):
        batches = torch.randperm(1797, generator=generator).split(64)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            train(model, [(data.tensors[0][i], data.tensors[1][i]) for i in batches], lr=0.05)
    return data, model


@pytest.mark.parametrize("strategy", BY_CONFIDENCE)
def test_a_model_that_has_learned_the_wrong_labels_too_gives_no_estimate(strategy):
    """It is nowhere surer than the share of right labels, and by Bayes' rule with its own numbers none is wrong."""
    data, model = trained_on_wrong_labels()
    _, sampler = select(strategy, dataset=data, model=model, size=200)
    assert sampler.stats.get("estimated_noise_rate", 0.3) > 0.2


def test_a_new_scoring_pass_without_an_estimate_does_not_repeat_the_last_one():
    sampler = CoresetSampler(
        digits(),
        trained_net(),
        size=100,
        strategy=strategies.LabelConfidence(posterior=PointMass(), rescore_every=1, warm_up=0),
    )
    sampler.select()
    assert "estimated_noise_rate" in sampler.stats
    sampler.model.load_state_dict(conv_net().state_dict())
    sampler.select()
    assert "estimated_noise_rate" not in sampler.stats


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: strategies.Stable(draws=0), "draws"),
        (lambda: strategies.Stable(keep=600), "keep"),
        (lambda: strategies.Stable(confidence_exponent=-1), "confidence_exponent"),
        (lambda: strategies.Stable(rescore_every=0), "rescore_every"),
        (lambda: select(strategies.Stable(balance="even")), "balance"),
        (lambda: select(strategies.Stable(posterior=PointMass()), size=0), "size"),
    ],
)
def test_bad_settings_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
