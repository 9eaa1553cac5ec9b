"""Sharing between draws must never change a number: everything here is compared bit for bit with separate runs."""

import pytest
import torch
from scenarios import conv_net
from torch import nn
from torch.func import functional_call

from coreset_sampler.layers import modules_of, parameter_names
from coreset_sampler.selection.shared_forward import CannotShareError, run_shared


def draws_of(model, layers, redraw=None, count=3):
    modules = list(modules_of(model, layers).items())
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    fresh = parameter_names(dict(modules[-redraw:] if redraw else modules))
    shared = {n: parameters[n] + 0.1 * torch.randn_like(parameters[n]) for n in parameter_names(dict(modules))}
    draws = [
        {**shared, **{n: parameters[n] + 0.1 * torch.randn_like(parameters[n]) for n in fresh}} for _ in range(count)
    ]
    return draws, [draws[0][n] for n in fresh]


def assert_shared_equals_separate(model, call, layers, redraw):
    model.eval()
    draws, changed = draws_of(model, layers, redraw)
    with torch.no_grad():
        separate = [call(draw) for draw in draws]
        shared, spared = run_shared(call, draws, changed)
    assert all(torch.equal(a, b) for a, b in zip(separate, shared, strict=True))
    assert not torch.equal(shared[0], shared[1])
    return spared


@pytest.mark.parametrize(("layers", "redraw"), [("norm", None), ("norm", 1), ("head", None), ("all", None), ("all", 2)])
def test_a_plain_network_gives_the_same_bits(layers, redraw):
    model, x = conv_net(), torch.randn(9, 1, 8, 8)
    assert_shared_equals_separate(model, lambda d: functional_call(model, d, (x,)), layers, redraw)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050"])
def test_timm_networks_give_the_same_bits(name):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=5, **({"img_size": 32} if "vit" in name else {}))
    x = torch.randn(3, 3, 32, 32)
    for layers, redraw in (("norm", None), ("norm", 2), ("head", None)):
        assert_shared_equals_separate(model, lambda d: functional_call(model, d, (x,)), layers, redraw)


@pytest.mark.integration
def test_a_hugging_face_encoder_gives_the_same_bits():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    model = transformers.BertForSequenceClassification(config)
    batch = {
        "input_ids": torch.randint(0, 100, (4, 7)),
        "attention_mask": torch.ones(4, 7, dtype=torch.int64),
    }
    batch["attention_mask"][0, 4:] = 0
    for redraw in (None, 1):
        assert_shared_equals_separate(model, lambda d: functional_call(model, d, (), batch).logits, "norm", redraw)


def test_only_what_depends_on_the_changed_layer_is_computed_again():
    model, x = conv_net(), torch.randn(9, 1, 8, 8)
    convolutions = []
    model[3].register_forward_hook(lambda *_: convolutions.append(1))
    spared = assert_shared_equals_separate(model, lambda d: functional_call(model, d, (x,)), "head", None)
    assert spared > 0.6
    spared_early = assert_shared_equals_separate(model, lambda d: functional_call(model, d, (x,)), "norm", None)
    assert spared_early < spared


class InPlace(nn.Module):
    """Adds a dependent branch in place onto a result that does not depend on the changed layer."""

    def __init__(self, read_first: bool = False, twice: bool = False, write_between: bool = False) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.second = nn.LayerNorm(6)
        self.read_first, self.twice, self.write_between = read_first, twice, write_between

    def forward(self, x):
        trunk = self.trunk(x)
        if self.write_between:
            first = self.branch(trunk)
            trunk.relu_()
            return self.head(first + self.second(trunk))
        if self.twice:
            trunk.relu_()
        branch = self.branch(trunk if self.read_first else x)
        trunk += branch
        return self.head(trunk)


def test_a_shared_result_that_is_written_to_starts_afresh_in_every_run():
    model, x = InPlace(), torch.randn(4, 6)
    assert_shared_equals_separate(model, lambda d: functional_call(model, d, (x,)), "norm", None)


@pytest.mark.parametrize("model", [InPlace(read_first=True), InPlace(twice=True), InPlace(write_between=True)])
def test_what_cannot_be_replayed_safely_is_refused(model):
    x = torch.randn(4, 6)
    draws, changed = draws_of(model, "norm")
    with torch.no_grad(), pytest.raises(CannotShareError):
        run_shared(lambda d: functional_call(model, d, (x,)), draws, changed)


def test_a_network_that_takes_another_path_is_refused():
    paths = iter([torch.sin, torch.cos, torch.cos])
    weight = [torch.randn(3), torch.randn(3)]
    with torch.no_grad(), pytest.raises(CannotShareError, match="another path"):
        run_shared(lambda w: next(paths)(torch.ones(3)) * w, weight, [weight[0]])


def test_inference_tensors_are_shared_and_writes_to_them_noticed():
    with torch.inference_mode():
        trunk = torch.randn(4, 6)
    weights = [torch.randn(6), torch.randn(6)]

    def reads(weight):
        return (trunk * weight).sum(1) + torch.sin(trunk).sum(1)

    def writes(weight):
        with torch.inference_mode():
            first = trunk * 1.0
            result = first * weight
            first.relu_()
            return result + first * weight

    with torch.no_grad():
        shared, spared = run_shared(reads, weights, [weights[0]])
        assert all(torch.equal(a, reads(w)) for a, w in zip(shared, weights, strict=True))
        assert spared > 0
        with pytest.raises(CannotShareError, match="written to after it had been read"):
            run_shared(writes, weights, [weights[0]])
