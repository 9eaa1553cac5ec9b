"""Every recipe at toy size: on scikit-learn's digits, or a few sentences and a tiny random BERT."""

import importlib.util
import re
import subprocess
import sys

import pytest
import torch
import toy_data
from toy_data import NUMBER, ROOT, run

from coreset_sampler import TrainingRecipe, fit, recipe_for

pytest.importorskip("datasets")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.recipe
RECIPES = ROOT / "recipes"


def recipe(name):
    """The recipe as a module of its own, so that a test may shrink its settings."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def digits_folder(tmp_path_factory):
    return toy_data.digits_folder(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    return toy_data.image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    return toy_data.sentences(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    pytest.importorskip("transformers")
    return toy_data.tiny_bert(tmp_path_factory.mktemp("bert"))


SMALL = ("--batch-size", 10, "--fraction", 0.5, "--epochs", 10)


@pytest.mark.parametrize("strategy", ["stable", "label_confidence"])
def test_cifar10_trains(strategy, digits_folder, monkeypatch, capsys):
    pytest.importorskip("torchvision")
    run(recipe("cifar10"), monkeypatch, "--data", digits_folder, *SMALL, "--strategy", strategy, "--noise", 0.2)
    said = capsys.readouterr().out
    assert float(re.search(r"accuracy (\d\.\d+)", said)[1]) > 0.2  # of ten classes
    assert "epoch 10: loss" in said
    right = float(re.search(r"right labels in the last coreset (\d\.\d+)", said)[1])
    assert 0.6 < right < 1


def test_cifar10_says_in_a_line_that_a_batch_is_larger_than_an_epoch(digits_folder, monkeypatch):
    pytest.importorskip("torchvision")
    with pytest.raises(SystemExit, match="--batch-size 99 is larger than an epoch of 30 images"):
        run(recipe("cifar10"), monkeypatch, "--data", digits_folder, "--batch-size", 99)


@pytest.mark.parametrize("name", ["cifar10", "imagenet", "snli", "train_on_distilled"])
@pytest.mark.parametrize("kind", ["missing", "empty", "split"])
def test_data_that_cannot_be_opened_are_an_error_of_one_line(name, kind, digits_folder, tmp_path, monkeypatch):
    for module in ("torchvision", "timm", "transformers", "accelerate"):
        pytest.importorskip(module)
    data = {"missing": tmp_path / "not there", "empty": tmp_path, "split": tmp_path / "only"}[kind]
    if kind == "split":  # the wrong one, or the wrong columns
        data.mkdir()
        (data / "train.parquet").write_bytes((digits_folder / "train.parquet").read_bytes())
    more = {"snli": ["--model", "none"], "train_on_distilled": ["fashion-mnist/herding-1"]}.get(name, [])
    with pytest.raises(SystemExit) as error:
        run(recipe(name), monkeypatch, "--data", data, *more)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"--data {data} ")


TOY = (
    *("--model", "test_resnet", "--img-size", 32, "--fraction", 0.2, "--epochs", 3, "--batch-size", 10, "--lr", 0.05),
    *("--workers", 0, "--warm-up", 1),
)


@pytest.fixture
def imagenet(monkeypatch):
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    return recipe("imagenet")


def test_imagenet_resumed_goes_on_to_the_same_weights(imagenet, image_folder, tmp_path, monkeypatch, capsys):
    whole, stopped = tmp_path / "new folder" / "whole.pt", tmp_path / "stopped.pt"
    run(imagenet, monkeypatch, "--data", image_folder, *TOY, "--checkpoint", whole)
    accuracy = re.findall(r"accuracy \d\.\d+", capsys.readouterr().out)
    replace = imagenet.os.replace

    def stop_after(source, target):
        replace(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(imagenet.os, "replace", stop_after)
        with pytest.raises(KeyboardInterrupt):
            run(imagenet, monkeypatch, "--data", image_folder, *TOY, "--checkpoint", stopped)
    assert torch.load(stopped, weights_only=True)["epoch"] == 1
    run(imagenet, monkeypatch, "--data", image_folder, *TOY, "--checkpoint", stopped, "--resume")
    one, other = (torch.load(file, weights_only=True)["parts"] for file in (whole, stopped))
    for kind in ("model", "average"):
        assert all(torch.equal(value, other[kind][name]) for name, value in one[kind].items())
    assert re.findall(r"accuracy \d\.\d+", capsys.readouterr().out) == accuracy


@pytest.mark.parametrize("strategy", ["uniform", "label_confidence"])
def test_imagenet_reads_hugging_face_data(strategy, imagenet, digits_folder, tmp_path, monkeypatch, capsys):
    options = ("--strategy", strategy, "--epochs", 2, "--checkpoint", tmp_path / "run.pt")
    run(imagenet, monkeypatch, "--data", digits_folder, *TOY, *options)
    assert re.search(r"accuracy \d\.\d+, selection \d+%", capsys.readouterr().out)


def test_snli_trains_and_goes_on_from_a_checkpoint(sentences, tiny_bert, tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    module = recipe("snli")
    options = ("--data", sentences, "--model", tiny_bert, "--output", tmp_path, "--noise", 0.3, "--freeze", 1)
    options += ("--pairs", 60, "--batch-size", 3, "--lr", 1e-3, "--strategy", "label_confidence")
    run(module, monkeypatch, *options, "--passes", 1)
    assert re.search(r"accuracy \d\.\d+\nselection took \d+% of the time", capsys.readouterr().out)
    assert list(tmp_path.glob("checkpoint-*/coreset_sampler.pt"))
    run(module, monkeypatch, *options, "--passes", 1.04, "--resume")  # as long a warm-up, so the same strategy
    assert "accuracy" in capsys.readouterr().out


def test_snli_freezes_what_it_is_told_to_and_no_more(tiny_bert):
    pytest.importorskip("accelerate")
    model = recipe("snli").load_model(str(tiny_bert), 1)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen
    assert all(".embeddings." in name or ".layer.0." in name for name in frozen)
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".layer.0." in name)


def test_train_on_distilled_trains_three_models_on_learned_and_on_random_images(monkeypatch, capsys):
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    module = recipe("train_on_distilled")
    monkeypatch.setattr(module, "VIT", module.VIT | {"depth": 1, "embed_dim": 8})
    quick = TrainingRecipe("any", labels="hard", steps=2, batch_size=5)
    asked = []

    def fit_quickly(model, train_set, *, test, seed):
        asked.append(recipe_for(train_set.coreset, model))
        return fit(model, train_set, quick, test=test, seed=seed)

    monkeypatch.setattr(module, "fit", fit_quickly)  # 300 steps take minutes
    options = ("--timm", "test_resnet", "--seeds", 1, "--test-images", 20)
    run(module, monkeypatch, "digits/vbpc-1", *options)
    out = capsys.readouterr().out
    for kind in ("learned images", "random images"):
        assert (
            len(re.findall(rf"{kind}: +accuracy \d\.\d{{3}} \(n = 1\), on its training images \d\.\d{{3}}", out)) == 3
        )
    assert [each.kind for each in asked] == ["batch norm", "batch norm", *["transformer"] * 4]
    assert [each.labels for each in asked] == ["soft", "hard"] * 3
    with pytest.raises(SystemExit):
        run(module, monkeypatch, "fashion-mnist/herding-1")
    assert "pass --data" in capsys.readouterr().err


def test_digits_noise_makes_its_table(monkeypatch, tmp_path, capsys):
    module = recipe("digits_noise")
    monkeypatch.setattr(module, "EPOCHS", 8)
    run(module, monkeypatch, "--seeds", 1, "--picture", tmp_path / "demo.png")
    assert len(re.findall(rf"\| (?:uniform|crest|stable) \| {NUMBER}", capsys.readouterr().out)) == 3
    assert (tmp_path / "demo.png").exists()


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.py")))
def test_a_recipe_opens_with_its_launch_line_and_its_result(name):
    text = (RECIPES / f"{name}.py").read_text()
    docstring = text.split('"""')[1]
    assert f"recipes/{name}.py" in docstring
    assert "Measured" in docstring
    assert len(text.splitlines()) <= 150, "a recipe reads in one sitting"
    assert not re.search(r"(?:from|import) (?:harness|benchmarks)", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "imagenet", "snli"])
def test_two_processes_train_together(name, digits_folder, image_folder, sentences, tiny_bert, tmp_path):
    options = {
        "cifar10": ["--data", digits_folder, *SMALL],
        "imagenet": ["--data", image_folder, *TOY, "--checkpoint", tmp_path / "run.pt"],
        "snli": ["--data", sentences, "--model", tiny_bert, "--passes", 1, "--batch-size", 2, "--output", tmp_path],
    }[name]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, RECIPES / f"{name}.py", *map(str, options)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"accuracy \d\.\d+", done.stdout)) == 1
