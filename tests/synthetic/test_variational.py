"""VBPC: its gradient, its pool, and what its coresets are worth."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from coreset_sampler.synthetic.distillers.checkpoint import Progress, load, same, save
from coreset_sampler.synthetic.distillers.real_data import RealData
from coreset_sampler.synthetic.distillers.run import as_coreset
from coreset_sampler.synthetic.distillers.state import DivergedError
from coreset_sampler.synthetic.distillers.variational import Variational
from coreset_sampler.synthetic.image_data import open_images
from coreset_sampler.synthetic.inference.predict import by_last_layer
from coreset_sampler.synthetic.networks import convnet, instance_norm

NETWORK = partial(convnet, 1, 10, 8, widths=(16, 32))
SMALL = partial(convnet, 1, 3, 8, widths=(4,))


def noise_data(n=60, classes=3):
    generator = torch.Generator().manual_seed(1)
    return RealData(torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % classes)


def begun(distiller, data=None, seed=0):
    inputs, targets = (data or noise_data()).per_class(2, torch.Generator().manual_seed(0))
    return distiller.init(inputs, targets, seed=seed)


def after(distiller, state, steps, data=None):
    for _ in range(steps):
        state, _ = distiller.step(state, data or noise_data())
    return state


@pytest.mark.parametrize(
    ("n", "norm"),
    [(6, instance_norm), (80, instance_norm), (6, nn.BatchNorm2d)],
    ids=["kernel form", "primal form, more examples than features", "through the real batch, by BatchNorm"],
)
def test_the_gradient_is_that_of_finite_differences_through_the_network(n, norm):
    generator = torch.Generator().manual_seed(0)
    distiller = Variational(lambda: convnet(1, 3, 8, widths=(4,), norm=norm).double(), beta=1e-3)
    inputs = torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64)
    state = distiller.init(inputs, torch.arange(n) % 3, seed=0)
    real, labels = torch.randn(20, 1, 8, 8, generator=generator).double(), torch.arange(20) % 3
    (kind,) = distiller._kinds
    parameters = kind.parameters(state.memory["network.0"])

    def loss(inputs, targets):
        features = kind.both_features(parameters, inputs, real)
        return distiller.loss(features[0], targets, features[1], labels, n=500)[0]

    pair = [state.inputs.requires_grad_(), state.targets.requires_grad_()]
    for value, gradient in zip(pair, torch.autograd.grad(loss(*pair), pair), strict=True):
        for _ in range(3):
            way = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            ends = [loss(*[v + s * 1e-6 * way if v is value else v for v in pair]) for s in (1, -1)]
            assert (gradient * way).sum().item() == pytest.approx((ends[0] - ends[1]).item() / 2e-6, rel=1e-5)


def test_the_loss_is_the_papers_computed_by_h_x_h_matrices():
    generator = torch.Generator().manual_seed(3)
    phi, y = (torch.randn(5, size, generator=generator).double() for size in (7, 3))
    real, labels = torch.randn(11, 7, generator=generator).double(), torch.arange(11) % 3
    distiller = Variational(SMALL, rho=2.0, gamma=3.0, beta=0.5, weight=0.7)
    precision = 2 * torch.eye(7).double() + 3 / 0.5 * phi.T @ phi
    mean = torch.linalg.solve(precision, 3 / 0.5 * phi.T @ y)
    covariance = precision.inverse()
    variance = (real @ covariance * real).sum(1)
    scores = real @ mean / (1 + torch.pi / 8 * variance).sqrt()[:, None]
    prior = torch.distributions.MultivariateNormal(torch.zeros(7).double(), torch.eye(7).double() / 2)
    kl = sum(
        torch.distributions.kl_divergence(
            torch.distributions.MultivariateNormal(column, precision_matrix=precision), prior
        )
        for column in mean.T
    )
    expected = functional.cross_entropy(scores, labels) + 0.7 / 100 * kl
    assert distiller.loss(phi, y, real, labels, n=100)[0].item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.fixture(scope="module")
def digits():
    split = open_images("digits").validation_split(0.2)
    return split, RealData(*split.train, preprocessing=split.normalize())


def closed_form_accuracy(distiller, state, split, seed):
    coreset = as_coreset(distiller, state, preprocessing=split.normalize())
    predictive = by_last_layer()(coreset, distiller.network, seed)
    inputs = coreset.preprocessing(split.test[0].float() / 255)
    return (predictive(inputs).argmax(1) == split.test[1]).double().mean().item()


def test_on_digits_the_loss_falls_and_ten_images_beat_random_real_ones_by_far(digits):
    split, data = digits
    distiller = Variational(NETWORK, batch=64, decay=200)
    real = [
        closed_form_accuracy(
            distiller, distiller.init(*data.per_class(1, torch.Generator().manual_seed(s)), seed=s), split, s
        )
        for s in range(3)
    ]
    state, losses = distiller.init(*data.per_class(1, torch.Generator().manual_seed(0)), seed=0), []
    for _ in range(200):
        state, info = distiller.step(state, data)
        losses.append(info["cross_entropy"])
    learned = [closed_form_accuracy(distiller, state, split, s) for s in range(3)]
    assert sum(losses[-50:]) < 0.6 * sum(losses[:50])
    assert min(learned) > max(real) + 0.1, (learned, real)
    assert sum(learned) / 3 > 0.8


def test_a_run_that_was_saved_and_loaded_goes_on_to_the_same_bits(tmp_path):
    distiller = Variational(SMALL, batch=16, pool=3, max_age=4)
    whole = after(distiller, begun(distiller), 14)
    save(tmp_path / "half.safetensors", Progress(after(distiller, begun(distiller), 6)), {})
    again = Variational(SMALL, batch=16, pool=3, max_age=4)
    assert same(after(again, load(tmp_path / "half.safetensors")[0].state, 8), whole)


def test_the_state_given_is_not_changed_and_global_randomness_neither_used_nor_moved():
    distiller = Variational(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 3)), pool=2
    )
    state = begun(distiller)
    before = replace(state, inputs=state.inputs.clone(), memory={k: v.clone() for k, v in state.memory.items()})
    torch.manual_seed(5)
    one = after(distiller, state, 3)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert drawn == torch.rand(1)
    torch.manual_seed(6)
    assert same(one, after(distiller, state, 3))
    assert same(state, before)


def test_seeds_differ_and_the_same_seed_agrees():
    distiller = Variational(SMALL, batch=16, pool=2)
    states = [after(distiller, begun(distiller, seed=seed), 2) for seed in (0, 0, 1)]
    assert same(states[0], states[1])
    assert not torch.equal(states[0].inputs, states[2].inputs)


def test_ages_begin_staggered_and_only_the_network_looked_through_is_trained():
    distiller = Variational(SMALL, batch=16, pool=5, max_age=20)
    state = begun(distiller)
    assert state.memory["ages"].tolist() == [0, 4, 8, 12, 16]
    later = after(distiller, state, 1)
    grown = (later.memory["ages"] - state.memory["ages"]).tolist()
    changed = [int(not torch.equal(later.memory[f"network.{i}"], state.memory[f"network.{i}"])) for i in range(5)]
    assert sorted(grown) == [0, 0, 0, 0, 1]
    assert changed == grown


def test_a_network_of_full_age_is_replaced_by_a_fresh_one_with_fresh_moments():
    distiller = Variational(SMALL, batch=16, pool=1, max_age=3)
    state = after(distiller, begun(distiller), 2)
    assert state.memory["ages"].tolist() == [2]
    assert state.memory["network.0.count"] == 2
    state = after(distiller, state, 1)
    assert state.memory["ages"].tolist() == [0]
    assert state.memory["network.0.count"] == 0
    assert not state.memory["network.0.square"].any()


def test_the_pool_takes_the_step_of_torchs_adam_on_the_mean_squared_error():
    def dense():  # no bias before a norm, whose gradient is rounding alone
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))

    distiller = Variational(dense, batch=16, pool=1, pool_lr=0.01, lr=0.0, label_lr=0.0)
    state, network = begun(distiller), dense()
    nn.utils.vector_to_parameters(state.memory["network.0"].clone(), network.parameters())
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        functional.mse_loss(network(state.inputs), state.targets).backward()
        optimizer.step()
    theirs = nn.utils.parameters_to_vector(network.parameters())
    assert torch.allclose(after(distiller, state, 3).memory["network.0"], theirs, atol=1e-6)


def test_rates_of_images_and_labels_fall_along_a_cosine():
    distiller = Variational(SMALL, batch=16, pool=1, decay=10)
    state = begun(distiller)
    moved = [(after(distiller, replace(state, step=t), 1).inputs - state.inputs).abs().max() for t in (0, 10, 30)]
    assert moved[1] < 0.15 * moved[0]  # by 100, less Adam's own factor at that step
    assert moved[2] <= moved[1] * 1.5


def test_soft_labels_unequal_classes_and_any_classifier_will_do():
    generator = torch.Generator().manual_seed(0)
    soft = functional.one_hot(torch.tensor([0] * 30 + [1] * 5 + [2] * 5), 3).float() * 0.9 + 0.1 / 3
    data = RealData(torch.randn(40, 6, generator=generator), soft)
    distiller = Variational(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), batch=16)
    state = distiller.init(*data.per_class(4, generator), seed=0)
    assert torch.allclose(state.targets.sum(1), torch.zeros(12), atol=1e-5)
    state, info = distiller.step(state, data)
    assert info["loss"] > 0
    assert as_coreset(distiller, state, preprocessing=open_images("digits").normalize()).last_layer["rho"] == 100


def test_augmentation_changes_real_images_and_coreset_by_the_same_draw():
    seen = []

    def shift(images, generator):
        seen.append((len(images), torch.rand((), generator=generator).item()))
        return images + 1

    after(Variational(SMALL, batch=16, pool=1, augmentation=shift), begun(Variational(SMALL, pool=1)), 1)
    assert [n for n, _ in seen] == [6, 16, 6]
    assert seen[0][1] == seen[1][1] != seen[2][1]


def test_what_diverges_is_stopped_and_says_what_to_lower():
    distiller = Variational(SMALL, batch=16, pool=1)
    state = begun(distiller)
    broken = replace(state, inputs=state.inputs * float("inf"))
    with pytest.raises(DivergedError, match=r"lower lr \(now 0\.1\), label_lr .* or pool_lr"):
        distiller.step(broken, noise_data())


@pytest.mark.parametrize(("setting", "value"), [("lr", -1.0), ("pool", 0), ("decay", 0), ("rho", float("nan"))])
def test_settings_that_cannot_be_are_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=setting):
        Variational(SMALL, **{setting: value})


def test_labels_that_the_network_has_no_output_for_are_refused():
    with pytest.raises(ValueError, match=r"classes 0\.\.2, .*got 0\.\.9"):
        Variational(SMALL).init(torch.randn(10, 1, 8, 8), torch.arange(10))


@pytest.mark.slow
def test_compiled_networks_give_the_same_gradients_up_to_rounding():
    # gradients, not steps: where one is nothing but rounding, Adam goes a full step either way
    plain, fast = (Variational(NETWORK, batch=32, pool=1, compiled=compiled) for compiled in (False, True))
    data = noise_data(100, 10)
    state = begun(plain, data)
    looks = [distiller._look(state, 0, data, torch.Generator().manual_seed(0))[0] for distiller in (plain, fast)]
    moments = [distiller._trained(state, 0, torch.Generator())["network.0.mean"] for distiller in (plain, fast)]
    for one, other in [*zip(*looks, strict=True), moments]:
        assert (one - other).norm() < 1e-5 * one.norm()
