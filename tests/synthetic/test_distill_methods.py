"""The pseudo-coreset methods on problems with exact answers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from gaussian_mean import GaussianMean
from torch import Generator, Tensor, nn
from torch.nn import functional

from coreset_sampler.synthetic import distillers
from coreset_sampler.synthetic.distillers import inner, pixels
from coreset_sampler.synthetic.distillers.checkpoint import same
from coreset_sampler.synthetic.flat import FlatNetwork
from coreset_sampler.synthetic.networks import convnet, network

PROBLEM = GaussianMean()
INNER = {"inner_steps": 30, "inner_lr": 0.1, "augmentation": None}


def gaussian_distillers() -> dict[str, distillers.Distiller]:
    net, loss = PROBLEM.network, PROBLEM.loss
    return {
        "reverse_kl": distillers.ReverseKL(net, loss=loss, samples=20, noise=0.3, batch=50, lr=1.0, **INNER),
        "wasserstein": distillers.Wasserstein(net, loss=loss, lr=6.0, inner_lr_lr=1e-4, **INNER),
        "forward_kl": distillers.ForwardKL(net, loss=loss, samples=5, noise=0.1, lr=1.0, **INNER),
        "contrastive_divergence": distillers.ContrastiveDivergence(net, energy=loss, lr=0.5, temperature=0.2, **INNER),
    }


@pytest.mark.parametrize("name", gaussian_distillers())
def test_each_method_lowers_its_own_exact_divergence_and_all_three(name):
    distiller = gaussian_distillers()[name]
    state = distiller.init(*PROBLEM.coreset(), seed=0)
    before = PROBLEM.divergences(state.inputs)
    for _ in range(50):
        state, _ = distiller.step(state, PROBLEM)
    after = PROBLEM.divergences(state.inputs)
    # no coreset of five can do better than with its mean where that of all points is: its covariance is fixed
    best = PROBLEM.divergences(PROBLEM.points.mean(0).expand(5, -1))
    for divergence in ("reverse_kl", "wasserstein", "forward_kl"):
        lowest, now, was = (getattr(each, divergence) for each in (best, after, before))
        assert now - lowest < 0.2 * (was - lowest), (
            f"{name}: {divergence} fell from {was:.2f} to {now:.2f} of {lowest:.2f}"
        )


def test_a_step_leaves_its_state_alone_and_the_same_state_gives_the_same_step():
    for distiller in gaussian_distillers().values():
        state = distiller.init(*PROBLEM.coreset(), seed=3)
        before = state.inputs.clone()
        random = torch.random.get_rng_state()
        one, _ = distiller.step(state, PROBLEM)
        other, info = distiller.step(state, PROBLEM)
        assert torch.equal(state.inputs, before)
        assert same(one, other)
        assert one.step == 1
        assert "loss" in info
        assert torch.equal(torch.random.get_rng_state(), random)


class Fixed:
    """A source with one expert."""

    def __init__(self, start: Tensor, end: Tensor, n: int = 50) -> None:
        self.points, self.n = (start, end), n

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        return x, (x[:, 0] > 0).long()

    def segment(self, epochs: int, generator: Generator, kind: int) -> tuple[Tensor, Tensor]:
        return self.points


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def small_problem(seed: int = 0, *, soft: bool = False) -> tuple[Tensor, Tensor, Fixed]:
    generator = Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    size = FlatNetwork(small()).size
    targets = draw(5, 3).softmax(-1) if soft else torch.tensor([0, 1, 2, 0, 0])
    start = 0.5 * draw(size)
    return draw(5, 4), targets, Fixed(start, start + 0.3 * draw(size))


def central_differences(function, x: Tensor, width: float = 1e-6) -> Tensor:
    gradient = torch.zeros_like(x)
    for i in range(x.numel()):
        step = torch.zeros_like(x)
        step.view(-1)[i] = width
        gradient.view(-1)[i] = (function(x + step) - function(x - step)) / (2 * width)
    return gradient


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_wasserstein_gradient_is_that_of_central_differences(soft, recompute):
    inputs, targets, source = small_problem(soft=soft)
    distiller = distillers.Wasserstein(small, inner_steps=4, inner_lr=0.2, augmentation=None, recompute=recompute)
    flat = FlatNetwork(small())

    def distance(u: Tensor, rate: Tensor) -> float:
        theta = inner.descend(
            flat, source.points[0], u, targets, loss=functional.cross_entropy, steps=4, lr=float(rate),
            generator=Generator(),
        )  # fmt: skip
        start, end = source.points
        return float((theta - end).square().sum() / (start - end).square().sum())

    state = distiller.init(inputs, targets)
    method = distiller.recomputed if recompute else distiller.unrolled
    value, gradient, rate_gradient = method(state, *source.points, [0] * 4)
    rate = state.memory["inner_lr"]
    assert value == pytest.approx(distance(inputs, rate), rel=1e-12)
    assert torch.allclose(gradient, central_differences(lambda u: distance(u, rate), inputs), atol=1e-8)
    assert torch.allclose(rate_gradient, central_differences(lambda r: distance(inputs, r), rate), atol=1e-8)


def test_wasserstein_recomputed_equals_wasserstein_plain_on_augmented_images():
    net = network("convnet", 3, 4, 8, widths=(4, 4))
    flat = pixels.flat_network(net)
    generator = Generator().manual_seed(0)
    images = torch.randn(8, 3, 8, 8, generator=generator)
    source = Fixed(flat.theta(), flat.theta() + 0.1 * torch.randn(flat.size, generator=generator))
    states = []
    for recompute in (False, True):
        distiller = distillers.Wasserstein(net, inner_steps=6, inner_lr=0.05, lr=100.0, recompute=recompute)
        state = distiller.init(images, torch.arange(8) % 4)
        for _ in range(2):
            state, _ = distiller.step(state, source)
        states.append(state)
    plain, recomputed = states
    assert (plain.inputs - images).abs().max() > 1e-4
    assert torch.allclose(plain.inputs, recomputed.inputs, atol=1e-5)
    assert torch.allclose(plain.memory["inner_lr"], recomputed.memory["inner_lr"], rtol=1e-5)


def test_the_forward_kl_gradient_is_that_of_its_objective_with_parameters_held():
    inputs, targets, source = small_problem()
    distiller = distillers.ForwardKL(small, inner_steps=3, inner_lr=0.2, samples=4, noise=0.1, augmentation=None)
    state = distiller.init(inputs, targets)
    theta, expert = source.points[0] + 0.2, source.points[1]

    def gap(u: Tensor) -> float:
        held = distiller.init(u, targets)
        return distiller.gap(held, expert, theta, Generator().manual_seed(5))[0]

    _, gradient = distiller.gap(state, expert, theta, Generator().manual_seed(5))
    assert torch.allclose(gradient, central_differences(gap, inputs), atol=1e-8)


def test_the_reverse_kl_gradient_is_the_covariance_of_algorithm_4():
    inputs, targets, source = small_problem()
    distiller = distillers.ReverseKL(small, inner_steps=1, samples=6, noise=0.2, batch=7, augmentation=None)
    flat, theta = FlatNetwork(small()), source.points[1]
    real, labels = source.batch(7, Generator().manual_seed(1))
    gradient, _ = distiller.covariance(distiller.init(inputs, targets), theta, real, labels, Generator().manual_seed(2))

    generator = Generator().manual_seed(2)
    samples = [theta + pixels.noise(theta, 0.2, generator) for _ in range(6)]
    u = inputs.clone().requires_grad_()
    log_likelihood = partial(functional.cross_entropy, reduction="none")
    of_real = torch.stack([-log_likelihood(flat(each, real), labels) for each in samples])
    of_u = torch.stack([-log_likelihood(flat(each, u), targets) for each in samples])
    slopes = torch.stack([torch.autograd.grad(each.sum(), u, retain_graph=True)[0] for each in of_u])
    g, g_u, h = (values - values.mean(0) for values in (of_real, of_u.detach(), slopes))
    expected = -(h * (g.mean(1) - g_u.mean(1))[:, None, None]).mean(0)
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_contrastive_divergence_without_noise_is_forward_kl_without_noise():
    inputs, targets, source = small_problem()
    common = {"inner_steps": 5, "inner_lr": 0.1, "augmentation": None, "lr": 2.0, "momentum": 0.5}
    cold = distillers.ContrastiveDivergence(small, temperature=0.0, epochs=1, **common)
    still = distillers.ForwardKL(small, noise=0.0, samples=1, epochs=1, **common)
    one, _ = cold.step(cold.init(inputs, targets), source)
    other, _ = still.step(still.init(inputs, targets), source)
    assert torch.allclose(one.inputs, other.inputs, atol=1e-14)


def test_langevin_dynamics_reaches_the_posterior_at_its_temperature():
    """A Gaussian mean with unit likelihood: exp(-E / T) has variance T around the mean of the points."""
    flat = FlatNetwork(nn.Sequential(GaussianMean(dimensions=400).network()))
    points = torch.ones(3, 400, dtype=torch.float64)
    theta = inner.descend(
        flat, torch.zeros(400, dtype=torch.float64), points, torch.zeros(3),
        loss=lambda outputs, _: 0.5 * outputs.square().sum(-1).mean(),
        steps=300, lr=0.05, temperature=0.25, generator=Generator().manual_seed(0),
    )  # fmt: skip
    # the step size 0.05 adds a factor 1 / (1 - 0.05 / 2) to the variance
    assert float(theta.mean()) == pytest.approx(1.0, abs=0.1)
    assert float(theta.var()) == pytest.approx(0.25 / (1 - 0.025), rel=0.2)


def test_focal_with_no_focus_is_cross_entropy_and_margin_is_that_of_torch():
    generator = Generator().manual_seed(0)
    outputs = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    hard = torch.randint(4, (7,), generator=generator)
    soft = functional.one_hot(hard, 4).double()
    plain = functional.cross_entropy(outputs, hard)
    assert torch.allclose(distillers.Focal(gamma=0.0)(outputs, hard), plain)
    assert torch.allclose(distillers.Margin(margin=0.7)(outputs, hard), nn.MultiMarginLoss(margin=0.7)(outputs, hard))
    for energy in (distillers.CrossEntropy(), distillers.Focal(), distillers.Margin()):
        assert torch.allclose(energy(outputs, hard), energy(outputs, soft))


@pytest.mark.parametrize("energy", [distillers.CrossEntropy(), distillers.Focal(), distillers.Margin()])
def test_every_energy_distills(energy):
    inputs, targets, source = small_problem()
    distiller = distillers.ContrastiveDivergence(small, energy=energy, augmentation=None, inner_lr=0.1)
    state, info = distiller.step(distiller.init(inputs, targets), source)
    assert math.isfinite(info["loss"])
    assert not torch.equal(state.inputs, inputs)


def test_forward_kl_draws_an_augmentation_for_each_sample_and_reverse_kl_one_for_all():
    drawn: list[int] = []

    def note(images: Tensor, generator: Generator) -> Tensor:
        drawn.append(int(torch.randint(2**30, (), generator=generator)))
        return images

    inputs, targets, source = small_problem()
    distiller = distillers.ForwardKL(small, inner_steps=1, samples=5, augmentation=note)
    distiller.step(distiller.init(inputs, targets), source)
    assert len(set(drawn[1:])) == 5
    drawn.clear()
    reverse = distillers.ReverseKL(small, inner_steps=1, samples=5, batch=3, augmentation=note)
    reverse.step(reverse.init(inputs, targets), source)
    assert len(set(drawn[1:])) == 1


def test_the_memory_of_forward_kl_does_not_grow_with_steps_nor_that_of_wasserstein_recomputed():
    """Counts the bytes that autograd keeps for the way back, at their largest."""
    net = partial(convnet, 1, 3, 8, widths=(4, 4))
    flat = pixels.flat_network(net)
    source = Fixed(flat.theta(), flat.theta() + 0.1)
    images, labels = torch.randn(6, 1, 8, 8, generator=Generator().manual_seed(0)), torch.arange(6) % 3
    kept = {
        (name, steps): _most_kept(
            make(net, inner_steps=steps, inner_lr=0.01, augmentation=None), images, labels, source
        )
        for name, make in {
            "fkl": distillers.ForwardKL,
            "cd": distillers.ContrastiveDivergence,
            "plain": partial(distillers.Wasserstein, recompute=False),
            "again": distillers.Wasserstein,
        }.items()
        for steps in (3, 12)
    }
    for name in ("fkl", "cd", "again"):
        assert kept[name, 12] <= 1.05 * kept[name, 3], name
    assert kept["plain", 12] > 3 * kept["plain", 3]


def _most_kept(distiller, images: Tensor, labels: Tensor, source: Fixed) -> int:
    now, most = 0, 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal now, most
            self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
            now += self.size
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            now -= self.size

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        distiller.step(distiller.init(images, labels), source)
    return most


def step_often(distiller: distillers.Distiller, state: distillers.State, source: distillers.Source) -> None:
    for _ in range(10):
        assert bool(torch.isfinite(state.inputs).all())
        state, _ = distiller.step(state, source)


@pytest.mark.parametrize("name", gaussian_distillers())
def test_divergence_to_nan_says_what_to_lower_and_keeps_the_state(name):
    distiller = replace(gaussian_distillers()[name], lr=1e200, inner_steps=2)
    with pytest.raises(distillers.DivergedError, match=r"came to NaN or infinity: lower lr \(now 1e\+200\)"):
        step_often(distiller, distiller.init(*PROBLEM.coreset(), seed=0), PROBLEM)


def test_wasserstein_refuses_a_step_size_below_zero():
    inputs, targets, source = small_problem()
    distiller = distillers.Wasserstein(small, inner_steps=2, inner_lr_lr=1e6, augmentation=None)
    with pytest.raises(distillers.DivergedError, match="lower inner_lr_lr"):
        step_often(distiller, distiller.init(inputs, targets), source)


@pytest.mark.parametrize("rates", [{"inner_lr_lr": 0}, {"momentum": 0}, {"lr": 1000, "inner_lr": 1}])
def test_rates_may_be_whole_numbers_and_zero_as_the_command_line_gives_them(rates):
    made = distillers.Wasserstein(small, **rates)
    assert all(getattr(made, name) == value for name, value in rates.items())


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (distillers.Wasserstein, {"lr": -3}, "lr must be a finite number, 0 or more, got -3"),
        (distillers.Variational, {"batch": 2.5}, "batch must be an integer of at least 1, got 2.5"),
        (distillers.Variational, {"augmentation": True}, "augmentation must be a function or None"),
        (distillers.ForwardKL, {"loss": 3}, "loss must be a function, which only Python can say, got 3"),
        (distillers.Variational, {"bounds": 3}, "bounds must be the lowest and the highest value"),
        (distillers.Variational, {"bounds": (0, 1)}, "bounds must be the lowest and the highest value"),
    ],
)
def test_settings_of_another_kind_are_refused_before_anything_is_trained(method, settings, message):
    with pytest.raises(ValueError, match=message):
        method(small, **settings)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="samples must be an integer of at least 1, got 0"):
        distillers.ForwardKL(small, samples=0)
    with pytest.raises(ValueError, match="lr must be a finite number, 0 or more, got nan"):
        distillers.Wasserstein(small, lr=math.nan)
    with pytest.raises(ValueError, match="samples of 2 or more"):
        distillers.ReverseKL(small, samples=1)
    distiller = distillers.ForwardKL(small, augmentation=None)
    inputs, targets, _ = small_problem()
    with pytest.raises(ValueError, match="inputs must be floats"):
        distiller.init(torch.zeros(3, 4, dtype=torch.uint8), targets[:3])
    with pytest.raises(ValueError, match="each input needs one target"):
        distiller.init(inputs, targets[:2])
    with pytest.raises(ValueError, match="inputs must be finite"):
        distiller.init(inputs / 0, targets)
    with pytest.raises(ValueError, match="experts have 7 parameters and the network 51"):
        distiller.step(distiller.init(inputs, targets), Fixed(torch.zeros(7), torch.zeros(7)))
