"""Muon: what a step does, which weights it is for, and how fit uses it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coreset_sampler import fit, load_coreset, recipe_for
from coreset_sampler.synthetic.muon import MUON_RATE, Muon, hidden_matrices, orthogonal
from coreset_sampler.synthetic.networks import convnet

LEARNED = load_coreset("digits/vbpc-1")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (16, 16), (1, 9)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_singular_values_become_about_one_and_singular_vectors_stay(shape, size):
    matrix = size * torch.randn(shape, generator=generator())
    left, before, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.T @ orthogonal(matrix) @ right.T
    after = turned.diagonal()
    assert float((turned - after.diag()).abs().max()) < 1e-3
    large = before > 0.05 * before.max()  # a square matrix has tiny ones, which stay below
    assert float(after[large].min()) > 0.6
    assert float(after.max()) < 1.25


def test_a_step_is_nesterov_momentum_made_orthogonal_and_weights_decay():
    weight = nn.Parameter(torch.randn(12, 2, 3, 1, generator=generator()))
    expected, mean = weight.detach().clone().reshape(12, 6), torch.zeros(12, 6)
    optimizer = Muon([weight], 0.1, momentum=0.9, weight_decay=0.5)
    for seed in (1, 2):
        gradient = torch.randn(12, 6, generator=generator(seed))
        weight.grad = gradient.reshape(weight.shape).clone()
        optimizer.step()
        mean = 0.9 * mean + gradient
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 2**0.5 * orthogonal(gradient + 0.9 * mean)
    assert torch.allclose(weight.detach().reshape(12, 6), expected, atol=1e-5)


def test_weights_without_a_gradient_stay_and_a_gradient_of_zero_is_no_step():
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    weights[0].grad = torch.zeros(2, 2)
    Muon(weights, 0.1).step()
    assert all(torch.equal(weight, torch.ones(2, 2)) for weight in weights)


def test_a_closure_is_refused():
    with pytest.raises(TypeError, match="closure must be left out"):
        Muon([nn.Parameter(torch.ones(2, 2))], 0.1).step(lambda: 0.0)


def test_hidden_matrices_are_weights_of_layers_but_for_the_head_frozen_ones_and_convolutions_in_groups():
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.LayerNorm(4), nn.Linear(4, 4),
        nn.Linear(4, 4), nn.Linear(4, 10),
    )  # fmt: skip
    model[4].weight.requires_grad_(False)
    assert [id(weight) for weight in hidden_matrices(model)] == [id(model[1].weight), id(model[5].weight)]
    model[5].weight = model[6].weight
    assert [id(weight) for weight in hidden_matrices(model)] == [id(model[1].weight)]
    assert hidden_matrices(nn.Flatten()) == []


def small():
    torch.manual_seed(0)
    return convnet(1, 10, 8, widths=(4, 8))


def test_training_is_muon_for_matrices_and_adamw_for_the_rest_along_one_cycle_written_out():
    recipe = replace(
        recipe_for(LEARNED, small(), labels="soft"), steps=4, batch_size=10, augmentation=(), optimizer="muon"
    )
    model, by_hand = small(), small()
    fit(model, LEARNED, recipe)
    matrices = [by_hand[0].weight, by_hand[4].weight]
    rest = [p for p in by_hand.parameters() if all(p is not matrix for matrix in matrices)]
    muon = Muon(matrices, MUON_RATE * recipe.lr, weight_decay=recipe.weight_decay)
    adamw = torch.optim.AdamW(rest, recipe.lr, weight_decay=recipe.weight_decay)
    cycles = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, rate * recipe.lr, total_steps=4)
        for optimizer, rate in ((muon, MUON_RATE), (adamw, 1))
    ]
    for _ in range(4):
        by_hand.zero_grad()
        nn.functional.cross_entropy(by_hand(LEARNED.inputs), LEARNED.targets.softmax(-1)).backward()
        for each in (muon, adamw, *cycles):
            each.step()
    real = load_coreset("digits/k-center-1").inputs / 255
    assert torch.allclose(model(real), by_hand(real), atol=1e-3)
    assert not torch.allclose(model(real), small()(real), atol=1e-2)


def test_a_model_without_hidden_matrices_is_trained_by_adamw_alone():
    models = []
    for optimizer in ("muon", "adamw"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        recipe = replace(recipe_for(LEARNED, model), steps=3, optimizer=optimizer)
        models.append(fit(model, LEARNED, recipe).model)
    assert torch.equal(models[0][1].weight, models[1][1].weight)
