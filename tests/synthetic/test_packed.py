"""Coresets whose stored images hold several examples: file, data set, training, judging, pictures, adapters."""

import json
from dataclasses import replace

import pytest
import safetensors
import torch
from torch import nn

from coreset_sampler import Normalize, Raw, SyntheticCoreset, evaluate, fit, load_coreset, recipe_for
from coreset_sampler.cli.main import main
from coreset_sampler.synthetic.file import CoresetFileError
from coreset_sampler.synthetic.image_data import open_images
from coreset_sampler.synthetic.inference.by_name import BY
from coreset_sampler.synthetic.networks import convnet
from coreset_sampler.synthetic.picture import draw, uneven
from coreset_sampler.synthetic.preprocessing import ZCA
from coreset_sampler.synthetic.real_images import RealImages
from coreset_sampler.synthetic.remarks import outside_pixels, remarks

NORMALIZE = Normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def by_hand(images, tiles):
    """Each tile cut out and enlarged, one pixel at a time: pixel centres, edges repeated."""
    height, width = (side // tiles for side in images.shape[-2:])
    examples = []
    for image in images:
        for row in range(tiles):
            for column in range(tiles):
                tile = image[:, row * height : (row + 1) * height, column * width : (column + 1) * width]
                large = torch.empty_like(image)
                for y in range(image.shape[-2]):
                    for x in range(image.shape[-1]):
                        v = min(max((y + 0.5) * height / image.shape[-2] - 0.5, 0), height - 1)
                        u = min(max((x + 0.5) * width / image.shape[-1] - 0.5, 0), width - 1)
                        top, left = int(v), int(u)
                        down, right = min(top + 1, height - 1), min(left + 1, width - 1)
                        a, b = v - top, u - left
                        large[:, y, x] = (1 - a) * ((1 - b) * tile[:, top, left] + b * tile[:, top, right]) + a * (
                            (1 - b) * tile[:, down, left] + b * tile[:, down, right]
                        )
                examples.append(large)
    return torch.stack(examples)


def stored(n=6, channels=3, size=8, seed=0):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


def packed(n=6, *, classes=3, size=8, **kwargs):
    targets = (torch.arange(n) % classes).repeat_interleave(4)
    about = {"preprocessing": NORMALIZE, "tiles": 2, "class_names": ("a", "b", "c")[:classes]}
    return SyntheticCoreset(NORMALIZE(stored(n, size=size)), targets, **about | kwargs)


def learned(n=6, **kwargs):
    targets = torch.randn(4 * n, 3, generator=torch.Generator().manual_seed(1))
    about = {"target_kind": "regression", "preprocessing": NORMALIZE, "tiles": 2}
    return SyntheticCoreset(NORMALIZE(stored(n)), targets, **about | kwargs)


def digits(per_class=3):
    """Packed random digits: a set that networks can learn from."""
    like = load_coreset("digits/vbpc-10")
    rows = 4 * 10 * per_class
    data = open_images("digits")
    shell = SyntheticCoreset(
        data.train[0][: rows // 4].float() / 255,
        torch.arange(rows) % 10,
        preprocessing=Raw(),
        tiles=2,
        class_names=like.class_names,
    )
    return RealImages(data, shell, "random-packed").coreset(0)


class TestTheDataSet:
    def test_examples_are_the_tiles_in_order_enlarged_and_each_has_its_target(self):
        coreset = packed()
        assert (len(coreset.stored), len(coreset), coreset.images_per_class) == (6, 24, 2)
        expected = by_hand(NORMALIZE(stored()), 2)
        assert torch.allclose(coreset.inputs, expected, atol=1e-5)
        x, y = coreset[4 * 2 + 3]  # the last tile of the third image
        assert torch.allclose(x, expected[11], atol=1e-5)
        assert int(y) == 2
        assert torch.allclose(coreset.exact_pixels(), by_hand(stored(), 2), atol=1e-5)
        assert torch.allclose(coreset.pixels(stored=True), stored(), atol=1e-6)

    def test_bytes_and_half_floats_are_unpacked_too(self):
        as_bytes = (stored() * 255).round().byte()
        coreset = SyntheticCoreset(as_bytes, packed().targets, preprocessing=Raw(), tiles=2)
        assert torch.allclose(coreset.inputs, by_hand(as_bytes.float() / 255, 2), atol=1e-5)
        half = packed().describe()
        coreset = SyntheticCoreset(NORMALIZE(stored()).half(), packed().targets, preprocessing=NORMALIZE, **half)
        assert torch.allclose(coreset.inputs.float(), packed().inputs, atol=0.02)

    @pytest.mark.parametrize("targets", ["soft", "hard"])
    def test_targets_of_another_kind_keep_the_tiles(self, targets):
        other = (packed() if targets == "soft" else learned()).with_targets(targets)
        assert other.tiles == 2
        assert len(other) == len(other.targets) == 24
        assert len(other.stored) == 6

    def test_sizes_are_said_twice(self):
        assert packed().size == "6 images, 24 examples"
        assert repr(packed()) == "SyntheticCoreset(6 images, 24 examples of 3 x 8 x 8, hard targets, unknown method)"
        assert {"size": 6, "examples": 24, "tiles": 2}.items() <= packed().info.items()
        one = SyntheticCoreset(stored(1), torch.tensor([0]), preprocessing=Raw())
        assert one.size == "1 image"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tiles": 3}, "each image needs 9 targets, one for each example, got 6 inputs and targets"),
            ({"tiles": 0}, "tiles must be an integer from 1 to 8, got 0"),
            ({"tiles": True}, "tiles must be an integer from 1 to 8, got True"),
            ({"tiles": 9}, "tiles must be an integer from 1 to 8, got 9"),
        ],
    )
    def test_wrong_numbers_of_tiles_are_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            packed(**change)

    def test_tables_and_whitened_images_cannot_be_cut(self):
        with pytest.raises(ValueError, match="tiles must be 1 for inputs that are no images"):
            SyntheticCoreset(torch.rand(3, 5), torch.zeros(12, dtype=torch.long), preprocessing=Raw(), tiles=2)
        zca = ZCA.fit(stored(40), convention="A")
        with pytest.raises(ValueError, match="tiles must be 1 with zca preprocessing, which mixes"):
            packed(preprocessing=zca)


class TestTheFile:
    @pytest.mark.parametrize("make", [packed, learned])
    def test_it_reads_back_equal_and_stores_no_more_than_the_images(self, make, tmp_path):
        coreset = make(method="mine", provenance={"seed": 1})
        coreset.save(tmp_path / "set.safetensors")
        back = load_coreset(tmp_path / "set.safetensors")
        assert back.equal(coreset)
        assert torch.equal(back.inputs, coreset.inputs)
        assert back.info == coreset.info
        with safetensors.safe_open(tmp_path / "set.safetensors", "pt") as file:
            assert file.get_slice("inputs").get_shape() == [6, 3, 8, 8]
            assert file.metadata()["version"] == "2"  # older readers ask for an upgrade

    def test_a_set_without_tiles_is_written_as_ever(self, tmp_path):
        coreset = SyntheticCoreset(stored(), torch.arange(6) % 3, preprocessing=Raw())
        coreset.save(tmp_path / "set.safetensors")
        with safetensors.safe_open(tmp_path / "set.safetensors", "pt") as file:
            assert file.metadata()["version"] == "1"
            assert "tiles" not in json.loads(file.metadata()["coreset"])

    def test_equal_sees_other_tiles(self):
        targets = torch.zeros(64, dtype=torch.long)
        one, other = (
            SyntheticCoreset(stored(64 // t**2), targets, preprocessing=Raw(), tiles=t, num_classes=3) for t in (2, 4)
        )
        assert not one.equal(other)

    @pytest.mark.parametrize("tiles", [0, 9, 10**6, "2", True])
    def test_a_damaged_number_of_tiles_is_refused_by_name(self, tiles, tmp_path):
        path = tmp_path / "set.safetensors"
        packed().save(path)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        about = json.loads(header["__metadata__"]["coreset"]) | {"tiles": tiles}
        header["__metadata__"]["coreset"] = json.dumps(about)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        with pytest.raises(CoresetFileError, match="tiles"):
            load_coreset(path)

    @pytest.mark.parametrize("make", [packed, learned])
    def test_hugging_face_datasets_keep_it_equal(self, make, tmp_path):
        pytest.importorskip("datasets")
        from coreset_sampler.integrations.huggingface import from_hf, to_hf

        from coreset_sampler import read_published

        coreset = make()
        dataset = to_hf(coreset)
        assert len(dataset) == 6
        assert from_hf(dataset).equal(coreset)
        dataset.save_to_disk(tmp_path / "saved")
        assert read_published(tmp_path / "saved").equal(coreset)


class TestTraining:
    def test_fit_trains_on_every_example_and_learns_them(self):
        coreset = digits()
        torch.manual_seed(0)
        model = convnet(1, 10, 8, widths=(16, 16))
        recipe = replace(recipe_for(coreset, model), lr=0.01, steps=150, augmentation=())
        assert fit(model, coreset, recipe).train_accuracy > 0.97

    @pytest.mark.parametrize("by", BY)
    def test_every_inference_learns_from_the_examples(self, by):
        coreset = digits()
        quick = {"hmc": {"steps": 12, "burn_in": 6, "thin": 2}, "sghmc": {"steps": 40, "burn_in": 20, "thin": 5}}
        quick["a-sghmc"] = quick["sghmc"]
        quick |= {"ensemble": {"networks": 2}, "last-layer": {"beta": 1.0}, "recipe": {"steps": 300}}
        (row,) = evaluate(
            coreset, "digits", by=[by], networks=["convnet"], widths=(16, 16), seeds=1, progress=False,
            settings={by: quick[by]} if by in quick else None,
        )  # fmt: skip
        assert row["accuracy"] > 0.5

    def test_timm_and_hugging_face_get_the_examples(self):
        timm = pytest.importorskip("timm")
        transformers = pytest.importorskip("transformers")
        from coreset_sampler.integrations.huggingface import for_huggingface
        from coreset_sampler.integrations.timm import for_timm

        coreset = learned()
        model = timm.create_model("resnet10t", num_classes=3)
        train_set = for_timm(coreset, model, size=32)
        assert len(train_set) == 24
        examples = by_hand(stored(), 2)
        mean, std = (torch.tensor(model.default_cfg[name])[:, None, None] for name in ("mean", "std"))
        shown = nn.functional.interpolate(
            examples[7][None], 32, mode=model.default_cfg["interpolation"], antialias=True
        )
        assert torch.allclose(train_set[7][0], (shown[0] - mean) / std, atol=1e-4)
        assert torch.allclose(train_set[7][1], coreset.targets[7].softmax(-1))
        processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
        adapted = for_huggingface(coreset, processor)
        assert len(adapted) == 24
        assert int(adapted[7]["labels"]) == int(coreset.targets[7].argmax())
        assert fit(model, train_set, replace(recipe_for(coreset, model), steps=2)).train_accuracy <= 1


class TestAgainstRealImages:
    def test_random_and_herding_are_as_many_as_are_stored_and_packed_as_many_as_examples(self):
        data, coreset = open_images("digits"), digits(per_class=2)
        for how, images, examples in (("random", 20, 20), ("herding", 20, 20), ("random-packed", 20, 80)):
            real = RealImages(data, coreset, how).coreset(0)
            assert (len(real.stored), len(real)) == (images, examples)
            assert real.targets.bincount().tolist() == [examples // 10] * 10

    def test_packed_images_are_real_ones_shrunk(self):
        data, coreset = open_images("digits"), digits(per_class=2)
        real = RealImages(data, coreset, "random-packed").coreset(3)
        small = nn.functional.interpolate(data.train[0].float() / 255, size=4, mode="bilinear", antialias=True)
        known = {
            (image * 255).round().byte().numpy().tobytes(): int(y)
            for image, y in zip(small, data.train[1], strict=True)
        }
        tiles = [
            s[:, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4] for s in real.pixels(stored=True) for r in (0, 1) for c in (0, 1)
        ]
        found = [known[(tile * 255).round().byte().numpy().tobytes()] for tile in tiles]
        assert found == real.targets.tolist()
        assert not torch.equal(RealImages(data, coreset, "random-packed").coreset(4).stored, real.stored)

    def test_packed_is_refused_where_nothing_is_packed(self):
        with pytest.raises(ValueError, match=r"tiles > 1\), this one has one; pass 'random'"):
            evaluate("digits/vbpc-1", "digits", against=["random-packed"], progress=False)

    def test_evaluate_says_both_sizes_and_puts_all_in_one_table(self):
        said = []
        results = evaluate(
            digits(2), "digits", widths=(4, 8), seeds=1, by=["recipe"], progress=said.append,
            against=("random", "random-packed"), settings={"recipe": {"steps": 2}},
        )  # fmt: skip
        assert said[:3] == [
            "the coreset: 20 images, 80 examples",
            "random: 20 real images",
            "random-packed: 80 real images, shrunk into 20",
        ]
        assert "random-packed real images" in str(results)


class TestPictures:
    def test_show_draws_and_counts_what_is_stored(self, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        packed(provenance={"network": {"net": "convnet"}}).save(tmp_path / "set.safetensors")
        assert main(["show", str(tmp_path / "set.safetensors"), "-o", str(tmp_path / "set.svg")]) == 0
        assert "6 images, 24 examples: each image is cut into 2 x 2 examples" in capsys.readouterr().out

    def test_an_image_stands_in_the_row_of_most_of_its_examples(self, tmp_path, monkeypatch):
        pytest.importorskip("matplotlib")
        from coreset_sampler.synthetic import picture

        seen = []
        real = picture._canvas
        monkeypatch.setattr(
            picture, "_canvas", lambda pixels, shown, n: seen.append((pixels, shown)) or real(pixels, shown, n)
        )
        targets = torch.tensor([1, 1, 1, 0, 0, 0, 2, 0])
        draw(SyntheticCoreset(stored(2), targets, preprocessing=Raw(), tiles=2), tmp_path / "x.png")
        assert [row.tolist() for _, shown in seen for row in shown] == [[1], [0]]
        assert torch.equal(seen[0][0], stored(2))

    def test_uneven_classes_are_counted_in_examples(self):
        assert uneven(packed()) == ""
        targets = packed().targets.clone()
        targets[0] = 1
        changed = packed(images_per_class=2)
        changed = SyntheticCoreset(changed.stored, targets, preprocessing=NORMALIZE, **changed.describe())
        assert uneven(changed) == "7 a, 9 b by their labels"

    def test_pixels_outside_are_those_that_are_stored(self):
        assert outside_pixels(packed()) is None
        bright = stored()
        bright[0, 0, 0, 0] = 3.0
        coreset = SyntheticCoreset(NORMALIZE(bright), packed().targets, preprocessing=NORMALIZE, tiles=2)
        assert "(from 0.00 to 3.00)" in outside_pixels(coreset)
        assert remarks(coreset)[0].startswith("6 images, 24 examples")


def test_a_distiller_that_packs_gives_a_packed_coreset():
    from coreset_sampler.synthetic.distillers.run import as_coreset
    from coreset_sampler.synthetic.distillers.state import State

    class Packs:
        def describe(self, state):
            return {"target_kind": "regression", "tiles": 2}

    state = State(NORMALIZE(stored()), torch.zeros(24, 3), seed=0)
    coreset = as_coreset(Packs(), state, preprocessing=NORMALIZE, images_per_class=2, method="packs")
    assert coreset.size == "6 images, 24 examples"
