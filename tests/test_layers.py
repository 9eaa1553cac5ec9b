import pytest
from scenarios import conv_net
from torch import nn

from coreset_sampler.layers import head_name, is_norm, modules_of, parameter_names


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.LayerNorm(4),
        nn.LayerNorm((2, 3)),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.RMSNorm(4),
    ],
)
def test_torch_norm_layers_are_found(module):
    assert is_norm(module)


def test_the_norm_layers_of_timm_are_found():
    layers = pytest.importorskip("timm.layers")
    for module in (layers.LayerNorm2d(4), layers.RmsNorm(4), layers.GroupNorm1(4), layers.BatchNormAct2d(4)):
        assert is_norm(module), type(module)
    assert not is_norm(layers.LayerScale(4))


def test_the_norm_layers_of_transformers_are_found():
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    assert is_norm(LlamaRMSNorm(4))
    assert is_norm(T5LayerNorm(4))


@pytest.mark.parametrize("module", [nn.Linear(3, 4), nn.Conv2d(3, 4, 1), nn.ReLU(), nn.LocalResponseNorm(2)])
def test_other_layers_are_no_norm_layers(module):
    assert not is_norm(module)


def test_the_head_is_the_last_layer_with_a_matrix():
    assert head_name(conv_net()) == "9"
    assert list(modules_of(conv_net(), "head")) == ["9"]


def test_a_head_behind_a_parametrization_is_found_with_its_parameters():
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3, bias=False))
    model = nn.Sequential(nn.Linear(4, 4), head)
    names = parameter_names(modules_of(model, "head"))
    assert sorted(names) == ["1.parametrizations.weight.original0", "1.parametrizations.weight.original1"]


def test_layers_can_be_names_or_a_function():
    model = conv_net()
    assert parameter_names(modules_of(model, ["4"])) == ["4.weight", "4.bias"]
    assert list(modules_of(model, lambda name, module: isinstance(module, nn.Conv2d))) == ["0", "3"]
    assert len(parameter_names(modules_of(model, "all"))) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("layers", "message"),
    [("norms", "must be"), (["nowhere"], "nowhere"), (lambda *_: False, "matches no layer")],
)
def test_unknown_layers_are_named(layers, message):
    with pytest.raises(ValueError, match=message):
        modules_of(conv_net(), layers)


def test_a_network_without_norm_layers_gets_an_error_that_names_the_way_out():
    with pytest.raises(ValueError, match='layers="head"'):
        modules_of(nn.Sequential(nn.Linear(3, 2)), "norm")
    with pytest.raises(ValueError, match="no norm layer"):
        modules_of(nn.Sequential(nn.InstanceNorm2d(3), nn.Conv2d(3, 2, 1)), "norm")
