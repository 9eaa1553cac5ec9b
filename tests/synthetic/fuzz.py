"""Mutants of a file of every layout, and the process that reads them: `python fuzz.py FOLDER FIRST LAST KIND ...`.

The process writes a line of JSON per finding and `done KIND` after each kind, on stdout. What it is reading stands in
`FOLDER/now`, so that the parent can name the mutant that killed it. Mutant `n` of a kind is always the same.
"""

import faulthandler
import io
import json
import pickle
import random
import resource
import shutil
import struct
import sys
import traceback
import zipfile
from pathlib import Path

import numpy as np
import torch

from coreset_sampler.synthetic.dataset import SyntheticCoreset
from coreset_sampler.synthetic.formats import (
    experts,
    read_experts,
    read_published,
    safe_arrow,
    safe_msgpack,
    safe_npz,
    safe_torch,
)
from coreset_sampler.synthetic.formats.pictures import read_picture
from coreset_sampler.synthetic.preprocessing import ZCA, Normalize, Raw
from coreset_sampler.synthetic.untrusted import CoresetFileError

SECONDS, MEMORY = 10, 2 << 30
READING = []  # the folder that is being read, for the audit hook
NORMALIZE = Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
NUMBERS = [0, 1, -1, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, -(2**63), -8, -64]


def seeded(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


X, Y = seeded(6, 3, 4, 4), torch.arange(6) // 2


def canary(folder):
    """A pickle that writes `folder/executed`."""

    class Canary:
        def __reduce__(self):
            return (open, (str(folder / "executed"), "w"))

    return pickle.dumps(Canary(), protocol=2)


def save_dc(folder):
    scores = {"ConvNet": [np.float64(0.5), np.float64(0.25)]}
    torch.save({"data": [[X, Y]], "accs_all_exps": scores}, folder / "res_DC_CIFAR10_ConvNet_2ipc.pt")


def save_parts(images, labels, rate, tag, hard):
    def save(folder):
        torch.save(X, folder / f"{images}{tag}.pt")
        torch.save(Y if hard else seeded(6, 3), folder / f"{labels}{tag}.pt")
        torch.save(torch.tensor(0.02), folder / f"{rate}{tag}.pt")

    return save


def save_kip(folder):
    x, y = X.permute(0, 2, 3, 1).numpy(), seeded(6, 3).numpy()
    np.savez(folder / "ConvNet_ssize6_zca_nol_noaug_ckpt10.npz", images=x, labels=y)


def save_frepo(folder):
    import msgpack

    def array(values):
        return msgpack.ExtType(1, msgpack.packb((values.shape, values.dtype.name, values.tobytes())))

    pieces = {str(i): array(part) for i, part in enumerate(np.split(X.permute(0, 2, 3, 1).numpy().ravel(), 2))}
    shape = {str(i): size for i, size in enumerate((6, 4, 4, 3))}
    x = {"__msgpack_chunked_array__": True, "shape": shape, "chunks": pieces}
    state = {"step": 7, "params": {"x_proto": x, "y_proto": array(seeded(6, 3).numpy())}}
    (folder / "checkpoint_1000").write_bytes(msgpack.packb(state))


def save_images(pattern):
    def save(folder):
        from PIL import Image

        for label in range(2):
            path = folder / pattern.format(c=label)
            path.parent.mkdir(parents=True)
            noise = seeded(3, 8, 8).mul(255).byte().permute(1, 2, 0).numpy()
            Image.fromarray(noise).save(path)

    return save


def save_plain(folder):
    np.savez_compressed(folder / "set.npz", images=X.numpy(), labels=Y.numpy())


def dataset(pictures):
    import datasets
    from PIL import Image

    datasets.disable_progress_bars()
    if pictures:
        rows = {"image": [Image.new("L", (8, 8), 30 * i) for i in range(6)], "label": Y.tolist()}
        feature = datasets.Image()
    else:
        rows = {"image": list(X.numpy()), "label": Y.tolist()}
        feature = datasets.Array3D((3, 4, 4), "float32")
    return datasets.Dataset.from_dict(
        rows, features=datasets.Features({"image": feature, "label": datasets.ClassLabel(names=["a", "b", "c"])})
    )


def save_ours(folder):
    first = Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    zca = ZCA("B", torch.eye(48), torch.zeros(48), first)
    provenance = {"seed": 0, "command": "made up", "accuracy": {"mean": 0.5}}
    SyntheticCoreset(X, Y, preprocessing=zca, class_names=("a", "b", "c"), provenance=provenance).save(
        folder / "set.safetensors"
    )


def save_experts(folder):
    buffer = [[[seeded(4, 3), torch.zeros(4)] for _ in range(3)] for _ in range(2)]
    torch.save(buffer, folder / "replay_buffer_0.pt")


def one(folder, ending="*"):
    return next(path for path in sorted(folder.rglob(ending)) if path.is_file())


def published(folder):
    return read_published(folder, preprocessing=NORMALIZE)


def published_file(folder):
    return read_published(one(folder), preprocessing=NORMALIZE)


def pixels(folder):
    return read_published(folder, preprocessing=Raw())


SEEDS = {  # name: (writes a seed into an empty folder, reads it)
    "dc": (save_dc, published_file),
    "mtt": (save_parts("images", "labels", "lr", "_best", True), published),
    "bpc": (save_parts("images", "labels", "lr", "_5000", True), published),
    "datm": (save_parts("images", "labels", "lr", "_best", False), published),
    "ddranking": (save_parts("images", "labels", "lr", "", False), published),
    "kip": (save_kip, published_file),
    "frepo": (save_frepo, published_file),
    "sre2l": (save_images("new{c:03d}/class{c:03d}_id000.jpg"), pixels),
    "rded": (save_images("{c:05d}/class{c:05d}_id00000.jpg"), pixels),
    "images": (save_images("class{c}/a.png"), pixels),
    "images-webp": (save_images("class{c}/a.webp"), pixels),
    "images-bmp": (save_images("class{c}/a.bmp"), pixels),
    "plain": (save_plain, published_file),
    "arrow-pictures": (lambda folder: dataset(True).save_to_disk(folder), pixels),
    "arrow-numbers": (lambda folder: dataset(False).save_to_disk(folder), published),
    "parquet-pictures": (lambda folder: dataset(True).to_parquet(folder / "train.parquet"), pixels),
    "parquet-numbers": (lambda folder: dataset(False).to_parquet(folder / "train.parquet"), published),
    "ours": (save_ours, lambda folder: SyntheticCoreset.load(one(folder))),
    "experts": (save_experts, lambda folder: list(read_experts(folder))),
    "safe_torch": (save_dc, lambda folder: safe_torch.load(one(folder))),
    "safe_torch-mapped": (save_experts, lambda folder: list(experts.open_buffers(folder))),
    "safe_npz": (save_kip, lambda folder: safe_npz.load(one(folder))),
    "safe_msgpack": (save_frepo, lambda folder: safe_msgpack.load(one(folder))),
    "safe_arrow": (
        lambda folder: dataset(True).save_to_disk(folder),
        lambda folder: safe_arrow.read_table(one(folder, "*.arrow"), ("image", "label")),
    ),
    "safe_picture": (save_images("{c}/a.png"), lambda folder: read_picture(one(folder), str(one(folder)))),
}


def mutate(data, dice):
    """Other bytes, now and then of another length."""
    data = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 3, 8])):
        at = _place(len(data), dice)
        how = dice.randrange(9)
        if how < 3:
            data[at : at + 1] = bytes([dice.randrange(256)])
        elif how == 3 and data:
            data[at % len(data)] ^= 1 << dice.randrange(8)
        elif how < 6:
            width, number = dice.choice([1, 2, 4, 8]), dice.choice(NUMBERS)
            data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, dice.choice(["little", "big"]))
        elif how == 6:
            del data[at : at + dice.choice([1, 4, 64, len(data)])]
        elif how == 7:
            data[at:at] = data[at : at + dice.choice([1, 8, 200])]
        else:
            data[at:at] = dice.randbytes(dice.choice([1, 4, 40]))
    return bytes(data)


def _place(length, dice):
    """Anywhere, the ends more often than the middle."""
    where = dice.randrange(4)
    near = min(length, 300)
    return (
        dice.randrange(near + 1)
        if where == 0
        else length - dice.randrange(near + 1)
        if where == 1
        else (dice.randrange(length + 1))
    )


def mutate_member(data, dice, evil):
    """A zip that is right in itself with one member changed, or its pickle replaced by `evil`."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w") as new:
        names = old.namelist()
        chosen = (
            next((n for n in names if n.endswith("data.pkl")), names[0]) if dice.random() < 0.7 else dice.choice(names)
        )
        for name in names:
            content = old.read(name)
            if name == chosen:
                content = evil + content if dice.random() < 0.1 else mutate(content, dice)
            new.writestr(name, content)
    return target.getvalue()


def mutate_header(data, dice):
    """A safetensors file with a changed header of the right length."""
    length = struct.unpack_from("<Q", data)[0]
    header = mutate(data[8 : 8 + length], dice)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def make_mutant(seed, folder, kind, number):
    """A copy of the seed's folder with one file changed."""
    dice = random.Random(f"{kind} {number}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(seed, folder)
    path = dice.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    data = path.read_bytes()
    evil = canary(folder.parent)
    how = dice.random()
    if data[:2] == b"PK" and how < 0.6:
        data = mutate_member(data, dice, evil)
    elif path.suffix == ".safetensors" and how < 0.6:
        data = mutate_header(data, dice)
    elif how > 0.99:
        data = evil
    else:
        data = mutate(data, dice)
    path.write_bytes(data)


def finding(read, folder, witness):
    """What is wrong with how this file was read; None if nothing is."""
    READING.append(folder)
    try:
        read(folder)
    except CoresetFileError as error:
        message = str(error)
        if str(folder) not in message or not message.replace("\n", "").isprintable():
            return f"message without the file's name, or not printable: {message!r}"
    except BaseException:
        return traceback.format_exc(limit=-4)
    finally:
        READING.clear()
    return "the pickle was executed" if (witness / "executed").exists() else None


def watch(folder):
    """Reports if reading starts a process, opens a connection or opens anything but code outside the folder."""

    def hook(event, arguments):
        if not READING:
            return
        if event == "open":
            path = str(arguments[0])
            code = path.endswith((".py", ".pyc", ".so"))
            wrong = not isinstance(arguments[0], int) and not code and not path.startswith(str(folder))
        else:
            wrong = event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
        if wrong:
            print(json.dumps(["elsewhere", -1, f"{event} {arguments}"]), flush=True)

    sys.addaudithook(hook)


def main(folder, first, last, kinds):
    torch.set_num_threads(1)
    folder = Path(folder)
    for kind in kinds:
        (folder / kind / "seed").mkdir(parents=True)
        SEEDS[kind][0](folder / kind / "seed")
        SEEDS[kind][1](folder / kind / "seed")  # also imports whatever reading needs
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    watch(folder)
    for kind in kinds:
        for number in range(int(first), int(last)):
            (folder / "now").write_text(f"{kind} {number}")
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            make_mutant(folder / kind / "seed", folder / kind / "mutant", kind, number)
            wrong = finding(SEEDS[kind][1], folder / kind / "mutant", folder / kind)
            faulthandler.cancel_dump_traceback_later()
            if wrong:
                print(json.dumps([kind, number, wrong]), flush=True)
        print(f"done {kind}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
