"""Hamiltonian Monte Carlo with an exact Metropolis test."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .potential import Potential, Report, Step, check_chain, value_and_gradient


def hmc(
    potential: Potential,
    theta0: Tensor,
    *,
    steps: int = 1000,
    leapfrog: int = 10,
    step_size: float = 0.01,
    burn_in: int = 100,
    thin: int = 1,
    target_acceptance: float | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> Tensor:
    r"""Samples `(kept, d)` from the density $\propto e^{-U(\theta)}$, exact but for their correlation.

    Each step draws a momentum $r \sim N(0, I)$, follows the Hamiltonian $H = U(\theta) + \frac12\|r\|^2$ for `leapfrog`
    steps of `step_size`, and accepts with probability $\min(1, e^{H_\text{old} - H_\text{new}})$ (Duane et al. 1987,
    Neal 2011). Of `steps` steps the first `burn_in` are dropped and of the others every `thin`-th is kept. With
    `target_acceptance` (0.8, say) the step size is adapted during burn-in and fixed after it.

    Costs `leapfrog` gradients of the potential per step. A proposal where the potential is not finite is rejected.

    Args:
        potential: U, parameters `(d,)` to a number.
        theta0: where the chain begins.
        steps, burn_in, thin: steps in all, those dropped at the start, and of the others every which is kept.
        leapfrog, step_size: moves per step, and how long each is.
        target_acceptance: adapt the step size to it during burn-in; `None` keeps it.
        seed: of momenta and acceptance.
        report: gets a `Step` after every step.
    """
    check_chain(theta0, steps, burn_in, thin, {"leapfrog": leapfrog, "step_size": step_size})
    if target_acceptance is not None and not 0 < target_acceptance < 1:
        raise ValueError(
            f"target_acceptance must be between 0 and 1, or None to keep step_size, got {target_acceptance}"
        )
    generator = torch.Generator(theta0.device).manual_seed(seed)
    theta = theta0.detach().clone()
    energy, gradient = value_and_gradient(potential, theta)
    if not math.isfinite(energy):
        raise ValueError(f"potential must be finite at theta0, got {energy}; start from other parameters")
    adapted = _StepSize(step_size, target_acceptance) if target_acceptance is not None and burn_in else None
    kept, moved = [], 0
    for number in range(steps):
        if adapted is not None:
            step_size = adapted.exploring if number < burn_in else adapted.settled
        r = torch.randn(theta.shape, generator=generator, dtype=theta.dtype, device=theta.device)
        proposal = _trajectory(potential, theta, r, gradient, leapfrog, step_size)
        accept = math.exp(min(0.0, energy + _kinetic(r) - proposal.hamiltonian)) if proposal.finite else 0.0
        accepted = float(torch.rand((), generator=generator, device=theta.device)) < accept
        if accepted:
            theta, gradient, energy = proposal.theta, proposal.gradient, proposal.energy
            moved += 1
        if number < burn_in and adapted is not None:
            adapted.update(accept)
        if report is not None:
            report(Step(number, energy, accepted, accept, step_size))
        if moved == 0 and number + 1 == min(steps, max(burn_in, 100)) and number >= 10:
            raise ValueError(
                f"none of {number + 1} proposals was accepted with step_size {step_size:.3g}; lower step_size"
            )
        if number >= burn_in and (number - burn_in + 1) % thin == 0:
            kept.append(theta)
    return torch.stack(kept)


class _Proposal:
    def __init__(self, theta: Tensor, r: Tensor, energy: float, gradient: Tensor) -> None:
        self.theta, self.energy, self.gradient = theta, energy, gradient
        self.hamiltonian = energy + _kinetic(r)
        self.finite = math.isfinite(self.hamiltonian) and bool(torch.isfinite(gradient).all())


def _trajectory(
    potential: Potential, theta: Tensor, r: Tensor, gradient: Tensor, leapfrog: int, step_size: float
) -> _Proposal:
    r = r - step_size / 2 * gradient
    for i in range(leapfrog):
        theta = theta + step_size * r
        energy, gradient = value_and_gradient(potential, theta)
        r = r - (step_size if i < leapfrog - 1 else step_size / 2) * gradient
        if not math.isfinite(energy):
            break  # it will be rejected
    return _Proposal(theta, r, energy, gradient)


def _kinetic(r: Tensor) -> float:
    return float(r.double().square().sum()) / 2


class _StepSize:
    """Dual averaging (Nesterov 2009; Hoffman and Gelman 2014) of the logarithm of the step size."""

    def __init__(self, start: float, target: float) -> None:
        self.target, self.centre = target, math.log(start)
        self.exploring = self.settled = start
        self.count, self.gap = 0, 0.0

    def update(self, acceptance: float) -> None:
        """Longer steps after likely acceptance, shorter ones after unlikely."""
        self.count += 1
        rate, share = 1 / (self.count + 10), self.count**-0.75
        self.gap = (1 - rate) * self.gap + rate * (self.target - acceptance)
        log_step = self.centre - math.sqrt(self.count) / 0.05 * self.gap
        self.settled = math.exp(share * log_step + (1 - share) * math.log(self.settled))
        self.exploring = math.exp(log_step)
