"""Small real problems that the tests share."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@functools.cache
def digits() -> TensorDataset:
    """scikit-learn's 1,797 handwritten digits as `(1, 8, 8)` images."""
    data = load_digits()
    return TensorDataset(torch.tensor(data.images[:, None] / 16, dtype=torch.float32), torch.tensor(data.target))


def conv_net(seed: int = 0) -> nn.Sequential:
    """A small BatchNorm network for the digits; in-place ReLU and dropout, as people have them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], lr: float = 0.1) -> None:
    """A plain training loop over these batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@functools.cache
def _trained_state() -> dict[str, Tensor]:
    """Trained in float64: in float32 another CPU, or another number of threads, trains to a network that selects others."""
    model = conv_net().double()
    x, y = digits().tensors
    x = x.double()
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        train(
            model,
            [(x[i], y[i]) for _ in range(3) for i in torch.randperm(1797, generator=generator).split(64)],
        )
    return model.float().state_dict()


def trained_net() -> nn.Sequential:
    """The same network after three epochs on the digits."""
    model = conv_net()
    model.load_state_dict(_trained_state())
    return model


def run_snippets(page: Path) -> dict[str, object]:
    """Runs the python blocks of a page as printed, one after the other, and gives the names that they leave."""
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert snippets, f"{page.name} has no python blocks"
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, page.name, "exec"), names)
    return names
