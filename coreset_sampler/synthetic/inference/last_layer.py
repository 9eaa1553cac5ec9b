"""The posterior over a network's last layer in closed form: Gaussian likelihood, Gaussian prior."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from ...layers import head_name, unwrapped


class LastLayerPosterior:
    r"""Gaussian posterior over last-layer weights `(h, k)` given `features` `(n, h)` and `targets` `(n, k)`.

    Prior $W_j \sim N(0, I/\rho)$, likelihood $y \sim N(W^\top \phi, I/\gamma)$; minimises
    $E_q[-\log p(Y | W)] + \beta\,\mathrm{KL}(q \| p)$, so `beta=1` is Bayes' rule and a smaller one counts every
    example $1/\beta$ times. With $c = \rho\beta/\gamma$ and $A = \Phi\Phi^\top + cI$ the mean of $W$ is
    $\Phi^\top A^{-1} Y$ and every class has the covariance $(I - \Phi^\top A^{-1}\Phi)/\rho$.

    One float64 Cholesky of $\min(n, h)$ rows and columns; no matrix of $h \times h$ unless $h < n$. All results are
    differentiable in features and targets, and come in the dtype of what was given. Lee, Lee and Lee 2025 (VBPC).

    Args:
        features, targets: of the coreset, `(n, h)` and `(n, k)`.
        rho, gamma, beta: as above, all positive.

    Example:
        >>> q = LastLayerPosterior(features, targets, rho=100.0, gamma=1.0, beta=1e-4)
        >>> mean, var = q.predict(test_features)
    """

    def __init__(self, features: Tensor, targets: Tensor, *, rho: float, gamma: float, beta: float) -> None:
        _check(features, targets, {"rho": rho, "gamma": gamma, "beta": beta})
        self.rho, self.c = rho, rho * beta / gamma
        self._dtype = features.dtype
        self._phi, self._y = features.double(), targets.double()
        n, h = features.shape
        self._by_kernel = n <= h
        self._gram = self._phi @ self._phi.T if self._by_kernel else self._phi.T @ self._phi
        self._cholesky = _cholesky(self._gram, self.c)
        right = self._y if self._by_kernel else self._phi.T @ self._y
        self._solved = torch.cholesky_solve(right, self._cholesky)  # A^-1 Y (n, k), or the mean itself (h, k)

    @property
    def mean(self) -> Tensor:
        """The mean of the weights, `(h, k)`: the head that a plain network would get."""
        weights = self._phi.T @ self._solved if self._by_kernel else self._solved
        return weights.to(self._dtype)

    def predict(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean `(t, k)` and variance `(t,)`, the same for every class, of the outputs at test features `(t, h)`."""
        if features.ndim != 2 or features.shape[1] != self._phi.shape[1]:
            raise ValueError(f"features must be (t, {self._phi.shape[1]}), got {tuple(features.shape)}")
        x = features.double()
        if self._by_kernel:
            kernel = self._phi @ x.T
            mean = kernel.T @ self._solved
            explained = self._whiten(kernel).square().sum(0)
            var = (x.square().sum(1) - explained).clamp_min(0) / self.rho
        else:
            mean = x @ self._solved
            var = self._whiten(x.T).square().sum(0) * (self.c / self.rho)
        return mean.to(features.dtype), var.to(features.dtype)

    def logits(self, features: Tensor) -> Tensor:
        r"""Mean-field logits `(t, k)`, $m / \sqrt{1 + \frac{\pi}{8} v}$, whose softmax are the probabilities."""
        mean, var = self.predict(features)
        return mean / (1 + math.pi / 8 * var).sqrt()[:, None]

    def probabilities(self, features: Tensor) -> Tensor:
        r"""Class probabilities `(t, k)`: about $E_q\,\mathrm{softmax}(W^\top\phi)$, by the mean-field formula."""
        return self.logits(features).softmax(-1)

    def kl(self) -> Tensor:
        r"""$\mathrm{KL}(q \| p)$ from posterior to prior, summed over classes; a scalar."""
        size, classes = len(self._gram), self._y.shape[1]
        eye = torch.eye(size, dtype=torch.float64, device=self._gram.device)
        logdet = 2 * self._cholesky.diagonal().log().sum() - size * math.log(self.c)
        trace = size - self.c * self._whiten(eye).square().sum()
        norm = (self._solved * (self._gram @ self._solved)).sum() if self._by_kernel else self._solved.square().sum()
        return (classes / 2 * (logdet - trace) + self.rho / 2 * norm).to(self._dtype)

    def _whiten(self, columns: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self._cholesky, columns, upper=False)


def features_of(network: nn.Module) -> nn.Module:
    """The network without its head: gives what the head receives, and shares every other layer with the original.

    The head is the last layer with a weight matrix. The network given is not changed; training the result trains the
    layers of both, and names of parameters are the same in both. A network that is nothing but a head gives its inputs.
    """
    network = unwrapped(network)
    *path, head = head_name(network).split(".")
    if not head:
        return nn.Identity()
    result = inner = _shallow(network)
    for name in path:
        inner._modules[name] = _shallow(inner.get_submodule(name))
        inner = inner.get_submodule(name)
    inner._modules[head] = nn.Identity()
    return result


def _shallow(module: nn.Module) -> nn.Module:
    """A module with the same children and parameters, but a list of children of its own."""
    twin = copy.copy(module)
    twin._modules = twin._modules.copy()
    return twin


def _cholesky(gram: Tensor, c: float) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(gram + c * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    if bool(failed) or not bool(torch.isfinite(factor).all()):
        what = "features hold NaN or infinity" if not bool(torch.isfinite(gram).all()) else "examples nearly coincide"
        raise ValueError(
            f"the features' Gram matrix plus c = rho * beta / gamma = {c:.3g} is not positive definite in float64: {what}. "
            "Raise beta, or look at the network that made the features."
        )
    return factor


def _check(features: Tensor, targets: Tensor, settings: dict[str, float]) -> None:
    if features.ndim != 2 or targets.ndim != 2 or len(features) != len(targets) or len(features) == 0:
        shapes = f"{tuple(features.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"features must be (n, h) and targets (n, k), got {shapes}; one-hot or centre class numbers")
    if not features.is_floating_point():
        raise ValueError(f"features must be floats, got {features.dtype}")
    for name, value in settings.items():
        if not (0 < value < math.inf):
            raise ValueError(f"{name} must be positive and finite, got {value}")
