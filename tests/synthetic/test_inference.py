import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from scenarios import conv_net, digits
from torch import Tensor, nn

from coreset_sampler import SyntheticCoreset
from coreset_sampler.synthetic.flat import FlatNetwork
from coreset_sampler.synthetic.inference.potential import network_potential
from coreset_sampler.synthetic.inference.predict import INFERENCES, by_hmc, by_last_layer, by_sgd, by_sghmc, train
from coreset_sampler.synthetic.metrics import accuracy
from coreset_sampler.synthetic.networks import network
from coreset_sampler.synthetic.preprocessing import Raw

MAKE = network("convnet", 1, 10, 8, widths=(8, 16))

FAST = {
    "last-layer": dict(steps=20),
    "sgd": dict(steps=60),
    "ensemble": dict(steps=30, networks=2),
    "hmc": dict(steps=12, burn_in=8, thin=2, leapfrog=3),
    "sghmc": dict(steps=40, burn_in=20, thin=10),
}


def coreset(kind: str = "hard", per_class: int = 5) -> SyntheticCoreset:
    x, y = digits().tensors
    rows = torch.cat([(y == label).nonzero().flatten()[:per_class] for label in range(10)])
    hot = nn.functional.one_hot(y[rows], 10).float()
    targets = {"hard": y[rows], "soft": 0.9 * hot + 0.01, "logits": 8 * hot, "regression": 8 * (hot - 0.1)}[kind]
    return SyntheticCoreset(x[rows], targets, preprocessing=Raw(), target_kind=kind, num_classes=10)


def test_images() -> tuple[Tensor, Tensor]:
    x, y = digits().tensors
    return x[-300:], y[-300:]


test_images.__test__ = False


@pytest.mark.parametrize("kind", ["hard", "soft", "logits", "regression"])
@pytest.mark.parametrize("by", INFERENCES)
def test_every_inference_gives_probabilities_that_beat_chance_by_far_for_every_kind_of_target(by, kind):
    x, y = test_images()
    probabilities = INFERENCES[by](**FAST[by])(coreset(kind), MAKE, 0)(x)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(x)))
    assert not probabilities.requires_grad
    assert accuracy(probabilities, y) > 0.5


@pytest.mark.parametrize("by", INFERENCES)
def test_same_seed_same_probabilities_and_global_random_state_untouched(by):
    infer = INFERENCES[by](**FAST[by])

    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))

    state, x = torch.get_rng_state(), test_images()[0]
    first, again, other = (infer(coreset(), make, seed)(x) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("of_network", [torch.float32, torch.float64])
@pytest.mark.parametrize("of_set", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["soft", "regression"])
@pytest.mark.parametrize("by", INFERENCES)
def test_a_set_of_any_precision_does_for_a_network_of_another(by, kind, of_set, of_network):
    settings = dict(steps=4) if by in ("sgd", "ensemble", "last-layer") else dict(steps=3, burn_in=1, thin=1)
    whole, x = coreset(kind, per_class=1), test_images()[0][:20]
    halved = SyntheticCoreset(
        whole.inputs.to(of_set), whole.targets.to(of_set), preprocessing=Raw(), **whole.describe()
    )
    start = dict(start=partial(train, steps=2, learning_rate=0.01)) if "hmc" in by else {}
    predictive = INFERENCES[by](**settings, **start)(halved, lambda: MAKE().to(of_network), 0)
    torch.testing.assert_close(predictive(x.to(of_set)), predictive(x.to(of_set).to(of_network)))


@pytest.mark.parametrize("by", INFERENCES)
def test_networks_whose_output_has_the_logits_are_inferred_as_others(by):
    class Named(nn.Module):
        """As a classifier of Hugging Face."""

        def __init__(self):
            super().__init__()
            self.net = MAKE()

        def forward(self, x):
            return SimpleNamespace(logits=self.net(x))

    settings = dict(steps=4) if by in ("sgd", "ensemble", "last-layer") else dict(steps=3, burn_in=1, thin=1)
    start = dict(start=partial(train, steps=2, learning_rate=0.01)) if "hmc" in by else {}
    infer, x = INFERENCES[by](**settings, **start), test_images()[0][:20]
    torch.testing.assert_close(infer(coreset(), Named, 0)(x), infer(coreset(), MAKE, 0)(x))


def test_a_predictive_may_be_asked_for_parts_and_again():
    x, _ = test_images()
    for predictive in (by_sgd(steps=10)(coreset(), conv_net, 0), by_last_layer(steps=10)(coreset(), conv_net, 0)):
        parts = torch.cat([predictive(part) for part in x.split(70)])
        torch.testing.assert_close(parts, predictive(x))


def test_ensemble_averages_probabilities_over_networks_of_its_own():
    generator, x = torch.Generator().manual_seed(3), test_images()[0][:20]
    both = by_sgd(networks=2, steps=20)(coreset(), MAKE, 3)(x)
    settings = dict(steps=20, learning_rate=0.02)
    one, other = (train(coreset(), MAKE, generator, **settings).eval()(x).softmax(-1).detach() for _ in range(2))
    torch.testing.assert_close(both, (one + other) / 2)
    assert not torch.allclose(one, other)


def test_potential_is_the_summed_loss_and_the_squared_norm_times_weight_decay():
    flat = FlatNetwork(MAKE())
    theta = flat.theta()
    for kind in ("hard", "regression"):
        data = coreset(kind)
        outputs = flat(theta, data.inputs)
        if kind == "hard":
            loss = nn.functional.cross_entropy(outputs, data.targets, reduction="sum")
        else:
            loss = (outputs - data.targets).square().sum() / 2
        value = network_potential(data, flat, weight_decay=0.7)(theta)
        torch.testing.assert_close(value, loss + 0.7 * theta.square().sum())


def test_prior_of_hmc_is_the_gaussian_of_the_squared_norm():
    """Far more weight decay than data: samples are those of N(0, T / (2 lambda)), which an unsquared norm is not."""
    linear = partial(nn.Linear, 4, 2)
    data = SyntheticCoreset(torch.zeros(1, 4), torch.tensor([0]), preprocessing=Raw(), num_classes=2)
    seen: list[float] = []
    settings = dict(steps=600, leapfrog=4, step_size=0.05, burn_in=100, thin=1, weight_decay=50.0, temperature=0.5)
    by_hmc(**settings, report=lambda step: seen.append(step.potential))(data, linear, 0)
    # U / T of a d-dimensional Gaussian has mean d / 2 above that of the constant part
    constant = math.log(2) / 0.5
    assert sum(seen[100:]) / len(seen[100:]) - constant == pytest.approx(10 / 2, abs=0.6)


def test_hmc_and_sghmc_agree_with_each_other_on_a_small_network():
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    x, data = test_images()[0][:50], coreset(per_class=2)
    cold = dict(weight_decay=0.5, temperature=0.05)
    one = by_hmc(steps=120, burn_in=30, thin=1, leapfrog=6, step_size=0.2, **cold)(data, make, 0)(x)
    other = by_sghmc(steps=800, burn_in=100, thin=5, step_size=0.3, **cold)(data, make, 0)(x)
    assert float((one - other).abs().mean()) < 0.02


def test_augmented_sghmc_sees_the_coreset_changed_at_every_gradient():
    calls: list[float] = []

    def shifted(inputs: Tensor, generator: torch.Generator) -> Tensor:
        calls.append(float(torch.rand((), generator=generator)))
        return inputs + calls[-1]

    by_sghmc(steps=10, burn_in=5, thin=1, augment=shifted)(coreset(), MAKE, 0)
    assert len(calls) == len(set(calls)) == 11


def test_closed_form_follows_the_numbers_that_a_coreset_says():
    data, x = coreset("regression"), test_images()[0][:20]
    own = dict(rho=3.0, gamma=2.0, beta=0.5, steps=5, learning_rate=1e-2)
    said = SyntheticCoreset(data.inputs, data.targets, preprocessing=Raw(), **data.describe() | {"last_layer": own})
    torch.testing.assert_close(by_last_layer()(said, MAKE, 0)(x), by_last_layer(**own)(data, MAKE, 0)(x))


def test_batches_of_a_large_coreset_cover_it():
    seen: list[Tensor] = []

    def watch(inputs: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(inputs)
        return inputs

    by_sgd(steps=5, batch_size=20, augment=watch)(coreset(per_class=10), MAKE, 0)
    assert [len(batch) for batch in seen] == [20] * 5
    assert len(torch.cat(seen).flatten(1).unique(dim=0)) == len(coreset(per_class=10).inputs.flatten(1).unique(dim=0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_sgd(networks=0), "networks must be positive, got 0"),
        (lambda: by_last_layer(beta=-1.0), "beta must be positive, got -1.0"),
        (lambda: by_hmc(temperature=0.0), "temperature must be positive, got 0.0"),
        (lambda: by_sgd(learning_rate=1e30)(coreset("regression"), MAKE, 0), "lower learning_rate"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
