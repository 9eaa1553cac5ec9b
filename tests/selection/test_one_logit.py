"""Networks with one logit for two classes, as trained with BCEWithLogitsLoss: what they say is what two logits would."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from coreset_sampler import CoresetSampler, IndexedDataset, PointMass, SphericalGaussian, Trajectory, strategies
from coreset_sampler.selection.forward import logits_of, of_both_classes
from coreset_sampler.selection.labels import class_numbers

SHAPES = {"(b, 1)": lambda z: z, "(b,)": lambda z: z[:, 0], "two": lambda z: torch.cat([torch.zeros_like(z), z], 1)}


class Odd(nn.Module):
    """Tells odd digits from even ones, and gives it in some shape."""

    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.head, self.shape = nn.Linear(64, 1), SHAPES[shape]

    def forward(self, x):
        return self.shape(self.head(self.body(x)))


def odd_digits(wrong=0.0):
    x, digits = load_digits(return_X_y=True)
    y = torch.tensor(digits % 2)
    flip = torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < wrong
    return torch.tensor(x / 16).float(), torch.where(flip, 1 - y, y), flip


def train(sampler, model, data, epochs, observe=False, loss_of=binary_cross_entropy_with_logits):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(epochs):
        for x, y, *index in DataLoader(data, 30, sampler=sampler):
            output = model(x)
            if observe:
                sampler.observe(index[0], output)
            logit = output[:, 1] if output.shape[1:] == (2,) else output.flatten()
            optimizer.zero_grad()
            loss_of(logit, y.flatten().float()).backward()
            optimizer.step()
    return sampler


def run(shape, labels=lambda y: y.float(), observe=False, **settings):
    x, y, _ = odd_digits(0.3)
    model, data = Odd(shape).train(), TensorDataset(x, labels(y))
    sampler = CoresetSampler(data, model, **{"fraction": 0.25, "progress": False} | settings)
    return train(sampler, model, IndexedDataset(data) if observe else data, 5, observe)


@pytest.mark.parametrize("shape", ["(b, 1)", "(b,)"])
@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("labels", [lambda y: y.float(), lambda y: y.double()[:, None], lambda y: y])
def test_scores_and_indices_are_those_of_two_logits(shape, observe, labels, recwarn):
    one, two = run(shape, labels, observe), run("two", observe=observe)
    assert one.coreset.indices.tolist() == two.coreset.indices.tolist()
    for name, value in one.scores.state_dict().items():
        torch.testing.assert_close(value, two.scores.state_dict()[name], atol=1e-3, rtol=0, equal_nan=True)
    assert not recwarn.list


@pytest.mark.parametrize(
    "strategy",
    [
        strategies.Stable(posterior=Trajectory()),
        strategies.Stable(posterior=Trajectory(noise=SphericalGaussian(0.1, "head")), draws=2),
        strategies.LossPruning(),
    ],
)
def test_other_strategies_choose_what_they_would_by_two_logits(strategy, recwarn):
    chosen = [run(shape, strategy=strategy).coreset.indices.tolist() for shape in ("two", "(b, 1)", "(b,)")]
    assert chosen[0] == chosen[1] == chosen[2]
    assert not recwarn.list


@pytest.mark.parametrize("strategy", ["stable", "crest", "k_center", strategies.LabelConfidence(posterior=PointMass())])
def test_by_scoring_passes_too(strategy):
    x, y, _ = odd_digits(0.3)
    samplers = [
        CoresetSampler(TensorDataset(x, y.float()), Odd(shape), size=200, strategy=strategy, progress=False)
        for shape in SHAPES
    ]
    chosen = [sampler.select().indices.tolist() for sampler in samplers]
    assert chosen[0] == chosen[1] == chosen[2]


def test_wrong_labels_are_found():
    x, y, flip = odd_digits(0.3)
    model, data = Odd("(b, 1)"), TensorDataset(x, y[:, None].float())
    sampler = train(CoresetSampler(data, model, fraction=0.25, progress=False), model.train(), data, 20)
    assert sampler.stats["estimated_noise_rate"] == pytest.approx(0.3, abs=0.06)
    assert sum(bool(flip[suspect.index]) for suspect in sampler.suspects(100)) >= 90
    assert float(flip[sampler.coreset.indices].double().mean()) < 0.15


class Labelled(Odd):
    """Is given labels too, as models of transformers are."""

    def forward(self, x, labels=None):
        return super().forward(x)


@pytest.mark.parametrize("change", [lambda y: y, lambda y: 0.9 * y + 0.05])
def test_labels_that_the_model_is_given_may_be_floats_in_a_column(change, recwarn):
    x, y, _ = odd_digits()
    model, data = Labelled("(b, 1)").train(), TensorDataset(x, y.float())
    sampler = CoresetSampler(data, model, fraction=1.0, progress=False)
    for seen, labels in DataLoader(data, 30, sampler=sampler):
        model(seen, labels=change(labels)[:, None])
    assert sampler.scores.coverage == 1
    assert not recwarn.list


def test_labels_that_are_not_those_of_the_examples_are_still_noticed():
    x, y, _ = odd_digits()
    model, data = Labelled("(b, 1)").train(), TensorDataset(x, y.float())
    sampler = CoresetSampler(data, model, fraction=1.0, progress=False)
    batches = iter(DataLoader(data, 30, sampler=sampler))
    seen, labels = next(batches)
    with pytest.warns(UserWarning, match="labels that it was given are not those"):
        model(seen, labels=1 - labels[:, None])


def test_one_logit_for_three_classes_or_for_a_number_is_refused():
    with pytest.raises(ValueError, match="for two classes only, and labels go up to 2"):
        logits_of(torch.zeros(4, 1), 3)
    with pytest.raises(ValueError, match=r"logits of shape \(batch, classes\)"):
        logits_of((torch.zeros(4), torch.zeros(4, 2)), 2)  # a loss for each example
    x, _, _ = odd_digits()
    with pytest.raises(ValueError, match="regression"):
        CoresetSampler(TensorDataset(x, torch.rand(len(x))), Odd("(b, 1)"), fraction=0.1, strategy="stable").select()


def test_only_columns_of_zeros_and_ones_become_class_numbers():
    assert class_numbers(torch.tensor([[0.0], [1.0]])).tolist() == [0, 1]
    for others in (torch.tensor([0.0, 0.5]), torch.eye(2), torch.tensor([[0], [1]]), torch.zeros(2, 1, 1)):
        assert class_numbers(others) is others


def test_only_single_columns_for_two_classes_are_widened():
    z = torch.tensor([[0.5], [-2.0]])
    torch.testing.assert_close(of_both_classes(z, 2).softmax(1)[:, 1], z[:, 0].sigmoid())
    for others, classes in ((z, 3), (torch.zeros(4, 2), 2), (torch.zeros(4, 1, 1, 3), 2), ("logits", 2)):
        assert of_both_classes(others, classes) is others


class WithSigmoid(Odd):
    """Gives probabilities, for BCELoss."""

    def forward(self, x):
        return super().forward(x).sigmoid()


@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_probabilities_in_place_of_the_logit_are_told(wrong):
    x, y, _ = odd_digits(wrong)
    model, data = WithSigmoid("(b, 1)").train(), TensorDataset(x, y[:, None].float())
    sampler = CoresetSampler(data, model, fraction=1.0, progress=False)
    with pytest.warns(UserWarning, match="is a probability, as after a sigmoid.*BCEWithLogitsLoss"):
        train(sampler, model, data, 4, loss_of=binary_cross_entropy)


class WithFeatures(Odd):
    """Gives what its head receives, and the logit."""

    def forward(self, x):
        hidden = self.body(x)
        return hidden, self.shape(self.head(hidden))


@pytest.mark.parametrize("shape", ["(b, 1)", "(b,)"])
def test_features_before_the_logit_are_not_taken_for_logits(shape):
    x, y, _ = odd_digits()
    data, model = TensorDataset(x, y.float()), WithFeatures(shape)
    with pytest.raises(ValueError, match="tensors of 64, 1 columns"):
        CoresetSampler(data, model, size=20, strategy="stable", progress=False).select()
    sampler = CoresetSampler(data, model.train(), fraction=1.0, progress=False)
    inputs, _ = next(iter(DataLoader(data, 30, sampler=sampler)))
    with pytest.warns(UserWarning, match="cannot be watched"):
        model(inputs)
    assert logits_of((torch.zeros(4, 2), torch.zeros(4)), 2).shape == (4, 2)  # a loss per example after the logits


@pytest.mark.parametrize("labels", [lambda y: y.float(), lambda y: y.float()[:, None]])
def test_floats_may_be_the_second_of_three_fields(labels):
    x, y, _ = odd_digits()
    chosen = [
        CoresetSampler(data, Odd("(b, 1)"), size=100, strategy="crest", progress=False).select().indices.tolist()
        for data in (TensorDataset(x, y), TensorDataset(x, labels(y), torch.arange(len(x))))
    ]
    assert chosen[0] == chosen[1]


class InsideAutocast(Odd):
    """Switches autocast on itself, as models that accelerate has prepared do."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("shape", SHAPES)
def test_noise_in_the_head_under_autocast_that_is_on_inside_the_model_only(shape, recwarn):
    x, y, _ = odd_digits()
    model, data = InsideAutocast(shape).train(), TensorDataset(x, y.float())
    strategy = strategies.Stable(posterior=Trajectory(noise=SphericalGaussian(0.1, "head")), draws=2)
    sampler = CoresetSampler(data, model, fraction=0.5, strategy=strategy, progress=False)
    for _ in range(3):
        for inputs, _ in DataLoader(data, 100, sampler=sampler):
            model(inputs)
    assert sampler.scores.coverage == 1
    assert not recwarn.list


@pytest.mark.parametrize(
    ("labels", "way_out"),
    [
        (lambda y: 2 * y - 1, r"labels=\(labels > 0\).long\(\)"),
        (lambda y: (2 * y - 1).float(), "regression.*labels.flatten"),
        (lambda y: 0.6 * y[:, None] + 0.3, "probabilities of class 1"),
        (lambda y: torch.stack([y, 1 - y], 1).float(), "multi-label"),
    ],
)
def test_labels_of_other_kinds_are_refused_with_a_way_out(labels, way_out):
    x, y, _ = odd_digits()
    with pytest.raises(ValueError, match=way_out):
        CoresetSampler(TensorDataset(x, labels(y)), Odd("(b, 1)"), fraction=0.1, strategy="stable").select()
