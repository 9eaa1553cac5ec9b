"""The commands, run as a user would."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import coreset_sampler
from coreset_sampler.cli import main as cli
from coreset_sampler.cli.evaluate import _settings
from coreset_sampler.synthetic import zoo
from coreset_sampler.synthetic.dataset import SyntheticCoreset, load_coreset
from coreset_sampler.synthetic.preprocessing import ZCA, Normalize, Raw
from coreset_sampler.synthetic.remarks import accuracy_range


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def mtt(tmp_path):
    torch.save(torch.randn(6, 3, 32, 32), tmp_path / "images_best.pt")
    torch.save(torch.arange(6) // 2, tmp_path / "labels_best.pt")
    return tmp_path / "images_best.pt"


def test_zoo_lists_what_ships_with_method_count_and_accuracy(capsys):
    code, out, _ = run(capsys, "zoo")
    assert code == 0
    for name, entry in zoo.index().items():
        line = next(line for line in out.splitlines() if line.startswith(name + " "))
        assert accuracy_range(entry["accuracy"]) in line
        assert entry["licence"] in line
    assert json.loads(run(capsys, "zoo", "--json")[1]) == zoo.index()


def test_info_tells_what_is_in_a_file(capsys):
    code, out, _ = run(capsys, "info", "digits/k-center-10")
    assert code == 0
    assert "SyntheticCoreset(100 of 1 x 8 x 8, hard targets, k-center)" in out
    assert "CC BY 4.0" in out


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"coreset-sampler {coreset_sampler.__version__}\n"


def test_help_has_examples_and_every_one_is_understood(capsys):
    for command in ([], ["distill"], ["experts"], ["evaluate"], ["audit"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        text = " ".join(capsys.readouterr().out.split("example")[-1].split())
        found = re.findall(r"coreset-sampler (.*?)(?= coreset-sampler|$)", text)
        assert found
        for example in found:
            if "COMMAND" not in example:
                assert callable(cli.parser().parse_args(example.split()).run)


def test_classes_are_counted_as_the_learned_targets_say(capsys, tmp_path):
    assert "images_per_class  10; 11 bird, 9 cat by their largest target" in run(capsys, "info", "cifar10/vbpc-10")[1]
    lines = run(capsys, "zoo")[1].splitlines()
    assert any(line.startswith("* cifar10/vbpc-10: 11 bird, 9 cat by their largest target") for line in lines)
    assert sum(line.startswith("* ") for line in lines) == 1
    assert "images_per_class  10\n" in run(capsys, "info", "fashion-mnist/vbpc-10")[1]


def test_a_file_that_claims_more_images_per_class_than_its_labels_is_contradicted(capsys, tmp_path):
    about = {"images_per_class": 2, "class_names": ("a", "b", "c")}
    made = SyntheticCoreset(torch.zeros(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]), preprocessing=Raw(), **about)
    made.save(tmp_path / "a.safetensors")
    out = run(capsys, "info", tmp_path / "a.safetensors")[1]
    assert "images_per_class  2; none of 1 classes by their labels" in out


def test_convert_asks_for_the_preprocessing_and_writes_nothing_without_it(capsys, mtt, tmp_path):
    code, _, err = run(capsys, "convert", mtt, tmp_path / "out.safetensors")
    assert code == 1
    assert "does not say how its inputs were preprocessed" in err
    assert "--mean M ... --std S" in err
    assert not (tmp_path / "out.safetensors").exists()


def test_convert_writes_our_format(capsys, mtt, tmp_path):
    out = tmp_path / "out.safetensors"
    numbers = ["--mean", 0.4, 0.5, 0.6, "--std", 0.2, 0.2, 0.2]
    code, text, _ = run(capsys, "convert", mtt, out, *numbers, "--class-names", "a", "b", "c")
    assert code == 0
    assert "wrote" in text
    coreset = load_coreset(out)
    assert torch.equal(coreset.inputs, torch.load(mtt, weights_only=True))
    assert coreset.preprocessing == Normalize((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))
    assert coreset.class_names == ("a", "b", "c")


def test_whitening_can_be_taken_from_a_coreset_of_ours(capsys, mtt, tmp_path):
    zca = ZCA("A", torch.eye(3072) * 2, torch.zeros(3072))
    whitened = SyntheticCoreset(torch.zeros(2, 3, 32, 32), torch.tensor([0, 1]), preprocessing=zca)
    whitened.save(tmp_path / "zca.safetensors")
    out = tmp_path / "out.safetensors"
    assert run(capsys, "convert", mtt, out, "--preprocessing-from", tmp_path / "zca.safetensors")[0] == 0
    assert torch.equal(load_coreset(out).preprocessing.matrix, zca.matrix)


@pytest.mark.parametrize(
    "words",
    [
        ["--mean", "0.5", "--std", "0.5"],
        ["--raw"],
        ["--targets", "soft"],
        ["--class-names", "cat", "dog"],
        ["--format", "mtt"],
        ["--preprocessing-from", "digits/k-center-1"],
    ],
)
def test_what_a_file_of_ours_says_itself_is_refused(capsys, tmp_path, words):
    out = tmp_path / "out.safetensors"
    code, _, err = run(capsys, "convert", "digits/k-center-1", out, *words)
    assert code == 1
    assert f"digits/k-center-1 is a coreset of ours, which says itself what {words[0]}" in err
    assert not out.exists()
    assert run(capsys, "convert", "digits/k-center-1", out)[0] == 0


def test_convert_overwrites_only_by_force(capsys, mtt, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    code, _, err = run(capsys, "convert", mtt, out, "--raw")
    assert (code, out.read_bytes()) == (1, b"precious")
    assert "--force" in err
    assert run(capsys, "convert", mtt, out, "--raw", "--force")[0] == 0
    assert len(load_coreset(out)) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mean", 0.5], "--mean and --std go together"),
        (["--raw", "--mean", 0.5, "--std", 0.5], "say the preprocessing once"),
        (["--mean", 0.5, "--std", 0.5], "1 channel"),
    ],
)
def test_contradictions_are_one_line_errors(capsys, mtt, tmp_path, arguments, message):
    code, _, err = run(capsys, "convert", mtt, tmp_path / "out.safetensors", *arguments)
    assert code == 1
    assert message in err
    assert "Traceback" not in err


def test_a_wrong_ending_is_refused_before_reading(capsys, mtt, tmp_path):
    code, _, err = run(capsys, "convert", mtt, tmp_path / "out.pt", "--raw")
    assert code == 1
    assert "must end in .safetensors" in err


def test_an_unknown_name_lists_the_known_ones(capsys):
    code, _, err = run(capsys, "info", "fashion-mnist/no-such-set")
    assert code == 1
    assert "digits/k-center-1" in err


@pytest.mark.parametrize("name", ["digits/k-center-1", "digits/k-center-10"])
def test_show_draws_every_image_of_a_small_set(capsys, tmp_path, name):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    assert run(capsys, "show", name, "-o", tmp_path / "grid.png")[0] == 0
    with image.open(tmp_path / "grid.png") as picture:
        page = torch.from_numpy(np.array(picture.convert("L")))
    # images are dark squares on white: count the pixels of the tiles, 72 x 72 drawn at twice the size
    black = (load_coreset(name).pixels() == 0).sum().item() * (9 * 2) ** 2
    assert (page == 0).sum().item() == pytest.approx(black, rel=0.03)


def test_a_set_in_bfloat16_is_shown(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    whole = load_coreset("digits/k-center-1")
    inputs = whole.inputs.to(torch.bfloat16)
    SyntheticCoreset(inputs, whole.targets, preprocessing=whole.preprocessing).save(tmp_path / "a.safetensors")
    assert run(capsys, "show", tmp_path / "a.safetensors", "-o", tmp_path / "grid.png")[0] == 0


def test_show_says_what_it_leaves_out():
    from coreset_sampler.synthetic.picture import _hidden

    labels = torch.arange(30) // 10
    shown = [torch.arange(4), torch.arange(10, 14)]
    assert _hidden(labels, shown, [0, 1, 2]) == "showing 2 of 3 classes, 4 of 10 a class"
    assert _hidden(labels, [torch.arange(10)] * 3, [0, 1, 2]) == ""


@pytest.mark.parametrize(("rows", "columns", "depth"), [(10, 1, 5), (10, 10, 10), (9, 1, 3), (2, 1, 2), (20, 2, 10)])
def test_short_rows_stand_side_by_side_with_no_place_empty(rows, columns, depth):
    from coreset_sampler.synthetic.picture import _depth

    assert _depth(rows, columns) == depth


def test_a_table_cannot_be_shown(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    torch.save({"x": torch.rand(6, 4), "y": torch.arange(6)}, tmp_path / "table.pt")
    code, _, err = run(capsys, "show", tmp_path / "table.pt", "--raw", "-o", tmp_path / "grid.png")
    assert code == 1
    assert "only images" in err


@pytest.mark.integration
def test_the_command_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "coreset_sampler.cli", "zoo"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "digits/k-center-1" in result.stdout


def test_settings_that_are_text_need_no_quotes():
    words = ["recipe.augmentation=shift+flip", "recipe.labels=hard", 'recipe.labels="soft"', "recipe.optimizer=muon"]
    found = _settings([*words, "sgd.steps=3"])
    of_recipe = {"augmentation": "shift+flip", "labels": "soft", "optimizer": "muon"}
    assert found == {"recipe": of_recipe, "sgd": {"steps": 3}}
    with pytest.raises(ValueError, match="--set takes NAME=VALUE"):
        _settings(["recipe.lr=fast"])


def test_settings_that_are_words_need_no_quotes(capsys, tmp_path):
    output, words = tmp_path / "c.safetensors", ["precision=bf16", "pool_loss=cross-entropy", "label_lr=0"]
    run_of_one = ["--images-per-class", 1, "--steps", 1, "--widths", 4, "--set", *words, "-o", output]
    code, _, err = run(capsys, "distill", "digits", *run_of_one)
    assert code == 0, err
    recorded = load_coreset(output).provenance["settings"]
    assert (recorded["precision"], recorded["pool_loss"], recorded["label_lr"]) == ("bf16", "cross-entropy", 0)
