"""Every benchmark at toy size: on scikit-learn's digits, or a few sentences and a tiny random BERT."""

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy_data
from harness import rows_of
from toy_data import NUMBER, ROOT

from coreset_sampler import CoresetSampler, strategies
from coreset_sampler.selection.testing import inject_label_noise

datasets = pytest.importorskip("datasets")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.recipe
BENCHMARKS = ROOT / "benchmarks"


def run(module, monkeypatch, *arguments):
    """A benchmark with these arguments."""
    study, options = getattr(module, "STUDY", None), getattr(module, "more_options", None)
    main = module.main if study is None else lambda: module.main(study, module.__doc__, options)
    toy_data.run(SimpleNamespace(__file__=module.__file__, main=main), monkeypatch, *arguments)


@pytest.fixture(scope="module")
def digits_folder(tmp_path_factory):
    return toy_data.digits_folder(tmp_path_factory.mktemp("digits"))


def shrink(monkeypatch, module, **changes):
    """All settings of a benchmark."""
    for name, setting in module.SETTINGS.items():
        monkeypatch.setitem(module.SETTINGS, name, dataclasses.replace(setting, **changes))


@pytest.fixture
def cifar10(monkeypatch):
    module = importlib.import_module("cifar10")
    trials = (dict(lr=0.05, batch_size=10), dict(lr=0.1, batch_size=10))
    grid = dict(trials=trials, lengths=(0.2, 0.6), noises=(0.0, 0.3), passes=0.6)
    shrink(monkeypatch, module, warm_up=0.2, pools=dict(pool_size=40, keep=20, rescore_every=2), **grid)
    return module


def test_cifar10_makes_its_table_and_takes_finished_runs_from_the_log(
    cifar10, digits_folder, tmp_path, monkeypatch, capsys
):
    log = tmp_path / "log.jsonl"
    table = ("table", "--data", digits_folder, "--setting", "cpu", "--seeds", 1, "--results", log)
    run(cifar10, monkeypatch, *table)
    printed = capsys.readouterr().out
    assert len(re.findall(rf"\| 0\.[03] \| (?:uniform|crest|stable|label_confidence|full) \|.*{NUMBER}", printed)) == 10
    lines = log.read_text().splitlines()
    assert len(lines) == 10
    again = dataclasses.replace(cifar10.STUDY, train=lambda job, args: pytest.fail("run again"))
    monkeypatch.setattr(cifar10, "STUDY", again)
    run(cifar10, monkeypatch, *table)
    assert capsys.readouterr().out == printed
    assert all((row["clean"] < 0.99) == (row["noise"] > 0) for row in map(json.loads, lines))


def test_cifar10_tunes_on_training_images_only(cifar10, digits_folder, tmp_path, monkeypatch, capsys):
    images = importlib.import_module("image_training")
    load = images.load.__wrapped__
    monkeypatch.setattr(images, "load", lambda data, split, mode: load(data, {"train": "train"}[split], mode))
    options = ("--setting", "cpu", "--results", tmp_path / "log.jsonl", "--noise", 0.3)
    run(cifar10, monkeypatch, "tune", "--data", digits_folder, *options, "--strategy", "uniform", "stable")
    said = capsys.readouterr().out
    assert "validation images, n = 1" in said
    rows = rows_of(tmp_path / "log.jsonl")
    assert [(row["strategy"], row["lr"]) for row in rows] == [
        ("uniform", 0.05), ("uniform", 0.1), ("stable", 0.05), ("stable", 0.1),
    ]  # fmt: skip
    best = max(rows[:2], key=lambda row: row["accuracy"])
    assert f"(0.3, 'uniform'): {{'lr': {best['lr']}, 'batch_size': 10, 'passes': 0.6}}" in said


def test_cifar10_changes_one_thing_of_stable_at_a_time(cifar10, digits_folder, tmp_path, monkeypatch, capsys):
    options = ("--setting", "cpu", "--results", tmp_path / "log.jsonl", "--noise", 0.3, "--seeds", 1)
    run(cifar10, monkeypatch, "ablation", "--data", digits_folder, *options)
    rows = {row["strategy"]: row for row in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())}
    assert list(rows) == cifar10.STUDY.ablation
    assert "different examples" in capsys.readouterr().out
    assert {row["on"] for row in rows.values()} == {"validation"}
    same = {"accuracy", "clean"}
    changed = [name for name in rows if {k: rows[name][k] for k in same} != {k: rows["stable"][k] for k in same}]
    assert len(changed) >= len(rows) - 3  # on so few digits two may come to the same choice


def test_cifar10_draws_accuracy_against_time(cifar10, digits_folder, tmp_path, monkeypatch, capsys):
    files = ("--results", tmp_path / "log.jsonl", "--picture", tmp_path / "time.png")
    run(cifar10, monkeypatch, "time", "--data", digits_folder, "--setting", "cpu", "--seeds", 1, *files)
    assert "99 % of what full data reaches" in capsys.readouterr().out
    assert (tmp_path / "time-0.png").stat().st_size > 10_000
    more = ("--setting", "mnist", "--noise", 0, "--strategy", "full", "infobatch", "loss_pruning, no weights")
    monkeypatch.setitem(cifar10.SETTINGS, "mnist", dataclasses.replace(cifar10.SETTINGS["mnist"], n=200))
    run(cifar10, monkeypatch, "time", "--data", digits_folder, *more, "--seeds", 2, "--lengths", 1, *files)
    run(cifar10, monkeypatch, "time", "--data", digits_folder, *more[:5], "full", "--seeds", 2, "--lengths", 4, *files)
    said = capsys.readouterr().out
    assert "less its standard deviation is 0." in said
    run(cifar10, monkeypatch, "time", "--data", digits_folder, *more, "--seeds", 2, "--lengths", 1, *files)
    said = capsys.readouterr().out
    assert re.search(r"infobatch, 1 epochs: 0\.\d{4} in \d+ s, full data", said)
    assert re.search(r"loss_pruning, no weights, 4 epochs: 0\.\d{4} in \d+ s, full data", said)


def test_cifar10_killed_in_the_middle_goes_on_to_the_same_weights(
    cifar10, digits_folder, tmp_path, monkeypatch, capsys
):
    """A real SIGKILL, of the paper's setting; the accuracy and every logged figure but the times come out equal."""
    results = []
    for name in ("whole", "killed"):
        log = tmp_path / name / "log.jsonl"
        options = ("run", "--data", digits_folder, "--noise", 0.3, "--save-every", 0, "--results", log)
        if name == "killed":
            victim = multiprocessing.get_context("fork").Process(target=run, args=(cifar10, monkeypatch, *options))
            victim.start()
            wait_for(log.parent, "*.pt", victim)  # the first checkpoint
            victim.kill()
            victim.join()
            assert not log.exists()
            begun = torch.load(next(log.parent.glob("*.pt")), weights_only=True)["epoch"]
            assert 0 < begun < 6
        run(cifar10, monkeypatch, *options)
        row = json.loads(log.read_text())
        results.append({key: row[key] for key in ("accuracy", "clean", "lr", "noise")})
        assert not list(log.parent.glob("*.pt"))
    assert results[0] == results[1]


def wait_for(folder, pattern, process, seconds=120):
    until = time.monotonic() + seconds
    while not list(folder.glob(pattern)):
        assert process.is_alive(), "it ended before it was killed"
        assert time.monotonic() < until
        time.sleep(0.002)


def test_landscape_prints_errors_and_draws(monkeypatch, tmp_path, capsys, digits_folder):
    module = importlib.import_module("landscape")
    monkeypatch.setattr(module, "VECTORS", 1)
    monkeypatch.setattr(module, "DIRECTIONS", 2)
    monkeypatch.setattr(module, "STEPS", torch.linspace(-1, 1, 3))
    for more, others in ((("--scales", 0.3), ["stable, scale 0.3"]), (("--data", digits_folder), [])):
        run(module, monkeypatch, "--n", 300, "--epochs", 1, "--seeds", 1, "--picture", tmp_path / "l.png", *more)
        rows = re.findall(rf"\| 1 \| ([\w,. ]+) \|(?: -?{NUMBER} \|){{5}}", capsys.readouterr().out)
        assert rows == ["uniform", "crest", "stable", *others]
    assert (tmp_path / "l-1.png").stat().st_size > 10_000


def test_the_landscapes_loss_of_all_examples_and_its_derivatives_are_right():
    """On a smooth network in float64, against plain autograd and differences."""
    module = importlib.import_module("landscape")
    images, labels = module.load(None, 200, 0)
    data = module.TensorDataset(images.double(), labels)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)
    ).double()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    everything = module.Coreset(torch.randperm(200), torch.full((200,), 3.0, dtype=torch.float64))
    one, other = module.Loss(model, data), module.Loss(model, data, everything)
    plain = torch.nn.functional.cross_entropy(model(data.tensors[0]), labels)
    assert one(weights) == pytest.approx(float(plain), rel=1e-6)
    assert other(weights) == pytest.approx(one(weights), rel=1e-6)
    slope = module.flat(torch.autograd.grad(plain, list(model.parameters())))
    assert module.apart(one.gradient(weights), slope) < 1e-6
    direction = {name: torch.randn_like(value) for name, value in weights.items()}
    before, after = (one.gradient(module.moved(weights, direction, step)) for step in (-1e-5, 1e-5))
    bend = one.curvature(weights, [module.flat(list(direction.values()))])[0]
    assert module.apart(bend, (after - before) / 2e-5) < 1e-4


def test_a_landscape_is_that_of_a_checkpoint_and_only_with_the_labels_that_it_saw(tmp_path, digits_folder):
    module, cifar10, training = (importlib.import_module(name) for name in ("landscape", "cifar10", "image_training"))
    args = argparse.Namespace(checkpoint=tmp_path / "run.pt", data=str(digits_folder), noise=0.5, n=20)
    setting = cifar10.SETTINGS["paper"]
    model = setting.network()
    pixels, labels, _ = training.data_of(dict(seed=3, on="test"), args, setting)
    noisy = inject_label_noise(labels, 0.5, seed=3)
    data = training.Images(pixels, noisy, setting)
    sampler = CoresetSampler(data, model, fraction=0.5, strategy="uniform", seed=3, labels=noisy, progress=False)
    sampler.select()
    torch.save(dict(model=model.state_dict(), sampler=sampler.state_dict(), epoch=7), args.checkpoint)
    found, epoch = module.from_checkpoint(args)
    assert epoch == 7
    assert torch.equal(found.data.tensors[1], noisy[:20])
    args.noise = 0.4
    with pytest.raises(SystemExit, match="do not give the labels"):
        module.from_checkpoint(args)


def test_a_filter_normalised_direction_has_filters_as_long_as_the_networks():
    module = importlib.import_module("landscape")
    weights = {"conv": torch.randn(4, 3, 3, 3), "linear": torch.randn(5, 7), "bias": torch.randn(5)}
    direction = module.filter_normalised(weights, torch.Generator().manual_seed(0))
    for name in ("conv", "linear"):
        assert torch.allclose(direction[name].flatten(1).norm(dim=1), weights[name].flatten(1).norm(dim=1))
    assert not direction["bias"].any()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The options that name data and model."""
    pytest.importorskip("accelerate")
    folders = toy_data.sentences(tmp_path_factory.mktemp("pairs")), toy_data.tiny_bert(tmp_path_factory.mktemp("bert"))
    return "--data", folders[0], "--model", folders[1]


@pytest.mark.slow
def test_snli_makes_its_table(pairs, tmp_path, monkeypatch, capsys):
    module = importlib.import_module("snli")
    small = dict(n=60, n_held_out=20, passes=0.4, lengths=(0.2, 0.4), batch_size=3, freeze=1, warm_up=0.25)
    shrink(monkeypatch, module, **small, pools=dict(pool_size=12, keep=6))
    files = ("--results", tmp_path / "log.jsonl", "--picture", tmp_path / "time.png", "--quiet")
    where = (*pairs, "--setting", "cpu", "--seeds", 1, *files)
    run(module, monkeypatch, "table", *where, "--strategy", "uniform", "stable", "full")
    printed = capsys.readouterr().out
    assert len(re.findall(rf"\| 0\.[03] \| (?:uniform|stable|full) \|.*{NUMBER}", printed)) == 6
    everything = [row for row in rows_of(tmp_path / "log.jsonl") if row["strategy"] == "full"]
    assert all(row["clean"] == pytest.approx(1 - row["noise"]) for row in everything)  # wrong labels are really there
    run(module, monkeypatch, "time", *where, "--strategy", "full", "uniform", "--noise", 0)
    assert "99 % of what full data reaches" in capsys.readouterr().out
    run(module, monkeypatch, "tune", *where, "--strategy", "uniform", "--noise", 0.3)
    assert "validation pairs, n = 1" in capsys.readouterr().out
    some = ("4 kept of 12, each once", "half of the wrong labels left out", "all wrong labels left out")
    run(module, monkeypatch, "ablation", *where, "--noise", 0.3, "--strategy", *some)
    lines = re.findall(r"\| 0\.3 \| ([^|]+) \|.* ([\d.]+) \|", capsys.readouterr().out)
    clean = {name: float(share) for name, share in lines}
    assert tuple(clean) == some
    assert clean["all wrong labels left out"] == 1.0 > clean["half of the wrong labels left out"]


def test_snli_ablation_names_strategies_that_there_are():
    pytest.importorskip("accelerate")
    module = importlib.import_module("snli")
    for name in module.ABLATION:
        assert strategies.resolve(module.strategy_of(name, module.SETTINGS["cpu"], 20, torch.tensor([3, 5])))


def test_snli_validates_on_pairs_that_it_does_not_train_on(pairs, monkeypatch):
    module = importlib.import_module("snli")
    shrink(monkeypatch, module, n=None, n_held_out=20)
    args = SimpleNamespace(data=str(pairs[1]), model=str(pairs[3]))
    everything = module.pairs(args.data, args.model, "train", 40)
    train_set, held_out = module.data_of(dict(setting="cpu", on="validation"), args)
    assert (len(train_set), len(held_out)) == (len(everything) - 20, 20)
    assert sorted(train_set["input_ids"][:] + held_out["input_ids"][:]) == sorted(everything["input_ids"][:])
    whole, test_set = module.data_of(dict(setting="cpu", on="test"), args)
    assert (len(whole), len(test_set)) == (len(everything), 20)


def test_tiny_imagenet_makes_its_table_on_images_set_aside_from_weights_in_a_file(
    tmp_path, monkeypatch, capsys, digits_folder
):
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    torch.manual_seed(1)
    source = timm.create_model("test_resnet", num_classes=1000)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    module = importlib.import_module("tiny_imagenet")
    trials = (dict(lr=0.0, batch_size=10),)  # what is not trained stays as it was in the file
    shrink(monkeypatch, module, model="test_resnet", img_size=32, passes=0.3, warm_up=1, trials=trials)
    found, plain_train = [], module.imagenet.train
    monkeypatch.setattr(module.imagenet, "train", lambda *a, **more: found.append(plain_train(*a, **more)) or found[-1])
    options = (
        "--data",
        digits_folder,
        "--weights",
        tmp_path / "weights.safetensors",
        "--results",
        tmp_path / "log.jsonl",
    )
    names = ("full", "stable", "label_confidence", "oracle")
    run(module, monkeypatch, "table", *options, "--strategy", *names, "--noise", 0.2, "--seeds", 1, "--validation")
    printed = capsys.readouterr().out
    assert re.findall(rf"\| 0\.2 \| (\w+) \| 0, 10, 0\.3 \| {NUMBER}", printed) == list(names)
    assert "validation images, n = 1 seeds" in printed
    assert all(torch.equal(model.conv1[0].weight, source.conv1[0].weight) for model, _, _ in found)
    assert [len(sampler.read_labels()) for _, _, sampler in found] == [270] * 4
    assert {row["strategy"]: row["clean"] for row in rows_of(tmp_path / "log.jsonl")}["oracle"] == 1
    assert [path.name for path in tmp_path.glob("*.pt*")] == []


def test_fashion_mnist_tunes_and_runs_every_contestant(monkeypatch, tmp_path, capsys, digits_folder):
    module = importlib.import_module("fashion_mnist")
    trials = tuple(dict(lr=0.05, batch_size=10, passes=passes) for passes in (0.2, 0.4))
    shrink(
        monkeypatch,
        module,
        trials=trials,
        tuned={(0.5, "any"): trials[0]},
        pools=dict(pool_size=40, keep=20, rescore_every=2),
    )
    options = ("--data", digits_folder, "--noise", 0.5, "--results", tmp_path / "log.jsonl", "--seeds", 1)
    run(module, monkeypatch, "tune", *options, "--strategy", "craig", "stable, exponent 2")
    assert re.search(
        r"\(0.5, 'craig'\): \{'lr': 0.05, 'batch_size': 10, 'passes': 0.[24]\},  # 0\.", capsys.readouterr().out
    )
    some = ("stable as in the table", "weights in the loss", "weights none", "head")
    run(module, monkeypatch, "ablation", *options, "--strategy", *some)
    found = re.findall(rf"\| 0\.5 \| ([^|]+) \| 0.05, 10, 0.2 \| {NUMBER}", capsys.readouterr().out)
    assert tuple(found) == some


def test_fashion_mnist_names_strategies_that_there_are_and_tells_what_was_tuned():
    module = importlib.import_module("fashion_mnist")
    setting = module.SETTINGS["cpu"]
    assert all(strategies.resolve(contestant.strategy()) for contestant in module.contestants(setting).values())
    assert setting.trial(0.5, "crest") == dict(lr=0.1, batch_size=64, passes=8)
    assert setting.trial(0.5, "8 draws") == setting.trial(0.5, "stable") == dict(lr=0.02, batch_size=16, passes=4)


def test_train_published_runs(monkeypatch, tmp_path, capsys):
    from PIL import Image

    module = importlib.import_module("train_published")
    monkeypatch.setattr(module, "EPOCHS", 2)
    monkeypatch.setattr(module, "WIDTH", 4)
    images, labels = torch.randn(10, 3, 32, 32), torch.arange(10)
    content = {"data": [[images, labels]], "accs_all_exps": {"ConvNet": [0.4, 0.5]}}
    torch.save(content, tmp_path / "res_DC_CIFAR10_ConvNet_1ipc.pt")
    pixels = [Image.fromarray(np.random.randint(0, 255, (32, 32, 3), np.uint8)) for _ in range(20)]
    rows = datasets.Dataset.from_dict({"img": pixels, "label": [i % 10 for i in range(20)]})
    (tmp_path / "data").mkdir()
    rows.to_parquet(tmp_path / "data" / "test.parquet")
    run(module, monkeypatch, tmp_path / "res_DC_CIFAR10_ConvNet_1ipc.pt", "--data", tmp_path / "data", "--seeds", 1)
    assert "recorded 0.450" in capsys.readouterr().out


PAPER = dict(setting="paper", on="test", noise=0.5, strategy="crest", lr=0.1, batch_size=128, passes=20.0, seed=0)


def test_rows_of_the_papers_setting_that_were_measured_before_are_read(tmp_path, monkeypatch, capsys):
    """What recipes/cifar10.py wrote when it was still a recipe."""
    module = importlib.import_module("cifar10")
    figures = dict(accuracy=0.5, wall=100.0, cpu=90.0, share=0.1, clean=0.6, distinct=0.8)
    (tmp_path / "log.jsonl").write_text(json.dumps(PAPER | figures) + "\n")
    monkeypatch.setattr(
        module, "STUDY", dataclasses.replace(module.STUDY, train=lambda *_, **__: pytest.fail("run again"))
    )
    options = ("--noise", 0.5, "--strategy", "crest", "--results", tmp_path / "log.jsonl")
    run(module, monkeypatch, "table", "--data", "none", "--seeds", 1, *options)
    assert "| 0.5 | crest | 0.1, 128, 20 | 0.500 ± 0.000 | 100 | 10% | 0.60 | 0.80 |" in capsys.readouterr().out


def test_the_papers_setting_is_what_it_was():
    setting = importlib.import_module("cifar10").SETTINGS["paper"]
    assert (setting.n, setting.passes, setting.weight_decay, setting.shift) == (None, 20, 1e-4, 4)
    assert not setting.nesterov
    assert setting.trials == (dict(lr=0.1, batch_size=128),)
    assert (setting.pools, setting.warm_up) == (dict(pool_size=500, keep=128, rescore_every=10), 0)
    assert (setting.posterior.scale, setting.posterior.layers) == (0.1, "norm")
    assert sum(p.numel() for p in setting.network().parameters()) == 269_722
    assert [setting.decay(done) for done in (0.05, 0.4, 0.6, 0.8)] == [0.5, 1.0, 0.1, 0.01]


def test_time_wants_full_data_to_compare_with(cifar10, monkeypatch):
    with pytest.raises(SystemExit, match="add full"):
        run(cifar10, monkeypatch, "time", "--data", "none", "--strategy", "stable")


def test_the_package_and_the_recipes_import_nothing_of_the_benchmarks():
    names = {path.stem for path in BENCHMARKS.glob("*.py")} - {"facility_location"}
    for path in [
        *(ROOT / "coreset_sampler").rglob("*.py"),
        *(ROOT / "integrations").glob("*.py"),
        *(ROOT / "recipes").glob("*.py"),
    ]:
        found = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert not {*found} & {*names, "benchmarks"}, path


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_tells_its_launch_line_or_is_a_part_of_others(name):
    text = (BENCHMARKS / f"{name}.py").read_text()
    assert f"benchmarks/{name}.py" in text.split('"""')[1] or "__main__" not in text


@pytest.mark.slow
def test_two_processes_run_a_benchmark_together(digits_folder, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["run", "--data", digits_folder, "--setting", "cpu", "--batch-size", 10, "--passes", 1]
    command = [*launch, BENCHMARKS / "cifar10.py", *options, "--results", tmp_path / "log.jsonl"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert len(rows_of(tmp_path / "log.jsonl")) == 1


def test_every_script_that_a_page_names_is_there_and_has_that_command():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "recipes" / "README.md"]
    pages += [*(ROOT / "recipes").glob("*.py"), *BENCHMARKS.glob("*.py")]
    named = [
        (page, found) for page in pages for found in re.findall(r"((?:recipes|benchmarks)/\w+\.py)", page.read_text())
    ]
    assert named
    for page, script in named:
        assert (ROOT / script).exists(), f"{page.name}: {script}"
    commands = {
        found for page in pages for found in re.findall(r"benchmarks/(\w+)\.py ([a-z]+) --data", page.read_text())
    }
    assert ("fashion_mnist", "ablation") in commands
    for name, command in commands:
        study = importlib.import_module(name).STUDY
        assert command in {"run", "tune", "table"} or study.ablation, f"{name} {command}"
        assert command != "time" or any(setting.lengths for setting in study.settings.values()), f"{name} {command}"


def test_distilled_sets_are_tabled_beside_real_images_and_a_killed_run_goes_on(tmp_path):
    results = tmp_path / "distilled.jsonl"
    command = [
        sys.executable,
        ROOT / "benchmarks" / "distilled.py",
        "digits/vbpc-1",
        "--data",
        "digits",
        "--steps",
        "2",
    ]
    command += ["--networks", "convnet", "hf", "--widths", "4", "8", "--results", results]
    first = subprocess.run([*command, "--seeds", "1"], capture_output=True, text=True, check=True)
    lines = results.read_text().splitlines()
    assert len(lines) == 2 * 3
    assert {json.loads(line)["images"] for line in lines} == {"set", "random", "herding"}
    assert "hf" in first.stdout
    subprocess.run([*command, "--seeds", "2"], capture_output=True, text=True, check=True)
    again = results.read_text().splitlines()
    assert again[:6] == lines
    assert len(again) == 12
