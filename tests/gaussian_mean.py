"""The problem of appendix C.5: a Gaussian's mean, whose posterior is exact for any coreset."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn


class Offset(nn.Module):
    """A network whose output is how far its inputs are from its one parameter, the mean."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(dimensions, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


class GaussianMean:
    """`n` points of N(theta, covariance) with theta ~ N(0, prior I); also the source that distillers learn from."""

    def __init__(self, n: int = 100, dimensions: int = 10, prior: float = 100.0, seed: int = 0) -> None:
        generator = Generator().manual_seed(seed)
        self.n, self.dimensions, self.prior = n, dimensions, prior
        root = torch.eye(dimensions, dtype=torch.float64) + 0.1 * self._randn(dimensions, generator=generator)
        self.precision = torch.linalg.inv(root @ root.T)
        self.points = 2 + self._randn(n, generator=generator) @ root.T
        self.full = self.posterior(self.points)

    def _randn(self, rows: int, generator: Generator) -> Tensor:
        return torch.randn(rows, self.dimensions, generator=generator, dtype=torch.float64)

    def network(self) -> nn.Module:
        return Offset(self.dimensions)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean negative log-likelihood, up to a constant."""
        return 0.5 * ((outputs @ self.precision) * outputs).sum(-1).mean()

    def posterior(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance, equations 28 and 29."""
        prior = torch.eye(self.dimensions, dtype=torch.float64) / self.prior
        covariance = torch.linalg.inv(prior + len(points) * self.precision)
        return covariance @ self.precision @ points.sum(0), covariance

    def coreset(self, size: int = 5) -> tuple[Tensor, Tensor]:
        """Points to begin with, far off, and targets that nobody looks at."""
        return self._randn(size, generator=Generator().manual_seed(1)), torch.zeros(size, dtype=torch.long)

    def divergences(self, points: Tensor) -> Divergences:
        """Exact, between the posteriors of the full data and of these points."""
        of_points = self.posterior(points)
        return Divergences(kl(of_points, self.full), w2(of_points, self.full), kl(self.full, of_points))

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(self.n, (size,), generator=generator)
        return self.points[rows], torch.zeros(size, dtype=torch.long)

    def segment(self, epochs: int, generator: Generator, kind: int) -> tuple[Tensor, Tensor]:
        """From somewhere near the prior to a draw of the exact posterior."""
        mean, covariance = self.full
        start = 3 * self._randn(1, generator=generator)[0]
        return start, mean + torch.linalg.cholesky(covariance) @ self._randn(1, generator=generator)[0]


@dataclass(frozen=True)
class Divergences:
    reverse_kl: float
    wasserstein: float
    forward_kl: float


def kl(p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> float:
    """KL[p || q] of Gaussians."""
    (m, s), (n, t) = p, q
    away = n - m
    trace = torch.linalg.solve(t, s).trace()
    return float(0.5 * (trace - len(m) + away @ torch.linalg.solve(t, away) + t.logdet() - s.logdet()))


def w2(p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> float:
    """The squared 2-Wasserstein distance of Gaussians, equation 15."""
    (m, s), (n, t) = p, q
    values, vectors = torch.linalg.eigh(s)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ t @ root).clamp(min=0).sqrt().sum()
    return float((m - n).square().sum() + s.trace() + t.trace() - 2 * cross)
