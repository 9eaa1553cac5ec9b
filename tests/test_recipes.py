"""Every recipe at toy size: on scikit-learn's digits, or a few sentences and a tiny random BERT."""

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

datasets = pytest.importorskip("datasets")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

RECIPES = Path(__file__).parent.parent / "recipes"
NUMBER = r"[01]\.\d{3} ± \d\.\d{3}"


def recipe(name):
    """The recipe as a module of its own, so that a test may shrink its settings."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    module.main()


def pictures(n):
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = [Image.fromarray(np.uint8(image * 15.9)) for image in digits.images[:n]]
    return images, digits.target[:n].tolist()


@pytest.fixture(scope="module")
def digits_folder(tmp_path_factory):
    """A folder that `datasets.load_dataset` opens: 300 digits to train on and 100 to test."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = pictures(400)
    for split, part in (("train", slice(300)), ("test", slice(300, 400))):
        rows = datasets.Dataset.from_dict({"image": images[part], "label": labels[part]})
        rows.to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture
def cifar10(monkeypatch):
    module = recipe("cifar10")
    small = {"trials": ((0.05, 10), (0.1, 10)), "lengths": (0.2, 0.6), "noises": (0.0, 0.3)}
    for name, setting in module.SETTINGS.items():
        pools = {"pool_size": 40, "keep": 20, **({"reuse": 2} if name == "cpu" else {})}
        changes = {**small, "passes": 0.6, "warm_up": 0.2, "pools": pools}
        monkeypatch.setitem(module.SETTINGS, name, dataclasses.replace(setting, **changes))
    return module


def test_cifar10_makes_its_table_and_takes_finished_runs_from_the_log(
    cifar10, digits_folder, tmp_path, monkeypatch, capsys
):
    log = tmp_path / "log.jsonl"
    table = ("table", "--data", digits_folder, "--setting", "cpu", "--seeds", 1, "--results", log)
    run(cifar10, monkeypatch, *table)
    printed = capsys.readouterr().out
    assert len(re.findall(rf"\| 0\.[03] \| (?:uniform|crest|stable|believed|full) \|.*{NUMBER}", printed)) == 10
    lines = log.read_text().splitlines()
    assert len(lines) == 10
    monkeypatch.setattr(cifar10, "train", lambda job, args: pytest.fail("run again"))
    run(cifar10, monkeypatch, *table)
    assert capsys.readouterr().out == printed
    assert all((row["clean"] < 0.99) == (row["noise"] > 0) for row in map(json.loads, lines))


def test_cifar10_tunes_on_training_images_only(cifar10, digits_folder, tmp_path, monkeypatch, capsys):
    seen = []
    train = cifar10.train
    monkeypatch.setattr(cifar10, "train", lambda job, args: seen.append(job) or train(job, args))
    monkeypatch.setattr(cifar10, "STRATEGIES", ("uniform", "stable"))
    load = cifar10.load
    monkeypatch.setattr(cifar10, "load", lambda data, split: load(data, split) if split == "train" else None)
    options = ("--setting", "cpu", "--results", tmp_path / "log.jsonl", "--noise", 0.3)
    run(cifar10, monkeypatch, "tune", "--data", digits_folder, *options)
    assert {job["on"] for job in seen} == {"validation"}
    assert len(seen) == 4
    assert "validation images, n = 1" in capsys.readouterr().out


def test_cifar10_changes_one_thing_of_stable_at_a_time(cifar10, digits_folder, tmp_path, monkeypatch, capsys):
    options = ("--setting", "cpu", "--results", tmp_path / "log.jsonl", "--noise", 0.3, "--seeds", 1)
    run(cifar10, monkeypatch, "ablation", "--data", digits_folder, *options)
    rows = {row["strategy"]: row for row in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())}
    assert tuple(rows) == cifar10.ABLATION
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
    module = recipe("landscape")
    monkeypatch.setattr(module, "VECTORS", 1)
    monkeypatch.setattr(module, "DIRECTIONS", 2)
    monkeypatch.setattr(module, "STEPS", torch.linspace(-1, 1, 3))
    for data in ((), ("--data", digits_folder)):
        run(module, monkeypatch, "--n", 300, "--epochs", 1, "--seeds", 1, "--picture", tmp_path / "l.png", *data)
        rows = re.findall(rf"\| 1 \| (\w+) \|(?: -?{NUMBER} \|){{5}}", capsys.readouterr().out)
        assert rows == ["uniform", "crest", "stable"]
    assert (tmp_path / "l-1.png").stat().st_size > 10_000


def test_the_landscapes_loss_of_all_examples_and_its_derivatives_are_right():
    """On a smooth network in float64, against plain autograd and differences."""
    module = recipe("landscape")
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


def test_a_filter_normalised_direction_has_filters_as_long_as_the_networks():
    module = recipe("landscape")
    weights = {"conv": torch.randn(4, 3, 3, 3), "linear": torch.randn(5, 7), "bias": torch.randn(5)}
    direction = module.filter_normalised(weights, torch.Generator().manual_seed(0))
    for name in ("conv", "linear"):
        assert torch.allclose(direction[name].flatten(1).norm(dim=1), weights[name].flatten(1).norm(dim=1))
    assert not direction["bias"].any()


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """Pairs whose label a bag of words could tell."""
    folder = tmp_path_factory.mktemp("pairs")
    ends = ("is happy", "may be late", "is not there")
    for split, n in (("train", 120), ("test", 30)):
        rows = {
            "premise": [f"person {i % 7} is there" for i in range(n)],
            "hypothesis": [f"person {i % 7} {ends[i % 3]}" for i in range(n)],
            "label": [i % 3 if i % 20 else -1 for i in range(n)],
        }
        datasets.Dataset.from_dict(rows).to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *["person", "is", "there", "happy", "may", "be", "late", "not", "0", "1", "2", "3", "4", "5", "6"],
    ]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_snli_makes_its_table(sentences, tiny_bert, tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    module = recipe("snli")
    small = dict(n=60, n_held_out=20, passes=0.4, lengths=(0.2, 0.4), batch_size=3, freeze=1, warm_up=0.25)
    monkeypatch.setitem(module.SETTINGS, "cpu", module.SETTINGS["cpu"] | small | dict(pools=dict(pool_size=12, keep=6)))
    files = ("--results", tmp_path / "log.jsonl", "--picture", tmp_path / "time.png", "--quiet")
    where = ("--data", sentences, "--model", tiny_bert, "--setting", "cpu", "--seeds", 1, *files)
    run(module, monkeypatch, "table", *where)
    printed = capsys.readouterr().out
    assert len(re.findall(rf"\| 0\.[03] \| (?:uniform|crest|stable|believed|full) \|.*{NUMBER}", printed)) == 10
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    everything = [row for row in rows if row["strategy"] == "full"]
    assert all(
        row["clean"] == pytest.approx(1 - row["noise"]) for row in everything
    )  # the wrong labels are really there
    run(module, monkeypatch, "time", *where, "--strategy", "full", "uniform", "--noise", 0)
    assert "99 % of what full data reaches" in capsys.readouterr().out
    run(module, monkeypatch, "tune", *where, "--strategy", "uniform", "--noise", 0.3)
    assert "validation pairs, n = 1" in capsys.readouterr().out
    some = ("four of twelve, each once", "half of the wrong labels left out", "all wrong labels left out")
    run(module, monkeypatch, "ablation", *where, "--noise", 0.3, "--strategy", *some)
    lines = re.findall(r"\| 0\.3 \| ([^|]+) \|.* ([\d.]+) \|", capsys.readouterr().out)
    clean = {name: float(share) for name, share in lines}
    assert tuple(clean) == some
    assert clean["all wrong labels left out"] == 1.0 > clean["half of the wrong labels left out"]


def test_snli_ablation_names_strategies_that_there_are():
    pytest.importorskip("accelerate")
    module = recipe("snli")
    for name in module.ABLATION:
        assert callable(module.strategy_of(name, module.SETTINGS["cpu"], 20, torch.tensor([3, 5])))


def test_snli_validates_on_pairs_that_it_does_not_train_on(sentences, tiny_bert, monkeypatch):
    module = recipe("snli")
    monkeypatch.setitem(module.SETTINGS, "cpu", module.SETTINGS["cpu"] | dict(n=None, n_held_out=20))
    args = module.argparse.Namespace(data=str(sentences), model=str(tiny_bert))
    everything = module.pairs(args.data, args.model, "train", 40)
    train_set, held_out = module.data_of(dict(setting="cpu", on="validation"), args)
    assert (len(train_set), len(held_out)) == (len(everything) - 20, 20)
    assert sorted(train_set["input_ids"][:] + held_out["input_ids"][:]) == sorted(everything["input_ids"][:])
    whole, test_set = module.data_of(dict(setting="cpu", on="test"), args)
    assert (len(whole), len(test_set)) == (len(everything), 20)


def test_snli_freezes_what_it_is_told_to_and_no_more(tiny_bert):
    pytest.importorskip("transformers")
    model = recipe("snli").model_of(str(tiny_bert), 1)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen
    assert all(".embeddings." in name or ".layer.0." in name for name in frozen)
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".layer.0." in name)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    """train/ and val/ with a folder a class."""
    folder = tmp_path_factory.mktemp("images")
    for i, (image, label) in enumerate(zip(*pictures(260), strict=True)):
        path = folder / ("train" if i < 200 else "val") / str(label) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return folder


@pytest.fixture
def imagenet():
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    return recipe("imagenet")


TOY = (
    *("--model", "test_resnet", "--img-size", 32, "--fraction", 0.2, "--epochs", 3, "--batch-size", 10, "--lr", 0.05),
    *("--pool-size", 40, "--keep", 20, "--workers", 0, "--quiet", "--noise", 0.2, "--warm-up", 1),
)


RUN = "stable-noise0.2-seed0.pt"


def test_imagenet_resumed_goes_on_to_the_same_weights(imagenet, image_folder, tmp_path, monkeypatch, capsys):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(imagenet, monkeypatch, "--data", image_folder, *TOY, "--output", whole)
    replace = os.replace

    def stop_after(source, target):
        replace(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop_after)
        with pytest.raises(KeyboardInterrupt):
            run(imagenet, monkeypatch, "--data", image_folder, *TOY, "--output", stopped)
    assert torch.load(stopped / RUN, weights_only=True)["epoch"] == 1
    run(imagenet, monkeypatch, "--data", image_folder, *TOY, "--output", stopped)
    one, other = (torch.load(folder / RUN, weights_only=True) for folder in (whole, stopped))
    for kind in ("model", "average"):
        assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())
    first, second = (json.loads((folder / "results.jsonl").read_text()) for folder in (whole, stopped))
    assert first["accuracy"] == second["accuracy"]
    with pytest.raises(SystemExit, match="another run"):
        run(imagenet, monkeypatch, "--data", image_folder, *TOY, "--output", stopped, "--lr", 0.1)


def test_imagenet_makes_a_table_of_strategies_on_images_set_aside(
    imagenet, image_folder, tmp_path, monkeypatch, capsys
):
    seen = []
    accuracy = imagenet.accuracy
    monkeypatch.setattr(
        imagenet, "accuracy", lambda model, data, args: seen.append(data) or accuracy(model, data, args)
    )
    options = ("--strategy", "full", "crest", "believed", "--noise", 0.2, "--seeds", 2, "--validation", "--epochs", 5)
    run(imagenet, monkeypatch, "--data", image_folder, *TOY, *options, "--output", tmp_path)
    printed = capsys.readouterr().out
    assert re.findall(rf"\| 0\.2 \| (\w+) \| {NUMBER}", printed) == ["full", "crest", "believed"]
    assert "n = 2 seeds" in printed
    assert [len(data) for data in seen] == [20] * 6
    assert not list(tmp_path.glob("*.new"))


def test_imagenet_reads_hugging_face_data_and_weights_from_a_file(
    imagenet, digits_folder, tmp_path, monkeypatch, capsys
):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(1)
    source = timm.create_model("test_resnet", num_classes=1000)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    options = ("--data", digits_folder, *TOY, "--epochs", 1, "--weights", tmp_path / "weights.safetensors")
    for strategy in ("uniform", "full"):
        run(imagenet, monkeypatch, *options, "--strategy", strategy, "--output", tmp_path / strategy)
        assert re.search(rf"\| 0\.2 \| {strategy} \| {NUMBER}", capsys.readouterr().out)
    model = imagenet.model_of(imagenet.argparse.Namespace(weights=tmp_path / "weights.safetensors", pretrained=False,
                                                          model="test_resnet"), 10)  # fmt: skip
    assert torch.equal(model.conv1[0].weight, source.conv1[0].weight)
    with pytest.raises(SystemExit, match="neither a folder nor a split"):
        imagenet.rows_and_labels(str(digits_folder), ("other",))


def test_train_on_distilled_trains_both_kinds_of_model(monkeypatch, capsys):
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    module = recipe("train_on_distilled")
    monkeypatch.setattr(module, "STEPS", {"timm": 8, "huggingface": 8})
    run(module, monkeypatch, "digits/k-center-1", "--timm", "test_resnet", "--seeds", 1)
    assert len(re.findall(rf"accuracy {NUMBER} \(n = 1\)", capsys.readouterr().out)) == 2
    with pytest.raises(SystemExit):
        run(module, monkeypatch, "fashion-mnist/herding-1")
    assert "pass --data" in capsys.readouterr().err


def test_digits_noise_makes_its_table(monkeypatch, tmp_path, capsys):
    module = recipe("digits_noise")
    monkeypatch.setattr(module, "EPOCHS", 8)
    run(module, monkeypatch, "--seeds", 1, "--picture", tmp_path / "demo.png")
    assert len(re.findall(rf"\| (?:uniform|crest|stable) \| {NUMBER}", capsys.readouterr().out)) == 3
    assert (tmp_path / "demo.png").exists()


def test_fashion_mnist_noise_runs(monkeypatch, tmp_path, capsys, digits_folder):
    module = recipe("fashion_mnist_noise")
    monkeypatch.setattr(module, "N_VALIDATION", 50)
    options = ("--noise", 0.3, "--passes", 1, "--batch-size", 10, "--log", tmp_path / "log.jsonl")
    run(module, monkeypatch, "run", "--data", digits_folder, "--strategy", "stable", *options)
    assert "'accuracy': " in capsys.readouterr().out


def test_train_published_runs(monkeypatch, tmp_path, capsys):
    from PIL import Image

    module = recipe("train_published")
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


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.py")))
def test_a_recipe_opens_with_its_launch_line_and_its_result(name):
    text = (RECIPES / f"{name}.py").read_text()
    docstring = text.split('"""')[1]
    assert f"recipes/{name}.py" in docstring
    assert "Measured" in docstring
    assert len(text.splitlines()) <= 450, "a recipe reads in one sitting"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "imagenet"])
def test_two_processes_train_together(name, digits_folder, image_folder, tmp_path):
    options = {
        "cifar10": [
            "run",
            "--data",
            digits_folder,
            "--setting",
            "cpu",
            "--batch-size",
            10,
            "--passes",
            1,
            "--results",
            tmp_path / "log.jsonl",
        ],
        "imagenet": ["--data", image_folder, *TOY, "--output", tmp_path],
    }[name]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, RECIPES / f"{name}.py", *map(str, options)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
