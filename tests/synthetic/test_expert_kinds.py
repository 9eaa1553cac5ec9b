"""Coresets that are learned from experts of several kinds of networks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from scenarios import digits
from torch import Generator

from coreset_sampler import distill, load_coreset
from coreset_sampler.cli.main import main
from coreset_sampler.synthetic import distillers
from coreset_sampler.synthetic.distillers import Experts, RealData, pixels, train_experts
from coreset_sampler.synthetic.distillers import experts as expert_module
from coreset_sampler.synthetic.distillers.checkpoint import same
from coreset_sampler.synthetic.distillers.expert_checks import untrained
from coreset_sampler.synthetic.distillers.presets import cpu, preset
from coreset_sampler.synthetic.networks import MANY, description, network

NAMES = ["convnet:4", "convnet-batch:4-6", "vit:32"]
NETS = [network(name, 1, 10, 8) for name in NAMES]
SIZES = [pixels.flat_network(make).size for make in NETS]
IMAGES, LABELS = (tensor[:200] for tensor in digits().tensors)
DATA = RealData(IMAGES, LABELS)
SETTINGS = {"experts": 4, "epochs": 2, "lr": 0.1, "batch": 50}
FEW = {"inner_steps": 2, "inner_lr": 0.05}
METHODS = {
    "fkl": partial(distillers.ForwardKL, samples=2, lr=1.0, **FEW),
    "cd": partial(distillers.ContrastiveDivergence, epochs=1, lr=1.0, **FEW),
    "w": partial(distillers.Wasserstein, epochs=1, lr=1.0, **FEW),
    "rkl": partial(distillers.ReverseKL, samples=2, batch=20, lr=1.0, **FEW),
}
TWO = ["convnet:4-8", "convnet-batch:4"]
RUN = {"images_per_class": 1, "networks": TWO, "progress": False, "settings": {"inner_steps": 2, "samples": 2}}
TRAINING = {"experts": 3, "epochs": 2, "lr": 0.1, "batch": 50, "examples": 200}


class Noted:
    """A source of fresh networks for experts, which notes the kinds that it is asked for."""

    n = 200

    def __init__(self, nets):
        self.flats, self.asked = [pixels.flat_network(make) for make in nets], []

    def batch(self, size, generator):
        return DATA.batch(size, generator)

    def segment(self, epochs, generator, kind):
        self.asked.append(kind)
        start = self.flats[kind].theta()
        return start, start + 0.05 * torch.randn(start.shape, generator=generator)


def begun(distiller, step=0):
    return replace(distiller.init(*DATA.per_class(1, Generator().manual_seed(0)), seed=3), step=step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)  # before the fixture that does so for tests, and bits depend on it
    folder = tmp_path_factory.mktemp("experts")
    train_experts(NETS, DATA, folder, **SETTINGS)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A coreset for two kinds, and the folder of its experts."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("two") / "experts"
    return distill("digits", method="fkl", steps=6, experts=folder, expert_settings=TRAINING, **RUN), folder


@pytest.mark.parametrize("method", METHODS)
def test_step_t_is_that_of_kind_t_mod_k(method):
    distiller, source = METHODS[method](NETS), Noted(NETS)
    for step in range(7):
        together, _ = distiller.step(begun(distiller, step), source)
        alone, one = METHODS[method](NETS[step % 3]), Noted([NETS[step % 3]])
        apart, _ = alone.step(begun(alone, step), one)
        assert torch.equal(together.inputs, apart.inputs)
        assert not torch.equal(together.inputs, begun(distiller).inputs)
    assert source.asked == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("method", METHODS)
def test_a_list_of_one_network_is_that_network(method, folder):
    one, other = METHODS[method](NETS[0]), METHODS[method](NETS[:1])
    source = Experts(folder, DATA)
    assert same(one.step(begun(one), source)[0], other.step(begun(other), source)[0])


@pytest.mark.parametrize("method", METHODS)
def test_pixels_stay_within_their_bounds(method):
    start = begun(METHODS[method](NETS)).inputs
    low, high = float(start.min()), float(start.max())
    for bounds, inside in ((((low,), (high,)), True), (None, False)):
        distiller = METHODS[method](NETS, bounds=bounds, lr=1e5)
        found = distiller.step(begun(distiller), Noted(NETS))[0].inputs
        assert (low <= float(found.min()) <= float(found.max()) <= high) is inside
    with pytest.raises(ValueError, match="bounds must be"):
        METHODS[method](NETS, bounds=((1.0,), (0.0,)))


@pytest.mark.parametrize("nets", [[], "convnet", ["convnet"]])
def test_what_makes_no_networks_is_refused(nets):
    with pytest.raises(ValueError, match="network must be a function that makes one, or a list of such functions"):
        distillers.ForwardKL(nets)


def test_expert_e_is_of_kind_e_mod_k_and_a_segment_is_of_the_kind_asked_for(folder):
    experts = Experts(folder)
    assert [experts.theta(expert, 0).numel() for expert in range(4)] == [SIZES[0], SIZES[1], SIZES[2], SIZES[0]]
    assert json.loads((folder / "experts.json").read_text())["kinds"] == 3
    assert (experts.kinds, experts.of_kind(0), experts.of_kind(2)) == (3, {0: 2, 3: 2}, {2: 2})
    for kind in (0, 1, 2):
        for seed in range(4):
            points = experts.segment(1, Generator().manual_seed(seed), kind)
            assert [len(point) for point in points] == [SIZES[kind]] * 2
    with pytest.raises(
        ValueError, match=r"experts of 3 kind\(s\) of networks, and one of kind 3 \(from 0\) is asked for"
    ):
        experts.segment(1, Generator(), 3)
    with pytest.raises(ValueError, match=r"no expert of kind 1 \(from 0\) in .* has 9 epochs, the longest has 2"):
        experts.segment(9, Generator(), 1)


def test_experts_of_one_kind_do_not_say_so(tmp_path):
    for name, nets in (("one", NETS[0]), ("list", NETS[:1])):
        train_experts(nets, DATA, tmp_path / name, **SETTINGS | {"experts": 1, "epochs": 1})
    one, other = ((tmp_path / name / "experts.json").read_text() for name in ("one", "list"))
    assert one == other
    assert "kinds" not in one


def test_training_that_was_killed_is_continued_and_split_over_ranks_to_the_same_bits(folder, tmp_path, monkeypatch):
    half, split = tmp_path / "half", tmp_path / "split"
    shutil.copytree(folder, half)
    for name in ("expert_0001_epoch_002", "expert_0002_epoch_001", "expert_0003_epoch_000"):
        (half / f"{name}.safetensors").unlink()
    train_experts(NETS, DATA, half, **SETTINGS)
    for rank in (1, 0):
        monkeypatch.setattr(expert_module, "share", lambda items, rank=rank: list(items[rank::2]))
        train_experts(NETS, DATA, split, **SETTINGS)
    for expert in range(4):
        for epoch in range(3):
            whole, *others = (Experts(each).theta(expert, epoch) for each in (folder, half, split))
            assert all(torch.equal(whole, other) for other in others)


def test_a_folder_for_other_kinds_is_refused_and_keeps_what_it_has(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for nets, message in ((NETS[:2], "kinds 3, asked for 2"), (NETS[0], "kinds 3, asked for 1")):
        with pytest.raises(ValueError, match=f"experts with {message}"):
            train_experts(nets, DATA, folder, **SETTINGS)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    train_experts(NETS[0], DATA, tmp_path, **SETTINGS | {"experts": 1})
    with pytest.raises(ValueError, match="experts with kinds 1, asked for 3"):
        train_experts(NETS, DATA, tmp_path, **SETTINGS)
    with pytest.raises(ValueError, match="experts must be at least one for each of the 3 networks, got 2"):
        train_experts(NETS, DATA, tmp_path / "new", **SETTINGS | {"experts": 2})
    (tmp_path / "experts.json").write_text('{"kinds": 0}')
    with pytest.raises(ValueError, match="damaged: kinds must be a count, got 0"):
        Experts(tmp_path).segment(1, Generator(), 0)


def test_published_experts_are_of_one_kind(folder, tmp_path):
    experts, flat = Experts(folder), pixels.flat_network(NETS[0])
    points = [[p.clone() for p in flat.parameters(experts.theta(0, epoch)).values()] for epoch in range(3)]
    torch.save([points], tmp_path / "replay_buffer_0.pt")
    published = Experts(tmp_path)
    assert torch.equal(published.segment(2, Generator(), 0)[1], experts.theta(0, 2))
    with pytest.raises(ValueError, match=r"experts of 1 kind\(s\) of networks, and one of kind 1"):
        published.segment(2, Generator(), 1)
    with pytest.raises(
        ValueError, match=r"experts of 1 kind\(s\) of networks, asked for 2: convnet:4-8, convnet-batch:4"
    ):
        distill("digits", method="fkl", steps=1, experts=tmp_path, **RUN)


def test_each_kind_that_learned_nothing_is_warned_of_and_batchnorm_is_judged_by_the_images_it_sees(tmp_path):
    experts = train_experts(NETS[:2], DATA, tmp_path, experts=2, epochs=6, lr=0.1, batch=20)
    assert untrained(experts, NETS[1], DATA, kind=1) is None
    lines = []
    more = {"method": "cd", "steps": 2, "expert_settings": TRAINING | {"lr": 1e-9}} | RUN
    distill("digits", **more | {"settings": {"inner_steps": 2}, "progress": lines.append})
    warned = [line.split(" in ")[0] for line in lines if "learned nothing" in line]
    assert warned == [f"warning: the {name} experts" for name in TWO]


@pytest.mark.parametrize("method", METHODS)
def test_distill_learns_for_several_kinds_and_says_so(method, tmp_path):
    settings = {"settings": {"inner_steps": 2}, "expert_settings": TRAINING}
    coreset = distill("digits", method=method, steps=4, **RUN | settings | {"networks": NAMES})
    coreset.save(tmp_path / "set.safetensors")
    said = load_coreset(tmp_path / "set.safetensors").provenance
    assert said["networks"] == said["experts"]["networks"] == NAMES
    assert (said["network"], said["experts"]["kinds"]) == (description(NAMES[0]), 3)
    found = coreset.exact_pixels()
    assert -1e-5 <= float(found.min()) < float(found.max()) <= 1 + 1e-5


def test_a_killed_run_is_continued_to_the_same_coreset_its_experts_too(trained, tmp_path):
    whole, folder = trained
    run, begun_there = tmp_path / "run", tmp_path / "experts"
    call = partial(distill, "digits", method="fkl", expert_settings=TRAINING, **RUN)
    call(steps=3, resume=run)
    (experts,) = run.glob("experts-*")
    for path in experts.glob("expert_0001_epoch_00[12].safetensors"):
        path.unlink()
    assert torch.equal(call(steps=6, resume=run).inputs, whole.inputs)
    # a folder that one names, in which training was stopped
    shutil.copytree(folder, begun_there)
    for path in begun_there.glob("expert_0002_*"):
        path.unlink()
    assert torch.equal(call(steps=6, experts=begun_there).inputs, whole.inputs)
    with pytest.raises(ValueError, match="holds experts with networks"):
        call(steps=6, resume=run, networks=TWO[::-1])


def test_experts_of_other_networks_are_refused_also_where_their_sizes_are_the_same(trained, tmp_path):
    _, folder = trained
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    call = partial(distill, "digits", method="fkl", steps=1, experts=folder, **RUN)
    for networks in (["convnet:4-8", "convnet-group:4"], [*TWO, "vit:32"], "convnet:4-8"):
        with pytest.raises(ValueError, match="holds experts of convnet:4-8, convnet-batch:4, asked for convnet"):
            call(networks=networks)
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    for path in half.glob("expert_0001_*"):
        path.unlink()
    with pytest.raises(ValueError, match="no experts of convnet-batch:4: finish them by coreset-sampler experts"):
        call(experts=half, expert_settings={"lr": 0.7})


def test_presets_train_two_experts_of_each_kind_at_least():
    for method in METHODS:
        plans = [preset("cpu", method, "digits", 1, kinds=kinds) for kinds in (1, 2, 6)]
        assert [plan.experts.training["experts"] for plan in plans] == [6, 6, 12]
        assert [plan.widths for plan in plans] == [(16, 32, 64), None, None]
        assert plans[0] == cpu(method, "digits", 1)
        rates = [preset("cpu", method, "digits", 10, kinds=kinds).settings["lr"] for kinds in (1, 6)]
        assert rates[1] == (rates[0] if method == "rkl" else rates[0] / 5)
        assert preset("paper", method, "digits", 1, kinds=len(MANY)).experts.training == {}


def test_the_commands_take_several_networks(tmp_path, capsys):
    folder, output = tmp_path / "experts", tmp_path / "a.safetensors"
    networks = ["--networks", ",".join(TWO)]
    training = ["--experts", "2", "--epochs", "1", "--lr", "0.1", "--examples", "200", "--threads", "1"]
    assert main(["experts", str(folder), "digits", *networks, *training]) == 0
    assert "holds 2 experts" in capsys.readouterr().out
    learned = ["--method", "cd", "--images-per-class", "1", "--steps", "2", "--set", "epochs=1", "--threads", "1"]
    assert main(["distill", "digits", *networks, *learned, "--experts", str(folder), "-o", str(output)]) == 0
    said = load_coreset(output).provenance
    assert said["networks"] == TWO
    assert f"--networks {','.join(TWO)} " in said["command"]
    assert main(["experts", str(folder), "digits", "--networks", "vit:32", *training]) != 0
    assert "kinds 2, asked for 1" in capsys.readouterr().err
