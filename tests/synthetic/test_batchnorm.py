"""calibrate_batchnorm: the statistics it leaves are those of the images, and nothing else is touched."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coreset_sampler import calibrate_batchnorm
from coreset_sampler.synthetic.networks import convnet


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(108, 4),
        nn.BatchNorm1d(4),
    )


IMAGES = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 3 + 1


def test_statistics_are_those_of_one_big_batch():
    model = network()
    assert calibrate_batchnorm(model, IMAGES, batch_size=60) == 60
    with torch.no_grad():
        first = model[0](IMAGES)
        assert torch.allclose(model[1].running_mean, first.mean((0, 2, 3)), atol=1e-5)
        assert torch.allclose(model[1].running_var, first.var((0, 2, 3)), atol=1e-5)
        mean, var = first.mean((0, 2, 3), keepdim=True), first.var((0, 2, 3), unbiased=False, keepdim=True)
        normal = (first - mean) / (var + model[1].eps).sqrt()
        second = model[5](normal.relu().flatten(1))  # no dropout: only BatchNorm is in training mode
    assert torch.allclose(model[6].running_mean, second.mean(0), atol=1e-5)
    assert torch.allclose(model[6].running_var, second.var(0), atol=1e-5)


def test_several_batches_are_averaged_with_equal_weights():
    model = network()
    calibrate_batchnorm(model, IMAGES, batch_size=25)  # three of 20
    with torch.no_grad():
        parts = [model[0](part) for part in IMAGES.split(20)]
    assert torch.allclose(model[1].running_mean, torch.stack([p.mean((0, 2, 3)) for p in parts]).mean(0), atol=1e-5)
    assert torch.allclose(model[1].running_var, torch.stack([p.var((0, 2, 3)) for p in parts]).mean(0), atol=1e-5)


def test_a_tensor_a_data_set_and_a_loader_give_the_same():
    labelled = TensorDataset(IMAGES, torch.zeros(60))
    dicts = [{"pixel_values": part} for part in IMAGES.split(20)]
    found = []
    for images in (IMAGES, labelled, DataLoader(labelled, 20), dicts):
        model = network()
        calibrate_batchnorm(model, images, batch_size=20)
        found.append(torch.cat([value.flatten().float() for value in model.state_dict().values()]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("as_data_set", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_modes_momenta_weights_and_random_state_stay_as_they_were(training, as_data_set):
    model = network().train(training)
    model[1].momentum, model[2].training = 0.3, not training
    before, state = copy.deepcopy(model), torch.get_rng_state()
    calibrate_batchnorm(model, TensorDataset(IMAGES) if as_data_set else IMAGES)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert (model[1].momentum, model[6].momentum) == (0.3, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(model[1].running_mean, before[1].running_mean)


def test_after_an_error_the_statistics_are_the_old_ones():
    model = network().eval()
    model[1].running_mean += 5
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError):
        calibrate_batchnorm(model, [IMAGES, torch.rand(4, 2, 8, 8)])
    with pytest.raises(ValueError, match="images must hold at least one image"):
        calibrate_batchnorm(model, IMAGES[:0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())


def test_bad_inputs_are_named():
    with pytest.raises(ValueError, match="must have BatchNorm layers .* Sequential has none"):
        calibrate_batchnorm(convnet(1, 10, 8, widths=(4,)), IMAGES)
    with pytest.raises(ValueError, match="batch_size must be at least 2, .* got 1"):
        calibrate_batchnorm(network(), IMAGES, batch_size=1)
    with pytest.raises(TypeError, match="images must be a tensor, a data set or a DataLoader, got a int"):
        calibrate_batchnorm(network(), 3)


def test_a_train_of_ones_own_is_called_on_the_way_back():
    class Merging(nn.Module):
        """As LoRA layers do it: evaluation merges a weight, training takes it out again."""

        def __init__(self):
            super().__init__()
            self.layer, self.merged = nn.Linear(64, 4), False

        def train(self, mode=True):
            super().train(mode)
            if self.merged == mode:
                self.layer.weight.data += -1 if mode else 1
                self.merged = not mode
            return self

        def forward(self, x):
            return self.layer(x.flatten(1))

    model = nn.Sequential(nn.BatchNorm2d(1), Merging()).train()
    before = model[1].layer.weight.clone()
    calibrate_batchnorm(model, IMAGES)
    assert model[1].training
    assert not model[1].merged
    assert torch.equal(model[1].layer.weight, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_images_of_any_precision_are_taken(dtype):
    model, other = network(), network()
    calibrate_batchnorm(model, IMAGES.to(dtype))
    calibrate_batchnorm(other, IMAGES.to(dtype).float())
    assert torch.equal(model[1].running_mean, other[1].running_mean)


def test_statistics_of_a_model_without_parameters():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4, affine=False))
    images = torch.randn(64, 1, 2, 2) + 3
    calibrate_batchnorm(model, images)
    assert model[1].running_mean.allclose(images.flatten(1).mean(0), atol=1e-4)
