"""for_huggingface with a real ViT in a real Trainer, and coresets as datasets."""

import pytest
import torch

from coreset_sampler.synthetic.dataset import SyntheticCoreset
from coreset_sampler.synthetic.preprocessing import ZCA, Normalize, Raw

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.integration

from coreset_sampler.integrations.huggingface import for_huggingface, from_hf, to_hf  # noqa: E402

from coreset_sampler.synthetic.fitting import accuracy_on  # noqa: E402
from coreset_sampler.synthetic.formats import read_published  # noqa: E402

MEAN, STD = (0.3, 0.4, 0.5), (0.2, 0.25, 0.3)


def processor(**kwargs):
    settings = {"size": {"height": 48, "width": 48}, "image_mean": MEAN, "image_std": STD}
    return transformers.ViTImageProcessor(**(settings | kwargs))


def vit(**kwargs):
    config = transformers.ViTConfig(
        image_size=48, patch_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, num_labels=2, **kwargs,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config)


def smooth_picture():
    noise = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return (torch.nn.functional.interpolate(noise, (32, 32), mode="bilinear")[0] * 255).byte()


def grey_pixels(n=8):
    pixels = torch.rand(n, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    return pixels * 0.5 + (torch.arange(n) % 2 * 0.5)[:, None, None, None]


def grey_coreset(kind="hard"):
    normalize = Normalize((0.2861,), (0.3530,))
    hard = torch.arange(8) % 2
    scores = torch.nn.functional.one_hot(hard).float() * 4 - 2
    targets = {"hard": hard, "soft": scores.softmax(-1), "logits": scores, "regression": scores}[kind]
    return SyntheticCoreset(normalize(grey_pixels()), targets, preprocessing=normalize, target_kind=kind)


def train(train_set, tmp_path, model=None, **kwargs):
    model = vit() if model is None else model
    seen = []
    model.vit.embeddings.register_forward_pre_hook(
        lambda _, args, named: seen.append((named.get("pixel_values") if not args else args[0]).detach().clone()),
        with_kwargs=True,
    )
    settings = {
        "num_train_epochs": 10,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "seed": 0,
    } | kwargs.pop("settings", {})
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=train_set, processing_class=processor(), **kwargs)
    trainer.train()
    return model, torch.cat(seen)


def test_a_real_vit_trains_in_trainer_on_tensors_normalised_exactly_once(tmp_path):
    train_set = for_huggingface(grey_coreset(), processor())
    model, seen = train(train_set, tmp_path)
    first_epoch = seen[:8]
    assert first_epoch.shape == (8, 3, 48, 48)
    for channel in range(3):
        back = first_epoch[:, channel] * STD[channel] + MEAN[channel]
        assert back.mean() == pytest.approx(grey_pixels().mean().item(), abs=0.005)
        assert back.flatten(1).mean(1).sort().values.tolist() == pytest.approx(
            grey_pixels().flatten(1).mean(1).sort().values.tolist(), abs=0.01
        )
    with torch.no_grad():
        x = torch.stack([train_set[i]["pixel_values"] for i in range(8)])
        assert (model.eval()(x).logits.argmax(1) == torch.arange(8) % 2).all()


@pytest.mark.parametrize(
    ("settings", "byte"),
    [
        ({}, 1 / 255 / 0.2),
        ({"do_resize": False}, 1e-4),
        ({"do_normalize": False}, 1 / 255),
        ({"size": {"height": 20, "width": 20}}, 1 / 255 / 0.2),
        ({"resample": 3}, 1 / 255 / 0.2),
        ({"do_rescale": False, "image_mean": (100, 100, 100), "image_std": (50, 50, 50)}, 1 / 50),
        ({"rescale_factor": 1 / 127.5}, 1 / 127.5 / 0.2),
    ],
)
def test_the_tensors_are_those_the_processor_makes_of_the_same_picture(settings, byte):
    """Up to one byte's worth: the processor rounds to bytes after resizing, we do not."""
    picture = smooth_picture()
    theirs = processor(**settings)(images=picture.permute(1, 2, 0).numpy(), return_tensors="pt")
    coreset = SyntheticCoreset(picture[None], torch.tensor([0]), preprocessing=Raw())
    ours = for_huggingface(coreset, processor(**settings))[0]["pixel_values"]
    assert ours.shape == theirs["pixel_values"][0].shape
    assert (ours - theirs["pixel_values"][0]).abs().max() < 1.01 * byte


def test_a_processor_with_shortest_edge_and_crop_is_followed():
    clip = transformers.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 36, "width": 36})
    picture = (torch.nn.functional.interpolate(torch.rand(1, 3, 6, 6), (32, 32), mode="bilinear")[0] * 255).byte()
    theirs = clip(images=picture.permute(1, 2, 0).numpy(), return_tensors="pt")["pixel_values"][0]
    coreset = SyntheticCoreset(picture[None], torch.tensor([0]), preprocessing=Raw())
    ours = for_huggingface(coreset, clip)[0]["pixel_values"]
    assert ours.shape == (3, 36, 36)
    assert (ours - theirs).abs().max() < 0.05


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 56}, "crop_pct": 0.875}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
        ("PoolFormerImageProcessor", {}),
        ("EfficientNetImageProcessor", {}),
        ("EfficientNetImageProcessor", {"include_top": False, "resample": 0}),
        ("MobileViTImageProcessor", {}),
        ("MobileViTImageProcessor", {"do_resize": False, "crop_size": {"height": 48, "width": 24}}),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 45}, "crop_size": {"height": 45, "width": 45}}),
    ],
)
@pytest.mark.parametrize("sides", [(32, 32), (48, 32)])
def test_processors_that_enlarge_crop_pad_and_swap_colours_are_followed(name, settings, sides):
    noise = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    picture = (torch.nn.functional.interpolate(noise, sides, mode="bilinear")[0] * 255).byte()
    made_by = getattr(transformers, name)(**settings)
    theirs = made_by(images=picture.permute(1, 2, 0).numpy(), return_tensors="pt")["pixel_values"][0]
    coreset = SyntheticCoreset(picture[None], torch.tensor([0]), preprocessing=Raw())
    ours = for_huggingface(coreset, made_by)[0]["pixel_values"]
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().mean() < 0.02


@pytest.mark.parametrize("name", ["LevitImageProcessor", "PerceiverImageProcessor", "PPLCNetImageProcessor"])
def test_a_processor_that_does_more_than_its_settings_say_is_refused(name):
    with pytest.raises(ValueError, match=rf"no more, but {name} makes .*pass transformers.ViTImageProcessor"):
        for_huggingface(grey_coreset(), getattr(transformers, name)())


@pytest.mark.parametrize("what", [None, "google/vit-base-patch16-224"])
def test_what_is_no_processor_is_refused(what):
    with pytest.raises(ValueError, match="image_processor must take pictures .*AutoImageProcessor.from_pretrained"):
        for_huggingface(grey_coreset(), what)


def test_values_outside_0_to_1_are_neither_clipped_nor_rounded():
    pixels = torch.linspace(-1, 2, 2 * 3 * 48 * 48).reshape(2, 3, 48, 48)
    coreset = SyntheticCoreset(pixels, torch.tensor([0, 1]), preprocessing=Raw())
    x = for_huggingface(coreset, processor())[1]["pixel_values"]
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    assert torch.allclose(x * std + mean, pixels[1], atol=1e-6)


def test_the_processor_would_have_corrupted_the_normalised_images():
    """Why the processor is never run: on inputs that are normalised floats it normalises again."""
    x = torch.stack([grey_coreset()[i][0].expand(3, -1, -1) for i in range(8)])
    theirs = processor()(images=list(x), return_tensors="pt")["pixel_values"]
    back = theirs * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    assert abs(back.mean() - grey_pixels().mean()) > 0.1


@pytest.mark.parametrize("method", ["set_transform", "with_transform", "map"])
def test_a_processor_cannot_be_put_on_top(method):
    train_set = for_huggingface(grey_coreset(), processor())
    with pytest.raises(TypeError, match="already"):
        getattr(train_set, method)(processor())


@pytest.mark.parametrize("kind", ["soft", "logits", "regression"])
def test_learned_targets_come_as_class_numbers_that_a_plain_trainer_fits(kind, tmp_path):
    train_set = for_huggingface(grey_coreset(kind), processor())
    assert torch.equal(train_set.targets, torch.arange(8) % 2)
    assert train_set[1]["labels"].dtype == torch.long
    model, _ = train(train_set, tmp_path)
    assert model.config.problem_type == "single_label_classification"
    assert accuracy_on(model, train_set) == 1


@pytest.mark.parametrize("targets", ["soft", "own"])
@pytest.mark.parametrize("kind", ["soft", "logits", "regression"])
def test_soft_targets_train_with_their_own_loss(kind, targets, tmp_path):
    train_set = for_huggingface(grey_coreset(kind), processor(), targets=targets)
    model, _ = train(train_set, tmp_path, compute_loss_func=train_set.compute_loss)
    with torch.no_grad():
        x = torch.stack([train_set[i]["pixel_values"] for i in range(8)])
        assert (model.eval()(x).logits.argmax(1) == torch.arange(8) % 2).all()


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_accumulated_batches_give_the_weights_of_one_large_batch(kind, tmp_path):
    weights = []
    for batch, steps in ((8, 1), (2, 4)):
        train_set = for_huggingface(grey_coreset(kind), processor(), targets=kind)
        settings = {
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": steps,
            "max_steps": 2, "optim": "sgd",
        }  # fmt: skip
        model, _ = train(train_set, tmp_path, settings=settings, compute_loss_func=train_set.compute_loss)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(weights[0], weights[1], atol=1e-6)


@pytest.mark.parametrize("targets", ["soft", "own"])
@pytest.mark.parametrize("batch", [2, 3])  # as many as classes, where squared error would broadcast, and another number
def test_trainer_evaluates_a_learned_set_on_class_numbers(batch, targets, tmp_path):
    train_set = for_huggingface(grey_coreset("regression"), processor(), targets=targets)
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=batch
    )
    model, eval_set = vit(), for_huggingface(grey_coreset(), processor())
    trainer = transformers.Trainer(
        model, arguments, train_dataset=train_set, eval_dataset=eval_set, compute_loss_func=train_set.compute_loss
    )
    x = torch.stack([eval_set[i]["pixel_values"] for i in range(8)])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model.eval()(x).logits, torch.arange(8) % 2)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), abs=2e-4)


@pytest.mark.parametrize("labels", [torch.zeros(4), torch.zeros(4, 1), torch.zeros(4, 3), torch.zeros(4, 2).long()])
@pytest.mark.parametrize("targets", ["soft", "own"])
def test_labels_that_are_neither_class_numbers_nor_like_the_outputs_are_refused(labels, targets):
    train_set = for_huggingface(grey_coreset("regression"), processor(), targets=targets)
    with pytest.raises(ValueError, match=r"class numbers \(4,\) or floats \(4, 2\) like the outputs, got"):
        train_set.compute_loss({"logits": torch.zeros(4, 2)}, labels)


@pytest.mark.parametrize("kind", ["hard", "soft", "logits", "regression"])
def test_soft_targets_are_probabilities_that_plain_cross_entropy_takes(kind):
    train_set = for_huggingface(grey_coreset(kind), processor(), targets="soft")
    assert torch.allclose(train_set.targets.sum(1), torch.ones(8))
    assert (train_set.targets >= 0).all()
    logits = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    plain = torch.nn.CrossEntropyLoss()(logits, train_set.targets)
    assert torch.allclose(train_set.compute_loss({"logits": logits}, train_set.targets), plain)
    assert plain > 0


def test_an_unknown_kind_of_targets_is_refused():
    with pytest.raises(ValueError, match="targets must be 'hard', 'soft' or 'own', got 'raw'"):
        for_huggingface(grey_coreset(), processor(), targets="raw")


class TestDatasets:
    def coresets(self):
        pixels = torch.rand(60, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        zca = ZCA.fit(pixels)
        names = ("a", "b", "c")
        yield SyntheticCoreset(zca(pixels[:6]), torch.arange(6) % 3, preprocessing=zca, class_names=names, method="MTT")
        yield grey_coreset()
        yield grey_coreset("logits")
        yield SyntheticCoreset((pixels[:6] * 255).byte(), torch.arange(6) % 3, preprocessing=Raw(), provenance={"n": 3})
        yield SyntheticCoreset(torch.rand(6, 7), torch.rand(6), preprocessing=Raw(), target_kind="regression")
        yield SyntheticCoreset(torch.randint(0, 9, (6, 7)), torch.arange(6), preprocessing=Raw())

    def test_a_coreset_comes_back_equal(self):
        for coreset in self.coresets():
            assert from_hf(to_hf(coreset)).equal(coreset), coreset

    def test_a_coreset_comes_back_equal_from_disk_also_as_a_published_folder(self, tmp_path):
        for number, coreset in enumerate(self.coresets()):
            to_hf(coreset).save_to_disk(tmp_path / str(number))
            assert from_hf(datasets.load_from_disk(str(tmp_path / str(number)))).equal(coreset)
            assert read_published(tmp_path / str(number)).equal(coreset)

    def test_class_names_become_a_class_label(self):
        first = next(self.coresets())
        assert to_hf(first).features["labels"].names == ["a", "b", "c"]

    def test_a_dataset_of_someone_else_is_not_guessed_at(self):
        dataset = datasets.Dataset.from_dict({"inputs": [[0.0]], "labels": [0]})
        with pytest.raises(ValueError, match="does not say how its inputs were preprocessed"):
            from_hf(dataset)
