import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from coreset_sampler import SyntheticCoreset, evaluate, load_coreset
from coreset_sampler.cli import main as cli
from coreset_sampler.cli.main import main
from coreset_sampler.synthetic.corruptions import corrupted, corruption_names
from coreset_sampler.synthetic.distillers.claim import claimed
from coreset_sampler.synthetic.image_data import open_images
from coreset_sampler.synthetic.inference.predict import by_sgd
from coreset_sampler.synthetic.networks import description, network
from coreset_sampler.synthetic.results import Log, summary

QUICK = ["--data", "digits", "--widths", "4,8", "--seeds", "2"]
SET = ["--set", "sgd.steps=20", "last-layer.steps=5", "hmc.steps=4", "hmc.burn_in=2", "hmc.thin=1", "sghmc.steps=6"]
SET += ["sghmc.burn_in=2", "sghmc.thin=2"]


def test_evaluate_prints_a_line_for_every_net_and_inference(capsys, tmp_path):
    output = tmp_path / "new" / "results.json"
    by = "last-layer,sgd,hmc,sghmc"
    command = [
        "evaluate",
        "digits/k-center-1",
        *QUICK,
        "--by",
        by,
        "--networks",
        "convnet,vgg",
        *SET,
        "-o",
        str(output),
    ]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "network by test images n accuracy training NLL ECE Brier CPU s"
    assert [line.split()[:2] for line in lines[1:9]] == [
        [net, name] for net in ("convnet", "vgg") for name in by.split(",")
    ]
    results = json.loads(output.read_text())
    assert len(results["rows"]) == 16
    assert {row["test_images"] for row in results["rows"]} == {500}
    assert all(group["n"] == 2 and 0 < group["accuracy"]["mean"] < 1 for group in results["summary"])


def test_no_image_of_a_judged_set_is_held_out():
    """Sets for many networks hold real images, picked among all training images."""
    coreset, digits = load_coreset("digits/views-10"), open_images("digits")
    stored = (coreset.pixels(stored=True) * 255).round().byte().flatten(1)
    split, without = digits.validation_split(0.5), digits.validation_split(0.5, without=coreset.pixels(stored=True))

    def shared(images):
        return int((images.flatten(1)[:, None] == stored).all(2).any(1).sum())

    assert shared(split.test[0]) > 10
    assert shared(without.test[0]) == 0
    assert len(without.test[1]) == len(split.test[1]) - shared(split.test[0])
    assert without.train[0].equal(split.train[0])
    rows = evaluate(
        coreset, digits, by="recipe", validation=True, seeds=1, settings={"recipe": {"steps": 2}}, progress=False
    )
    assert rows[0]["test_images"] == len(digits.validation_split(without=coreset.pixels(stored=True)).test[1]) < 130
    whole = digits.train[0] / 255
    with pytest.raises(ValueError, match="all that are held out are in the set; raise share"):
        digits.validation_split(without=whole)
    assert len(digits.validation_split(without=whole[..., 1:, 1:]).test[1]) == 130  # of another size: none of these


def test_a_killed_run_goes_on_and_gives_the_same_rows(capsys, tmp_path):
    output = tmp_path / "results.json"
    command = ["evaluate", "digits/k-center-1", *QUICK, "--by", "sgd,last-layer", *SET, "-o", str(output)]
    assert main(command) == 0
    whole = json.loads(output.read_text())["rows"]
    log = output.with_suffix(".jsonl")
    first, second, *_ = log.read_text().splitlines(keepends=True)
    log.write_text(first + second[: len(second) // 2])  # killed while it wrote the second row
    output.unlink()
    assert main(command) == 0
    assert "done before" in capsys.readouterr().err.splitlines()[6]
    again = json.loads(output.read_text())["rows"]
    strip = [{name: value for name, value in row.items() if name != "cpu_seconds"} for row in whole]
    assert [{name: value for name, value in row.items() if name != "cpu_seconds"} for row in again] == strip


def test_other_settings_are_not_taken_for_done(tmp_path):
    output = tmp_path / "results.json"
    command = ["evaluate", "digits/k-center-1", *QUICK, "--by", "sgd", "-o", str(output)]
    main([*command, "--set", "sgd.steps=3"])
    main([*command, "--set", "sgd.steps=4"])
    assert len(output.with_suffix(".jsonl").read_text().splitlines()) == 4
    assert len(json.loads(output.read_text())["rows"]) == 2


def test_networks_that_are_said_with_less_are_not_taken_for_done(tmp_path):
    """A network with its own norm, or one of somebody's own, is not that with another norm, or of ours, of the same name."""
    quick = {"by": "sgd", "seeds": 1, "settings": {"sgd": {"steps": 3}}, "progress": False}
    ours = quick | {"networks": ["convnet"], "widths": [4, 8]}
    own = quick | {"networks": {"convnet": network("convnet", 1, 10, 8, widths=(8,))}}
    evaluate("digits/k-center-1", "digits", norm="batch", output=tmp_path / "r.json", **ours)
    for asked in (ours, own):
        kept = evaluate("digits/k-center-1", "digits", output=tmp_path / "r.json", **asked)
        fresh = evaluate("digits/k-center-1", "digits", **asked)
        assert "norm" not in kept[0]
        assert kept[0]["nll"] == fresh[0]["nll"]


def test_corrupted_images_are_judged_by_the_same_networks():
    data = open_images("digits")
    coreset = SyntheticCoreset.load(_zoo("digits/k-center-1"))
    calls = []
    infer = by_sgd(steps=20)

    def counted(*arguments):
        calls.append(arguments[-1])
        return infer(*arguments)

    nets = {"convnet": network("convnet", 1, 10, 8, widths=(4, 8))}
    rows = evaluate(
        coreset, data, by={"sgd": counted}, networks=nets, seeds=[7], corruptions=[("contrast", 5), ("fog", 1)]
    )
    assert calls == [7]
    assert [(row["corruption"], row["severity"]) for row in rows] == [(None, None), ("contrast", 5), ("fog", 1)]
    assert rows[0]["accuracy"] > rows[1]["accuracy"]


def _zoo(name):
    from coreset_sampler.synthetic import zoo

    return zoo.path(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--by", "magic"], "unknown inference 'magic'; known: last-layer, sgd"),
        (["--networks", "lenet"], "unknown network 'lenet'; known: convnet"),
        (["--set", "sgd.stepps=3"], "--set takes sgd.NAME=VALUE with NAME one of networks, steps"),
        (["--corruptions", "rain"], "unknown corruption 'rain'; known: all, gaussian_noise"),
        (["--corruptions", "fog", "--severity", "6"], "severity must be 1 to 5, got 6"),
        (["--set", "sgd.steps=2.5"], "steps must be a whole number, got 2.5"),
        (["--set", 'sgd.learning_rate="a"'], "learning_rate must be a number, got 'a'"),
        (["--by", "hmc", "--set", "hmc.leapfrog=2.5"], "leapfrog must be a whole number, got 2.5"),
        (["--by", "hmc", "--set", "hmc.steps=40.5"], "steps must be a whole number, got 40.5"),
        (["--by", "recipe", "--set", "recipe.batch_size=2.5"], "batch_size must be a whole number, got 2.5"),
        (["--seeds", "0"], "seeds must be at least 1, or the seeds themselves, got 0"),
    ],
)
def test_mistakes_are_named_on_one_line(capsys, changes, message):
    assert main(["evaluate", "digits/k-center-1", *QUICK, "--by", "sgd", *changes]) == 1
    assert message in capsys.readouterr().err


def test_data_of_another_size_or_order_of_classes_is_refused():
    data = open_images("digits")
    nets = {"convnet": network("convnet", 1, 10, 8, widths=(4,))}
    coreset = SyntheticCoreset.load(_zoo("digits/k-center-1"))
    values = coreset.describe() | {
        "class_names": coreset.class_names[::-1] if coreset.class_names else data.class_names[::-1]
    }
    turned = SyntheticCoreset(coreset.inputs, coreset.targets, preprocessing=coreset.preprocessing, **values)
    with pytest.raises(ValueError, match="in another order than those of digits"):
        evaluate(turned, data, by={}, networks=nets)
    large = SyntheticCoreset.load(_zoo("fashion-mnist/herding-1"))
    with pytest.raises(ValueError, match=r"inputs are \(1, 28, 28\), images of digits \(1, 8, 8\)"):
        evaluate(large, data, by={}, networks=nets)


def test_data_with_other_class_names_are_refused_and_with_none_are_said_to_be_unchecked():
    data = open_images("digits")
    nets = {"convnet": network("convnet", 1, 10, 8, widths=(4,))}
    coreset = SyntheticCoreset.load(_zoo("digits/k-center-1"))
    animals = replace(data, class_names=tuple(f"animal {i}" for i in range(10)))
    with pytest.raises(ValueError, match=r"not those of digits: 0, 1, 2, 3, 4, ... and animal 0, .*it was made from"):
        evaluate(coreset, animals, by={}, networks=nets)
    said = []
    assert evaluate(coreset, replace(animals, named=False), by={}, networks=nets, progress=said.append) == []
    assert said == ["whether classes are the same is not checked: digits has no class names"]


def test_images_of_another_size_are_scaled_only_if_asked_or_recorded(tmp_path, capsys):
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    for split in ("train", "test"):
        pictures = [image.fromarray(np.full((16, 16), 20 * i, np.uint8)) for i in range(10)]
        rows = datasets.Dataset.from_dict({"image": pictures, "label": list(range(10))})
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")
    command = ["--data", str(tmp_path / "data"), "--by", "sgd", "--seeds", "1", "--set", "sgd.steps=1"]
    assert main(["evaluate", "digits/k-center-1", *command]) == 1
    assert "inputs are (1, 8, 8), images of data (1, 16, 16)" in capsys.readouterr().err
    assert main(["evaluate", "digits/k-center-1", "--image-size", "8", *command]) == 0
    assert "whether classes are the same is not checked: data has no class names" in capsys.readouterr().err
    made = tmp_path / "made.safetensors"
    coreset = load_coreset("digits/k-center-1")
    coreset.provenance |= {"image_size": 8}
    coreset.save(made)
    assert main(["evaluate", str(made), *command]) == 0


def test_digits_are_not_said_to_have_another_size():
    with pytest.raises(ValueError, match="which have 8 x 8 pixels, got 28"):
        open_images("digits", image_size=28)
    assert open_images("digits", image_size=8).image_size == 8


def test_a_second_evaluation_into_the_same_file_is_refused(tmp_path, capsys):
    output = tmp_path / "results.json"
    with claimed(output):
        assert main(["evaluate", "digits/k-center-1", *QUICK, "--by", "sgd", "-o", str(output)]) == 1
    assert f"another process is writing {output}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_results_is_refused_before_anything_is_measured(tmp_path, capsys):
    assert main(["evaluate", "digits/k-center-1", *QUICK, "--by", "sgd", "-o", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path} is a folder: name a file in it" in said
    assert "accuracy" not in said


def test_evaluate_takes_the_network_that_the_coreset_names_and_says_so(tmp_path, capsys):
    output = tmp_path / "results.json"
    command = ["evaluate", "digits/vbpc-1", "--data", "digits", "--by", "last-layer", "--seeds", "1", "-o", str(output)]
    assert main(command) == 0
    assert "convnet: widths 32 64, what the coreset was made with" in capsys.readouterr().err
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["network"], row["widths"]) == ("convnet", [32, 64])
    recorded = load_coreset("digits/vbpc-1").provenance["accuracy"]
    assert row["accuracy"] == pytest.approx(recorded["mean"], abs=0.03)


@pytest.mark.parametrize("widths", [["4", "8"], ["4,8"], ["4,", "8"]])
def test_widths_are_taken_with_spaces_and_with_commas_by_every_command(widths, tmp_path):
    for start in (
        ["evaluate", "FILE", "--data", "digits"],
        ["distill", "digits", "-o", "F"],
        ["experts", "D", "digits"],
    ):
        assert cli.parser().parse_args([*start, "--widths", *widths]).widths == [4, 8]


def test_widths_that_are_no_numbers_are_told_where_other_arguments_go(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--widths", "4,8", "digits/vbpc-1", "--data", "digits"])
    assert "other arguments go before it, got 'digits/vbpc-1'" in capsys.readouterr().err


def test_a_coreset_that_claims_absurd_networks_is_refused(tmp_path, capsys):
    coreset = load_coreset("digits/k-center-1")
    for number, widths in enumerate([[10**9], "many", [0], [1.5]]):
        coreset.provenance = {"network": {"net": "convnet", "widths": widths}}
        coreset.save(tmp_path / f"{number}.safetensors")
        command = ["evaluate", str(tmp_path / f"{number}.safetensors"), "--data", "digits", "--by", "sgd"]
        assert main(command) == 1
        assert "widths must be" in capsys.readouterr().err


def test_spread_is_that_of_a_sample_and_absent_for_one_seed():
    row = dict(network="a", by="b", corruption=None, severity=None, nll=1.0, ece=0.1, brier=0.5, cpu_seconds=1.0)
    rows = [row | {"seed": seed, "accuracy": value} for seed, value in enumerate((0.5, 0.7, 0.9))]
    (group,) = summary(rows)
    assert group["accuracy"] == {"mean": pytest.approx(0.7), "std": pytest.approx(0.2)}
    assert summary(rows[:1])[0]["accuracy"]["std"] is None


def test_log_without_a_file_only_remembers():
    log = Log(None)
    log.add({"seed": 0, "accuracy": 0.5})
    assert log.find({"seed": 0}) == {"seed": 0, "accuracy": 0.5}
    assert log.find({"seed": 1}) is None


@pytest.mark.integration  # imports an image library that compiles for seconds
@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 3, 32, 32)])
def test_every_corruption_changes_images_and_repeats_with_the_seed(shape):
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    state = np.random.get_state()[1].copy()
    for name in corruption_names():
        if name == "glass_blur" and shape[1] == 3:
            continue  # it compiles for seconds; once is enough
        changed = corrupted(pixels, name)
        assert changed.shape == pixels.shape
        assert changed.dtype == torch.uint8
        assert not torch.equal(changed, pixels)
        assert torch.equal(changed, corrupted(pixels, name)), name
    assert len(corruption_names()) == 19
    assert np.array_equal(state, np.random.get_state()[1])


def test_without_the_corruptions_library_evaluation_still_runs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    command = ["evaluate", "digits/k-center-1", *QUICK, "--by", "sgd", "--set", "sgd.steps=2"]
    assert main(command) == 0
    assert main([*command, "--corruptions", "fog"]) == 1
    assert "pip install 'coreset-sampler[corruptions]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made_with", "asked", "network", "inferences"),
    [
        ("convnet-batch:4-8", None, "convnet-batch", {"sgd", "last-layer"}),
        ("convnet-instance:4-8", None, "convnet", {"sgd", "last-layer"}),
        ("convnet-batch:4-8", "convnet", "convnet", {"recipe"}),  # InstanceNorm is not its home
    ],
)
def test_a_set_is_judged_with_the_norm_that_it_was_made_with(made_with, asked, network, inferences):
    coreset = load_coreset("digits/k-center-1")
    values = coreset.describe() | {"provenance": {"network": description(made_with)}}
    coreset = SyntheticCoreset(coreset.stored, coreset.targets, preprocessing=coreset.preprocessing, **values)
    quick = {"sgd": {"steps": 2}, "last-layer": {"steps": 2}, "recipe": {"steps": 2}}
    rows = evaluate(coreset, "digits", networks=asked, seeds=1, progress=False, settings=quick)
    assert {row["by"] for row in rows} == inferences
    assert {row["network"] for row in rows} == {network}
    if asked is None:
        assert {tuple(row["widths"]) for row in rows} == {(4, 8)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sets_in_half_precision_are_judged(dtype, tmp_path):
    whole = load_coreset("digits/k-center-1").with_targets("soft")
    half = SyntheticCoreset(
        whole.inputs.to(dtype), whole.targets.to(dtype), preprocessing=whole.preprocessing, **whole.describe()
    )
    rows = evaluate(
        half, "digits", by={"sgd": by_sgd(steps=2)}, networks=["convnet:4-4"], seeds=1, output=tmp_path / "r.json"
    )
    assert 0 <= rows[0]["train_accuracy"] <= 1


@pytest.mark.parametrize("network", [torch.nn.Linear(64, 10), "convnet"])
def test_networks_of_ones_own_are_functions_that_make_them(network):
    with pytest.raises(TypeError, match=f"got a {type(network).__name__} for 'mine': pass .*lambda"):
        evaluate(load_coreset("digits/k-center-1"), "digits", networks={"mine": network}, seeds=1)


def test_an_interrupted_evaluation_says_what_is_kept(tmp_path, capsys, monkeypatch):
    measured = []

    def interrupted(*_):
        measured.append(1)
        if len(measured) > 1:
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setattr("coreset_sampler.synthetic.evaluation.accuracy", interrupted)
    command = ["evaluate", "digits/k-center-1", *QUICK, "--by", "sgd", *SET]
    assert main([*command, "-o", str(tmp_path / "r.json")]) == 130
    assert "stopped; to continue, repeat the command" in capsys.readouterr().err
    assert main(command) == 130
    assert "stopped; nothing is kept without -o" in capsys.readouterr().err


def test_a_damaged_log_is_named(tmp_path, capsys):
    (tmp_path / "r.jsonl").write_text('{"seed": 0}\ngarbage\n')
    assert main(["evaluate", "digits/k-center-1", *QUICK, "--by", "sgd", "-o", str(tmp_path / "r.json")]) == 1
    assert f"{tmp_path / 'r.jsonl'} is damaged: line 2 is no row of results" in capsys.readouterr().err
