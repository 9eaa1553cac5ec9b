import math
from functools import partial

import pytest
import torch
from torch import Tensor

from coreset_sampler.synthetic.inference import hmc, sghmc
from coreset_sampler.synthetic.inference.potential import Step, longest_stable_step


def gaussian(d: int = 5, condition: float = 20.0) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a correlated Gaussian, axes turned at random, variances from 1 down to 1 / condition."""
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    variances = torch.logspace(0, -math.log10(condition), d, dtype=torch.float64)
    return torch.randn(d, generator=generator, dtype=torch.float64), axes * variances @ axes.T


def energy_of(mean: Tensor, covariance: Tensor):
    precision = torch.linalg.inv(covariance)
    return lambda theta: (theta - mean) @ precision @ (theta - mean) / 2


def normal(theta: Tensor) -> Tensor:
    """The energy of standard normal numbers: for SGHMC as many chains that know nothing of each other."""
    return theta.square().sum() / 2


def effective(series: Tensor) -> float:
    """The number of independent draws that average as well as this chain: Geyer's initial positive sequence."""
    n = len(series)
    x = series - series.mean()
    spectrum = torch.fft.rfft(x, n=2 * n)
    correlation = torch.fft.irfft(spectrum.abs().square())[:n] / x.square().sum()
    pairs = correlation[: n // 2 * 2].reshape(-1, 2).sum(1)
    end = int((pairs <= 0).nonzero()[0]) if bool((pairs <= 0).any()) else len(pairs)
    return n / max(float(2 * pairs[:end].sum() - 1), 1e-3)


def off(series: Tensor, true: float) -> float:
    """The error of a chain's mean in standard errors that allow for its correlation."""
    assert effective(series) > 100
    return abs(float(series.mean()) - true) / (float(series.std()) / math.sqrt(effective(series)))


def furthest_off(samples: Tensor, mean: Tensor, covariance: Tensor) -> float:
    """The largest error of all means and covariances, in standard errors."""
    away, d = samples - mean, len(mean)
    errors = [off(away[:, i], 0.0) for i in range(d)]
    errors += [off(away[:, i] * away[:, j], float(covariance[i, j])) for i in range(d) for j in range(i + 1)]
    return max(errors)


SAMPLERS = {
    "hmc": partial(hmc, steps=1100, leapfrog=5, step_size=0.22, burn_in=100),
    "sghmc": partial(sghmc, steps=6000, step_size=0.25, friction=0.2, burn_in=200),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_mean_and_covariance_of_a_correlated_gaussian_are_recovered(name):
    mean, covariance = gaussian()
    samples = SAMPLERS[name](energy_of(mean, covariance), torch.zeros(5, dtype=torch.float64), seed=1)
    assert furthest_off(samples, mean, covariance) < 4  # of 20 figures


def test_variance_of_the_standard_normal_is_one():
    """The released evaluator's sign error gives 0.38 here."""
    samples = hmc(normal, torch.zeros(1, dtype=torch.float64), steps=2000, leapfrog=5, step_size=0.3)
    assert furthest_off(samples, torch.zeros(1), torch.eye(1)) < 4


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_sghmc_is_exact_on_a_gaussian_even_at_long_steps_and_temperature_scales_the_variance(temperature):
    start = torch.zeros(500, dtype=torch.float64)
    samples = sghmc(normal, start, steps=500, step_size=0.8, friction=0.2, temperature=temperature)
    assert off(samples.square().mean(1), temperature) < 4
    assert float(samples.square().mean()) == pytest.approx(temperature, rel=0.03)


@pytest.mark.parametrize("step_size", [0.5, 1.1])
def test_hmc_is_exact_at_steps_so_long_that_it_rejects(step_size):
    seen: list[Step] = []
    energy = lambda theta: theta.square().sum() / 2 + (theta**4).sum() / 4  # noqa: E731
    samples = hmc(
        energy, torch.zeros(1, dtype=torch.float64), steps=2000, leapfrog=2, step_size=step_size, report=seen.append
    )
    grid = torch.linspace(-6, 6, 20_001, dtype=torch.float64)
    density = torch.exp(-(grid**2) / 2 - grid**4 / 4)
    variance = float((density * grid**2).sum() / density.sum())
    assert furthest_off(samples, torch.zeros(1), torch.tensor([[variance]])) < 4
    assert len(seen) == 2000
    rejected = 1 - sum(step.accepted for step in seen) / len(seen)
    expected = 1 - sum(step.acceptance for step in seen) / len(seen)
    assert rejected == pytest.approx(expected, abs=0.04)
    assert rejected > (0.15 if step_size > 1 else 0.01)


def test_a_rejected_proposal_repeats_the_sample_and_infinite_energy_is_rejected():
    half = lambda theta: torch.where(theta > 0, theta.sum(), torch.inf).sum()  # noqa: E731 - exponential on theta > 0
    steps: list[Step] = []
    samples = hmc(half, torch.ones(1, dtype=torch.float64), steps=1500, leapfrog=5, step_size=0.4, report=steps.append)
    assert float(samples.min()) > 0
    assert furthest_off(samples, torch.ones(1), torch.eye(1)) < 4
    for step, before, after in zip(steps[101:], samples, samples[1:], strict=False):
        assert step.accepted != torch.equal(before, after)


def test_adapted_step_size_reaches_the_acceptance_asked_for_and_stays_fixed_after_burn_in():
    mean, covariance = gaussian()
    seen: list[Step] = []
    start = torch.zeros(5, dtype=torch.float64)
    run = partial(hmc, energy_of(mean, covariance), start, leapfrog=5, target_acceptance=0.8, report=seen.append)
    run(steps=500, burn_in=200, step_size=1e-3)
    kept = seen[200:]
    assert len({step.step_size for step in kept}) == 1
    assert 0.65 < sum(step.acceptance for step in kept) / len(kept) < 0.95


def test_sghmc_without_temperature_finds_the_minimum():
    mean, covariance = gaussian()
    start = torch.zeros(5, dtype=torch.float64)
    samples = sghmc(energy_of(mean, covariance), start, steps=2000, step_size=0.1, temperature=0.0, burn_in=1999)
    torch.testing.assert_close(samples[-1], mean, rtol=0, atol=1e-6)


def test_noise_of_the_gradient_heats_sghmc_as_much_as_documented():
    generator, variance, step_size, friction = torch.Generator().manual_seed(3), 25.0, 0.2, 0.1

    def noisy(theta: Tensor) -> Tensor:
        push = math.sqrt(variance) * torch.randn(500, generator=generator, dtype=theta.dtype)
        return normal(theta) + (push * theta).sum()

    start = torch.zeros(500, dtype=torch.float64)
    samples = sghmc(noisy, start, steps=800, step_size=step_size, friction=friction)
    heated = 1 + step_size**2 * variance / (friction * (2 - friction))
    assert heated > 6
    assert float(samples.square().mean()) == pytest.approx(heated, rel=0.1)


@pytest.mark.parametrize("name", SAMPLERS)
def test_same_seed_same_samples_and_global_random_state_untouched(name):
    run = partial(SAMPLERS[name], normal, torch.zeros(3), steps=20, burn_in=2)
    state = torch.get_rng_state()
    first, again, other = run(seed=0), run(seed=0), run(seed=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == (18, 3)
    assert first.dtype == torch.float32
    assert not first.requires_grad


@pytest.mark.parametrize("name", SAMPLERS)
def test_thinning_keeps_every_so_many_th_sample_of_the_same_chain(name):
    run = partial(SAMPLERS[name], normal, torch.zeros(2), steps=30, burn_in=3)
    assert torch.equal(run(thin=5), run()[4::5])


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_work_where_gradients_are_switched_off(name):
    with torch.no_grad():
        samples = SAMPLERS[name](normal, torch.zeros(2), steps=3, burn_in=1)
    assert samples.shape == (2, 2)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(burn_in=20), "burn_in must be at least 0 and less than steps=20, got 20"),
        (dict(step_size=0.0), "step_size must be positive, got 0.0"),
        (dict(step_size=float("nan")), "step_size must be positive, got nan"),
        (dict(thin=0), "thin must be between 1 and steps - burn_in = 18, got 0"),
        (dict(theta0=torch.zeros(2, 2)), r"theta0 must be one vector of floats"),
        (dict(potential=lambda theta: theta), "potential must give one number"),
        (dict(potential=lambda theta: theta.sum() * torch.nan), "potential must be finite at theta0, got nan"),
    ],
)
def test_bad_input_is_named(name, changes, message):
    values = dict(potential=normal, theta0=torch.zeros(2), steps=20, burn_in=2) | changes
    potential, theta0 = values.pop("potential"), values.pop("theta0")
    with pytest.raises(ValueError, match=message):
        SAMPLERS[name](potential, theta0, **values)


def test_a_step_size_far_too_long_says_what_to_lower():
    steep = lambda theta: 1e6 * theta.square().sum()  # noqa: E731
    with pytest.raises(ValueError, match="none of 100 proposals was accepted .* lower step_size"):
        hmc(steep, torch.ones(10), step_size=1.0)
    with pytest.raises(ValueError, match=r"after \d+ steps of step_size 1.0; lower step_size"):
        sghmc(steep, torch.ones(10), step_size=1.0)


def test_friction_and_temperature_out_of_range_are_refused():
    for changes in (dict(friction=1.5), dict(temperature=-1.0)):
        with pytest.raises(ValueError, match=r"friction must be in \(0, 1\], temperature at least 0"):
            sghmc(lambda theta: theta.sum(), torch.zeros(2), **changes)


def test_longest_stable_step_is_two_over_the_root_of_the_largest_curvature():
    mean, covariance = gaussian()
    step = longest_stable_step(energy_of(mean, covariance), torch.zeros(5, dtype=torch.float64), iterations=50)
    assert step == pytest.approx(2 / math.sqrt(20), rel=1e-3)
    assert longest_stable_step(lambda theta: (0 * theta).sum(), torch.zeros(5)) == math.inf
