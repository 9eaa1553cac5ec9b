import pytest
import torch
from simulated import labelled, observed, predictions, symmetric
from test_due import Run, uniform_picks, view_of

from coreset_sampler import PointMass, strategies
from coreset_sampler.selection.scores import ScoreStore
from coreset_sampler.selection.strategies.loss_pruning import inclusion, is_hard, pruned
from coreset_sampler.selection.testing import check_strategy


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("size", "ratio"), [(30, 0.5), (90, 0.5), (60, 0.1), (119, 0.5), (2, 1.0)])
@pytest.mark.parametrize("confident", [False, True])
def test_the_expected_weighted_sum_is_the_full_one(size, ratio, confident):
    """Over many draws, for values that go with the group and the mass; within four standard errors."""
    hard = torch.arange(120) < 40
    mass = 0.02 + 0.98 * torch.rand(120, generator=seeded(1), dtype=torch.float64) if confident else torch.ones(120)
    values = torch.randn(120, 3, generator=seeded(2), dtype=torch.float64) + 3 * hard[:, None] + mass.double()[:, None]
    generator, sums = seeded(3), []
    for _ in range(2000):
        coreset = pruned(hard, mass.double(), size, ratio, generator)
        assert len(coreset) == size
        assert float(coreset.weights.sum()) == pytest.approx(120)
        sums.append((coreset.weights[:, None] * values[coreset.indices]).sum(0))
    full = (mass[:, None] * values).sum(0) * 120 / mass.sum()
    error = torch.stack(sums).std(0) / 2000**0.5
    assert ((torch.stack(sums).mean(0) - full).abs() <= 4 * error + 1e-6).all()


def test_learned_examples_have_their_part_of_the_chance_and_the_inverse_weight():
    hard = torch.arange(1000) < 400
    coreset = pruned(hard, torch.ones(1000, dtype=torch.float64), 350, 0.5, seeded())
    kept = hard[coreset.indices]
    assert (int(kept.sum()), int((~kept).sum())) == (200, 150)  # 400 : 600 / 2
    assert coreset.weights[kept].unique().tolist() == pytest.approx([2.0])
    assert coreset.weights[~kept].unique().tolist() == pytest.approx([4.0])
    larger = pruned(hard, torch.ones(1000, dtype=torch.float64), 900, 0.5, seeded())
    assert int(hard[larger.indices].sum()) == 400  # all, and the rest of the places for the learned
    whole = pruned(hard, torch.ones(1000, dtype=torch.float64), 1000, 0.5, seeded())
    assert whole.weights.tolist() == pytest.approx([1.0] * 1000)


def test_inclusion_probabilities_are_in_proportion_and_capped():
    assert inclusion(torch.tensor([4.0, 1.0, 1.0, 2.0]), 3).tolist() == [1.0, 0.5, 0.5, 1.0]
    generator = seeded()
    for size in (1, 5, 19, 20):
        mass = torch.rand(20, generator=generator, dtype=torch.float64) ** 4 + 1e-6
        p = inclusion(mass, size)
        assert float(p.sum()) == pytest.approx(size)
        assert float(p.max()) <= 1
        free = p < 1
        assert (p[free] / mass[free]).std().nan_to_num() < 1e-6 * (p[free] / mass[free]).mean() if free.any() else True


def test_one_group_alone_and_one_place_alone_work():
    for hard in (torch.ones(9, dtype=torch.bool), torch.zeros(9, dtype=torch.bool), torch.arange(9) < 8):
        for size in (1, 5, 9):
            coreset = pruned(hard, torch.ones(9, dtype=torch.float64), size, 0.5, seeded())
            assert len(coreset) == size
            assert float(coreset.weights.sum()) == pytest.approx(9)


def test_a_single_place_goes_to_hard_and_learned_examples_by_what_they_weigh():
    hard, mass, generator = torch.arange(10) < 5, torch.tensor([1.0] * 5 + [3.0] * 5).double(), seeded()
    drawn = [int(pruned(hard, mass, 1, 0.5, generator).indices) for _ in range(2000)]
    assert float(hard[drawn].double().mean()) == pytest.approx(0.25, abs=0.04)


def test_hard_is_a_loss_above_the_mean_or_never_seen():
    logits = torch.tensor([[5.0, 0.0], [0.0, 5.0], [4.0, 0.0], [0.0, 0.0]])
    store = observed(logits, torch.zeros(4, dtype=torch.int64), seen=3)
    assert is_hard(store).tolist() == [False, True, False, True]


def test_everything_is_seen_once_then_pruned_then_shown_alike_at_the_end():
    truth, logits = predictions(2000, 10, signal=2.0)
    strategy = strategies.LossPruning(selections=40)
    run = Run(truth, lambda at, epoch: logits[at].float(), strategy).go(40)  # forward_examples == 0 in each
    alike = uniform_picks(truth, 10)
    assert all(map(torch.equal, run.picks[:10], alike))
    assert all(weights.unique().numel() == 1 for weights in (*run.weights[:10], *run.weights[35:]))
    hard = is_hard(run.store)
    shown = hard[torch.cat(run.picks[10:35])].double().mean()
    assert float(shown) > 1.25 * float(hard.double().mean())
    assert all(weights.unique().numel() == 2 for weights in run.weights[10:35])
    ends = torch.cat(run.picks[35:])
    assert len(ends.unique()) == len(ends)  # a pass


def test_with_confidence_neither_what_is_learned_nor_what_is_wrong_comes_often():
    truth, logits = predictions(2000, 10)
    labels = labelled(truth, symmetric(0.4, 10))
    shares = {}
    for exponent in (0.0, 2.0):
        run = Run(labels, lambda at, epoch: logits[at].float(), strategies.LossPruning(confidence_exponent=exponent))
        run.go(40)
        weights = torch.cat(run.weights[10:])
        wrong = (labels != truth)[torch.cat(run.picks[10:])]
        shares[exponent] = float((weights * wrong).sum() / weights.sum()), float(wrong.double().mean())
    assert shares[0.0][0] == pytest.approx(0.4, abs=0.04)  # unbiased
    assert shares[0.0][1] > 0.5  # since wrong labels are hard
    assert max(shares[2.0]) < 0.08
    assert run.figures["estimated_noise_rate"] == pytest.approx(0.4, abs=0.05)


def test_with_confidence_wrong_labels_stay_away_at_the_end_too():
    truth, logits = predictions(2000, 10)
    labels, strategy = labelled(truth, symmetric(0.4, 10)), strategies.LossPruning(confidence_exponent=2, selections=40)
    run = Run(labels, lambda at, epoch: logits[at].float(), strategy).go(40)
    hard, ends = is_hard(run.store), torch.cat(run.picks[35:])
    assert float((labels != truth)[ends].double().mean()) < 0.08
    right = labels == truth
    shown, there = hard[ends][right[ends]].double().mean(), hard[right].double().mean()
    assert float(shown) == pytest.approx(float(there), abs=0.05)  # hard and learned ones alike


def test_without_scores_it_is_uniform_and_its_state_can_be_saved():
    check_strategy(strategies.LossPruning(selections=3))
    labels = torch.arange(2000) % 10
    view = view_of(labels, ScoreStore(labels, 10))
    coreset, state = strategies.LossPruning().select(view, 200, None, seeded())
    assert torch.equal(coreset.indices, uniform_picks(labels, 1)[0])
    saved = strategies.state_dict(strategies.LossPruning(), state)
    assert strategies.load_state(strategies.LossPruning(), saved).selections == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(ratio=0), ValueError, "ratio must be above 0 and at most 1, got 0"),
        (dict(ratio=1.5), ValueError, "ratio must be above 0 and at most 1, got 1.5"),
        (dict(anneal=-0.1), ValueError, "anneal must be between 0 and 1, got -0.1"),
        (dict(selections=0), ValueError, "selections must be at least 1 selection, got 0"),
        (dict(confidence_exponent=-1), ValueError, "confidence_exponent must be 0 or more"),
        (dict(posterior=PointMass()), TypeError, r"posterior must be a Trajectory\(\), got PointMass\(\).*Stable"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        strategies.LossPruning(**settings)
