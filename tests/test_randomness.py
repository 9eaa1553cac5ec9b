"""torch's global random state: seeded inside, afterwards as it was, on accelerators as on the CPU."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

from coreset_sampler import distill, evaluate, fit, label_views, load_coreset, recipe_for, teach
from coreset_sampler.randomness import accelerators, seeded
from coreset_sampler.selection.testing import check_strategy
from coreset_sampler.synthetic.distillers.experts import train_experts
from coreset_sampler.synthetic.distillers.real_data import RealData
from coreset_sampler.synthetic.distillers.teacher import Teacher, train_teacher
from coreset_sampler.synthetic.inference.predict import by_last_layer, by_sgd
from coreset_sampler.synthetic.networks import network


class FakeAccelerator:
    """A kind of device with a CPU generator for each number; like torch.mps it has no `device` to enter."""

    def __init__(self, count):
        self.generators = [torch.Generator().manual_seed(number) for number in range(count)]

    def get_rng_state(self, number):
        return self.generators[number].get_state()

    def set_rng_state(self, state, number):
        self.generators[number].set_state(state)


@pytest.fixture
def fake(monkeypatch):
    """Three of them under the name of cuda."""
    accelerator, make = FakeAccelerator(3), torch.Generator
    monkeypatch.setattr(torch, "get_device_module", lambda kind: accelerator)
    monkeypatch.setattr(torch, "Generator", lambda device=None: make())
    return accelerator


def test_each_accelerator_counts_once_and_the_cpu_needs_no_number():
    names = ["cpu", "cuda:1", "cuda:0", "cuda:1", "meta", "mps"]
    assert accelerators(torch.device(name) for name in names) == {"cuda": [0, 1], "mps": [0]}
    assert accelerators([torch.device("cpu")]) == {}


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_named_is_seeded_and_comes_back_and_nothing_else_is_touched(fake, fails):
    before = [generator.get_state() for generator in fake.generators]
    on_cpu = torch.get_rng_state()
    with suppress(ZeroDivisionError), seeded(5, [torch.device("cuda:0"), torch.device("cuda:2")]):
        seeds = [generator.initial_seed() for generator in fake.generators]
        drawn = torch.rand(3)
        torch.rand(3, generator=fake.generators[0])
        1 / (not fails)
    assert seeds == [5, 1, 5]
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert all(map(torch.equal, before, [generator.get_state() for generator in fake.generators]))
    assert torch.equal(on_cpu, torch.get_rng_state())


def test_checking_a_strategy_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    check_strategy("uniform")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("module", ["fitting", "distillers.teacher", "inference.predict", "distillers.experts"])
def test_whoever_trains_names_the_device_of_the_model(module, monkeypatch, tmp_path):
    named = []

    def note(seed, devices=()):
        named.append({device.type for device in devices})
        return seeded(seed)

    monkeypatch.setattr(f"coreset_sampler.synthetic.{module}.seeded", note)
    coreset = load_coreset("digits/k-center-1")
    data, make = RealData(coreset.inputs, coreset.targets), network("convnet:4-4", 1, 10, 8)
    if module == "fitting":
        fit(make(), coreset, replace(recipe_for(coreset, make()), steps=1))
    elif module == "distillers.teacher":
        train_teacher(Teacher(epochs=1), make, data)
    elif module == "inference.predict":
        by_sgd(steps=1)(coreset, make, 0)
        by_last_layer(steps=1)(coreset, make, 0)
    else:
        train_experts(make, data, tmp_path, experts=1, epochs=1)
    assert {"cpu"} in named
    assert set() not in named


def test_another_default_device_is_refused_in_words_by_whatever_learns(tmp_path):
    coreset = load_coreset("digits/vbpc-1")
    images, model = (coreset.inputs, torch.arange(10)), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    calls = (
        lambda: distill(images, images_per_class=1, steps=1),
        lambda: teach(images, images_per_class=1),
        lambda: evaluate(coreset, images, seeds=1),
        lambda: fit(model, coreset),
        lambda: label_views(coreset, model),
        lambda: train_experts(lambda: model, RealData(*images), tmp_path),
    )
    torch.set_default_device("meta")
    try:
        for call in calls:
            with pytest.raises(RuntimeError, match="needs the CPU as default device, got meta"):
                call()
    finally:
        torch.set_default_device(None)
