"""Label confidence that watches: simulated predictions whose truth is known, through the real view and store."""

import io
from itertools import pairwise

import pytest
import torch
from simulated import labelled, pairs, predictions, symmetric
from torch import nn
from torch.utils.data import TensorDataset

from coreset_sampler import CoresetSampler, PointMass, SphericalGaussian, Trajectory, strategies
from coreset_sampler.selection.noise import NoiseModel, quality_of
from coreset_sampler.selection.scores import ScoreStore
from coreset_sampler.selection.scoring import ScoringView
from coreset_sampler.selection.strategies import due
from coreset_sampler.selection.strategies.due import Watched

N, SIZE, CLASSES = 2000, 200, 10


def view_of(labels, store=None):
    data = TensorDataset(torch.zeros(len(labels), 1), labels)
    options = dict(forward_fn=None, collate_fn=None, batch_size=128, num_workers=0, progress=False, seed=0)
    view = ScoringView(data, nn.Linear(1, 2), labels, **options)
    view.scores = store
    return view


class Run:
    """Selections one after the other; after each one the store sees what `said` gives for its examples."""

    def __init__(self, labels, said, strategy=None, size=SIZE, classes=CLASSES):
        self.store = ScoreStore(labels, classes) if said is not None else None
        self.labels, self.said, self.size = labels, said, size
        self.strategy, self.state, self.picks, self.epoch = strategy or strategies.LabelConfidence(), None, [], 0
        self.figures, self.weights = {}, []

    def go(self, selections):
        for _ in range(selections):
            view, generator = view_of(self.labels, self.store), torch.Generator().manual_seed(self.epoch)
            coreset, self.state = self.strategy.select(view, self.size, self.state, generator)
            assert view.forward_examples == 0
            self.picks.append(coreset.indices)
            self.weights.append(coreset.weights)
            self.figures = view.figures
            if self.said is not None:
                self.store.observe(coreset.indices, self.said(coreset.indices, self.epoch), self.epoch)
            self.epoch += 1
        return self

    def times(self, first=0):
        return torch.bincount(torch.cat(self.picks[first:]), minlength=len(self.labels))


def noisy_run(matrix, *, signal=3.0, strategy=None):
    truth, logits = predictions(N, len(matrix), signal=signal)
    labels = labelled(truth, matrix)
    return Run(labels, lambda at, epoch: logits[at].float(), strategy), labels != truth


def uniform_picks(labels, selections, size=SIZE):
    return Run(labels, None, strategies.Uniform(), size).go(selections).picks


def test_clean_labels_are_shown_in_exactly_the_uniform_passes():
    truth, logits = predictions(N, CLASSES)
    run = Run(truth, lambda at, epoch: logits[at].float()).go(50)
    assert all(map(torch.equal, run.picks, uniform_picks(truth, 50)))
    assert run.figures == {"estimated_noise_rate": 0.0}
    assert all(weights.unique().tolist() == [N / SIZE] for weights in run.weights)


@pytest.mark.parametrize("size", [200, 333, 1999, 2000])
def test_a_network_that_knows_nothing_changes_nothing(size):
    labels = torch.arange(N) % CLASSES
    guesses = torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(0))
    run = Run(labels, lambda at, epoch: guesses[at], size=size).go(25)
    assert all(map(torch.equal, run.picks, uniform_picks(labels, 25, size)))
    assert run.figures == {}


def test_without_scores_it_is_uniform():
    labels = torch.arange(N) % CLASSES
    run = Run(labels, None)
    run.store = ScoreStore(labels, CLASSES)
    assert all(map(torch.equal, run.go(15).picks, uniform_picks(labels, 15)))  # nothing observed
    run.store = None
    assert all(map(torch.equal, run.go(10).picks, uniform_picks(labels, 25)))  # and no store


@pytest.mark.parametrize("matrix", [symmetric(0.5, CLASSES), pairs(0.35, CLASSES), symmetric(0.15, CLASSES)])
def test_wrong_labels_are_seen_once_and_then_seldom(matrix):
    run, wrong = noisy_run(matrix)
    run.go(60)
    assert torch.equal(torch.cat(run.picks[:10]).sort().values, torch.arange(N))
    assert float(wrong[torch.cat(run.picks[10:])].double().mean()) < 0.2 * float(wrong.double().mean())
    assert run.figures["estimated_noise_rate"] == pytest.approx(float(wrong.double().mean()), abs=0.04)
    assert float(run.state.chance.min()) == pytest.approx(0.02)


def test_each_example_waits_for_the_inverse_of_its_chance_and_nothing_is_owed():
    """Between two times there are at least 1 / chance passes over what is trusted, also after it was held back for long."""
    run, wrong = noisy_run(symmetric(0.4, CLASSES), signal=1.5)
    run.go(150)
    chance = run.state.chance.double()
    step = SIZE / float(chance.sum())
    shown = [[] for _ in range(N)]
    for epoch, picks in enumerate(run.picks[60:]):
        for index in picks.tolist():
            shown[index].append(epoch)
    for index, epochs in enumerate(shown):
        for one, other in pairwise(epochs):
            assert (other - one + 2) * step > 0.75 / float(chance[index]) or chance[index] > 0.9
    times = run.times(60).double()
    served = times.sum() / chance.sum()
    assert float((times - served * chance).abs().mean()) < 1
    assert float((times * wrong).sum() / times.sum()) < 0.2


def test_what_was_held_back_is_not_owed_when_it_is_trusted_again():
    labels = torch.zeros(6, dtype=torch.int64)
    shown = torch.tensor([0.0, 9.1, 9.2, 9.3, 9.4, 9.5], dtype=torch.float64)
    state = Watched(7, None, 10.0, shown, torch.tensor([0.02, 1.0, 1.0, 1.0, 1.0, 1.0]))
    picks = []
    for _ in range(10):
        coreset, state = strategies.LabelConfidence().select(
            view_of(labels), 1, state, torch.Generator().manual_seed(0)
        )
        picks.append(int(coreset.indices))
    assert picks == [1, 2, 3, 4, 5] * 2
    coreset, after = strategies.LabelConfidence().select(
        view_of(labels), 1, Watched(7, None, 60.0, shown + 50 * (shown > 0), state.chance), torch.Generator()
    )
    assert coreset.indices.tolist() == [0]  # due at 50; the others at 60.1 and later
    assert float(after.shown[0]) == 60.0  # from now on, not from 50


def test_the_rate_is_not_lowered_when_the_labels_are_learned_by_heart():
    truth, logits = predictions(N, CLASSES)
    labels = labelled(truth, symmetric(0.4, CLASSES))
    by_heart = 9.0 * torch.nn.functional.one_hot(labels, CLASSES)
    run = Run(labels, lambda at, epoch: logits[at].float() if epoch < 20 else by_heart[at])
    run.go(170)
    assert run.figures["estimated_noise_rate"] == pytest.approx(0.4, abs=0.04)
    assert float((labels != truth)[torch.cat(run.picks[-10:])].double().mean()) < 0.15


def test_a_network_that_was_too_weak_at_first_is_asked_again():
    truth, logits = predictions(N, CLASSES)
    labels = labelled(truth, symmetric(0.5, CLASSES))
    guesses = torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(0))
    run = Run(labels, lambda at, epoch: (guesses if epoch < 10 else logits)[at].float())
    run.go(20)
    assert run.figures == {}
    assert all(map(torch.equal, run.picks, uniform_picks(labels, 20)))
    run.go(20)
    assert run.figures["estimated_noise_rate"] == pytest.approx(0.5, abs=0.06)
    assert float((labels != truth)[torch.cat(run.picks[-10:])].double().mean()) < 0.15


def test_clean_labels_stay_trusted_by_a_network_that_was_weak_at_first():
    """The mean over visits mixes what an untrained network said with what it knows, and that must not pass for noise."""
    truth, logits = predictions(N, CLASSES)
    guesses = torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(0))
    run = Run(truth, lambda at, epoch: (guesses if epoch < 10 else logits)[at].float()).go(90)
    assert all(map(torch.equal, run.picks, uniform_picks(truth, 90)))


def test_examples_that_a_loader_dropped_are_trusted():
    run, wrong = noisy_run(symmetric(0.5, CLASSES))
    dropped = torch.arange(N) % 50 == 0
    said, observe = run.said, run.store.observe
    run.store.observe = lambda at, logits, epoch: observe(at[~dropped[at]], logits[~dropped[at]], epoch)
    run.go(11)
    assert run.said is said
    assert float(run.state.chance[dropped].min()) > float(run.state.chance[wrong & ~dropped].median())


def test_classes_are_kept_equal_or_in_proportion_on_request():
    truth, logits = predictions(N, 4, signal=4.0)
    labels = labelled(truth, pairs(0.3, 4))
    labels[:600] = 0  # and a large class
    counts = torch.bincount(labels)
    for balance in ("equal", "proportional"):
        run = Run(labels, lambda at, epoch: logits[at].float(), strategies.LabelConfidence(balance=balance), classes=4)
        run.go(25)
        assert run.times(0)[:].min() >= 1 or balance == "equal"
        for picks, weights in zip(run.picks, run.weights, strict=True):
            kept = torch.bincount(labels[picks], minlength=4)
            expected = torch.full((4,), SIZE / 4) if balance == "equal" else counts * SIZE / N
            assert float((kept - expected).abs().max()) <= 1
            shares = torch.zeros(4, dtype=torch.float64).index_add_(0, labels[picks], weights)
            assert shares.tolist() == pytest.approx(counts.tolist(), rel=1e-6)


def test_many_classes_are_judged_by_one_rate():
    truth, logits = predictions(N, 100, signal=4.5)
    labels = labelled(truth, symmetric(0.4, 100))
    run = Run(labels, lambda at, epoch: logits[at].float(), classes=100).go(40)
    assert run.store.projected
    assert run.figures["estimated_noise_rate"] == pytest.approx(0.4, abs=0.06)
    assert float((labels != truth)[torch.cat(run.picks[20:])].double().mean()) < 0.1


def test_a_state_is_saved_and_goes_on_as_it_would_have():
    (whole, _), (first, _) = noisy_run(symmetric(0.5, CLASSES)), noisy_run(symmetric(0.5, CLASSES))
    whole.go(30)
    first.go(18)
    buffer = io.BytesIO()
    torch.save(strategies.state_dict(first.strategy, first.state), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert saved["state"]["noise"].keys() >= {"matrix", "rate"}
    first.state = strategies.load_state(first.strategy, saved)
    first.go(12)
    assert all(map(torch.equal, first.picks, whole.picks))
    saved["state"]["noise"]["rate"] = "x"
    with pytest.raises(ValueError, match="the state of LabelConfidence is damaged"):
        strategies.load_state(first.strategy, saved)


def test_it_says_whether_the_sampler_has_to_watch():
    assert strategies.LabelConfidence() == strategies.resolve("label_confidence")
    assert strategies.LabelConfidence().observes
    assert strategies.WarmUp("label_confidence", selections=3).observes
    assert not strategies.LabelConfidence(posterior=PointMass()).observes
    assert not strategies.WarmUp("crest", selections=3).observes


@pytest.mark.parametrize("setting", ["rescore_every", "candidates", "warm_up"])
def test_settings_of_scoring_passes_are_refused_where_there_are_none(setting):
    with pytest.raises(
        ValueError, match=rf"{setting} must be left out with posterior=Trajectory\(\).*got 3.*PointMass"
    ):
        strategies.LabelConfidence(**{setting: 3}, posterior=Trajectory(SphericalGaussian(0.1, "head")))


def test_a_sampler_that_has_seen_nothing_gives_uniform_passes():
    data = TensorDataset(torch.randn(100, 3), torch.arange(100) % 2)
    samplers = [
        CoresetSampler(data, nn.Linear(3, 2), size=20, strategy=name) for name in ("label_confidence", "uniform")
    ]
    for epoch in range(8):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        assert torch.equal(*(sampler.select().indices for sampler in samplers))


@pytest.mark.parametrize("size", [200, 400, 182, 285])  # 10, 5, 11 and 8 selections a pass
def test_labels_are_judged_again_after_2_4_and_8_passes_whatever_the_fraction(size, monkeypatch):
    judged = []
    monkeypatch.setattr(due, "_judged_again", lambda store, before: judged.append(run.epoch) or before)
    truth, logits = predictions(N, CLASSES)
    run = Run(labelled(truth, symmetric(0.4, CLASSES)), lambda at, epoch: logits[at].float(), size=size)
    per_pass = -(-N // size)
    run.go(8 * per_pass + 1)
    assert judged == [2 * per_pass, 4 * per_pass, 8 * per_pass]


@pytest.mark.parametrize("size", [1, 7, 60, 100])
def test_who_is_first_is_what_sorting_all_by_time_and_tie_says(size):
    generator = torch.Generator().manual_seed(size)
    times = torch.randint(12, (100,), generator=generator).double()  # many are due at once
    ties = torch.rand(100, generator=generator, dtype=torch.float64)
    expected = sorted(range(100), key=lambda row: (float(times[row]), float(ties[row])))[:size]
    assert due._first(times, ties, size).tolist() == expected


@pytest.mark.parametrize(
    ("matrix", "power"), [(pairs(0.4, CLASSES), 4.0), (symmetric(0.4, CLASSES), 2 + 2 / (CLASSES - 1))]
)
def test_wrong_labels_that_are_all_of_one_class_are_held_back_more(matrix, power):
    truth, logits = predictions(N, CLASSES, signal=1.5)
    labels = labelled(truth, matrix)
    store = ScoreStore(labels, CLASSES)
    store.observe(torch.arange(N), logits.float(), 0)
    model = NoiseModel(matrix, 0.4, competent=True)
    state = due.learned(Watched(10, noise=model), store, 10, 2.0)
    chance = due.label_chance(quality_of(store, model), labels, exponent=power)
    assert state.chance.allclose(chance.clamp(0.02, 1.0))


def test_what_was_found_is_not_judged_again():
    truth, logits = predictions(N, CLASSES)
    labels = labelled(truth, symmetric(0.4, CLASSES))
    run = Run(labels, lambda at, epoch: logits[at].float() * (1 if epoch < 10 else 0.1))
    run.go(11)
    found = run.state.noise
    assert found.rate > 0.3
    run.go(30)
    assert run.state.noise is found
