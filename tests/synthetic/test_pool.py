"""A pool of several kinds of networks: BatchNorm with the coreset's statistics, kinds in state and file, bounds."""

from functools import partial

import pytest
import torch
from torch import nn

from coreset_sampler import distill
from coreset_sampler.synthetic.dataset import SyntheticCoreset
from coreset_sampler.synthetic.distillers.augment import Moves
from coreset_sampler.synthetic.distillers.checkpoint import Progress, load, same, save
from coreset_sampler.synthetic.distillers.pool import FirstRowsStatistics, PoolNetwork
from coreset_sampler.synthetic.distillers.real_data import RealData
from coreset_sampler.synthetic.distillers.variational import Variational
from coreset_sampler.synthetic.networks import MANY, NORMS, Kind, description, kinds, network

KINDS = [network(kind, 1, 3, 8) for kind in ("convnet:4", "convnet-batch:4-8", "vgg-batch:4-4")]


def noise(n, seed=0, **more):
    return torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed), **more)


def data():
    return RealData(noise(60), torch.arange(60) % 3)


def begun(distiller, seed=0):
    return distiller.init(*data().per_class(2, torch.Generator().manual_seed(0)), seed=seed)


def after(distiller, state, steps):
    for _ in range(steps):
        state, _ = distiller.step(state, data())
    return state


def by_hand(model, coreset, real):
    """Coreset and real images through conv, BatchNorm, relu and pooling, each row and channel on its own."""
    for layer in model[:-1]:
        if isinstance(layer, nn.BatchNorm2d):
            normed = [torch.empty_like(coreset), torch.empty_like(real)]
            for c in range(coreset.shape[1]):
                values = coreset[:, c].flatten().tolist()
                mean = sum(values) / len(values)
                deviation = (sum((value - mean) ** 2 for value in values) / len(values) + layer.eps) ** 0.5
                for out, x in zip(normed, (coreset, real), strict=True):
                    out[:, c] = (x[:, c] - mean) / deviation * layer.weight[c] + layer.bias[c]
            coreset, real = normed
        else:
            coreset, real = layer(coreset), layer(real)
    return coreset.flatten(1), real.flatten(1)


def test_batch_norm_gives_real_images_the_coresets_statistics():
    kind = PoolNetwork(partial(_double, "convnet-batch:4-8"))
    theta = kind.newborn(torch.Generator().manual_seed(1), noise(1, dtype=torch.float64))
    theta = theta + 0.1 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(2)).double()
    model = _double("convnet-batch:4-8")
    nn.utils.vector_to_parameters(theta, model.parameters())
    coreset, real = noise(7, 3, dtype=torch.float64), 3 + 2 * noise(5, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = by_hand(model, coreset, real)
        got = kind.both_features(kind.parameters(theta), coreset, real)
        own = kind.features(kind.parameters(theta), real)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(own, expected[1], atol=0.1)  # with statistics of its own, which it has not after training


def _double(kind):
    return network(kind, 1, 3, 8)().double()


def test_the_statistics_reach_batch_norm_inside_other_layers_and_leave_evaluation_alone():
    timm_layers = pytest.importorskip("timm.layers")
    layer, x = timm_layers.BatchNormAct2d(1).double(), noise(9, dtype=torch.float64)
    with FirstRowsStatistics(4):
        got, evaluated = layer(x), layer.eval()(x)
    head = x[:4]
    assert torch.allclose(got, ((x - head.mean()) / (head.var(correction=0) + layer.eps).sqrt()).relu())
    assert torch.equal(evaluated, layer(x))
    dense = nn.BatchNorm1d(3, affine=False)
    with FirstRowsStatistics(2):
        rows = dense(torch.tensor([[0.0, 1, 2], [2, 3, 4], [8, 9, 10]]))
    assert torch.allclose(rows[2], torch.full((3,), 7.0), atol=1e-3)


def test_without_batch_norm_no_gradient_is_kept_through_real_images():
    kind = PoolNetwork(KINDS[0])
    parameters = kind.parameters(kind.newborn(torch.Generator(), noise(1)))
    coreset, real = kind.both_features(parameters, noise(4).requires_grad_(), noise(5, 1))
    assert coreset.requires_grad
    assert not real.requires_grad


def test_a_mixed_pool_that_was_saved_and_loaded_goes_on_to_the_same_bits(tmp_path):
    settings = dict(batch=16, pool=4, max_age=3, bounds=((-1.0,), (1.0,)), augmentation=Moves())
    distiller = Variational(KINDS, **settings)
    first = begun(distiller)
    whole = after(distiller, first, 24)
    save(tmp_path / "half.safetensors", Progress(after(distiller, first, 11)), {})
    again = Variational(list(KINDS), **settings)
    assert same(after(again, load(tmp_path / "half.safetensors")[0].state, 13), whole)
    assert not torch.equal(whole.memory["kinds"], first.memory["kinds"])  # newborns of other kinds came
    sizes = [PoolNetwork(make).newborn(torch.Generator(), noise(1)).numel() for make in KINDS]
    for i, kind in enumerate(whole.memory["kinds"].tolist()):
        assert whole.memory[f"network.{i}"].numel() == sizes[kind]


def test_a_pool_of_one_kind_is_the_same_whether_listed_or_not_and_names_no_kinds():
    alone, listed = (Variational(networks, batch=16, pool=2, max_age=2) for networks in (KINDS[1], [KINDS[1]]))
    state = after(alone, begun(alone), 5)
    assert "kinds" not in state.memory
    assert same(state, after(listed, begun(listed), 5))


def test_images_stay_within_bounds_channel_by_channel():
    colour = RealData(torch.rand(60, 2, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3)
    bounds = ((0.0, 0.25), (0.5, 1.0))
    distiller = Variational(network("convnet:4", 2, 3, 8), batch=16, pool=2, lr=0.3, bounds=bounds)
    state = distiller.init(*colour.per_class(2, torch.Generator().manual_seed(0)), seed=0)
    for _ in range(3):
        state, _ = distiller.step(state, colour)
        for channel, (low, high) in enumerate(zip(*bounds, strict=True)):
            assert (state.inputs[:, channel].min().item(), state.inputs[:, channel].max().item()) == (low, high)


def test_networks_of_the_pool_can_learn_from_the_softmax_of_the_targets():
    distiller = Variational(KINDS[0], batch=16, pool=1, pool_loss="cross-entropy", pool_lr=0.01, lr=0.0, label_lr=0.0)
    state = begun(distiller)
    model = KINDS[0]()
    nn.utils.vector_to_parameters(state.memory["network.0"].clone(), model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    nn.functional.cross_entropy(model(state.inputs), state.targets.softmax(-1)).backward()
    optimizer.step()
    theirs = nn.utils.parameters_to_vector(list(model.parameters())[-2:])  # the head's, whose gradients are no rounding
    assert torch.allclose(after(distiller, state, 1).memory["network.0"][-len(theirs) :], theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"network": []}, "network must be a function .*empty list"),
        ({"pool_loss": "hinge"}, "pool_loss must be one of squared, cross-entropy, got 'hinge'"),
        ({"bounds": ((1.0,), (0.0,))}, "bounds must be the lowest and the highest .*got"),
        ({"bounds": ((0.0,), (1.0, 1.0))}, "bounds must be the lowest and the highest"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        Variational(**{"network": KINDS, **wrong})


def test_kinds_must_agree_on_the_number_of_outputs():
    with pytest.raises(ValueError, match=r"same number of outputs, got \[3, 4\]"):
        begun(Variational([KINDS[0], network("convnet:4", 1, 4, 8)], pool=2))


def test_a_kind_says_its_norm_and_widths_and_reads_back():
    assert Kind.parse("resnet-batch:8-16") == Kind("resnet", "batch", (8, 16))
    assert [str(Kind.parse(kind)) for kind in MANY] == list(MANY)
    assert description("convnet-batch:8-16") == {"net": "convnet", "widths": [8, 16], "depth": 2, "norm": "BatchNorm2d"}
    model = network("resnet-group:8-16", 1, 3, 8)()
    assert {type(m) for m in model.modules() if "Norm" in type(m).__name__} == {nn.GroupNorm}
    for kind in MANY:
        for size in (8, 28, 32):
            assert network(kind, 1, 3, size)()(torch.zeros(2, 1, size, size)).shape == (2, 3)
    assert set(NORMS) == {"instance", "batch", "group"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("lenet", "unknown network 'lenet'; known: convnet"),
        (["convnet", "resnet-layer"], "unknown network 'resnet-layer'; .*norms: instance, batch, group"),
        ("convnet:4-x", "widths must be .*got"),
        ([], "networks must name at least one"),
    ],
)
def test_bad_names_of_networks_say_what_is_known(asked, message):
    with pytest.raises(ValueError, match=message):
        kinds(asked)
    with pytest.raises(ValueError, match="vit takes equal widths"):
        network("vit:32-64", 1, 3, 8)()


def test_moves_are_one_draw_for_all_or_one_for_each_and_identity_at_zero():
    images = noise(3)
    still = Moves(shift=0.0, stretch=1.0, mirror=False)
    assert torch.allclose(still(images, torch.Generator()), images, atol=1e-5)
    same_image = images[:1].expand(3, -1, -1, -1)
    together, apart = (Moves(each=each)(same_image, torch.Generator().manual_seed(0)) for each in (False, True))
    assert torch.equal(together[0], together[1])
    assert not torch.allclose(apart[0], apart[1], atol=0.1)
    turned = Moves(shift=0.0, stretch=1.0)
    seen = {torch.allclose(turned(images, torch.Generator().manual_seed(s)), images, atol=1e-4) for s in range(8)}
    assert seen == {True, False}
    assert torch.allclose(
        turned(images, torch.Generator().manual_seed(0)).flip(-1), images, atol=1e-4
    ) or torch.allclose(turned(images, torch.Generator().manual_seed(0)), images, atol=1e-4)


def test_distill_for_several_networks_records_them_bounds_the_pixels_and_resumes(tmp_path):
    asked = ["convnet:8-16", "convnet-batch:8", "vit:32"]
    call = partial(distill, "digits", images_per_class=1, networks=asked, progress=False, settings={"pool": 4})
    with_break = tmp_path / "run"
    call(steps=4, resume=with_break, settings={"pool": 4, "decay": 8})
    coreset, whole = call(steps=8, resume=with_break), call(steps=8)
    assert torch.equal(coreset.inputs, whole.inputs)
    assert torch.equal(coreset.targets, whole.targets)
    coreset.save(tmp_path / "set.safetensors")
    assert coreset.equal(SyntheticCoreset.load(tmp_path / "set.safetensors"))
    assert coreset.provenance["networks"] == asked
    assert coreset.provenance["network"] == description("convnet:8-16")
    pixels = coreset.exact_pixels()
    assert pixels.min() >= -1e-5
    assert pixels.max() <= 1 + 1e-5
    assert "mirror=False" in coreset.provenance["settings"]["augmentation"]
    with pytest.raises(ValueError, match="the run to resume has networks"):
        call(steps=8, resume=with_break, networks=asked[:2])


def test_widths_for_several_networks_are_refused():
    with pytest.raises(ValueError, match="widths must be left out where there are several networks"):
        distill("digits", networks="many", widths=[8], steps=1)


def test_kinds_stay_even_in_the_pool_over_births():
    distiller = Variational(KINDS, batch=8, pool=6, max_age=2)
    state = begun(distiller)
    for _ in range(25):
        assert torch.bincount(state.memory["kinds"], minlength=3).tolist() == [2, 2, 2]
        state = after(distiller, state, 1)
    # six births bring kinds in any order
    drawn = {tuple(begun(distiller, seed=seed).memory["kinds"].tolist()) for seed in range(6)}
    assert len(drawn) > 1
