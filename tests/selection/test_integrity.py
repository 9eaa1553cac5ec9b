"""Your model comes back as it was: many kinds of model, every strategy, everything compared before and after."""

import copy
import random
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from coreset_sampler import CoresetSampler, DiagonalLaplace, PointMass, Snapshots, SphericalGaussian, strategies

N, CLASSES = 36, 3


def vectors():
    return TensorDataset(torch.randn(N, 12, generator=torch.Generator().manual_seed(0)), torch.arange(N) % CLASSES)


def images():
    x = torch.randn(N, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(N) % CLASSES)


def small_images():
    return TensorDataset(images().tensors[0][:, :, :8, :8].clone(), torch.arange(N) % CLASSES)


def words():
    x = torch.randint(0, 20, (N, 6), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(N) % CLASSES)


class Rows(Dataset):
    """Dicts, as Hugging Face models take them."""

    def __init__(self, key, data):
        self.key, self.data, self.labels = key, data, data.tensors[1]

    def __len__(self):
        return N

    def __getitem__(self, i):
        return {self.key: self.data[i][0], "labels": self.data[i][1]}


def mlp(norm=nn.BatchNorm1d, **settings):
    return nn.Sequential(nn.Linear(12, 8), norm(8, **settings), nn.ReLU(inplace=True), nn.Linear(8, CLASSES))


def conv(norm):
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES))


class SharedModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16))
        self.features = nn.Sequential(*self.backbone)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.features(x))


class SameLayerTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, CLASSES)
        self.second, self.other_norm = self.first, self.norm

    def forward(self, x):
        return self.head(self.other_norm(self.second(self.norm(self.first(x)))))


class TiedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.norm(self.b(self.a(x))))


class LoRA(nn.Linear):
    """Adds its matrices to the weight in eval mode and takes them off in train mode, as loralib does."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.weight.requires_grad_(False)
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down)
            self.merged = not mode
        return self

    def forward(self, x):
        y = nn.functional.linear(x, self.weight, self.bias)
        return y if self.merged else y + x @ self.down.T @ self.up.T


class Folding(nn.Module):
    """In eval mode its two layers become one new parameter, and the first is gone, as in RepVGG."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def train(self, mode=True):
        super().train(mode)
        if mode and hasattr(self, "folded"):
            self.a = nn.Linear(12, 12)
            self.a.weight = nn.Parameter(self.folded.detach().clone())
            del self.folded
        elif not mode and hasattr(self, "a"):
            self.folded = nn.Parameter(self.a.weight.detach() * 1.0)
            del self.a
        return self

    def forward(self, x):
        return self.head(self.norm(x @ self.folded.T if hasattr(self, "folded") else self.a(x)))


class Caching(nn.Module):
    """Keeps a product of its weights in eval mode, under a flag, in an attribute and in a dict."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)
        self.cached, self.table, self.tables = False, None, {}

    def forward(self, x):
        if self.training:
            return self.head(x * self.norm.weight) + x @ self.head.weight.T
        if not self.cached:
            self.table, self.cached = self.norm.weight * 1.0, True
            self.tables["head"] = [self.head.weight * 1.0]
        return self.head(x * self.table) + x @ self.tables["head"][0].T


class Writing(nn.Module):
    """Writes wherever a forward can: buffers, parameters by `data`, plain tensors, counters, lists, a generator."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("average", torch.zeros(12))
        self.scale, self.plain, self.calls, self.seen = nn.Parameter(torch.ones(12)), torch.ones(12), 0, []
        self.generator, self.numbers = torch.Generator().manual_seed(3), random.Random(4)

    def forward(self, x):
        self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.scale.data.mul_(0.99)
        self.plain += 0.01
        self.calls += 1
        self.seen.append(len(x))
        noise = torch.rand(12, generator=self.generator) * self.numbers.random()
        return self.net(x * self.scale * self.plain + self.average + 0 * noise)


class Moving(nn.Module):
    """Gives a parameter other memory."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = mlp(), nn.Parameter(torch.ones(12))

    def forward(self, x):
        self.scale.data = self.scale.data * 0.5
        return self.net(x * self.scale)


class Hidden(nn.Module):
    """Holds modules where torch does not look for them."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(12, 12), nn.BatchNorm1d(12)]
        self.pair = (nn.BatchNorm1d(12),)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.pair[0](self.layers[1](self.layers[0](x)))))


class FrozenBackbone(nn.Module):
    """Its backbone was made, and runs, under inference_mode."""

    def __init__(self):
        super().__init__()
        with torch.inference_mode():
            self.backbone = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 8), nn.ReLU(inplace=True))
        self.backbone.requires_grad_(False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        with torch.inference_mode():
            features = self.backbone(x)
        return self.head(self.norm(features.clone()))


class StubbornAttributes(nn.Module):
    """Takes tensors by its own rules."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def __setattr__(self, name, value):
        if "head" in self.__dict__.get("_modules", {}) and name != "training":
            raise AttributeError(name)
        super().__setattr__(name, value)

    def forward(self, x):
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.norm, self.head = kind(4, 6, batch_first=True), nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.rnn(x.view(-1, 3, 4))[0][:, -1]))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = x.view(-1, 3, 4)
        return self.head(self.norm(self.attention(x, x, x)[0].mean(1)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(x.view(-1, 3, 4)).mean(1))


class Words(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 6, **settings), nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.embed(x).mean(1)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.body, self.head, self.reentrant = mlp()[:3], nn.Linear(8, CLASSES), reentrant
        self.body[2] = nn.ReLU()

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


class Vector(nn.Module):
    """A classifier without a weight matrix."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x):
        return x[:, :CLASSES] * self.scale


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.net, self.dtype = mlp(nn.LayerNorm).to(dtype), dtype

    def forward(self, x):
        return self.net(x.to(self.dtype))


def ran(model, data):
    """Lazy modules that have run."""
    model(data.tensors[0][:4])
    return model


def partly_frozen():
    model = mlp()
    model[0].requires_grad_(False)
    model[1].eval()
    return model


def hooked():
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    model[1].register_forward_pre_hook(lambda *_: None)
    model[3].register_full_backward_hook(lambda *_: None)
    model.register_forward_hook(lambda *_: None, with_kwargs=False)
    return model


def old_spectral():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(12, 8)), nn.LayerNorm(8), nn.Linear(8, CLASSES))


def old_weight_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(12, 8)), nn.LayerNorm(8), nn.Linear(8, CLASSES))


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


def parametrized():
    model = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, CLASSES))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


def transformer(kind, **config):
    transformers = pytest.importorskip("transformers")
    settings = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, num_labels=CLASSES)
    names = {
        "vit": "ViTForImageClassification",
        "bert": "BertForSequenceClassification",
        "albert": "AlbertForSequenceClassification",
        "gpt2": "GPT2ForSequenceClassification",
    }
    if kind == "gpt2":
        settings = dict(n_embd=8, n_layer=2, n_head=2, num_labels=CLASSES, pad_token_id=0)
    build = getattr(transformers, names[kind])
    return build(build.config_class(**{**settings, **config}))


def timm_model(name, **settings):
    return pytest.importorskip("timm").create_model(name, num_classes=CLASSES, **settings)


def compiled_in_place():
    model = mlp()
    model.compile(backend="eager")
    return model


MODELS = {
    "plain": (mlp, vectors),
    "linear": (lambda: nn.Linear(12, CLASSES), vectors),
    "no norm": (lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, CLASSES)), vectors),
    "no matrix": (Vector, vectors),
    "shared modules": (SharedModules, vectors),
    "same layer twice": (SameLayerTwice, vectors),
    "tied weights": (TiedWeights, vectors),
    "LoRA": (lambda: nn.Sequential(LoRA(12, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)), vectors),
    "folding in eval": (Folding, vectors),
    "caching in eval": (Caching, vectors),
    "writing": (Writing, vectors),
    "moving": (Moving, vectors),
    "hidden modules": (Hidden, vectors),
    "parametrized": (parametrized, vectors),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 8)), *mlp()[1:]), vectors),
    "old spectral norm": (old_spectral, vectors),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(12, 8)), *mlp()[1:]), vectors),
    "old weight norm": (old_weight_norm, vectors),
    "orthogonal": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(12, 8)), *mlp()[1:]), vectors),
    "lazy that has run": (lambda: ran(conv(nn.LazyBatchNorm2d()), small_images()), small_images),
    "batch norm, no momentum": (lambda: mlp(momentum=None), vectors),
    "batch norm, no statistics": (lambda: mlp(track_running_stats=False), vectors),
    "instance norm": (
        lambda: ran(conv(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), small_images()),
        small_images,
    ),
    "group norm": (lambda: ran(conv(nn.GroupNorm(2, 4)), small_images()), small_images),
    "channels last": (
        lambda: ran(conv(nn.BatchNorm2d(4)), small_images()).to(memory_format=torch.channels_last),
        small_images,
    ),
    "compiled": (lambda: torch.compile(mlp(), backend="eager"), vectors),
    "compiled in place": (compiled_in_place, vectors),
    "compiled inside": (
        lambda: nn.Sequential(torch.compile(mlp()[:3], backend="eager"), nn.Linear(8, CLASSES)),
        vectors,
    ),
    "bfloat16": (lambda: Cast(torch.bfloat16), vectors),
    "float64": (lambda: Cast(torch.float64), vectors),
    "data parallel": (lambda: nn.DataParallel(mlp()), vectors),
    "partly frozen": (partly_frozen, vectors),
    "inference backbone": (FrozenBackbone, vectors),
    "dropout": (lambda: nn.Sequential(*mlp()[:3], nn.Dropout(), nn.AlphaDropout(), nn.Linear(8, CLASSES)), vectors),
    "hooks": (hooked, vectors),
    "own setattr": (StubbornAttributes, vectors),
    "RNN": (lambda: Recurrent(nn.RNN), vectors),
    "LSTM": (lambda: Recurrent(nn.LSTM), vectors),
    "attention": (Attention, vectors),
    "transformer encoder": (Encoder, vectors),
    "embedding": (Words, words),
    "embedding, max_norm": (lambda: Words(max_norm=0.5), words),
    "embedding, sparse": (lambda: Words(sparse=True), words),
    "checkpointed": (Checkpointed, vectors),
    "layers without parameters": (
        lambda: nn.Sequential(OrderedDict(id=nn.Identity(), a=nn.Linear(12, 8), norm=nn.LayerNorm(8), relu=nn.GELU()))
        .append(nn.Linear(8, CLASSES)),
        vectors,
    ),
    "BERT": (lambda: transformer("bert", vocab_size=20), lambda: Rows("input_ids", words())),
    "ALBERT": (
        lambda: transformer("albert", vocab_size=20, embedding_size=4),
        lambda: Rows("input_ids", words()),
    ),
    "GPT-2": (lambda: transformer("gpt2", vocab_size=20), lambda: Rows("input_ids", words())),
    "ViT": (lambda: transformer("vit", image_size=8, patch_size=4), lambda: Rows("pixel_values", small_images())),
    "timm test_resnet": (lambda: timm_model("test_resnet"), images),
    "timm test_vit": (lambda: timm_model("test_vit", img_size=32), images),
    "timm test_efficientnet": (lambda: timm_model("test_efficientnet"), images),
}  # fmt: skip
OF_FRAMEWORKS = re.compile("BERT|GPT|ViT|timm")
KINDS = [pytest.param(kind, marks=[pytest.mark.integration] * bool(OF_FRAMEWORKS.search(kind))) for kind in MODELS]

LOOKS = {
    "stable": strategies.Stable,
    "stable all": lambda: strategies.Stable(posterior=SphericalGaussian(0.1, "all")),
    "stable redraw": lambda: strategies.Stable(posterior=SphericalGaussian(0.1, "all", redraw=1)),
    "stable laplace": lambda: strategies.Stable(posterior=DiagonalLaplace(layers="all", examples=12)),
    "stable rescored": lambda: strategies.Stable(rescore_every=2, confidence_exponent=1.0),
    "warm_up": lambda: strategies.WarmUp(strategies.Stable(), selections=1),
    **{name: lambda name=name: name for name in strategies.available() if name != "stable"},
    "label_confidence": lambda: strategies.LabelConfidence(posterior=PointMass(), rescore_every=1, warm_up=0),
}
EVERY_RUN = ("stable", "stable all", "stable laplace", "herding")
NO_EMBEDDINGS = {("no matrix", "herding"), ("no matrix", "k_center")}


def modules_in(value, found):
    """All modules, also those in lists, tuples and dicts, that torch does not know of."""
    if isinstance(value, nn.Module) and id(value) not in found:
        found[id(value)] = value
        modules_in(list(value.__dict__.values()), found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            modules_in(item, found)
    elif isinstance(value, dict):
        modules_in(list(value.values()), found)
    return found


def bits(tensor):
    return None if tensor is None else (id(tensor), tensor.dtype, tensor.stride(), tensor.detach().clone())


def contents(value):
    """An attribute in a form that compares: what is in it, and that it is the same object."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, (list, tuple)):
        return id(value), [contents(v) for v in value]
    if isinstance(value, dict):
        return id(value), [(k, contents(v)) for k, v in value.items()]
    if isinstance(value, torch.Generator):
        return id(value), value.get_state()
    if isinstance(value, random.Random):
        return id(value), repr(value.getstate())
    return id(value), repr(value) if isinstance(value, (int, float, str)) else None


def snapshot(model):
    modules = modules_in(model, {}).values()
    parameters = list(model.parameters())
    return {
        "attributes": [[(k, contents(v)) for k, v in m.__dict__.items()] for m in modules],
        "modes": [m.training for m in modules],
        "parameters": [(name, bits(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        "buffers": [(name, bits(b)) for name, b in model.named_buffers(remove_duplicate=False)],
        "gradients": [
            (p.requires_grad, None if p.grad is None or p.grad.is_sparse else bits(p.grad)) for p in parameters
        ],
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),
        "autograd": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), parametrize._cache_enabled),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_unchanged(before, model):
    after = snapshot(model)
    for part, value in before.items():
        assert same(value, after[part]), part


def train_step(model, data):
    """Gradients of one training step, by name: whether each parameter gets one."""
    batch = torch.utils.data.default_collate([data[i] for i in range(6)])
    logits = model(**batch).logits if isinstance(batch, dict) else model(batch[0])
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    model.zero_grad()
    nn.functional.cross_entropy(logits.float(), labels).backward()
    return {name: p.grad is not None for name, p in model.named_parameters()}


def trained(kind):
    torch.manual_seed(0)
    build, data = MODELS[kind]
    model, examples = build(), data()
    for module in modules_in(model, {}).values():
        module.training = True
    if kind == "partly frozen":
        model[1].eval()
    return model, examples, train_step(model, examples)


def assert_comes_back(kind, names, selections=1):
    model, data, gradients = trained(kind)
    for name in names:
        if (kind, name) in NO_EMBEDDINGS:
            continue
        sampler = CoresetSampler(data, model, size=9, strategy=LOOKS[name](), scoring_batch_size=16, progress=False)
        before = snapshot(model)
        try:
            for _ in range(selections):
                sampler.select()
            assert_unchanged(before, model)
        except AssertionError as error:
            raise AssertionError(f"{kind}, {name}: {error}") from error
    assert train_step(model, data) == gradients


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back_as_it_was(kind):
    assert_comes_back(kind, EVERY_RUN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_comes_back_as_it_was_from_every_strategy(kind):
    assert_comes_back(kind, LOOKS, selections=2)
    model, data, _ = trained(kind)
    states = [
        copy.deepcopy(getattr(model, "_orig_mod", getattr(model, "module", model)).state_dict()) for _ in range(4)
    ]
    before = snapshot(model)
    snapshots = strategies.Stable(posterior=Snapshots(states))
    sampler = CoresetSampler(data, model, size=9, strategy=snapshots, progress=False)
    if kind == "folding in eval":  # states of training have no place in what eval mode makes of it
        with pytest.raises(ValueError, match="does not fit the model"):
            sampler.select()
    else:
        sampler.select()
    assert_unchanged(before, model)


@pytest.mark.slow
def test_a_network_of_timm_with_many_shared_modules_comes_back_as_it_was():
    model = timm_model("coat_tiny", img_size=32)
    strategy = strategies.Stable(posterior=SphericalGaussian(0.1, "all"))
    before = snapshot(model)
    CoresetSampler(images(), model, size=9, strategy=strategy, progress=False).select()
    assert_unchanged(before, model)


def test_there_are_at_least_forty_kinds():
    assert len(MODELS) >= 40
