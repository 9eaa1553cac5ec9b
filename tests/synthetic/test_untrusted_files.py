"""Untrusted files: nothing is run, fetched or read elsewhere, costs are limited, errors are of one kind."""

import http.server
import json
import os
import struct
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest
import torch

from coreset_sampler.cli import main as cli
from coreset_sampler.synthetic.dataset import SyntheticCoreset, load_coreset
from coreset_sampler.synthetic.formats import hf_dataset, pictures, read_experts, read_published, safe_arrow, safe_torch
from coreset_sampler.synthetic.formats.source import load
from coreset_sampler.synthetic.preprocessing import ZCA, Normalize, Raw
from coreset_sampler.synthetic.untrusted import CoresetFileError, Limits, printable

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")
Image = pytest.importorskip("PIL.Image")

NORMALIZE = Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
SPLIT = "train-00000-of-00001.parquet"


def picture(path, value=7, mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (8, 8), value).save(path)
    return path


def save_saved(folder, pointer=None):
    """What `save_to_disk` writes, of two rows; `pointer` is the path in place of the second one's bytes."""
    data = picture(folder / "tmp.png").read_bytes()
    (folder / "tmp.png").unlink()
    last = {"bytes": None, "path": pointer} if pointer else {"bytes": data, "path": None}
    kinds = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    features = {"image": {"_type": "Image"}, "label": {"dtype": "int64", "_type": "Value"}}
    table = pyarrow.table(
        {"image": pyarrow.array([{"bytes": data, "path": None}, last], kinds), "label": [0, 1]},
        metadata=None,
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    with pyarrow.ipc.new_stream(str(folder / "data.arrow"), table.schema) as file:
        file.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}], "_format_type": None}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features, "description": ""}))
    return table


class TestNothingElsewhere:
    @pytest.fixture
    def asked(self):
        """Requests that a server on this machine got, and its address."""
        requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                requests.append(self.path)
                self.send_error(404)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield requests, f"http://127.0.0.1:{server.server_port}/x.png"
        server.shutdown()
        server.server_close()

    @pytest.mark.parametrize("layout", ["arrow", "parquet"])
    def test_no_address_is_fetched(self, tmp_path, asked, layout):
        requests, address = asked
        table = save_saved(tmp_path, address)
        if layout == "parquet":
            parquet.write_table(table, tmp_path / SPLIT)
        with pytest.raises(CoresetFileError, match="no bytes for the picture in row 1"):
            read_published(tmp_path)
        assert not requests

    @pytest.mark.parametrize("layout", ["arrow", "parquet"])
    def test_no_picture_elsewhere_is_read(self, tmp_path, layout):
        secret = picture(tmp_path / "outside" / "secret.png", 99)
        (tmp_path / "set").mkdir()
        table = save_saved(tmp_path / "set", str(secret))
        if layout == "parquet":
            parquet.write_table(table, tmp_path / "set" / SPLIT)
        with pytest.raises(CoresetFileError, match="which is not opened"):
            read_published(tmp_path / "set")

    @pytest.mark.parametrize("name", ["../outside/data.arrow", "/etc/passwd", "..", "sub/x.arrow", "", 3, "a\\b"])
    def test_data_files_that_leave_the_folder_are_refused(self, tmp_path, name):
        for folder in ("set", "outside"):
            (tmp_path / folder).mkdir()
            save_saved(tmp_path / folder)
        assert len(read_published(tmp_path / "set")) == 2
        (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(CoresetFileError, match="not a name in that folder"):
            read_published(tmp_path / "set")

    @pytest.mark.parametrize("name", ["data.arrow", "state.json", "dataset_info.json"])
    def test_links_in_a_hugging_face_folder_are_refused(self, tmp_path, name):
        for folder in ("set", "outside"):
            (tmp_path / folder).mkdir()
            save_saved(tmp_path / folder)
        (tmp_path / "set" / name).unlink()
        os.symlink(tmp_path / "outside" / name, tmp_path / "set" / name)
        with pytest.raises(CoresetFileError, match=f"{name} is refused: a link"):
            read_published(tmp_path / "set")

    @pytest.mark.parametrize("whole_folder", [False, True])
    def test_linked_parquet_and_linked_folders_of_it_are_not_read(self, tmp_path, whole_folder):
        (tmp_path / "outside").mkdir()
        (tmp_path / "set").mkdir()
        parquet.write_table(save_saved(tmp_path / "outside"), tmp_path / "outside" / SPLIT)
        target, place = (tmp_path / "outside", "data") if whole_folder else (tmp_path / "outside" / SPLIT, SPLIT)
        os.symlink(target, tmp_path / "set" / place)
        with pytest.raises(CoresetFileError, match="none of the layouts" if whole_folder else "a link"):
            read_published(tmp_path / "set")

    @pytest.mark.parametrize("name", ["labels_best.pt", "images_best.pt", "lr_best.pt"])
    def test_links_among_the_parts_of_a_set_are_refused(self, tmp_path, name):
        for part, values in (("images", torch.rand(4, 3, 8, 8)), ("labels", torch.arange(4)), ("lr", torch.ones(()))):
            torch.save(values, tmp_path / f"{part}_best.pt")
        (tmp_path / name).rename(tmp_path / "elsewhere")
        os.symlink(tmp_path / "elsewhere", tmp_path / name)
        with pytest.raises(CoresetFileError, match=f"{name} is refused: a link"):
            read_published(tmp_path, preprocessing=NORMALIZE)

    def test_linked_buffers_are_refused(self, tmp_path):
        torch.save([[[torch.zeros(2)]]], tmp_path / "elsewhere.pt")
        os.symlink(tmp_path / "elsewhere.pt", tmp_path / "replay_buffer_0.pt")
        with pytest.raises(CoresetFileError, match="a link"):
            list(read_experts(tmp_path))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(/witness) (w) file\nshowpage\n%%EOF\n"


class TestPictures:
    @pytest.fixture
    def ghostscript(self, tmp_path, monkeypatch):
        """A `gs` that leaves a trace when it is started."""
        program = tmp_path / "bin" / "gs"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        from PIL import EpsImagePlugin

        monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
        return tmp_path / "started"

    def test_eps_under_another_name_does_not_reach_ghostscript(self, tmp_path, ghostscript):
        picture(tmp_path / "set" / "a" / "1.png")
        picture(tmp_path / "set" / "b" / "1.png").write_bytes(EPS)
        with pytest.raises(CoresetFileError, match=r"b.1\.png is truncated or no image of PNG, JPEG, WEBP, BMP"):
            read_published(tmp_path / "set")
        assert not ghostscript.exists()

    def test_eps_in_a_hugging_face_folder_does_not_reach_ghostscript(self, tmp_path, ghostscript):
        (tmp_path / "set").mkdir()
        table = pyarrow.table({"image": [{"bytes": EPS, "path": None}] * 2, "label": [0, 1]})
        parquet.write_table(table, tmp_path / "set" / SPLIT)
        with pytest.raises(CoresetFileError, match="picture 0 is truncated or no image of"):
            read_published(tmp_path / "set")
        assert not ghostscript.exists()

    def test_16_bits_are_scaled_by_their_own_range(self, tmp_path):
        values = np.array([[0, 257, 30000], [32768, 65278, 65535]], np.uint16)
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            Image.fromarray(values).save(tmp_path / name / "1.png")
        inputs = read_published(tmp_path).inputs
        assert inputs.dtype == torch.uint8
        assert inputs[0, 0].tolist() == [[0, 1, 117], [128, 254, 255]]

    def test_float_pictures_are_refused(self, tmp_path):
        values = np.full((4, 4), 0.5, np.float32)
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            Image.fromarray(values).save(tmp_path / name / "1.png", format="TIFF")
        with pytest.raises(CoresetFileError, match="no image of PNG"):
            read_published(tmp_path)

    def test_many_small_files_that_unpack_to_too_much_are_refused(self, tmp_path, monkeypatch):
        for name in ("a", "b"):
            picture(tmp_path / name / "1.png")
        monkeypatch.setattr(pictures, "LIMITS", Limits(always_fine=127, expansion=0))
        with pytest.raises(CoresetFileError, match="would unpack to 128"):
            read_published(tmp_path)


def zipped(folder, tensor):
    """torch.save's archive without 64-bit fields, and where its directory begins."""
    torch.save(tensor, folder / "set.pt")
    with zipfile.ZipFile(folder / "set.pt") as old, zipfile.ZipFile(folder / "plain.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        directory = new.start_dir
    return (folder / "plain.pt").read_bytes(), directory


def two_archives(torchs, pythons):
    """The end names the directory of `torchs`; zipfile takes the one that lies right before the end, `pythons`."""
    (hidden, place), (shown, directory) = torchs, pythons
    shown, at = bytearray(shown), directory
    while shown[at : at + 4] == b"PK\x01\x02":
        offset = struct.unpack_from("<L", shown, at + 42)[0]
        struct.pack_into("<L", shown, at + 42, offset + place - directory)
        at += 46 + sum(struct.unpack_from("<3H", shown, at + 28))
    struct.pack_into("<L", shown, at + 16, place)
    return hidden[:-22] + bytes(shown)


class TestZip:
    @pytest.fixture
    def pt(self, tmp_path):
        torch.save({"images": torch.rand(4, 3, 8, 8), "labels": torch.arange(4)}, tmp_path / "set.pt")
        return tmp_path / "set.pt"

    def test_what_torch_and_numpy_write_passes(self, pt, tmp_path):
        assert load(pt)["images"].shape == (4, 3, 8, 8)
        np.savez(tmp_path / "set.npz", a=np.arange(3))
        assert load(tmp_path / "set.npz")["a"].tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data[:4] + data,  # python's zipfile moves every offset by four
            lambda data: data + b"x",
            lambda data: data + bytes(22),
            lambda data: data[:-2] + b"\x05\x00hello",
        ],
    )
    def test_anything_around_the_archive_is_refused(self, pt, change):
        pt.write_bytes(change(pt.read_bytes()))
        with pytest.raises(CoresetFileError, match=r"zip"):
            load(pt)

    def test_an_archive_that_two_readers_see_differently_is_refused(self, tmp_path):
        two = tmp_path / "two.pt"
        two.write_bytes(two_archives(zipped(tmp_path, torch.ones(1000)), zipped(tmp_path, torch.zeros(1))))
        with zipfile.ZipFile(two) as archive:
            assert max(entry.file_size for entry in archive.infolist()) < 1000  # what was checked
        assert torch.load(two, weights_only=True).shape == (1000,)  # what was opened
        with pytest.raises(CoresetFileError, match="does not lie where"):
            safe_torch.load(two)

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    @pytest.mark.parametrize("name", ["set/data.pkl", "set/DATA.pkl"])
    def test_a_name_that_occurs_twice_is_refused(self, pt, name):
        with zipfile.ZipFile(pt, "a") as archive:
            archive.writestr(name, b"\x80\x02}.")
        with pytest.raises(CoresetFileError, match="occurs twice"):
            load(pt)


class TestArrow:
    def test_changed_offsets_are_noticed_before_use(self, tmp_path):
        table = pyarrow.table({"image": pyarrow.array([[1.0, 2.0], [3.0, 4.0]]), "label": [0, 1]})
        with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as file:
            file.write_table(table)
        data = (tmp_path / "a.arrow").read_bytes()
        offsets = struct.pack("<3i", 0, 2, 4)
        assert data.count(offsets) == 1
        for bad in ((-1000, 2, 4), (0, 2, 4000), (0, 3, 2)):
            (tmp_path / "a.arrow").write_bytes(data.replace(offsets, struct.pack("<3i", *bad)))
            with pytest.raises(CoresetFileError, match=r"a\.arrow is truncated or damaged"):
                safe_arrow.read_table(tmp_path / "a.arrow", ("image", "label"))

    @pytest.mark.parametrize("kind", [0, 2, 3, 198])
    def test_a_stream_that_does_not_begin_with_a_schema_is_refused(self, tmp_path, kind):
        """Arrow takes whatever comes first for one, which ended the process with a segmentation fault."""
        table = pyarrow.table({"image": [1.0], "label": [0]})
        with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as file:
            file.write_table(table)
        data = bytearray((tmp_path / "a.arrow").read_bytes())
        message = bytes(data[8:])
        data[8 + safe_arrow._field(message, struct.unpack_from("<I", message)[0], 1)] = kind
        (tmp_path / "a.arrow").write_bytes(data)
        with pytest.raises(
            CoresetFileError, match=r"a\.arrow is (refused: an Arrow stream begins with a schema|truncated)"
        ):
            safe_arrow.read_table(tmp_path / "a.arrow", ("image", "label"))

    @pytest.mark.parametrize("compression", ["lz4", "zstd"])
    def test_compressed_batches_are_refused_before_they_are_unpacked(self, tmp_path, compression):
        table = pyarrow.table({"image": pyarrow.array(np.zeros(1 << 20)), "label": np.zeros(1 << 20, int)})
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema, options=options) as file:
            file.write_table(table)
        with pytest.raises(CoresetFileError, match="only plain record batches"):
            safe_arrow.read_table(tmp_path / "a.arrow", ("image", "label"))

    def test_a_parquet_that_repeats_one_large_value_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(safe_arrow, "LIMITS", Limits(always_fine=1 << 20))
        big = bytes(50_000)
        parquet.write_table(
            pyarrow.table({"image": [big] * 2000, "label": [0] * 2000}), tmp_path / SPLIT, compression="zstd"
        )
        assert (tmp_path / SPLIT).stat().st_size < 100_000
        with pytest.raises(CoresetFileError, match="would unpack to"):
            read_published(tmp_path)

    def test_large_values_are_read_few_at_a_time(self, tmp_path, monkeypatch):
        """One value of 100 kB for 500 rows: no batch may hold more than the 250 kB that are allowed here."""
        table = pyarrow.table({"image": [bytes(100_000)] * 500, "label": [0] * 500})
        parquet.write_table(table, tmp_path / SPLIT, compression="zstd")
        monkeypatch.setattr(safe_arrow, "LIMITS", Limits(always_fine=250_000, expansion=0))
        largest, iter_batches = [], parquet.ParquetFile.iter_batches

        def watched(*arguments, **options):
            for batch in iter_batches(*arguments, **options):
                largest.append(batch.nbytes)
                yield batch

        monkeypatch.setattr(parquet.ParquetFile, "iter_batches", watched)
        with pytest.raises(CoresetFileError, match="would unpack to"):
            read_published(tmp_path)
        assert 0 < max(largest) < 250_000

    def test_rows_of_nothing_are_counted_too(self, tmp_path):
        nothing = pyarrow.Array.from_buffers(pyarrow.null(), 2**31 - 1, [None])
        batch = pyarrow.record_batch({"image": nothing, "label": nothing})
        with pyarrow.ipc.new_stream(str(tmp_path / "data.arrow"), batch.schema) as file:
            file.write_batch(batch)
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        (tmp_path / "dataset_info.json").write_text("{}")
        with pytest.raises(CoresetFileError, match="would unpack to"):
            read_published(tmp_path)

    def test_columns_of_other_names_are_named(self, tmp_path):
        parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / SPLIT)
        with pytest.raises(CoresetFileError, match="no column of images or labels, it has text"):
            read_published(tmp_path)

    def test_missing_values_and_ragged_arrays_are_refused(self, tmp_path):
        for values, message in (([[1.0], [2.0, 3.0]], "several shapes"), ([[1.0], [None]], "missing values")):
            parquet.write_table(pyarrow.table({"image": values, "label": [0, 1]}), tmp_path / SPLIT)
            with pytest.raises(CoresetFileError, match=message):
                read_published(tmp_path, preprocessing=Raw())

    def test_bytes_are_pixels_and_other_numbers_are_what_models_train_on(self, tmp_path):
        for kind, read in (("uint8", torch.uint8), ("int32", torch.int64), ("float64", torch.float32)):
            features = datasets.Features({"image": datasets.Array3D((3, 4, 4), kind), "label": datasets.Value("uint8")})
            x = np.arange(96).reshape(2, 3, 4, 4).astype(kind)
            dataset = datasets.Dataset.from_dict({"image": list(x), "label": [0, 1]}, features=features)
            dataset.to_parquet(tmp_path / SPLIT)
            coreset = read_published(tmp_path, preprocessing=None if kind == "uint8" else Raw())
            assert coreset.inputs.dtype == read
            assert np.array_equal(coreset.inputs.numpy(), x)
            assert coreset.targets.dtype == torch.int64
            assert coreset.preprocessing == Raw()


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64"]
)
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4, 4)])
def test_a_coreset_of_any_number_comes_back_equal_from_hugging_face(tmp_path, dtype, shape):
    values = (torch.rand(shape, dtype=torch.float64) * 100).to(getattr(torch, dtype))
    soft = torch.rand(6, 3, dtype=torch.float64).to(getattr(torch, dtype) if "float" in dtype else torch.float64)
    coreset = SyntheticCoreset(values, soft, preprocessing=Raw(), target_kind="logits")
    dataset = hf_dataset.to_dataset(coreset)
    assert hf_dataset.from_dataset(dataset).equal(coreset)
    dataset.save_to_disk(tmp_path)
    assert read_published(tmp_path).equal(coreset)


def test_a_whitening_matrix_travels_with_a_hugging_face_folder(tmp_path):
    """The largest thing in a description: 26 MB here, 50 MB for CIFAR-10."""
    coreset = SyntheticCoreset(
        torch.rand(4, 1, 44, 50), torch.arange(4), preprocessing=ZCA("C", torch.rand(2200, 2200))
    )
    hf_dataset.to_dataset(coreset).save_to_disk(tmp_path)
    assert read_published(tmp_path).equal(coreset)


class TestCost:
    def test_json_of_very_many_values_is_refused_unread(self, tmp_path):
        save_saved(tmp_path)
        (tmp_path / "dataset_info.json").write_text(json.dumps({"features": [[]] * (1 << 20)}))
        with pytest.raises(CoresetFileError, match=r"dataset_info\.json is refused: JSON of"):
            read_published(tmp_path)

    def test_a_header_of_very_many_values_is_refused_unread(self, tmp_path):
        header = b'{"a":[' + b"[]," * (1 << 20) + b"[]]}"
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(CoresetFileError, match=r"a\.safetensors is refused: JSON of"):
            load_coreset(tmp_path / "a.safetensors")

    @pytest.mark.parametrize("read", [load, load_coreset, read_published, lambda path: list(read_experts(path))])
    def test_pipes_are_refused_not_waited_for(self, tmp_path, read):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises((CoresetFileError, FileNotFoundError), match="named pipe|neither a buffer"):
            read(tmp_path / "pipe")

    def test_devices_are_refused(self):
        with pytest.raises(CoresetFileError, match="a device is neither"):
            read_published("/dev/zero")

    def test_a_long_header_is_refused_unread(self, tmp_path):
        length = 17 << 20
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", length) + b"{" + b" " * length)
        with pytest.raises(CoresetFileError, match="a header of"):
            load_coreset(tmp_path / "a.safetensors")

    def test_a_flax_array_of_many_dimensions_is_refused_at_once(self, tmp_path):
        msgpack = pytest.importorskip("msgpack")
        lie = msgpack.ExtType(1, msgpack.packb(([2**62] * 100_000, "float32", b"1234")))
        (tmp_path / "checkpoint").write_bytes(msgpack.packb({"params": {"x_proto": lie, "y_proto": lie}}))
        with pytest.raises(CoresetFileError, match="shape"):
            load(tmp_path / "checkpoint")

    def test_lists_that_hold_one_list_again_and_again_are_refused(self, tmp_path):
        content = [torch.zeros(1)]
        for _ in range(3):
            content = [content] * 1000
        torch.save(content, tmp_path / "replay_buffer_0.pt")
        with pytest.raises(CoresetFileError, match="unfold to more"):
            list(read_experts(tmp_path))

    def test_many_views_of_one_tensor_are_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(safe_torch, "LIMITS", Limits(always_fine=0))
        torch.save([torch.zeros(100_000)] * 1000, tmp_path / "a.pt")
        with pytest.raises(CoresetFileError, match="would unpack"):
            load(tmp_path / "a.pt")


BAD = {
    "empty.pt": b"",
    "text.pt": b"hello",
    "zip.pt": b"PK\x03\x04 no more",
    "pickle.pt": b"\x80\x04N.",
    "safetensors.pt": b"\x02\0\0\0\0\0\0\0{}",
    "map.msgpack": b"\x81\xa1",
    "latin.safetensors": b'\x08\0\0\0\0\0\0\0{"\xff": 1}',
    "number.safetensors": struct.pack("<Q", 41) + b'{"__metadata__": {"format": 1, "a": [1]}} ',
    "deep.safetensors": struct.pack("<Q", 100_000) + b'{"a":' + b"[" * 99_995,
    "huge.safetensors": struct.pack("<Q", 2**63) + b"{}",
}


class TestOneKindOfError:
    @pytest.mark.parametrize("name", BAD)
    def test_the_command_line_gives_one_message_without_a_traceback(self, tmp_path, capsys, name):
        (tmp_path / name).write_bytes(BAD[name])
        for command in (["info"], ["show", "-o", "x.png"], ["convert"]):
            rest = [str(tmp_path / "out.safetensors")] if command == ["convert"] else []
            assert cli.main([command[0], str(tmp_path / name), *command[1:], *rest]) == 1
            assert name in capsys.readouterr().err

    def test_an_npz_header_that_is_no_python_is_one_of_them(self, tmp_path):
        np.savez(tmp_path / "a.npz", images=np.zeros((4, 3)), labels=np.arange(4))
        with zipfile.ZipFile(tmp_path / "a.npz") as old, zipfile.ZipFile(tmp_path / "b.npz", "w") as new:
            for info in old.infolist():
                new.writestr(info.filename, old.read(info).replace(b"'descr': ", b"'descr\x00'((("))
        with pytest.raises(CoresetFileError, match=r"b\.npz is damaged at images\.npy"):
            load(tmp_path / "b.npz")

    @pytest.mark.parametrize("change", [{"method": 5}, {"learning_rate": "x"}, {"classes": "abc"}, {"provenance": [1]}])
    def test_a_description_of_wrong_types_is_one_of_them(self, tmp_path, change):
        from coreset_sampler.synthetic import file as coreset_file
        from coreset_sampler.synthetic.dataset import to_tensors

        coreset = SyntheticCoreset(torch.rand(6, 3), torch.arange(6) % 3, preprocessing=Raw())
        tensors, description = to_tensors(coreset)
        coreset_file.write(tmp_path / "a.safetensors", tensors, description | change)
        with pytest.raises(CoresetFileError, match=rf"a\.safetensors holds no valid coreset: {next(iter(change))}"):
            load_coreset(tmp_path / "a.safetensors")

    @pytest.mark.integration
    def test_memory_that_runs_out_is_one_of_them(self, tmp_path):
        """In a process of its own, whose memory is limited."""
        pytest.importorskip("resource")
        SyntheticCoreset(torch.zeros(100_000, 300), torch.zeros(100_000).long(), preprocessing=Raw()).save(
            tmp_path / "a.safetensors"
        )
        code = (
            "import resource, sys, os; from coreset_sampler import load_coreset; load_coreset('digits/k-center-10');"
            "from coreset_sampler.cli import main as cli;"
            "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (40 << 20);"
            "resource.setrlimit(resource.RLIMIT_AS, (used, used)); sys.exit(cli.main(['info', sys.argv[1]]))"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "a.safetensors")]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 1
        assert "a.safetensors" in ran.stderr
        assert "Traceback" not in ran.stderr

    def test_what_a_terminal_would_obey_is_escaped(self, tmp_path, capsys):
        evil = "\x1b]0;owned\x07\x1b[31m\u202e"
        coreset = SyntheticCoreset(
            torch.rand(6, 3),
            torch.arange(6) % 3,
            preprocessing=Raw(),
            method=evil,
            class_names=("a", evil, "c"),
            provenance={evil: evil, "x": {evil: 1}},
        )
        coreset.save(tmp_path / "a.safetensors")
        assert cli.main(["info", str(tmp_path / "a.safetensors")]) == 0
        torch.save({evil: torch.zeros(2)}, tmp_path / f"{evil[:4]}.pt")
        assert cli.main(["info", str(tmp_path / f"{evil[:4]}.pt")]) == 1
        out, err = capsys.readouterr()
        assert (out + err).replace("\n", "").isprintable()
        assert "\\x1b" in out
        assert "\\x1b" in err

    def test_printable_leaves_ordinary_text_alone(self):
        assert printable("Größe 3 µm, 日本\nnext") == "Größe 3 µm, 日本\nnext"
        assert printable("\x1b[2J\ud800\u200b") == "\\x1b[2J\\ud800\\u200b"
