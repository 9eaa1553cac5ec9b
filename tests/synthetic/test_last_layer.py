import math

import mpmath
import pytest
import torch
from scenarios import conv_net
from torch import Tensor, nn
from torch.func import functional_call

from coreset_sampler.synthetic.inference.last_layer import LastLayerPosterior, features_of
from coreset_sampler.synthetic.networks import network

SETTINGS = dict(rho=3.0, gamma=2.0, beta=0.3)


def problem(n: int, h: int, k: int = 3, t: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n + 100 * h)
    sizes = (n, h), (n, k), (t, h)
    return tuple(torch.randn(*size, generator=generator, dtype=dtype) for size in sizes)


def direct(phi: Tensor, y: Tensor, x: Tensor, rho: float, gamma: float, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and KL from the h x h posterior precision, as in a textbook."""
    h, k = phi.shape[1], y.shape[1]
    covariance = torch.linalg.inv(rho * torch.eye(h, dtype=phi.dtype) + gamma / beta * phi.T @ phi)
    mean = gamma / beta * covariance @ phi.T @ y
    posterior = torch.distributions.MultivariateNormal(mean.T, covariance.expand(k, h, h))
    prior = torch.distributions.MultivariateNormal(mean.new_zeros(k, h), torch.eye(h, dtype=phi.dtype) / rho)
    kl = torch.distributions.kl_divergence(posterior, prior).sum()
    return x @ mean, (x @ covariance * x).sum(1), kl


@pytest.mark.parametrize(("n", "h"), [(5, 12), (12, 5), (7, 7), (1, 3), (3, 1)])
def test_closed_form_is_the_textbook_computation_with_its_gradients(n, h):
    phi, y, x = (tensor.requires_grad_() for tensor in problem(n, h))
    q = LastLayerPosterior(phi, y, **SETTINGS)
    ours, theirs = (*q.predict(x), q.kl()), direct(phi, y, x, **SETTINGS)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)
        weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(0), dtype=mine.dtype)
        mine_grads = torch.autograd.grad((mine * weights).sum(), (phi, y, x), retain_graph=True, allow_unused=True)
        grads = torch.autograd.grad((reference * weights).sum(), (phi, y, x), retain_graph=True, allow_unused=True)
        for one, other in zip(mine_grads, grads, strict=True):
            torch.testing.assert_close(*(0 * phi.sum() if g is None else g for g in (one, other)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(x @ q.mean, ours[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("n", "h"), [(4, 9), (9, 4)])
def test_gradients_pass_gradcheck(n, h):
    phi, y, x = (tensor.requires_grad_() for tensor in problem(n, h))

    def everything(phi: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        q = LastLayerPosterior(phi, y, **SETTINGS)
        return *q.predict(x), q.probabilities(x), q.kl()

    assert torch.autograd.gradcheck(everything, (phi, y, x))


def exactly(phi: Tensor, y: Tensor, x: Tensor, rho: float, c: float) -> tuple[list[float], list[float], float]:
    """The same in 80 digits."""
    with mpmath.workdps(80):
        matrix = lambda tensor: mpmath.matrix(tensor.tolist())  # noqa: E731
        phi_, y_, rho_, c_ = matrix(phi), matrix(y), mpmath.mpf(rho), mpmath.mpf(c)
        h, k = phi.shape[1], y.shape[1]
        covariance = (rho_ * mpmath.eye(h) + rho_ / c_ * phi_.T * phi_) ** -1
        mean = rho_ / c_ * covariance * phi_.T * y_
        trace = sum((covariance[i, i] for i in range(h)), mpmath.mpf(0))
        square = sum((entry**2 for entry in mean), mpmath.mpf(0))
        kl = k * (rho_ * trace - h - mpmath.log(mpmath.det(rho_ * covariance))) / 2 + rho_ * square / 2
        rows = [matrix(row[None]) for row in x]
        outputs = [float(entry) for row in rows for entry in (row * mean)]
        return outputs, [float((row * covariance * row.T)[0]) for row in rows], float(kl)


@pytest.mark.parametrize("c", [1e-10, 1e-4, 1e6])
@pytest.mark.parametrize(("n", "h"), [(4, 12), (12, 4)])
def test_closed_form_stays_right_where_the_textbook_fails(n, h, c):
    phi, y, x = problem(n, h)
    rho = 100.0
    mean, var = LastLayerPosterior(phi, y, rho=rho, gamma=1.0, beta=c / rho).predict(x)
    kl = LastLayerPosterior(phi, y, rho=rho, gamma=1.0, beta=c / rho).kl()
    exact_mean, exact_var, exact_kl = exactly(phi, y, x, rho, rho * (c / rho))
    assert mean.flatten().tolist() == pytest.approx(exact_mean, rel=1e-10)
    assert var.tolist() == pytest.approx(exact_var, rel=1e-10)
    assert float(kl) == pytest.approx(exact_kl, rel=1e-8 if c < 1 else 1e-4, abs=1e-12)


def test_gradient_at_tiny_c_is_right_and_the_textbook_gradient_is_not():
    phi, y, x = problem(3, 8, k=2, t=2)
    rho, c, step = 100.0, 1e-10, 1e-20
    nudged = phi.clone().requires_grad_()
    q = LastLayerPosterior(nudged, y, rho=rho, gamma=1.0, beta=c / rho)
    (ours,) = torch.autograd.grad(q.predict(x)[1].sum() + q.predict(x)[0].sum(), nudged)
    with mpmath.workdps(80):  # central differences in 80 digits are exact to far more than float64

        def value(delta: float) -> mpmath.mpf:
            moved = mpmath.matrix(phi.tolist())
            moved[1, 2] += mpmath.mpf(delta)
            a = (moved * moved.T + mpmath.mpf(rho * (c / rho)) * mpmath.eye(3)) ** -1
            total = mpmath.mpf(0)
            for row in x.tolist():
                point = mpmath.matrix([row])
                kernel = moved * point.T
                total += ((point * point.T)[0] - (kernel.T * a * kernel)[0]) / rho
                total += sum(kernel.T * a * mpmath.matrix(y.tolist()))
            return total

        exact = float((value(step) - value(-step)) / (2 * mpmath.mpf(step)))
    assert float(ours[1, 2]) == pytest.approx(exact, rel=1e-9)
    textbook = phi.clone().requires_grad_()
    mean, var, _ = direct_without_checks(textbook, y, x, rho, c)
    (theirs,) = torch.autograd.grad(var.sum() + mean.sum(), textbook)
    assert abs(float(theirs[1, 2]) - exact) > 1e-6 * abs(exact)


def direct_without_checks(phi: Tensor, y: Tensor, x: Tensor, rho: float, c: float) -> tuple[Tensor, Tensor, None]:
    covariance = torch.linalg.inv(rho * torch.eye(phi.shape[1], dtype=phi.dtype) + rho / c * phi.T @ phi)
    return x @ (rho / c * covariance @ phi.T @ y), (x @ covariance * x).sum(1), None


def test_kernel_and_primal_form_agree_where_both_apply():
    phi, y, x = problem(6, 6)
    wider = torch.cat([phi, torch.zeros(6, 3, dtype=phi.dtype)], 1)  # a feature that is always 0 changes nothing
    longer = LastLayerPosterior(
        torch.cat([phi, phi.new_zeros(4, 6)]), torch.cat([y, y.new_zeros(4, 3)]), **SETTINGS
    )  # nor does an example whose features are 0
    shorter = LastLayerPosterior(wider, y, **SETTINGS)
    for one, other in zip(longer.predict(x), shorter.predict(torch.cat([x, x.new_zeros(4, 3)], 1)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(longer.kl(), shorter.kl())


def test_kl_is_the_monte_carlo_average_of_the_log_ratio():
    phi, y, _ = problem(4, 6)
    covariance = torch.linalg.inv(3.0 * torch.eye(6, dtype=phi.dtype) + 2.0 / 0.3 * phi.T @ phi)
    q = LastLayerPosterior(phi, y, **SETTINGS)
    posterior = torch.distributions.MultivariateNormal(q.mean.T, covariance)
    prior = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=phi.dtype), torch.eye(6).double() / 3.0)
    torch.manual_seed(0)
    draws = posterior.sample((20_000,))
    ratios = (posterior.log_prob(draws) - prior.log_prob(draws)).sum(1)
    error = float(ratios.std()) / math.sqrt(len(ratios))
    assert abs(float(ratios.mean() - q.kl())) < 4 * error


def test_mean_field_probabilities_are_near_those_of_monte_carlo():
    phi, y, x = problem(4, 6, t=20)
    q = LastLayerPosterior(phi, y * 4, rho=0.3, gamma=1.0, beta=0.1)
    mean, var = q.predict(x)
    assert 4 < float(var.max()) < 40
    generator = torch.Generator().manual_seed(0)
    draws = mean + var.sqrt()[:, None] * torch.randn(20_000, *mean.shape, generator=generator, dtype=mean.dtype)
    probabilities, exact = q.probabilities(x), draws.softmax(-1).mean(0)
    distance, without = ((p - exact).abs().sum(1) / 2 for p in (probabilities, mean.softmax(-1)))
    assert float(distance.max()) < 0.07 < 0.3 < float(without.max())
    torch.testing.assert_close(probabilities.sum(1), torch.ones(20, dtype=mean.dtype))


def test_beta_of_one_half_counts_every_example_twice():
    phi, y, x = problem(5, 8)
    half = LastLayerPosterior(phi, y, rho=3.0, gamma=2.0, beta=0.5)
    twice = LastLayerPosterior(torch.cat([phi, phi]), torch.cat([y, y]), rho=3.0, gamma=2.0, beta=1.0)
    torch.testing.assert_close(half.predict(x), twice.predict(x))


def test_variance_is_never_negative_and_that_of_the_prior_far_from_data():
    phi, y, _ = problem(6, 10)
    q = LastLayerPosterior(phi.float(), y.float(), rho=2.0, gamma=1.0, beta=1e-12)
    assert float(q.predict(phi.float())[1].min()) >= 0
    away = torch.linalg.svd(phi, full_matrices=True).Vh[-1:].float()
    torch.testing.assert_close(q.predict(away)[1], torch.tensor([0.5]))


def test_single_precision_features_lose_nothing_in_the_solve():
    phi, y, x = problem(50, 300, dtype=torch.float32)
    mean, var = LastLayerPosterior(phi, y, rho=100.0, gamma=1.0, beta=1e-8).predict(x)
    exact = LastLayerPosterior(phi.double(), y.double(), rho=100.0, gamma=1.0, beta=1e-8).predict(x.double())
    assert mean.dtype == var.dtype == torch.float32
    torch.testing.assert_close(mean.double(), exact[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(var.double(), exact[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rho=0.0), "rho must be positive and finite, got 0.0"),
        (dict(beta=float("nan")), "beta must be positive"),
        (dict(targets=torch.zeros(5)), "targets (n, k)"),
        (dict(targets=torch.zeros(4, 3)), "targets (n, k)"),
        (dict(features=torch.full((5, 8), float("nan"))), "NaN"),
        (dict(features=torch.zeros(5, 8, dtype=torch.long)), "floats"),
    ],
)
def test_bad_input_is_named(changes, message):
    arguments = dict(features=torch.ones(5, 8), targets=torch.ones(5, 3), **SETTINGS) | changes
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        LastLayerPosterior(arguments.pop("features"), arguments.pop("targets"), **arguments)


def test_coinciding_examples_without_noise_say_what_to_raise():
    with pytest.raises(ValueError, match="Raise beta"):
        LastLayerPosterior(torch.ones(5, 8) * 1e4, torch.ones(5, 3), rho=1.0, gamma=1.0, beta=1e-30)


def test_test_features_of_another_width_are_refused():
    phi, y, _ = problem(5, 8)
    with pytest.raises(ValueError, match=r"features must be \(t, 8\)"):
        LastLayerPosterior(phi, y, **SETTINGS).predict(torch.zeros(2, 7))


@pytest.mark.parametrize("name", ["convnet", "resnet", "vgg", "alexnet"])
def test_features_are_what_the_head_receives(name):
    net = network(name, 1, 10, 8, widths=(4, 4))() if name != "alexnet" else network(name, 1, 10, 8)()
    names = list(net.state_dict())
    x = torch.randn(3, 1, 8, 8)
    features = features_of(net)
    torch.testing.assert_close(net[-1](features(x)), net(x), rtol=0, atol=0)
    assert list(net.state_dict()) == names
    assert net(x).shape == (3, 10)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.outer = nn.Linear(6, 5), nn.ModuleDict({"inner": nn.Sequential(nn.Linear(5, 2))})

    def forward(self, x: Tensor) -> Tensor:
        return self.outer["inner"](torch.relu(self.body(x)))


def test_features_share_parameters_with_the_network_and_take_others_by_functional_call():
    net, x = Nested(), torch.randn(3, 6)
    features = features_of(net)
    assert {id(p) for p in features.parameters()} == {id(net.body.weight), id(net.body.bias)}
    assert dict(features.named_parameters()).keys() == {"body.weight", "body.bias"}
    others = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    assert float(functional_call(features, others, (x,)).abs().max()) == 0
    assert features(x).abs().max() > 0
    with torch.no_grad():
        net.body.weight.zero_()
        net.body.bias.fill_(2.0)
    assert features(x).min() == 2.0
    assert net(x).shape == (3, 2)


def test_features_of_a_bare_head_are_its_inputs_and_buffers_are_shared():
    x = torch.randn(3, 6)
    assert features_of(nn.Linear(6, 2))(x) is x
    net = conv_net()
    assert features_of(net)(torch.randn(4, 1, 8, 8)).shape == (4, 128)
    assert int(net[1].num_batches_tracked) == 1
