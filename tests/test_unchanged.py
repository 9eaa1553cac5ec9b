"""What every strategy, posterior and distiller gave on a fixed problem before the code was rebuilt, and gives still.

`unchanged.json` was recorded by `python tests/test_unchanged.py` before the rebuilding; record it anew only where an
algorithm is changed on purpose, and say so in CHANGELOG. Models run in float64, so that another CPU picks the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gaussian_mean import GaussianMean
from scenarios import digits, trained_net
from torch.utils.data import TensorDataset

from coreset_sampler import (
    CoresetSampler,
    DiagonalLaplace,
    PointMass,
    Snapshots,
    SphericalGaussian,
    load_coreset,
    strategies,
)
from coreset_sampler.synthetic import distillers
from coreset_sampler.synthetic.networks import convnet
from coreset_sampler.synthetic.preprocessing import Raw
from coreset_sampler.synthetic.zoo import index

RECORD = Path(__file__).with_name("unchanged.json")
N, SIZE, EPOCHS = 600, 40, 3


def posteriors() -> dict[str, Any]:
    states = [{k: v + 0.01 * i for k, v in _net().state_dict().items() if v.is_floating_point()} for i in range(2)]
    return {
        "point mass": PointMass(),
        "norm": SphericalGaussian(0.1, "norm"),
        "head": SphericalGaussian(0.1, "head"),
        "all": SphericalGaussian(0.05, "all"),
        "redraw": SphericalGaussian(0.1, "norm", redraw=1),
        "laplace": DiagonalLaplace(examples=64),
        "snapshots": Snapshots(states),
    }


def selections() -> dict[str, Callable[[], Any]]:
    s, pools = strategies, dict(pool_size=50, keep=10)
    found: dict[str, Callable[[], Any]] = {
        "stable": lambda: s.Stable(),
        "stable, proportional": lambda: s.Stable(balance="proportional", **pools),
        "stable, reuse": lambda: s.Stable(rescore_every=2, **pools),
        "stable, one of five": lambda: s.Stable(pool_size=5, keep=1, rescore_every=3),
        "stable, doubt": lambda: s.Stable(confidence_exponent=2, **pools),
        "stable, doubt, reuse": lambda: s.Stable(confidence_exponent=1, rescore_every=2, **pools),
        "crest": lambda: s.Crest(**pools),
        "crest, doubt": lambda: s.Crest(confidence_exponent=2, **pools),
        "craig": lambda: s.Craig(),
        "craig, proportional": lambda: s.Craig(balance="proportional"),
        "k_center": lambda: s.KCenter(),
        "herding": lambda: s.Herding(),
        "forgetting": lambda: s.Forgetting(),
        "uniform": lambda: s.Uniform(),
        "believed": lambda: s.LabelConfidence(posterior=PointMass(), exponent=2, rescore_every=1, warm_up=0),
        "believed, reuse": lambda: s.LabelConfidence(
            posterior=PointMass(), exponent=1, rescore_every=2, balance="proportional", warm_up=0
        ),
        "warm_up": lambda: s.WarmUp(s.Crest(**pools), selections=1),
    }
    for name, posterior in posteriors().items():
        found[f"posterior: {name}"] = functools.partial(s.Stable, posterior=posterior, draws=2, **pools)
    return found


def _net() -> torch.nn.Module:
    return trained_net().double()


def selected(name: str, weighting: str = "resample") -> dict[str, Any]:
    x, y = digits().tensors
    y = y[:N].clone()
    y[::4] = (y[::4] + 3) % 10  # a quarter of the labels is wrong
    model = _net()
    sampler = CoresetSampler(
        TensorDataset(x[:N].double(), y),
        model,
        size=SIZE,
        seed=5,
        strategy=selections()[name](),
        weighting=weighting,
        progress=False,
    )
    rows = []
    for _ in range(EPOCHS):
        order = list(sampler)
        rows.append(
            {"order": order, "indices": sampler.coreset.indices.tolist(), "weights": sampler.coreset.weights.tolist()}
        )
        with torch.no_grad():
            model[9].weight.mul_(1.1)
    return {"epochs": rows}


def distilled() -> dict[str, list[float]]:
    problem, inner = GaussianMean(), {"inner_steps": 5, "inner_lr": 0.1, "augmentation": None}
    net, loss = problem.network, problem.loss
    methods = {
        "reverse_kl": distillers.ReverseKL(net, loss=loss, samples=20, noise=0.3, batch=50, lr=1.0, **inner),
        "wasserstein": distillers.Wasserstein(net, loss=loss, lr=6.0, inner_lr_lr=1e-4, **inner),
        "forward_kl": distillers.ForwardKL(net, loss=loss, samples=5, noise=0.1, lr=1.0, **inner),
        "contrastive_divergence": distillers.ContrastiveDivergence(net, energy=loss, lr=0.5, temperature=0.2, **inner),
    }
    found = {}
    for name, method in methods.items():
        state = method.init(*problem.coreset(), seed=0)
        for _ in range(5):
            state, _ = method.step(state, problem)
        found[name] = state.inputs.flatten().tolist()
    return found | {"variational": _variational()}


def _variational() -> list[float]:
    x, y = digits().tensors
    method = distillers.Variational(functools.partial(convnet, 1, 10, 8, widths=(4, 8)), pool=2, batch=32)
    state = method.init(x[:10], y[:10], seed=0)
    source = distillers.RealData((x[:500] * 255).byte(), y[:500], preprocessing=Raw())
    for _ in range(4):
        state, _ = method.step(state, source)
    return state.inputs.flatten()[::7].tolist()


def zoo() -> dict[str, str]:
    found = {}
    for name in sorted(index()):
        coreset = load_coreset(name)
        data = coreset.inputs.contiguous().numpy().tobytes() + coreset.targets.contiguous().numpy().tobytes()
        found[name] = hashlib.sha256(data).hexdigest()
    return found


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize("name", selections())
def test_a_strategy_selects_what_it_did(name, record):
    now, before = selected(name), record["selections"][name]
    for here, there in zip(now["epochs"], before["epochs"], strict=True):
        assert here["indices"] == there["indices"]
        assert here["order"] == there["order"]
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(here["weights"], there["weights"], strict=True))


def test_distillers_step_where_they_did(record):
    for name, values in distilled().items():
        assert values == pytest.approx(record["distilled"][name], rel=1e-4, abs=1e-5), name


def test_the_zoo_holds_the_same_bits(record):
    now = zoo()
    assert {name: now[name] for name in record["zoo"]} == record["zoo"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {"selections": {name: selected(name) for name in selections()}, "distilled": distilled(), "zoo": zoo()}
    RECORD.write_text(json.dumps(found) + "\n")
