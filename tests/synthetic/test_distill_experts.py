"""Expert trajectories: training, resuming, reading a point at a time."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from scenarios import digits
from torch import Generator, nn

from coreset_sampler.synthetic.distillers import Experts, RealData, pixels, train_experts
from coreset_sampler.synthetic.networks import network
from coreset_sampler.synthetic.preprocessing import Normalize

NET = network("convnet", 1, 10, 8, widths=(4, 4))
IMAGES, LABELS = (tensor[:300] for tensor in digits().tensors)
DATA = RealData(IMAGES, LABELS)
SETTINGS = {"experts": 2, "epochs": 3, "lr": 0.1, "batch": 50}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)  # before the fixture that does so for tests, and bits depend on it
    folder = tmp_path_factory.mktemp("experts")
    train_experts(NET, DATA, folder, **SETTINGS)
    return folder


def points(folder):
    return {p.name: Experts(folder).theta(int(p.name[7:11]), int(p.name[18:21])) for p in folder.glob("*.safetensors")}


def test_experts_learn_and_differ(folder):
    experts, flat = Experts(folder), pixels.flat_network(NET)
    assert len(experts) == 2
    start, end = experts.theta(0, 0), experts.theta(0, 3)
    losses = [float(nn.functional.cross_entropy(flat(theta, IMAGES), LABELS)) for theta in (start, end)]
    assert losses[1] < losses[0]
    assert not torch.equal(end, experts.theta(1, 3))


def test_a_run_that_lost_its_end_is_continued_to_the_same_bits(folder, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    for name in ("expert_0000_epoch_002", "expert_0000_epoch_003", "expert_0001_epoch_003"):
        (half / f"{name}.safetensors").unlink()
    (half / ".expert_0000_epoch_002.safetensors.abc").write_bytes(b"half a file of a killed run")
    before = torch.random.get_rng_state()
    train_experts(NET, DATA, half, **SETTINGS)
    assert torch.equal(torch.random.get_rng_state(), before)
    whole, again = points(folder), points(half)
    assert whole.keys() == again.keys()
    assert all(torch.equal(theta, again[name]) for name, theta in whole.items())


def test_trained_again_nothing_is_written_and_longer_adds_epochs(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    times = {p: p.stat().st_mtime_ns for p in copy.glob("*.safetensors")}
    train_experts(NET, DATA, copy, **SETTINGS)
    assert times == {p: p.stat().st_mtime_ns for p in copy.glob("*.safetensors")}
    train_experts(NET, DATA, copy, **SETTINGS | {"experts": 1, "epochs": 4})
    assert json.loads((copy / "experts.json").read_text())["experts"] == 2
    assert Experts(copy).theta(0, 4).shape == Experts(copy).theta(0, 3).shape


def test_other_settings_in_the_same_folder_are_refused(folder):
    with pytest.raises(ValueError, match=r"experts with lr 0.1, asked for 0.2"):
        train_experts(NET, DATA, folder, **SETTINGS | {"lr": 0.2})
    with pytest.raises(ValueError, match="experts with net 'a', asked for 'b'|experts with net None"):
        train_experts(NET, DATA, folder, **SETTINGS, about={"net": "b"})


def test_a_segment_reads_two_files_and_begins_early(folder, monkeypatch):
    from coreset_sampler.synthetic import file as coreset_file

    opened = []
    read = coreset_file.read
    monkeypatch.setattr(coreset_file, "read", lambda path: opened.append(path.name) or read(path))
    starts = set()
    generator = Generator().manual_seed(0)
    experts = Experts(folder, max_start=1)
    for _ in range(30):
        opened.clear()
        experts.segment(2, generator)
        assert len(opened) == 2
        starts.add(opened[0])
    assert starts == {f"expert_000{e}_epoch_00{t}.safetensors" for e in (0, 1) for t in (0, 1)}


def test_a_segment_longer_than_any_expert_is_refused(folder):
    with pytest.raises(ValueError, match="has 9 epochs, the longest has 3"):
        Experts(folder).segment(9, Generator())


def test_mtt_buffers_are_the_same_source(folder, tmp_path):
    flat, experts = pixels.flat_network(NET), Experts(folder)
    trajectories = [
        [[p.clone() for p in flat.parameters(experts.theta(expert, epoch)).values()] for epoch in range(4)]
        for expert in range(2)
    ]
    torch.save(trajectories[:1], tmp_path / "replay_buffer_0.pt")
    torch.save(trajectories[1:], tmp_path / "replay_buffer_1.pt")
    buffers = Experts(tmp_path, max_start=1)
    ours = Experts(folder, max_start=1)
    for seed in range(5):
        mine, theirs = (source.segment(2, Generator().manual_seed(seed)) for source in (ours, buffers))
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    with pytest.raises(ValueError, match="pass data"):
        _ = buffers.n
    assert Experts(tmp_path, DATA).n == 300


def test_experts_without_data_know_n_but_give_no_batches(folder):
    assert Experts(folder).n == 300
    with pytest.raises(ValueError, match="RealData"):
        Experts(folder).batch(3, Generator())
    inputs, labels = Experts(folder, DATA).batch(7, Generator().manual_seed(0))
    assert inputs.shape == (7, 1, 8, 8)
    assert labels.shape == (7,)


def test_a_nan_in_an_expert_is_found(folder, tmp_path):
    from coreset_sampler.synthetic import file as coreset_file

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    coreset_file.write(copy / "expert_0000_epoch_001.safetensors", {"theta": torch.full((3,), torch.nan)}, {})
    with pytest.raises(ValueError, match="expert 0 .* epoch 1: train it anew"):
        Experts(copy).theta(0, 1)


def test_a_folder_without_experts_says_how_to_make_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="coreset-sampler experts"):
        Experts(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no experts"):
        Experts(tmp_path)


def test_what_a_killed_run_began_to_write_is_removed_unless_it_may_be_under_way(tmp_path):
    old, new = (tmp_path / f".expert_0000_epoch_00{n}.safetensors.0123456789abcdef" for n in (1, 2))
    described = tmp_path / ".experts.json.4711"
    for path in (old, new, described):
        path.write_bytes(b"half")
    for path in (old, described):
        os.utime(path, (0, 0))
    data = RealData(torch.rand(8, 3), torch.arange(8) % 2)
    train_experts(lambda: torch.nn.Linear(3, 2), data, tmp_path, experts=1, epochs=1, augmentation=None)
    assert (old.exists(), new.exists(), described.exists()) == (False, True, False)


def test_bytes_become_floats_a_batch_at_a_time_and_rare_classes_give_what_they_have():
    pixels_, labels = torch.randint(256, (20, 1, 4, 4), dtype=torch.uint8), torch.tensor([0] * 18 + [1] * 2)
    data = RealData(pixels_, labels, preprocessing=Normalize(0.5, 0.25))
    inputs, targets = data.per_class(5, Generator().manual_seed(0))
    assert torch.bincount(targets).tolist() == [5, 2]
    assert inputs.dtype == torch.float32
    everything, _ = data.rows(torch.arange(20))
    assert torch.allclose(everything, (pixels_ / 255 - 0.5) / 0.25)
    assert len(data.batch(100, Generator())[0]) == 20
    assert sum(len(x) for x, _ in data.epoch(6, Generator())) == 20


@pytest.mark.integration
def test_two_ranks_of_torchrun_share_the_experts(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29731"]
    command += ["-m", "coreset_sampler.cli", "experts", str(tmp_path / "ours"), "digits", "--widths", "4", "4"]
    command += ["--experts", "3", "--epochs", "1", "--batch", "256", "--threads", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("holds 3 experts") == 2
    assert done.stderr.count("epoch 1/1") == 3
