"""Labelled views: the same everywhere, differentiable, in files and adapters, and labelled by the model that was given."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from coreset_sampler import Normalize, Raw, SyntheticCoreset, Views, fit, label_views, load_coreset, recipe_for
from coreset_sampler.cli.main import main
from coreset_sampler.synthetic import file as coreset_file
from coreset_sampler.synthetic.networks import convnet
from coreset_sampler.synthetic.picture import _line, uneven
from coreset_sampler.synthetic.remarks import remarks

NORMALIZE = Normalize(0.3, 0.4)
RECORDED = [25.330566, 48.75, 38.5, 51.9375, 92.246094, 90.375, 99.943359, 94.953125]


def images(n: int = 6, channels: int = 1, side: int = 16) -> torch.Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(0))


def real(**about: object) -> SyntheticCoreset:
    labels = torch.arange(6) % 3
    return SyntheticCoreset(NORMALIZE(images()), labels, preprocessing=NORMALIZE, num_classes=3, **about)


def teacher() -> nn.Module:
    torch.manual_seed(1)
    return convnet(1, 3, 16, widths=(4, 4))


def by_hand(x: torch.Tensor, views: Views, example: int) -> torch.Tensor:
    """One view, by loops over pixels, straight from the definition in docs/file_format.md."""
    import numpy as np

    n, _, height, width = x.shape
    raw = np.random.Philox(key=views.seed).random_raw(n * views.count * 7)
    a = [int(number) >> 16 for number in raw[7 * example : 7 * example + 7]]
    image, view = divmod(example, views.count)

    def shown(number: int, down: int, right: int, mirrored: bool) -> torch.Tensor:
        most = [max(1, round(side / 8)) for side in (height, width)]
        dy, dx = down % (2 * most[0] + 1) - most[0], right % (2 * most[1] + 1) - most[1]
        out = torch.empty_like(x[number])
        for row in range(height):
            for column in range(width):
                at = width - 1 - column if mirrored else column
                out[:, row, column] = x[number, :, min(max(row + dy, 0), height - 1), min(max(at + dx, 0), width - 1)]
        return out

    own = shown(image, a[0], a[1], views.mirror and a[2] % 2 == 1)
    other = shown(a[3] % n, a[4], a[5], views.mirror and (a[2] >> 1) % 2 == 1)
    amount = a[6] % 256
    if view % 2 == 0:
        share = 0.5 + amount / 512
        return share * own + (1 - share) * other
    upright, far = (a[2] >> 2) % 2 == 1, (a[2] >> 3) % 2 == 1
    side = height if upright else width
    strip = side * (64 + amount // 2) // 256
    out = own.clone()
    for place in range(side):
        if place >= side - strip if far else place < strip:
            out[(slice(None), place) if upright else (slice(None), slice(None), place)] = other[
                (slice(None), place) if upright else (slice(None), slice(None), place)
            ]
    return out


@pytest.mark.parametrize("views", [Views(5), Views(4, seed=7, mirror=False)])
@pytest.mark.parametrize("shape", [(3, 1, 16, 16), (4, 3, 9, 12)])
def test_views_are_what_the_file_format_says(views: Views, shape: tuple[int, ...]) -> None:
    x = torch.rand(*shape, generator=torch.Generator().manual_seed(3))
    made = views(x)
    assert made.shape == (shape[0] * views.count, *shape[1:])
    for example in range(len(made)):
        torch.testing.assert_close(made[example], by_hand(x, views, example))


def test_views_never_change_between_versions() -> None:
    # Recorded: files hold labels for just these views.
    made = Views(4, seed=11)(torch.arange(2 * 64, dtype=torch.float64).view(2, 1, 8, 8))
    assert [round(float(value), 6) for value in made.mean((1, 2, 3))] == RECORDED


def test_global_random_state_and_the_gradient_to_pixels() -> None:
    before = torch.random.get_rng_state()
    x = images().double().requires_grad_()
    Views(3)(x).sum().backward()
    assert torch.equal(before, torch.random.get_rng_state())
    assert x.grad is not None
    assert float(x.grad.sum()) == pytest.approx(6 * 3 * 16 * 16)  # shares of own and partner sum to one everywhere


def test_a_model_labels_every_view_and_is_left_as_it_was() -> None:
    model = teacher().train()
    next(iter(model.children())).eval()  # modes differ between modules
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    taught = label_views(real(), model, views=8)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    expected = model.eval()(Views(8)(NORMALIZE(images()))).softmax(1)
    torch.testing.assert_close(taught.targets, expected)
    assert (len(taught), taught.size, taught.target_kind) == (48, "6 images, 48 examples", "soft")
    softer = label_views(real(), model, views=8, temperature=4.0)
    assert float(softer.targets.max()) < float(taught.targets.max())


def test_a_file_keeps_images_labels_and_the_way_views_are_made(tmp_path) -> None:
    taught = label_views(real(), teacher(), views=Views(8, seed=3))
    taught.save(tmp_path / "a.safetensors")
    again = SyntheticCoreset.load(tmp_path / "a.safetensors")
    assert again.equal(taught)
    assert torch.equal(again.inputs, taught.inputs)
    assert not again.equal(label_views(real(), teacher(), views=Views(8, seed=4)))
    tensors, description = coreset_file.read(tmp_path / "a.safetensors")
    assert tensors["inputs"].shape[0] == 6
    assert description["views"] == {"count": 8, "seed": 3, "mirror": True}
    assert coreset_file.version_for(description) == 3
    json.dumps(taught.info)


@pytest.mark.parametrize(
    "said", [{"count": 10**9, "seed": 0, "mirror": True}, {"count": 8}, {"count": 8, "seed": 0, "mirror": 1}, {"a": 1}]
)
def test_a_file_that_says_strange_views_is_refused(tmp_path, said) -> None:
    taught = label_views(real(), teacher(), views=8)
    taught.save(tmp_path / "a.safetensors")
    tensors, description = coreset_file.read(tmp_path / "a.safetensors")
    coreset_file.write(tmp_path / "b.safetensors", tensors, description | {"views": said})
    with pytest.raises(coreset_file.CoresetFileError, match="views|mirror"):
        SyntheticCoreset.load(tmp_path / "b.safetensors")


def test_as_a_dataset_of_hugging_face_and_back() -> None:
    pytest.importorskip("datasets")
    from coreset_sampler.integrations.huggingface import from_hf, to_hf

    taught = label_views(real(), teacher(), views=8)
    rows = to_hf(taught)
    assert len(rows) == 6
    assert from_hf(rows).equal(taught)


def test_plain_loops_take_it_and_the_recipe_leaves_it_as_it_is() -> None:
    taught = label_views(real(), teacher(), views=8)
    model = teacher()
    x, y = next(iter(DataLoader(taught, batch_size=5)))
    cross_entropy(model(x), y).backward()
    recipe = recipe_for(taught, model)
    assert (recipe.labels, recipe.loss, recipe.augmentation) == ("soft", "cross-entropy", ())


def test_a_network_learns_the_teacher_better_from_views_than_from_its_labels_of_the_images() -> None:
    # The teacher knows a rule; twelve images with one label each show little of it.
    generator = torch.Generator().manual_seed(0)
    x, test = (torch.randn(n, 1, 8, 8, generator=generator) for n in (12, 2000))
    knows = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with torch.no_grad():
        knows[1].weight.copy_(3 * torch.randn(3, 64, generator=generator))
        truth = knows(test).argmax(1)
    plain = SyntheticCoreset(x, knows(x).detach().softmax(1), preprocessing=Raw(), target_kind="soft", num_classes=3)
    right = {}
    for name, made in (("images", plain), ("views", label_views(plain, knows, Views(64, mirror=True)))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        found = fit(model, made, test=(test, truth))
        right[name] = found.test_accuracy
    assert right["views"] > right["images"] + 0.1


def test_what_a_person_is_told() -> None:
    taught = label_views(real(images_per_class=2), teacher(), views=8)
    assert "6 images, 48 examples: each image gives 8 views" in remarks(taught)[0]
    assert "6 images, 48 examples" in repr(taught)
    assert not uneven(taught)  # views are mixtures: how many there are of each class says nothing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(views=0), "views must be an integer from 1"),
        (dict(views=True), "views must be an integer from 1"),
        (dict(views=2.5), "views must be an integer from 1"),
        (dict(views=8, temperature=0), "temperature must be positive"),
        (
            dict(views=8, model=nn.Sequential(nn.Flatten(), nn.Linear(256, 4))),
            "model must know the coreset's 3 classes",
        ),
    ],
)
def test_bad_arguments_are_refused(change, message) -> None:
    settings = dict(model=teacher()) | change
    with pytest.raises(ValueError, match=message):
        label_views(real(), **settings)


def test_what_views_cannot_be_made_of_is_refused() -> None:
    table = SyntheticCoreset(torch.rand(4, 5), torch.arange(4), preprocessing=Raw())
    with pytest.raises(ValueError, match="views need images"):
        label_views(table, nn.Linear(5, 4), views=2)
    packed = SyntheticCoreset(images(), torch.arange(24) % 3, preprocessing=Raw(), tiles=2)
    with pytest.raises(ValueError, match="one example per image"):
        label_views(packed, teacher(), views=2)
    with pytest.raises(ValueError, match="each image needs 8 targets"):
        SyntheticCoreset(images(), torch.arange(6) % 3, preprocessing=Raw(), views=Views(8))
    with pytest.raises(ValueError, match="views and tiles do not go together"):
        SyntheticCoreset(images(), torch.arange(24) % 3, preprocessing=Raw(), views=Views(4), tiles=2)


def test_a_saved_dataset_of_hugging_face_is_read_with_its_views(tmp_path) -> None:
    pytest.importorskip("datasets")
    from coreset_sampler.integrations.huggingface import to_hf

    from coreset_sampler import read_published

    taught = label_views(real(), teacher(), views=8)
    to_hf(taught).save_to_disk(tmp_path / "saved")
    assert read_published(tmp_path / "saved").equal(taught)


def test_views_that_would_fill_the_memory_are_refused_unmade(tmp_path) -> None:
    # eight images in a file of a megabyte, which would ask for gigabytes
    big = torch.zeros(8, 3, 224, 224, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"1024 views of 8 images would take 4\.6 GiB of memory; make fewer"):
        SyntheticCoreset(big, torch.zeros(8 * 1024, dtype=torch.int8), preprocessing=Raw(), views=Views(1024))
    with pytest.raises(ValueError, match="make fewer of each"):
        label_views(SyntheticCoreset(big, torch.arange(8), preprocessing=Raw()), teacher(), views=1024)


def test_views_made_in_parts_are_those_made_at_once_and_differentiable():
    x, views = images(5).requires_grad_(), Views(7, seed=3)
    parts = list(views.parts(x, at_once=4))
    assert [len(part) for part in parts] == [4] * 8 + [3]
    assert torch.equal(torch.cat(parts), views(x))
    assert torch.autograd.grad(views(x).sum(), x)[0].abs().sum() > 0


def test_labelling_never_holds_more_than_a_few_views(monkeypatch):
    seen = []

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("all views at once")

    monkeypatch.setattr(Views, "__call__", refuse)
    model = teacher()
    model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    assert len(label_views(real(), model, Views(100))) == 600
    assert seen == [250, 250, 100]


class Merging(nn.Linear):
    """As LoRA layers do: evaluation mode merges weights, training mode takes them out again, up to rounding."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += -0.1 if mode else 0.1
            self.merged = not mode
        return self


@pytest.mark.parametrize("training", [True, False])
def test_a_teacher_that_merges_weights_in_evaluation_mode_is_left_as_it_was(training):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), Merging(256, 3)).train(training)
    before, merged = model[1].weight.clone(), model[1].merged
    label_views(real(), model, 2)
    assert (model.training, model[1].training, model[1].merged) == (training, training, merged)
    assert torch.equal(model[1].weight, before)


def test_a_teacher_without_parameters_labels():
    class Brightness(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((1, 2, 3))[:, None] * torch.tensor([0.0, 1.0, 2.0])

    assert label_views(real(), Brightness(), 2).targets.shape == (12, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_set_of_another_precision_is_labelled(dtype):
    few = SyntheticCoreset(images().to(dtype), torch.arange(6) % 3, preprocessing=Raw())
    taught = label_views(few, teacher(), 4)
    assert taught.stored.dtype == dtype
    assert taught.targets.dtype == torch.float32


def test_what_is_recorded_is_that_of_the_new_labels():
    old = real(provenance={"data": "mine", "accuracy": {"mean": 0.9, "n": 3}}, method="vbpc")
    taught = label_views(old, teacher(), 4, temperature=2.0)
    assert taught.provenance == {"data": "mine", "views": {"teacher": "Sequential", "temperature": 2.0}}
    assert "accuracy" in old.provenance


def test_the_picture_of_labelled_views_shows_no_accuracy_of_the_old_labels(tmp_path, capsys):
    old = load_coreset("digits/vbpc-1")
    torch.manual_seed(0)
    label_views(old, convnet(1, 10, 8, widths=(4,)), 4).save(tmp_path / "a.safetensors")
    assert main(["show", str(tmp_path / "a.safetensors"), "-o", str(tmp_path / "a.png")]) == 0
    assert "each image gives 4 views" in capsys.readouterr().out
    taught = load_coreset(tmp_path / "a.safetensors")
    assert "trains to" in _line(old, "")
    assert "trains to" not in _line(taught, "")
