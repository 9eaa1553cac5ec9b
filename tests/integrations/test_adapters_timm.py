"""for_timm with real timm models: the tensors that reach the model, and that it trains."""

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from coreset_sampler.synthetic.dataset import SyntheticCoreset, load_coreset
from coreset_sampler.synthetic.preprocessing import ZCA, Normalize, Raw

timm = pytest.importorskip("timm")
pytestmark = pytest.mark.integration
from coreset_sampler.integrations.timm import for_timm  # noqa: E402
from timm.data import create_loader, create_transform, resolve_model_data_config  # noqa: E402

GREY = Normalize((0.2861,), (0.3530,))


def grey_pixels(n=8):
    """Four bright and four dark textures, so that there is something to learn."""
    pixels = torch.rand(n, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    return pixels * 0.5 + (torch.arange(n) % 2 * 0.5)[:, None, None, None]


def grey_coreset(preprocessing=GREY):
    return SyntheticCoreset(preprocessing(grey_pixels()), torch.arange(8) % 2, preprocessing=preprocessing)


def resnet(name="resnet18", **kwargs):
    return timm.create_model(name, pretrained=False, num_classes=2, **kwargs)


def vit(size=64):
    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        num_classes=2,
        img_size=size,
        embed_dim=48,
        depth=2,
        num_heads=3,
    )


def seen_by(model, loader):
    """What the first layer of the model gets."""
    seen = []
    handle = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d)).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].detach())
    )
    with torch.no_grad():
        for x, _ in loader:
            model.eval()(x)
    handle.remove()
    return torch.cat(seen)


@pytest.mark.parametrize(("make", "size"), [(resnet, 224), (vit, 64)])
def test_grey_images_of_32_reach_the_model_as_rgb_of_its_size_normalised_once(make, size):
    model = make()
    config = resolve_model_data_config(model)
    x = seen_by(model, DataLoader(for_timm(grey_coreset(), model), batch_size=4))
    assert x.shape == (8, 3, size, size)
    for channel in range(3):
        back = x[:, channel] * config["std"][channel] + config["mean"][channel]
        assert back.mean() == pytest.approx(grey_pixels().mean().item(), abs=0.005)
        for image in range(8):
            expected = (grey_pixels()[image].mean() - config["mean"][channel]) / config["std"][channel]
            assert x[image, channel].mean() == pytest.approx(expected.item(), abs=0.03)


def test_at_the_models_own_size_pixels_arrive_bit_for_bit_normalised():
    model = resnet()
    config = resolve_model_data_config(model)
    x, _ = for_timm(grey_coreset(Raw()), model, size=32)[3]
    mean, std = torch.tensor(config["mean"])[:, None, None], torch.tensor(config["std"])[:, None, None]
    assert torch.equal(x, (grey_pixels()[3].expand(3, -1, -1) - mean) / std)


def test_the_result_is_what_timms_own_evaluation_transform_gives_a_picture():
    image = pytest.importorskip("PIL.Image")
    model = resnet()
    config = resolve_model_data_config(model) | {"crop_pct": 1.0}
    picture = (torch.nn.functional.interpolate(torch.rand(1, 3, 5, 5), (32, 32), mode="bilinear")[0] * 255).byte()
    theirs = create_transform(**config)(image.fromarray(picture.permute(1, 2, 0).numpy()))
    coreset = SyntheticCoreset(picture[None], torch.tensor([0]), preprocessing=Raw(), num_classes=2)
    ours, _ = for_timm(coreset, model)[0]
    assert (ours - theirs).abs().mean() < 0.02
    assert ours.std() == pytest.approx(theirs.std().item(), rel=0.02)


@pytest.mark.parametrize("convention", ["raw", "normalize", "A", "B"])
def test_the_tensors_do_not_depend_on_how_the_coreset_was_preprocessed(convention):
    pixels = torch.rand(60, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    first = Normalize((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))
    preprocessing = {"raw": Raw(), "normalize": first}.get(convention)
    if preprocessing is None:
        preprocessing = ZCA.fit(pixels, convention=convention, first=first if convention == "B" else None)
    coreset = SyntheticCoreset(preprocessing(pixels[:2]), torch.tensor([0, 1]), preprocessing=preprocessing)
    x, _ = for_timm(coreset, resnet(), size=16)[0]
    raw = SyntheticCoreset(pixels[:2], torch.tensor([0, 1]), preprocessing=Raw())
    assert torch.allclose(x, for_timm(raw, resnet(), size=16)[0][0], atol=1e-3)


def test_a_grey_model_gets_one_channel_as_timm_would_normalise_it():
    x, _ = for_timm(grey_coreset(), resnet(in_chans=1), size=32)[0]
    mean, std = (0.485 + 0.456 + 0.406) / 3, (0.229 + 0.224 + 0.225) / 3
    assert torch.allclose(x, (grey_pixels()[0] - mean) / std, atol=1e-5)


def test_colour_is_not_dropped_for_a_grey_model():
    coreset = SyntheticCoreset(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]), preprocessing=Raw())
    with pytest.raises(ValueError, match=r"takes 1 channel.*has 3"):
        for_timm(coreset, resnet(in_chans=1))


@pytest.mark.parametrize(("make", "size"), [(lambda: resnet("resnet10t"), 32), (vit, 64)])
def test_a_resnet_and_a_vit_learn_the_coreset(make, size):
    torch.manual_seed(0)
    model = make()
    train_set = for_timm(grey_coreset(), model, size=size)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(8):
        for x, y in DataLoader(train_set, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss = grey_coreset().loss(model(x), y)
            loss.backward()
            optimizer.step()
    assert loss < 0.3


def test_learned_targets_come_as_probabilities_unless_asked_for_by_name():
    learned = load_coreset("digits/vbpc-1")
    train_set = for_timm(learned, resnet(), size=8)
    assert torch.allclose(train_set.targets.sum(1), torch.ones(10))
    assert (train_set.targets >= 0).all()
    assert torch.equal(train_set.targets.argmax(1), learned.targets.argmax(1))
    outputs = 50 * torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    loss = torch.nn.CrossEntropyLoss()(outputs, train_set.targets)
    assert loss > 0
    assert train_set.loss(outputs, train_set.targets) == loss
    own = for_timm(learned, resnet(), size=8, targets="own")
    assert torch.equal(own.targets, learned.targets)
    assert own.loss(outputs, own.targets) == learned.loss(outputs, learned.targets)
    assert torch.equal(for_timm(learned, resnet(), size=8, targets="hard").targets, learned.targets.argmax(1))


def test_values_without_classes_have_no_probabilities():
    values = SyntheticCoreset(torch.rand(2, 3, 8, 8), torch.rand(2), preprocessing=Raw(), target_kind="regression")
    with pytest.raises(ValueError, match=r"targets \(2,\) .* have no classes: pass targets='own'"):
        for_timm(values, resnet(), size=8)


def test_a_module_that_is_not_timms_is_asked_for_its_size():
    plain = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten())
    with pytest.raises(ValueError, match=r"size must be said for Sequential, .* size=32"):
        for_timm(grey_coreset(), plain)
    assert for_timm(grey_coreset(), plain, size=16)[0][0].shape == (1, 16, 16)
    assert for_timm(grey_coreset(), torch.nn.DataParallel(vit()))[0][0].shape == (3, 64, 64)


@pytest.mark.parametrize("prefetcher", [True, False])
def test_timms_create_loader_cannot_normalise_twice_or_truncate(prefetcher):
    model = resnet()
    train_set = for_timm(grey_coreset(), model)
    with pytest.raises(TypeError, match=r"normalised already.*DataLoader"):
        create_loader(train_set, (3, 224, 224), 4, use_prefetcher=prefetcher, device=torch.device("cpu"), num_workers=0)


@pytest.mark.parametrize("wrap", [lambda d: Subset(d, range(8)), lambda d: torch.utils.data.ConcatDataset([d, d])])
def test_not_even_through_a_wrapper_does_the_prefetcher_get_to_make_bytes(wrap):
    wrapped = wrap(for_timm(grey_coreset(), resnet()))
    loader = create_loader(
        wrapped,
        (3, 224, 224),
        4,
        use_prefetcher=True,
        device=torch.device("cpu"),
        num_workers=0,
        is_training=True,
    )
    with pytest.raises(AssertionError):
        next(iter(loader))


def test_the_prefetcher_would_have_corrupted_the_plain_coreset():
    """Why the guard is there: delete this, and the two tests above, once timm refuses floats itself."""
    from timm.data.loader import fast_collate

    x, _ = fast_collate([grey_coreset(Raw())[i] for i in range(8)])
    assert x.dtype == torch.uint8
    assert x.max() == 0


def test_workers_deliver_the_same_batches():
    train_set = for_timm(grey_coreset(), resnet(), size=48)
    alone, workers = (list(DataLoader(train_set, batch_size=4, num_workers=n)) for n in (0, 2))
    for (x, y), (wx, wy) in zip(alone, workers, strict=True):
        assert torch.equal(x, wx)
        assert torch.equal(y, wy)


@pytest.mark.parametrize(("size", "rule"), [(0, "positive"), ((32, 32), "a whole number"), (32.5, "a whole number")])
def test_a_size_that_is_no_number_of_pixels_is_refused(size, rule):
    with pytest.raises(ValueError, match=f"size must be {rule}, got"):
        for_timm(grey_coreset(), resnet(), size=size)
