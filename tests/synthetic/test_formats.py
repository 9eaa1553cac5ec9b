"""Readers, on files written in exactly the published layouts, and on two real ones where they are."""

import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from scenarios import run_snippets

from coreset_sampler.synthetic.formats import READERS, pictures, read_experts, read_published
from coreset_sampler.synthetic.formats.source import load
from coreset_sampler.synthetic.preprocessing import ZCA, Normalize, Raw
from coreset_sampler.synthetic.untrusted import CoresetFileError, Limits

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "published"
CIFAR = Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def images(n=6, channels=3, size=32):
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(n))


def labels(n=6, classes=3):
    return (torch.arange(n) * classes) // n


def save_dc(folder, name="res_DM_CIFAR10_ConvNet_2ipc.pt", pictures=None):
    pictures = images() if pictures is None else pictures
    runs = [[pictures * 0, labels()], [pictures, labels()]]
    accuracies = {"ConvNet": [np.float64(0.25), np.float64(0.35)], "MLP": [np.float64(0.125)]}
    torch.save({"data": runs, "accs_all_exps": accuracies}, folder / name)
    return folder / name


class TestCondensation:
    def test_the_last_run_is_read_with_the_normalisation_of_the_named_data(self, tmp_path):
        coreset = read_published(save_dc(tmp_path))
        assert torch.equal(coreset.inputs, images())
        assert torch.equal(coreset.targets, labels())
        assert coreset.preprocessing == CIFAR
        assert coreset.method == "DM"
        assert coreset.images_per_class == 2
        assert coreset.provenance["runs_in_file"] == 2
        assert coreset.provenance["recorded_accuracy"]["ConvNet"]["mean"] == pytest.approx(0.3)
        assert coreset.provenance["recorded_accuracy"]["ConvNet"]["n"] == 2
        assert "by the file's name" in coreset.provenance["preprocessing_from"]

    def test_the_older_name_without_a_method_is_read_too(self, tmp_path):
        assert read_published(save_dc(tmp_path, "res_SVHN_ConvNet_2ipc.pt")).preprocessing.mean[0] == 0.4377

    @pytest.mark.parametrize("name", ["mine.pt", "res_DC_Birds_ConvNet_2ipc.pt", "res_DC_MNIST_ConvNet_2ipc.pt"])
    def test_an_unknown_data_set_or_one_of_another_shape_is_asked_for(self, tmp_path, name):
        with pytest.raises(
            ValueError, match=r"does not say how[\s\S]*read_published\(.*preprocessing=Normalize\(mean="
        ):
            read_published(save_dc(tmp_path, name))

    def test_what_the_reader_says_wins_over_the_name(self, tmp_path):
        coreset = read_published(save_dc(tmp_path), preprocessing=Normalize((0, 0, 0), (1, 1, 1)))
        assert coreset.preprocessing.std == (1, 1, 1)
        assert coreset.provenance["preprocessing_from"] == "the reader"

    @pytest.mark.parametrize(("ipc", "recorded"), [(1, 0.26459), (10, 0.42202)])
    def test_the_real_ones_open_with_the_accuracy_their_makers_recorded(self, ipc, recorded):
        path = PUBLISHED / f"res_DC_CIFAR10_ConvNet_{ipc}ipc.pt"
        if not path.exists():
            pytest.skip("the published files are not here")
        coreset = read_published(path)
        assert coreset.inputs.shape == (10 * ipc, 3, 32, 32)
        assert coreset.images_per_class == ipc
        assert coreset.preprocessing == CIFAR
        assert coreset.provenance["recorded_accuracy"]["ConvNet"]["mean"] == pytest.approx(recorded)
        # condensed images keep about the statistics of normalised CIFAR-10, so this is not off by a factor
        assert coreset.inputs.mean().abs() < 0.3
        assert 0.8 < coreset.inputs.std() < 2


class TestTrajectoryMatching:
    def test_mtt_asks_for_the_preprocessing_with_the_calls_to_write(self, tmp_path):
        torch.save(images(), tmp_path / "images_best.pt")
        torch.save(labels(), tmp_path / "labels_best.pt")
        with pytest.raises(ValueError) as error:
            read_published(tmp_path / "images_best.pt")
        message = str(error.value)
        assert f"read_published({str(tmp_path / 'images_best.pt')!r}, preprocessing=Normalize(mean=(0.4914" in message
        assert 'preprocessing=ZCA.fit(train_pixels, convention="A"))' in message

    def test_the_call_that_the_error_prints_works(self, tmp_path):
        torch.save(images(), tmp_path / "images_best.pt")
        torch.save(labels(), tmp_path / "labels_best.pt")
        with pytest.raises(ValueError) as error:
            read_published(tmp_path)
        line = next(line for line in str(error.value).splitlines() if line.startswith("    read_published"))
        coreset = eval(line.strip(), {"read_published": read_published, "Normalize": Normalize})
        assert coreset.preprocessing == CIFAR
        assert torch.equal(coreset.inputs, images())

    @pytest.mark.parametrize("tag", ["best", "5000"])
    def test_mtt_and_bpc_are_read_from_the_folder_or_the_file(self, tmp_path, tag):
        torch.save(images(), tmp_path / f"images_{tag}.pt")
        torch.save(labels(), tmp_path / f"labels_{tag}.pt")
        for path in (tmp_path, tmp_path / f"images_{tag}.pt"):
            coreset = read_published(path, preprocessing=CIFAR)
            assert torch.equal(coreset.inputs, images())
            assert torch.equal(coreset.targets, labels())
            assert coreset.target_kind == "hard"

    def test_best_is_taken_over_steps_and_steps_alone_are_asked_for(self, tmp_path):
        for tag, scale in (("1000", 0), ("2000", 2), ("best", 1)):
            torch.save(images() * scale, tmp_path / f"images_{tag}.pt")
            torch.save(labels(), tmp_path / f"labels_{tag}.pt")
        assert torch.equal(read_published(tmp_path, preprocessing=CIFAR).inputs, images())
        assert torch.equal(read_published(tmp_path / "images_2000.pt", preprocessing=CIFAR).inputs, images() * 2)
        (tmp_path / "images_best.pt").unlink()
        with pytest.raises(CoresetFileError, match="several steps, 1000, 2000: point at one"):
            read_published(tmp_path, preprocessing=CIFAR)

    def test_parts_are_joined_in_order(self, tmp_path):
        for part in range(5):
            torch.save(torch.full((40, 3, 64, 64), float(part)), tmp_path / f"images_best_{part}.pt")
            torch.save(torch.arange(part * 40, part * 40 + 40), tmp_path / f"labels_best_{part}.pt")
        imagenet = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        for path in (tmp_path, tmp_path / "images_best_3.pt"):
            coreset = read_published(path, preprocessing=imagenet)
            assert coreset.targets.tolist() == list(range(200))
            assert coreset.inputs[:, 0, 0, 0].tolist() == [float(i // 40) for i in range(200)]

    def test_parts_of_different_sizes_are_refused(self, tmp_path):
        for part, size in ((0, 32), (1, 64)):
            torch.save(images(size=size), tmp_path / f"images_best_{part}.pt")
            torch.save(labels(), tmp_path / f"labels_best_{part}.pt")
        with pytest.raises(CoresetFileError, match="do not fit together"):
            read_published(tmp_path, preprocessing=CIFAR)

    def test_a_missing_part_is_noticed(self, tmp_path):
        for part in (0, 2):
            torch.save(images(), tmp_path / f"images_best_{part}.pt")
            torch.save(labels(), tmp_path / f"labels_best_{part}.pt")
        with pytest.raises(CoresetFileError, match=r"parts \[0, 2\].*missing"):
            read_published(tmp_path, preprocessing=CIFAR)

    def test_datm_labels_are_logits_and_the_learning_rate_is_kept(self, tmp_path):
        logits = torch.randn(6, 3, requires_grad=True)
        torch.save(images(), tmp_path / "images_best.pt")
        torch.save(logits, tmp_path / "labels_best.pt")
        torch.save(torch.tensor(0.0177), tmp_path / "lr_best.pt")
        coreset = read_published(tmp_path, preprocessing=CIFAR)
        assert coreset.method == "DATM"
        assert coreset.target_kind == "logits"
        assert torch.equal(coreset.targets, logits.detach())
        assert not coreset.targets.requires_grad
        assert coreset.learning_rate == pytest.approx(0.0177)

    @pytest.mark.parametrize("kind", ["hard", "soft", "logits"])
    def test_dd_ranking_tells_the_three_kinds_of_labels_apart(self, tmp_path, kind):
        scores = torch.randn(6, 3)
        targets = {"hard": labels(), "soft": scores.softmax(-1), "logits": scores}[kind]
        torch.save(images(), tmp_path / "images.pt")
        torch.save(targets, tmp_path / "labels.pt")
        torch.save(torch.tensor(0.01), tmp_path / "lr.pt")
        coreset = read_published(tmp_path, preprocessing=CIFAR)
        assert coreset.target_kind == kind
        assert torch.equal(coreset.targets, targets)
        assert coreset.learning_rate == pytest.approx(0.01)
        with pytest.raises(ValueError, match="does not say"):
            read_published(tmp_path / "images.pt")


class TestKernelMethods:
    def save_kip(self, folder, zca):
        name = f"ConvNet_ssize6_{zca}_nol_noaug_ckpt1000.npz"
        targets = np.eye(10, dtype=np.float32)[:6] - 0.1
        np.savez(folder / name, images=images().permute(0, 2, 3, 1).numpy(), labels=targets)
        return folder / name

    def test_kip_is_turned_to_channels_first_with_regression_targets(self, tmp_path):
        coreset = read_published(self.save_kip(tmp_path, "nozca"), preprocessing=CIFAR)
        assert torch.equal(coreset.inputs, images())
        assert coreset.target_kind == "regression"
        assert coreset.num_classes == 10
        assert coreset.provenance["step"] == "1000"

    def test_kip_asks_for_what_the_name_of_its_file_says(self, tmp_path):
        with pytest.raises(ValueError, match='convention="C"') as error:
            read_published(self.save_kip(tmp_path, "zca"))
        assert "Normalize" not in str(error.value)
        with pytest.raises(ValueError, match=r"Normalize\(mean=train_pixels") as error:
            read_published(self.save_kip(tmp_path, "nozca"))
        assert "ZCA" not in str(error.value)

    def test_kip_under_its_own_whitening_can_be_looked_at(self, tmp_path):
        zca = ZCA("C", torch.eye(3 * 32 * 32))
        coreset = read_published(self.save_kip(tmp_path, "zca"), preprocessing=zca)
        assert coreset.preprocessing.convention == "C"
        assert coreset.pixels().shape == (6, 3, 32, 32)

    def save_frepo(self, folder, chunked=False):
        msgpack = pytest.importorskip("msgpack")

        def array(values):
            return msgpack.ExtType(
                1, msgpack.packb((values.shape, values.dtype.name, values.tobytes()), use_bin_type=True)
            )

        x = images().permute(0, 2, 3, 1).contiguous().numpy()
        y = np.linspace(-1, 1, 60, dtype=np.float32).reshape(6, 10)
        leaf = array(x)
        if chunked:
            flat = x.reshape(-1)
            pieces = {"0": array(flat[:1000]), "1": array(flat[1000:])}
            leaf = {
                "__msgpack_chunked_array__": True,
                "shape": {str(i): s for i, s in enumerate(x.shape)},
                "chunks": pieces,
            }
        scalar = msgpack.ExtType(3, msgpack.packb(((), "float32", np.float32(3).tobytes()), use_bin_type=True))
        state = {
            "step": 7,
            "params": {"x_proto": leaf, "y_proto": array(y)},
            "opt_state": {"0": {"count": scalar}},
        }
        (folder / "checkpoint_1000").write_bytes(msgpack.packb(state, use_bin_type=True))
        return folder / "checkpoint_1000", torch.from_numpy(y)

    @pytest.mark.parametrize("chunked", [False, True])
    def test_frepo_is_read_without_flax(self, tmp_path, chunked):
        path, y = self.save_frepo(tmp_path, chunked)
        coreset = read_published(path, preprocessing=CIFAR)
        assert torch.equal(coreset.inputs, images())
        assert torch.equal(coreset.targets, y)
        assert coreset.target_kind == "regression"
        assert coreset.method == "FRePo"

    def test_frepo_asks_for_its_own_whitening(self, tmp_path):
        with pytest.raises(ValueError, match='convention="B", first=Normalize'):
            read_published(self.save_frepo(tmp_path)[0])


class TestFoldersOfImages:
    def save(self, path, value, mode="RGB", size=(16, 16)):
        image = pytest.importorskip("PIL.Image")
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new(mode, size, value if mode == "L" else (value, value, value)).save(path)

    @pytest.mark.parametrize(
        ("method", "layout"),
        [("SRe2L", "new{c:03d}/class{c:03d}_id{i:03d}.jpg"), ("RDED", "{c:05d}/class{c:05d}_id{i:05d}.jpg")],
    )
    def test_sre2l_and_rded_give_bytes_and_the_class_of_the_folder(self, tmp_path, method, layout):
        for c in range(12):
            for i in range(2):
                self.save(tmp_path / layout.format(c=c, i=i), c * 20)
        coreset = read_published(tmp_path)
        assert coreset.method == method
        assert coreset.inputs.dtype == torch.uint8
        assert coreset.targets.tolist() == [c for c in range(12) for _ in range(2)]
        assert coreset.images_per_class == 2
        assert (coreset.inputs.float().mean((1, 2, 3)) - 20 * coreset.targets).abs().max() < 3
        assert coreset.preprocessing == Raw()
        assert 0 <= coreset[23][0].min() <= coreset[23][0].max() <= 1

    def test_an_image_in_the_folder_of_another_class_is_refused(self, tmp_path):
        self.save(tmp_path / "new000" / "class000_id000.jpg", 0)
        self.save(tmp_path / "new001" / "class000_id001.jpg", 0)
        with pytest.raises(CoresetFileError, match="must name the class of its folder, new001"):
            read_published(tmp_path)

    def test_any_folder_of_class_folders_is_read_with_their_names(self, tmp_path):
        for name in ("cat", "dog"):
            self.save(tmp_path / name / "a.png", 100, mode="L")
        coreset = read_published(tmp_path)
        assert coreset.class_names == ("cat", "dog")
        assert coreset.inputs.shape == (2, 1, 16, 16)

    def test_images_of_several_sizes_are_refused(self, tmp_path):
        self.save(tmp_path / "a" / "1.png", 0)
        self.save(tmp_path / "b" / "1.png", 0, size=(16, 17))
        with pytest.raises(CoresetFileError, match="one size and mode"):
            read_published(tmp_path)

    def test_links_out_of_the_folder_are_not_followed(self, tmp_path):
        self.save(tmp_path / "outside" / "x" / "secret.png", 255)
        self.save(tmp_path / "set" / "a" / "1.png", 0)
        self.save(tmp_path / "set" / "b" / "1.png", 0)
        os.symlink(tmp_path / "outside" / "x" / "secret.png", tmp_path / "set" / "a" / "2.png")
        os.symlink(tmp_path / "outside" / "x", tmp_path / "set" / "c")
        coreset = read_published(tmp_path / "set")
        assert len(coreset) == 2
        assert coreset.inputs.max() == 0

    def test_a_truncated_image_is_named(self, tmp_path):
        for name in ("a", "b"):
            self.save(tmp_path / name / "1.png", 0)
        whole = (tmp_path / "b" / "1.png").read_bytes()
        (tmp_path / "b" / "1.png").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CoresetFileError, match=r"b.1\.png is truncated or no image"):
            read_published(tmp_path)

    def test_an_image_that_unpacks_to_too_much_is_refused_before_unpacking(self, tmp_path, monkeypatch):
        monkeypatch.setattr(pictures, "LIMITS", Limits(image_pixels=255))
        for name in ("a", "b"):
            self.save(tmp_path / name / "1.png", 0)
        with pytest.raises(CoresetFileError, match="16 x 16 pixels"):
            read_published(tmp_path)


class TestPlainFiles:
    def test_bytes_are_pixels_and_need_no_word(self, tmp_path):
        pixels = (images().sigmoid() * 255).byte()
        np.savez(tmp_path / "set.npz", images=pixels.permute(0, 2, 3, 1).numpy(), labels=labels().numpy())
        torch.save({"images": pixels, "labels": labels()}, tmp_path / "set.pt")
        for name in ("set.npz", "set.pt"):
            coreset = read_published(tmp_path / name)
            assert torch.equal(coreset.inputs, pixels)
            assert coreset.preprocessing == Raw()

    def test_floats_ask_for_their_preprocessing(self, tmp_path):
        torch.save((images(), labels()), tmp_path / "pair.pt")
        with pytest.raises(ValueError, match=r"If they were normalised[\s\S]*preprocessing=Raw\(\)"):
            read_published(tmp_path / "pair.pt")
        assert torch.equal(read_published(tmp_path / "pair.pt", preprocessing=CIFAR).inputs, images())

    def test_tables_and_tokens_are_read_as_they_are(self, tmp_path):
        table = torch.rand(6, 4)
        torch.save({"x": table, "y": labels()}, tmp_path / "table.pt")
        assert torch.equal(read_published(tmp_path / "table.pt", preprocessing=Raw()).inputs, table)

    def test_float_targets_that_are_no_probabilities_are_asked_about(self, tmp_path):
        torch.save({"images": images(), "labels": torch.randn(6, 3)}, tmp_path / "set.pt")
        with pytest.raises(ValueError, match="target_kind='logits'"):
            read_published(tmp_path / "set.pt", preprocessing=CIFAR)
        coreset = read_published(tmp_path / "set.pt", preprocessing=CIFAR, target_kind="logits")
        assert coreset.target_kind == "logits"

    def test_channels_that_may_be_first_or_last_are_not_guessed(self, tmp_path):
        torch.save({"images": torch.rand(6, 3, 8, 3), "labels": labels()}, tmp_path / "set.pt")
        with pytest.raises(CoresetFileError, match="first or last"):
            read_published(tmp_path / "set.pt", preprocessing=CIFAR)

    def test_preprocessing_of_another_shape_is_refused(self, tmp_path):
        torch.save({"images": images(channels=1), "labels": labels()}, tmp_path / "set.pt")
        with pytest.raises(CoresetFileError, match="3 channel"):
            read_published(tmp_path / "set.pt", preprocessing=CIFAR)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, y: (x * float("nan"), y), "must be finite"),
            (lambda x, y: (x, y - 1), "classes 0"),
        ],
    )
    def test_nan_inputs_and_labels_outside_the_classes_are_refused(self, tmp_path, change, message):
        x, y = change(images(), labels())
        torch.save({"images": x, "labels": y}, tmp_path / "set.pt")
        with pytest.raises(CoresetFileError, match=message):
            read_published(tmp_path / "set.pt", preprocessing=CIFAR)

    def test_labels_beyond_the_named_classes_are_refused(self, tmp_path):
        with pytest.raises(CoresetFileError, match=r"0\.\.1, got 0\.\.2"):
            read_published(save_dc(tmp_path), class_names=("a", "b"))

    def test_an_unknown_layout_lists_the_known_ones_and_what_was_found(self, tmp_path):
        torch.save({"weights": torch.zeros(3)}, tmp_path / "model.pt")
        with pytest.raises(CoresetFileError) as error:
            read_published(tmp_path / "model.pt")
        assert "'weights': a tensor float32 (3,)" in str(error.value)
        assert all(reader in str(error.value) for reader in READERS)

    def test_a_named_format_that_the_file_has_not_is_refused(self, tmp_path):
        for name in ("kip", "frepo", "mtt", "ddranking", "rded", "huggingface", "plain"):
            with pytest.raises(CoresetFileError, match=r"is not .*; it is a dict of 'data': a list of 2"):
                read_published(save_dc(tmp_path), format=name)
        assert len(read_published(save_dc(tmp_path), format="dc")) == 6

    def test_an_unknown_format_lists_the_known_ones(self, tmp_path):
        with pytest.raises(ValueError, match="one of dc, mtt, datm"):
            read_published(save_dc(tmp_path), format="mttt")


class TestHuggingFaceFolders:
    def rows(self):
        image = pytest.importorskip("PIL.Image")
        return {"image": [image.new("L", (8, 8), 30 * i) for i in range(6)], "label": labels().tolist()}

    def features(self, datasets):
        return datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})

    @pytest.mark.parametrize("layout", ["saved", "dict", "parquet"])
    def test_images_and_class_names_are_read(self, tmp_path, layout):
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_dict(self.rows(), features=self.features(datasets))
        if layout == "saved":
            dataset.save_to_disk(tmp_path)
        elif layout == "dict":
            datasets.DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(tmp_path)
        else:
            dataset.to_parquet(tmp_path / "train-00000-of-00001.parquet")
            dataset.select([0]).to_parquet(tmp_path / "test-00000-of-00001.parquet")
        coreset = read_published(tmp_path)
        assert coreset.class_names == ("a", "b", "c")
        assert coreset.inputs[:, 0, 0, 0].tolist() == [0, 30, 60, 90, 120, 150]
        assert torch.equal(coreset.targets, labels())

    def test_float_arrays_ask_for_their_preprocessing(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(
            {"inputs": datasets.Array3D((3, 32, 32), "float32"), "label": datasets.Value("int64")}
        )
        rows = {"inputs": list(images().numpy()), "label": labels().tolist()}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path)
        with pytest.raises(ValueError, match="does not say"):
            read_published(tmp_path)
        assert torch.equal(read_published(tmp_path, preprocessing=CIFAR).inputs, images())


class TestExperts:
    def buffer(self, trajectories=2, epochs=3, scale=1.0):
        return [[[torch.full((4, 3), scale * e), torch.zeros(4)] for e in range(epochs)] for _ in range(trajectories)]

    def test_trajectories_come_file_by_file_in_numeric_order(self, tmp_path):
        for number in (0, 2, 10):
            torch.save(self.buffer(scale=float(number)), tmp_path / f"replay_buffer_{number}.pt")
        last = [trajectory[2][0][0, 0].item() for trajectory in read_experts(tmp_path)]
        assert last == [0, 0, 4, 4, 20, 20]
        one = list(read_experts(tmp_path / "replay_buffer_2.pt"))
        assert [len(one), len(one[0]), len(one[0][0])] == [2, 3, 2]

    def test_a_buffer_is_not_taken_for_a_coreset(self, tmp_path):
        torch.save(self.buffer(), tmp_path / "replay_buffer_0.pt")
        with pytest.raises(CoresetFileError, match="use read_experts"):
            read_published(tmp_path / "replay_buffer_0.pt")

    def test_bad_buffers_are_refused(self, tmp_path):
        path = tmp_path / "replay_buffer_0.pt"
        for content, message in (
            (self.buffer(scale=float("nan")), "NaN or infinity at epoch"),
            ([[[torch.zeros(2)], [torch.zeros(3)]]], "changes its shapes at epoch 1"),
            ({"not": "a buffer"}, "no expert buffer"),
        ):
            torch.save(content, path)
            with pytest.raises(CoresetFileError, match=message):
                list(read_experts(path))


class Malicious:
    """Unpickling this would write a file."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return (open, (str(self.witness), "w"))


def rewrite(path, change):
    """The same zip with `change` applied to its pickle."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries:
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)


class TestSafety:
    @pytest.mark.parametrize("protocol", [2, 4])
    def test_a_malicious_pt_runs_nothing_and_its_global_is_named(self, tmp_path, protocol):
        path, witness = tmp_path / "res_DC_CIFAR10_ConvNet_10ipc.pt", tmp_path / "witness"
        torch.save({"data": [[images(), labels()]], "accs": Malicious(witness)}, path, pickle_protocol=protocol)
        with pytest.raises(CoresetFileError, match=r"10ipc\.pt is refused: it would import (builtins|io|_io)\.open"):
            read_published(path)
        assert not witness.exists()

    @pytest.mark.parametrize("protocol", [0, 2, 4])
    def test_a_bare_malicious_pickle_runs_nothing_either(self, tmp_path, protocol):
        path, witness = tmp_path / "images_best.pt", tmp_path / "witness"
        path.write_bytes(pickle.dumps(Malicious(witness), protocol=protocol))
        (tmp_path / "labels_best.pt").write_bytes(path.read_bytes())
        with pytest.raises(CoresetFileError, match="refused: it would import"):
            load(path)
        with pytest.raises(CoresetFileError, match="refused: it would import"):
            read_published(path)
        assert not witness.exists()

    def test_a_global_with_a_computed_name_is_refused(self, tmp_path):
        torch.save({"a": torch.zeros(2)}, tmp_path / "set.pt")
        evil = b"\x80\x04\x8c\x02osq\x00\x8c\x06systemq\x010h\x00h\x01\x93\x8c\x04true\x85R."
        rewrite(tmp_path / "set.pt", lambda _: evil)
        with pytest.raises(CoresetFileError, match="refused"):
            load(tmp_path / "set.pt")

    def test_only_plain_numpy_numbers_pass_for_numpy_scalars(self, tmp_path):
        numbers = {
            "a": np.float64(0.1),
            "b": np.int32(-3),
            "c": np.float32(0.5),
            "d": np.bool_(True),
            "e": np.uint8(255),
        }
        torch.save(numbers, tmp_path / "numbers.pt")
        read = load(tmp_path / "numbers.pt")
        assert read == {"a": 0.1, "b": -3, "c": 0.5, "d": True, "e": 255}
        assert all(type(value) in (float, int, bool) for value in read.values())
        for bad in (np.array(["x"] * 3)[0], np.datetime64("2020-01-01"), np.void(b"12345678")):
            torch.save({"a": bad}, tmp_path / "bad.pt")
            with pytest.raises(CoresetFileError, match="not a plain number"):
                load(tmp_path / "bad.pt")

    def test_numpy_arrays_in_a_pickle_are_refused_by_name(self, tmp_path):
        torch.save({"images": np.zeros(3)}, tmp_path / "array.pt")
        with pytest.raises(CoresetFileError, match=r"numpy\.?_?(core|_core)\.multiarray\._reconstruct"):
            load(tmp_path / "array.pt")

    def test_the_old_format_of_torch_save_is_refused_with_a_way_out(self, tmp_path):
        torch.save({"a": torch.zeros(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        with pytest.raises(CoresetFileError, match="refused"):
            load(tmp_path / "old.pt")

    def test_a_pt_tensor_that_claims_more_than_is_stored_is_refused(self, tmp_path):
        path = tmp_path / "lie.pt"
        torch.save({"images": torch.arange(4.0), "labels": torch.zeros(4)}, path)
        huge = b"J" + struct.pack("<i", 10**9)
        rewrite(
            path,
            lambda program: program.replace(b"K\x04tq", huge + b"tq").replace(b"K\x04\x85", huge + b"\x85"),
        )
        with pytest.raises(CoresetFileError, match="refused"):
            load(path)

    def test_a_pt_view_that_repeats_one_number_is_refused_unread(self, tmp_path):
        torch.save(
            {"images": torch.zeros(1).expand(10**12, 3, 32, 32), "labels": torch.zeros(4)},
            tmp_path / "view.pt",
        )
        with pytest.raises(CoresetFileError, match=r"claims \d+ bytes, the file holds 4 for it"):
            read_published(tmp_path / "view.pt")

    def test_a_compressed_pt_is_a_bomb(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("bomb/data.pkl", b"\x80\x02}.")
            archive.writestr("bomb/data/0", bytes(50_000_000))
        with pytest.raises(CoresetFileError, match="zip bomb"):
            load(tmp_path / "bomb.pt")

    def test_an_npz_bomb_is_refused_before_unpacking(self, tmp_path, monkeypatch):
        np.savez_compressed(tmp_path / "bomb.npz", images=np.zeros((100_000, 200)), labels=np.zeros(100_000))
        with pytest.raises(CoresetFileError, match="zip bomb"):
            load(tmp_path / "bomb.npz")

    def test_a_small_compressed_npz_is_fine(self, tmp_path):
        np.savez_compressed(tmp_path / "fine.npz", images=np.zeros((10, 8, 8, 3), np.uint8), labels=np.arange(10))
        assert len(read_published(tmp_path / "fine.npz")) == 10

    def test_an_npz_array_that_claims_more_than_is_stored_is_refused(self, tmp_path):
        np.savez(tmp_path / "honest.npz", images=np.zeros((10, 8)), labels=np.arange(10))
        with (
            zipfile.ZipFile(tmp_path / "honest.npz") as old,
            zipfile.ZipFile(tmp_path / "lie.npz", "w") as new,
        ):
            for info in old.infolist():
                new.writestr(info.filename, old.read(info).replace(b"(10, 8), }    ", b"(10, 80000), }"))
        with pytest.raises(CoresetFileError, match=r"claims 6400000 bytes \(10, 80000\), it holds 640"):
            load(tmp_path / "lie.npz")

    def test_objects_in_an_npz_are_never_unpickled(self, tmp_path):
        np.savez(
            tmp_path / "evil.npz",
            images=np.array([Malicious(tmp_path / "witness")], dtype=object),
            labels=np.arange(1),
        )
        with pytest.raises(CoresetFileError, match="never objects"):
            read_published(tmp_path / "evil.npz")
        assert not (tmp_path / "witness").exists()

    @pytest.mark.parametrize(
        ("shape", "dtype", "message"),
        [((10**9, 10), "float32", "claims"), ((-1, 4), "float32", "shape"), ((1,), "object", "not read")],
    )
    def test_a_flax_array_that_lies_is_refused(self, tmp_path, shape, dtype, message):
        msgpack = pytest.importorskip("msgpack")
        lie = msgpack.ExtType(1, msgpack.packb((shape, dtype, b"1234"), use_bin_type=True))
        (tmp_path / "checkpoint").write_bytes(msgpack.packb({"params": {"x_proto": lie, "y_proto": lie}}))
        with pytest.raises(CoresetFileError, match=message):
            read_published(tmp_path / "checkpoint")

    @pytest.mark.parametrize("kind", ["pt", "npz", "msgpack"])
    def test_every_truncation_is_refused_with_the_file_named(self, tmp_path, kind):
        path = tmp_path / f"set.{kind}"
        if kind == "pt":
            torch.save({"images": images(), "labels": labels()}, path)
        elif kind == "npz":
            np.savez(path, images=images().numpy(), labels=labels().numpy())
        else:
            path = TestKernelMethods().save_frepo(tmp_path)[0]
        whole = path.read_bytes()
        for length in (0, 3, 20, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(CoresetFileError, match=path.name):
                read_published(path, preprocessing=CIFAR)

    def test_a_missing_optional_package_names_its_extra(self, tmp_path, monkeypatch):
        import sys

        path, _ = TestKernelMethods().save_frepo(tmp_path)
        monkeypatch.setitem(sys.modules, "msgpack", None)
        with pytest.raises(ImportError, match=r"pip install 'coreset-sampler\[formats\]'"):
            read_published(path)


@pytest.mark.parametrize("page", ["loading.md", "file_format.md"])
def test_the_snippets_of_the_docs_run_as_printed(page, tmp_path, monkeypatch):
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    save_dc(tmp_path, "res_DC_CIFAR10_ConvNet_10ipc.pt")
    torch.save(images(channels=1, size=28), tmp_path / "images_best.pt")
    torch.save(labels(), tmp_path / "labels_best.pt")
    monkeypatch.chdir(tmp_path)
    run_snippets(Path(__file__).resolve().parents[2] / "docs" / page)
