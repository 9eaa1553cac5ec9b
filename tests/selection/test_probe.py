"""The user's model is looked at and never left changed."""

import random

import numpy as np
import pytest
import torch
from scenarios import conv_net, digits, trained_net
from torch import nn
from torch.utils.data import Dataset

from coreset_sampler import CoresetSampler, DiagonalLaplace, PointMass, Snapshots, SphericalGaussian, strategies


def everything(model):
    """All that selection must leave alone, in a form that compares bit for bit."""
    return {
        "values": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()},
        "identity": [id(p) for p in model.parameters()] + [id(b) for b in model.buffers()],
        "versions": [p._version for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "hooks": [
            (list(m._forward_hooks), list(m._forward_pre_hooks), list(m._backward_hooks)) for m in model.modules()
        ],
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "random": (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()),
        "autocast": (torch.is_autocast_cache_enabled(), torch.is_grad_enabled()),
    }


def assert_same(before, after):
    for part, value in before.items():
        flat_before, flat_after = (
            torch.utils._pytree.tree_leaves(value),
            torch.utils._pytree.tree_leaves(after[part]),
        )
        assert len(flat_before) == len(flat_after), part
        for a, b in zip(flat_before, flat_after, strict=True):
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b)
            assert same, part


def unusual_state(model):
    """Some modules in eval mode, a frozen layer, gradients waiting, a hook of the user's."""
    model.train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    x, y = digits().tensors
    nn.functional.cross_entropy(model(x[:32]), y[:32]).backward()
    model[3].register_forward_hook(lambda *_: None)
    return model


STRATEGIES = {
    "norm": lambda: strategies.Stable(),
    "redraw": lambda: strategies.Stable(posterior=SphericalGaussian(0.1, redraw=1)),
    "head": lambda: strategies.Stable(posterior=SphericalGaussian(0.1, "head")),
    "all": lambda: strategies.Stable(posterior=SphericalGaussian(0.1, "all")),
    "laplace": lambda: strategies.Stable(posterior=DiagonalLaplace()),
    "snapshots": lambda: strategies.Stable(posterior=Snapshots([conv_net(s).state_dict() for s in range(4)])),
    "scoring every third time": lambda: strategies.Stable(rescore_every=3),
    "warm-up": lambda: strategies.WarmUp(strategies.Stable(), selections=1),
    **{name: lambda name=name: name for name in strategies.available() if name != "stable"},
    "label_confidence": lambda: strategies.LabelConfidence(posterior=PointMass(), rescore_every=1, warm_up=0),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_selection_leaves_the_model_bit_for_bit_as_it_was(name):
    model = unusual_state(trained_net())
    sampler = CoresetSampler(digits(), model, size=100, strategy=STRATEGIES[name]())
    before = everything(model)
    sampler.select()
    sampler.select()
    assert_same(before, everything(model))


class Failing(nn.Module):
    """Raises, or is interrupted, at the n-th call, after writing into a buffer and drawing a random number."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.at, self.error, self.count = at, error, 0
        self.register_buffer("calls", torch.zeros(()))
        self.net = trained_net()

    def forward(self, x):
        self.calls += 1
        self.count += 1
        torch.rand(1)
        if self.count >= self.at:
            raise self.error("in the middle of a draw")
        return self.net(x)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("posterior", [SphericalGaussian(0.1), SphericalGaussian(0.1, redraw=1), DiagonalLaplace()])
def test_a_selection_that_is_interrupted_leaves_no_trace_and_loses_nothing(error, posterior):
    model = Failing(6, error)
    model.train()
    sampler = CoresetSampler(digits(), model, size=100, strategy=strategies.Stable(posterior=posterior))
    before, state = everything(model), sampler.state_dict()
    with pytest.raises(error, match="in the middle"):
        sampler.select()
    assert_same(before, everything(model))
    assert sampler.state_dict() == state
    model.at = 10**9
    assert len(sampler.select()) == 100


def test_a_model_that_counts_its_calls_in_a_buffer_does_not_notice():
    model = Failing(10**9, RuntimeError)
    CoresetSampler(digits(), model, size=50, strategy="stable").select()
    assert float(model.calls) == 0


class Caching(nn.Module):
    """Builds a table at its first call and keeps it, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = trained_net(), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0.9, 1.1, 64).view(1, 1, 8, 8)
        return self.net(x * self.table)


def test_training_goes_on_after_a_selection_filled_a_cache_inside_the_model():
    model = Caching()
    CoresetSampler(digits(), model, size=50, strategy="stable").select()
    x, y = digits().tensors
    x = x[:8].clone().requires_grad_()
    nn.functional.cross_entropy(model(x), y[:8]).backward()
    assert model.table is not None
    assert x.grad is not None


class RandomCrop(Dataset):
    """An augmenting data set that draws from all three global random states."""

    def __init__(self):
        self.targets = digits().tensors[1]

    def __len__(self):
        return 1797

    def __getitem__(self, i):
        x, y = digits()[i]
        shift = int(torch.randint(0, 2, ())) + random.randint(0, 1) + int(np.random.randint(0, 2))
        return x.roll(shift, 2), y


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_neither_disturbs_nor_is_disturbed_by_the_users_random_state(workers):
    picks = []
    for seed in (1, 2):
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        model = trained_net()
        before = everything(model)
        picks.append(
            CoresetSampler(RandomCrop(), model, size=100, num_workers=workers, strategy="stable").select().indices
        )
        assert_same(before, everything(model))
    assert torch.equal(*picks)


def test_gradients_equal_those_that_autograd_finds():
    model = trained_net().eval()
    seen = {}

    def look(view, size, generator):
        seen["gradients"] = list(view.gradients([torch.arange(40, 70), torch.arange(3)]))
        seen["embeddings"] = list(view.embeddings([torch.arange(40, 70), torch.arange(3)]))
        return strategies.Uniform().select(view, size, None, generator)[0]

    CoresetSampler(digits(), model, size=10, strategy=look, scoring_batch_size=7).select()
    x, y = (t[40:70] for t in digits().tensors)
    logits = model(x).detach().requires_grad_()
    nn.functional.cross_entropy(logits, y, reduction="sum").backward()
    assert [g.shape for g in seen["gradients"]] == [(1, 30, 10), (1, 3, 10)]
    assert torch.allclose(seen["gradients"][0][0], logits.grad, atol=1e-6)
    assert torch.allclose(seen["embeddings"][0], model[:9](x), atol=1e-5)


def test_a_perturbed_draw_equals_a_copy_of_the_model_with_that_noise():
    model = trained_net().eval()
    seen = {}

    def look(view, size, generator):
        draws = SphericalGaussian(0.2).draw(view, 3, generator)
        seen["draws"], seen["gradients"] = draws, next(view.gradients([torch.arange(20)], draws))
        return strategies.Uniform().select(view, size, None, generator)[0]

    CoresetSampler(digits(), model, size=10, strategy=look).select()
    x, y = (t[:20] for t in digits().tensors)
    for draw, gradients in zip(seen["draws"], seen["gradients"], strict=True):
        copy = trained_net().eval()
        copy.load_state_dict({**copy.state_dict(), **draw})
        expected = copy(x).softmax(1) - nn.functional.one_hot(y, 10)
        assert torch.allclose(gradients, expected, atol=1e-6)


@pytest.mark.integration
def test_forward_understands_dicts_and_hugging_face_outputs():
    transformers = pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=50,
        num_labels=3,
    )
    generator = torch.Generator().manual_seed(0)
    rows = {
        "input_ids": torch.randint(0, 50, (90, 6), generator=generator).tolist(),
        "attention_mask": [[1] * 6] * 90,
        "idx": list(range(90)),
        "label": [i % 3 for i in range(90)],
    }
    data = datasets.Dataset.from_dict(rows).with_format("torch")
    sampler = CoresetSampler(data, transformers.BertForSequenceClassification(config), size=12, strategy="stable")
    assert len(sampler.select()) == 12
    assert sampler.stats["forward_examples"] > 0


def test_forward_can_be_given():
    calls = []

    def forward(model, batch):
        calls.append(len(batch[0]))
        return model(batch[0]), batch[1]

    CoresetSampler(
        digits(), trained_net(), size=50, forward_fn=forward, scoring_batch_size=64, strategy="stable"
    ).select()
    assert max(calls) == 64


def test_selection_runs_inside_the_users_autocast():
    model, dtypes = trained_net(), set()
    model[9].register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    sampler = CoresetSampler(
        digits(), model, size=50, strategy=strategies.Stable(posterior=SphericalGaussian(0.1, redraw=1))
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sampler.select()
    assert dtypes == {torch.bfloat16}


class Writing(nn.Module):
    """Writes into what it is given and into a buffer, at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = trained_net()
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x):
        self.shift += 0.3
        return self.net(x.mul_(0.5).add_(self.shift))


@pytest.mark.parametrize("redraw", [None, 1])
def test_draws_see_the_same_input_and_buffers_whatever_the_network_does_to_them(redraw):
    seen = []

    def look(view, size, generator):
        draws = SphericalGaussian(0.0, redraw=redraw).draw(view, 3, generator)
        seen.extend(view.gradients([torch.arange(10)], draws))
        return strategies.Uniform().select(view, size, None, generator)[0]

    CoresetSampler(digits(), Writing(), size=10, strategy=look).select()
    assert torch.equal(seen[0][0], seen[0][1])
    assert torch.equal(seen[0][0], seen[0][2])


def test_a_draw_that_leaves_the_model_as_it_is_may_come_first():
    class Mixed:
        def draw(self, view, draws, generator):
            return [{}, *SphericalGaussian(0.5).draw(view, draws - 1, generator)]

    seen = []

    def look(view, size, generator):
        seen.extend(view.gradients([torch.arange(10)], Mixed().draw(view, 3, generator)))
        return strategies.Uniform().select(view, size, None, generator)[0]

    CoresetSampler(digits(), trained_net(), size=10, strategy=look).select()
    first, second, third = seen[0]
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_a_tied_head_is_perturbed_too():
    model = trained_net()
    model[8] = nn.Identity()
    model.add_module("tied", nn.Linear(10, 10))
    model.add_module("again", nn.Linear(10, 10))
    model.again.weight = model.tied.weight
    seen = []

    def look(view, size, generator):
        seen.extend(SphericalGaussian(0.5, "head").draw(view, 2, generator))
        return strategies.Uniform().select(view, size, None, generator)[0]

    CoresetSampler(digits(), model, size=10, strategy=look).select()
    assert {name.split(".")[-1] for name in seen[0]} == {"weight", "bias"}


def test_reading_labels_leaves_the_random_state_alone():
    class Unlabelled(RandomCrop):
        def __init__(self):
            pass

    model = trained_net()
    sampler = CoresetSampler(Unlabelled(), model, size=10, strategy="stable")
    before = everything(model)
    assert torch.equal(sampler.read_labels(), digits().tensors[1])
    assert_same(before, everything(model))


def test_embeddings_are_what_the_layer_called_last_receives_and_not_the_one_registered_last():
    model = trained_net()
    model.add_module("spare", nn.Linear(3, 3))
    model.forward = lambda x: model[:10](x)
    coreset = CoresetSampler(digits(), model, size=20, strategy=strategies.KCenter()).select()
    plain = CoresetSampler(digits(), trained_net(), size=20, strategy=strategies.KCenter()).select()
    assert torch.equal(coreset.indices, plain.indices)
