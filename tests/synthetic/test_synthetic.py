"""SyntheticCoreset, its preprocessing and its file."""

import json
import os
import stat
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader

from coreset_sampler.synthetic import file as coreset_file
from coreset_sampler.synthetic.dataset import SyntheticCoreset, load_coreset
from coreset_sampler.synthetic.file import CoresetFileError
from coreset_sampler.synthetic.preprocessing import ZCA, Normalize, Raw, packed, unpacked

NORMALIZE = Normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def images(n=6, channels=3, size=5, seed=0):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


def labels(n=6, classes=3):
    return torch.arange(n) % classes


def hard(**kwargs):
    return SyntheticCoreset(images(), labels(), **({"preprocessing": NORMALIZE} | kwargs))


def every_kind():
    soft = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    zca_a = ZCA.fit(images(40, 1, 3), convention="A")
    zca_b = ZCA.fit(images(40, 3, 3), convention="B", first=NORMALIZE)
    zca_c = ZCA.fit(images(40, 1, 3), convention="C")
    small, colour = images(6, 1, 3), images(6, 3, 3)
    yield (
        "hard",
        hard(class_names=("a", "b", "c"), method="DC", provenance={"seed": 1, "nested": [1, {"x": None}]}),
    )
    yield "soft", SyntheticCoreset(images(), soft, target_kind="soft", preprocessing=NORMALIZE)
    yield (
        "logits",
        SyntheticCoreset(images(), soft.log(), target_kind="logits", preprocessing=Raw(), learning_rate=0.1),
    )
    yield "regression", SyntheticCoreset(images(), soft - 0.3, target_kind="regression", preprocessing=Raw())
    yield (
        "vbpc",
        SyntheticCoreset(
            images(),
            soft,
            target_kind="regression",
            preprocessing=NORMALIZE,
            last_layer={"rho": 100, "gamma": 1e-3},
        ),
    )
    yield "zca A", SyntheticCoreset(zca_a(small), labels(), preprocessing=zca_a)
    yield "zca B", SyntheticCoreset(zca_b(colour), labels(), preprocessing=zca_b)
    yield "zca C", SyntheticCoreset(zca_c(small), labels(), preprocessing=zca_c)
    yield "bytes", SyntheticCoreset((small * 255).byte(), labels(), preprocessing=Raw())
    yield "tokens", SyntheticCoreset(torch.randint(0, 99, (6, 8)), labels(), preprocessing=Raw())
    yield (
        "table",
        SyntheticCoreset(torch.rand(6, 4, dtype=torch.float64), labels(), preprocessing=Raw(), num_classes=9),
    )
    yield (
        "one-dimensional targets",
        SyntheticCoreset(torch.rand(6, 4), torch.rand(6), target_kind="regression", preprocessing=Raw()),
    )


KINDS = dict(every_kind())


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_coreset_reads_back_equal(name, tmp_path):
    coreset = KINDS[name]
    coreset.save(tmp_path / "set.safetensors")
    back = SyntheticCoreset.load(tmp_path / "set.safetensors")
    assert back.equal(coreset)
    assert back.info == coreset.info
    assert load_coreset(tmp_path / "set.safetensors").equal(coreset)


def test_equal_sees_a_change_in_data_description_or_whitening():
    coreset = KINDS["zca A"]
    values = coreset.describe()
    moved = coreset.inputs.clone()
    moved[0, 0, 0, 0] += 1e-6
    other_zca = ZCA.fit(images(41, 1, 3), convention="A")
    assert coreset.equal(
        SyntheticCoreset(coreset.inputs, coreset.targets, preprocessing=coreset.preprocessing, **values)
    )
    assert not coreset.equal(SyntheticCoreset(moved, coreset.targets, preprocessing=coreset.preprocessing, **values))
    assert not coreset.equal(SyntheticCoreset(coreset.inputs, coreset.targets, preprocessing=other_zca, **values))
    values["method"] = "other"
    assert not coreset.equal(
        SyntheticCoreset(coreset.inputs, coreset.targets, preprocessing=coreset.preprocessing, **values)
    )


def test_a_loader_gives_batches_of_inputs_and_targets():
    x, y = next(iter(DataLoader(hard(), batch_size=4)))
    assert x.shape == (4, 3, 5, 5)
    assert y.tolist() == [0, 1, 2, 0]
    assert torch.equal(x, images()[:4])


def test_bytes_come_out_as_floats_between_0_and_1():
    coreset = SyntheticCoreset(
        torch.full((2, 1, 3, 3), 51, dtype=torch.uint8), torch.tensor([0, 1]), preprocessing=Raw()
    )
    x, _ = coreset[1]
    assert x.dtype == torch.float32
    assert torch.allclose(x, torch.tensor(0.2))
    assert torch.allclose(coreset.pixels(), torch.tensor(0.2))


def test_images_per_class_is_counted_when_equal_and_absent_when_not():
    assert hard().images_per_class == 2
    assert SyntheticCoreset(images(5), labels(5), preprocessing=Raw()).images_per_class is None
    assert SyntheticCoreset(images(), labels(), preprocessing=Raw(), num_classes=4).images_per_class is None


def test_a_damaged_label_beyond_all_memory_costs_none():
    targets = torch.tensor([0, 1, 2, 10**18, 1, 2])
    assert SyntheticCoreset(images(), targets, preprocessing=Raw()).images_per_class is None
    with pytest.raises(ValueError, match=r"0\.\.2, got 0\.\.1000"):
        SyntheticCoreset(images(), targets, preprocessing=Raw(), num_classes=3)


class TestPreprocessing:
    def test_normalize_is_what_torchvision_does(self):
        from torchvision.transforms.v2.functional import normalize

        expected = normalize(images(), list(NORMALIZE.mean), list(NORMALIZE.std))
        assert torch.allclose(NORMALIZE(images()), expected)
        assert torch.allclose(NORMALIZE(images())[0], NORMALIZE(images()[0]))
        assert torch.allclose(NORMALIZE.invert(expected), images(), atol=1e-6)

    @pytest.mark.parametrize("kind", ["A", "B"])
    def test_inverting_zca_gives_the_pixels_back(self, kind):
        pixels = images(60, 3, 4)
        zca = ZCA.fit(pixels, convention=kind, first=NORMALIZE if kind == "B" else None)
        assert torch.allclose(zca.invert(zca(pixels)), pixels, atol=1e-4)
        assert torch.allclose(zca(pixels[3]), zca(pixels)[3], atol=1e-5)

    def test_convention_a_is_regularised_whitening_over_n_minus_1(self):
        pixels = images(50, 1, 3)
        flat = pixels.flatten(1).double().numpy()
        u, s, _ = np.linalg.svd(np.cov(flat.T))
        expected = (flat - flat.mean(0)) @ (u @ np.diag((s + 0.1) ** -0.5) @ u.T)
        ours = ZCA.fit(pixels, convention="A")(pixels).flatten(1)
        assert np.allclose(ours.numpy(), expected, atol=1e-5)

    def test_convention_b_normalises_channels_and_scales_its_regulariser(self):
        pixels = images(50, 3, 2)
        flat = NORMALIZE(pixels).flatten(1).double().numpy()
        centred = flat - flat.mean(0)
        covariance = centred.T @ centred / 50
        u, s, _ = np.linalg.svd(covariance + 0.1 * np.trace(covariance) / 12 * np.eye(12))
        ours = ZCA.fit(pixels, convention="B", first=NORMALIZE)(pixels).flatten(1)
        assert np.allclose(ours.numpy(), centred @ (u @ np.diag(s**-0.5) @ u.T), atol=1e-4)

    def test_convention_c_normalises_each_image_first(self):
        pixels = images(50, 1, 3)
        flat = pixels.flatten(1).double().numpy()
        flat = flat - flat.mean(1, keepdims=True)
        flat /= np.linalg.norm(flat, axis=1, keepdims=True)
        second = flat.T @ flat / 50
        u, s, _ = np.linalg.svd(second + 0.1 * np.trace(second) / 9 * np.eye(9))
        zca = ZCA.fit(pixels, convention="C")
        assert np.allclose(zca(pixels).flatten(1).numpy(), flat @ (u @ np.diag(s**-0.5) @ u.T), atol=1e-4)
        brighter = zca(pixels * 0.5 + 0.25)
        assert torch.allclose(brighter, zca(pixels), atol=1e-4)

    def test_convention_c_refuses_to_invert_but_can_be_looked_at(self):
        coreset = KINDS["zca C"]
        with pytest.raises(ValueError, match="brightness and contrast"):
            coreset.exact_pixels()
        assert coreset.pixels().amin() == 0
        assert coreset.pixels().amax() == 1

    def test_the_three_conventions_differ(self):
        pixels = images(60, 3, 3)
        whitened = [
            ZCA.fit(pixels, convention=kind, first=NORMALIZE if kind == "B" else None)(pixels) for kind in "ABC"
        ]
        for one in range(3):
            for other in range(one):
                assert (whitened[one] - whitened[other]).abs().mean() > 0.05

    def test_pixels_are_clamped_and_exact_pixels_are_not(self):
        coreset = SyntheticCoreset(images() * 20 - 10, labels(), preprocessing=NORMALIZE)
        assert coreset.pixels().min() == 0
        assert coreset.pixels().max() == 1
        assert coreset.exact_pixels().min() < -1
        assert torch.allclose(NORMALIZE(coreset.exact_pixels()), coreset.inputs, atol=1e-5)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Normalize((0.5,), (0.0,)), "std must be positive"),
            (lambda: Normalize((0.5, 0.5), (1.0,)), "one value per channel"),
            (lambda: Normalize((float("nan"),), (1.0,)), "finite"),
            (lambda: NORMALIZE(images(channels=1)), "3 channel"),
            (lambda: ZCA("D", torch.eye(4)), "convention must be"),
            (lambda: ZCA("B", torch.eye(4), torch.zeros(4)), "first=Normalize"),
            (lambda: ZCA("A", torch.full((4, 4), torch.nan), torch.zeros(4)), "finite"),
            (lambda: ZCA.fit(images().byte()), "floats"),
            (lambda: ZCA.fit(images(20, 1, 3), convention="A")(images(2, 3, 3)), "9 values"),
        ],
    )
    def test_wrong_preprocessing_is_refused(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()


class TestTargets:
    def test_the_loss_of_hard_and_soft_targets_is_cross_entropy(self):
        outputs = torch.randn(6, 3)
        for name in ("hard", "soft"):
            coreset = KINDS[name]
            expected = torch.nn.functional.cross_entropy(outputs, coreset.targets)
            assert torch.allclose(coreset.loss(outputs, coreset.targets), expected)

    def test_the_loss_of_logits_is_that_of_their_softmax(self):
        outputs, logits, soft = torch.randn(6, 3), KINDS["logits"], KINDS["soft"]
        assert torch.allclose(logits.loss(outputs, logits.targets), soft.loss(outputs, soft.targets))
        naive = torch.nn.functional.cross_entropy(outputs, logits.targets)
        assert not torch.allclose(logits.loss(outputs, logits.targets), naive)

    def test_the_loss_of_regression_targets_is_the_squared_error(self):
        coreset, outputs = KINDS["regression"], torch.randn(6, 3)
        assert torch.allclose(coreset.loss(outputs, coreset.targets), ((outputs - coreset.targets) ** 2).mean())
        summed = coreset.loss(outputs, coreset.targets, reduction="sum")
        assert torch.allclose(summed / 6, coreset.loss(outputs, coreset.targets))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
    def test_class_numbers_of_any_integers_have_a_loss(self, dtype):
        outputs, coreset = torch.randn(6, 3), SyntheticCoreset(images(), labels().to(dtype), preprocessing=Raw())
        assert torch.equal(coreset.loss(outputs, coreset.targets), hard().loss(outputs, labels()))

    def test_targets_without_a_second_dimension_are_regressed_on(self):
        values, outputs = torch.rand(6), torch.randn(6)
        coreset = SyntheticCoreset(images(), values, target_kind="regression", preprocessing=Raw())
        torch.testing.assert_close(coreset.loss(outputs, values), (outputs - values).square().mean())
        assert coreset.loss(outputs, values, reduction="none").shape == (6,)

    @pytest.mark.parametrize(
        ("kind", "outputs", "targets"),
        [
            ("regression", torch.rand(6, 1), torch.rand(6)),
            ("regression", torch.rand(6, 3), torch.rand(6, 1)),
            ("soft", torch.rand(6, 3), torch.rand(6, 2)),
            ("hard", torch.rand(6, 3), torch.zeros(6, 1, dtype=torch.long)),
        ],
    )
    def test_a_loss_is_refused_where_targets_would_be_broadcast(self, kind, outputs, targets):
        with pytest.raises(ValueError, match=f"{kind} targets must be .*, got targets"):
            KINDS[kind].loss(outputs, targets)

    @pytest.mark.parametrize("name", ["hard", "soft", "logits", "regression"])
    def test_every_kind_trains_a_model_to_fit_it(self, name):
        coreset = KINDS[name]
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(75, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)
        )
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)  # or the last steps jump about the fit
        for _ in range(150):
            for x, y in DataLoader(coreset, batch_size=6):
                optimizer.zero_grad()
                coreset.loss(model(x), y).backward()
                optimizer.step()
            schedule.step()
        assert (model(coreset.inputs).argmax(1) == coreset.with_targets("hard").targets).all()

    def test_targets_turn_hard_or_soft_and_keep_the_number_of_classes(self):
        wide = SyntheticCoreset(images(), labels(), preprocessing=Raw(), num_classes=7)
        soft = wide.with_targets("soft")
        assert soft.target_kind == "soft"
        assert soft.targets.shape == (6, 7)
        assert soft.with_targets("hard").equal(wide)
        assert torch.allclose(KINDS["logits"].with_targets("soft").targets, KINDS["soft"].targets)
        with pytest.raises(ValueError, match="no probabilities"):
            KINDS["regression"].with_targets("soft")


class TestRefused:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_inputs_that_are_not_finite(self, bad):
        broken = images()
        broken[4, 0, 0, 0] = bad
        with pytest.raises(ValueError, match=r"1 example\(s\), first 4"):
            SyntheticCoreset(broken, labels(), preprocessing=NORMALIZE)

    @pytest.mark.parametrize(
        ("targets", "arguments", "message"),
        [
            (torch.tensor([0, 1, 2, 3, 0, 1]), {"class_names": ("a", "b", "c")}, r"0\.\.2, got 0\.\.3"),
            (torch.tensor([0, 1, -1, 2, 0, 1]), {}, r"got -1\.\.2"),
            (torch.arange(6), {"num_classes": 5}, r"0\.\.4"),
            (torch.arange(5), {}, "one target"),
            (torch.rand(6, 3), {}, "must be said"),
            (torch.rand(6, 3) + 1, {"target_kind": "soft"}, "summing to 1"),
            (torch.full((6, 3), torch.nan), {"target_kind": "logits"}, "finite"),
            (torch.rand(6, 3), {"target_kind": "logits", "num_classes": 4}, r"\(n, 4\)"),
            (torch.arange(6), {"target_kind": "strange"}, "one of hard, soft, logits, regression"),
            (torch.arange(6) % 3, {"class_names": ("a", "b", "c"), "num_classes": 4}, "number of class names"),
            (torch.arange(6) % 3, {"provenance": {"tensor": torch.zeros(1)}}, "JSON"),
            (torch.arange(6) % 3, {"provenance": {"nan": float("nan")}}, "JSON"),
        ],
    )
    def test_targets_and_descriptions_that_make_no_sense(self, targets, arguments, message):
        with pytest.raises(ValueError, match=message):
            SyntheticCoreset(images(), targets, preprocessing=NORMALIZE, **arguments)

    def test_bytes_that_claim_to_be_normalised(self):
        with pytest.raises(ValueError, match="bytes are raw pixels"):
            SyntheticCoreset(images().byte(), labels(), preprocessing=NORMALIZE)

    def test_an_empty_set(self):
        with pytest.raises(ValueError, match="at least one"):
            SyntheticCoreset(images()[:0], labels()[:0], preprocessing=Raw())

    def test_pixels_of_what_is_no_image(self):
        with pytest.raises(ValueError, match="only images"):
            KINDS["table"].pixels()


class TestFile:
    @pytest.fixture
    def path(self, tmp_path):
        KINDS["hard"].save(tmp_path / "set.safetensors")
        return tmp_path / "set.safetensors"

    def test_every_truncation_is_refused(self, path):
        whole = path.read_bytes()
        for length in [0, 1, 7, 8, 9, 50, len(whole) // 2, len(whole) - 1]:
            path.write_bytes(whole[:length])
            with pytest.raises(CoresetFileError, match="truncated"):
                SyntheticCoreset.load(path)

    def test_a_foreign_file_is_called_foreign(self, path):
        for content in (b"PK\x03\x04 a zip, perhaps of torch.save", b'{"a": 1234567}', os.urandom(300)):
            path.write_bytes(content)
            with pytest.raises(CoresetFileError, match=r"foreign.*read_published"):
                SyntheticCoreset.load(path)

    def test_a_safetensors_file_of_someone_else_is_told_apart(self, path):
        path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}))
        with pytest.raises(CoresetFileError, match="not a coreset of ours"):
            SyntheticCoreset.load(path)

    def test_a_newer_file_asks_for_an_upgrade(self, path, monkeypatch):
        monkeypatch.setattr(coreset_file, "version_for", lambda *_: 5)
        KINDS["hard"].save(path)
        monkeypatch.undo()
        with pytest.raises(CoresetFileError, match=r"newer.*version 5.*up to 4.*pip install -U"):
            SyntheticCoreset.load(path)

    def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(self, path):
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        for change, message in (("shape", "damaged"), ("data_offsets", "truncated")):
            lie = json.loads(json.dumps(header))
            lie["inputs"][change] = [10**9, 3, 5, 5] if change == "shape" else [0, 10**12]
            text = json.dumps(lie).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
            with pytest.raises(CoresetFileError, match=message):
                SyntheticCoreset.load(path)

    def test_a_file_with_labels_outside_the_classes_is_refused(self, path):
        tensors, description = coreset_file.read(path)
        coreset_file.write(path, tensors | {"targets": tensors["targets"] + 1}, description)
        with pytest.raises(CoresetFileError, match=r"no valid coreset.*0\.\.2, got 1\.\.3"):
            SyntheticCoreset.load(path)

    @pytest.mark.parametrize("missing", ["preprocessing", "target_kind"])
    def test_a_description_without_its_parts_is_refused(self, path, missing):
        tensors, description = coreset_file.read(path)
        del description[missing]
        if missing == "target_kind":
            tensors["targets"] = tensors["targets"].float()
        coreset_file.write(path, tensors, description)
        with pytest.raises(CoresetFileError, match="no valid coreset"):
            SyntheticCoreset.load(path)

    def test_the_same_coreset_saves_to_the_same_bytes(self, tmp_path):
        coreset = load_coreset("digits/k-center-1")
        found = set()
        for number in range(20):  # safetensors' own order of three entries differs from call to call
            coreset.save(tmp_path / f"{number}.safetensors")
            found.add((tmp_path / f"{number}.safetensors").read_bytes())
        assert len(found) == 1
        assert load_coreset(tmp_path / "0.safetensors").equal(coreset)

    def test_a_failed_write_leaves_the_old_file_and_no_litter(self, path, monkeypatch):
        before = path.read_bytes()

        def full(*_):
            raise OSError("disk full")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="disk full"):
            KINDS["soft"].save(path)
        assert path.read_bytes() == before
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]

    @pytest.mark.skipif(sys.platform == "win32", reason="permissions are different there")
    def test_a_saved_file_is_as_readable_as_any_other(self, path):
        ordinary = path.with_name("ordinary")
        ordinary.write_bytes(b"")
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)

    def test_a_loaded_coreset_survives_its_file_being_cut_short(self, path):
        coreset = SyntheticCoreset.load(path)
        path.write_bytes(b"")
        assert coreset.equal(KINDS["hard"])

    def test_an_unknown_name_lists_the_known_ones(self):
        with pytest.raises(FileNotFoundError, match=r"fashion-mnist/no-such-set.*ships: .*digits/"):
            load_coreset("fashion-mnist/no-such-set")


@pytest.mark.integration
def test_importing_the_package_imports_no_framework():
    import subprocess

    heavy = "timm transformers datasets matplotlib PIL torchvision lightning accelerate msgpack ray sklearn"
    code = (
        "import sys, coreset_sampler, coreset_sampler.synthetic.formats, coreset_sampler.cli.main\n"
        "import coreset_sampler.integrations\n"
        f"print([name for name in {heavy.split()} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert result.stdout.strip() == "[]"


class TestWhatIsMadeCanBeSaved:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("images_per_class", 10.0),
            ("images_per_class", True),
            ("num_classes", 3.0),
            ("method", 5),
            ("learning_rate", "0.1"),
        ],
    )
    def test_what_a_file_cannot_say_is_refused_at_once(self, name, value):
        with pytest.raises(ValueError, match=f"{name} must be (int|str|int or float) or left out, got '{value}'"):
            hard(**{name: value})

    def test_numbers_of_numpy_are_numbers(self, tmp_path):
        coreset = hard(images_per_class=np.int64(2), num_classes=np.int32(3), learning_rate=np.float32(0.5))
        coreset.save(tmp_path / "a.safetensors")
        assert SyntheticCoreset.load(tmp_path / "a.safetensors").equal(coreset)

    def test_inputs_and_targets_that_share_memory(self, tmp_path):
        both = torch.rand(12, 5)
        for x, y in ((both, both), (both[:6], both[6:])):
            coreset = SyntheticCoreset(x, y, target_kind="regression", preprocessing=Raw())
            coreset.save(tmp_path / "a.safetensors")
            assert SyntheticCoreset.load(tmp_path / "a.safetensors").equal(coreset)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("classes", [10, 1000])
    def test_probabilities_computed_in_halves_are_probabilities(self, dtype, classes):
        scores = torch.randn(100, classes, generator=torch.Generator().manual_seed(0))
        for each in (scores.to(dtype).softmax(1), scores.softmax(1).to(dtype).float()):
            SyntheticCoreset(images(100), each, target_kind="soft", preprocessing=Raw())
        with pytest.raises(ValueError, match="soft targets must be probabilities"):
            SyntheticCoreset(images(100), scores.to(dtype), target_kind="soft", preprocessing=Raw())


def test_normalised_real_images_are_saved_as_bytes_and_come_back_bit_for_bit(tmp_path):
    pixels = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    normalize = Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))
    real = SyntheticCoreset(normalize(pixels.float() / 255), torch.arange(20) % 10, preprocessing=normalize)
    learned = SyntheticCoreset(real.stored + 1e-4, real.targets, preprocessing=normalize)
    one = real.stored.clone()
    one[7, 1, 3, 3] = torch.nextafter(one[7, 1, 3, 3], torch.tensor(9.0))
    nearly = SyntheticCoreset(one, real.targets, preprocessing=normalize)
    other = SyntheticCoreset(real.stored[:, :2], real.targets, preprocessing=normalize)  # of no use, but there it is
    table = SyntheticCoreset(normalize(torch.rand(3, 2, 2))[:, 0], torch.arange(3), preprocessing=normalize)
    stored = {}
    for name, coreset in {"real": real, "learned": learned, "nearly": nearly, "other": other, "table": table}.items():
        coreset.save(tmp_path / name)
        assert SyntheticCoreset.load(tmp_path / name).equal(coreset)
        stored[name] = safetensors.torch.load_file(tmp_path / name)["inputs"]
        with safetensors.safe_open(tmp_path / name, "pt") as file:
            assert file.metadata()["version"] == ("4" if name == "real" else "1")  # older readers ask for an upgrade
    assert torch.equal(stored.pop("real"), pixels)
    assert {inputs.dtype for inputs in stored.values()} == {torch.float32}


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_comes_back_from_any_mean_and_std(seed):
    generator = torch.Generator().manual_seed(seed)
    mean, std = torch.rand(2, 3, generator=generator, dtype=torch.float64) * 10 ** (seed % 5 - 2)
    normalize = Normalize(mean.tolist(), std.clamp(min=1e-3).tolist())
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(2, 3, 1, 1)
    images = normalize(pixels.float() / 255)
    assert torch.equal(packed(images, normalize), pixels)
    assert torch.equal(unpacked(pixels, normalize), images)


def test_a_negative_zero_stays_one():
    zero = torch.tensor(-0.0).expand(1, 1, 2, 2)
    assert packed(zero, Normalize(0.0, 1.0)) is zero
