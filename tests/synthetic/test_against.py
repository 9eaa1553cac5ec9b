"""evaluate against real images and on networks of timm and Hugging Face; what zoo and show say of a set."""

import json

import pytest
import torch

from coreset_sampler import Raw, SyntheticCoreset, evaluate, load_coreset
from coreset_sampler.cli.main import main
from coreset_sampler.synthetic.image_data import open_images
from coreset_sampler.synthetic.real_images import RealImages, herded
from coreset_sampler.synthetic.remarks import accuracy_range, made_for, outside_pixels, remarks

QUICK = {"settings": {"recipe": {"steps": 2, "batch_size": 10}, "sgd": {"steps": 2}, "last-layer": {"steps": 2}}}


@pytest.mark.parametrize("how", ["random", "herding"])
def test_real_images_are_training_images_as_many_per_class_as_the_coreset_has(how):
    data, learned = open_images("digits"), load_coreset("digits/vbpc-10")
    real = RealImages(data, learned, how).coreset(0)
    assert real.targets.bincount().tolist() == [10] * 10
    assert real.preprocessing == learned.preprocessing
    known = {image.numpy().tobytes(): int(label) for image, label in zip(*data.train, strict=True)}
    pixels = (real.exact_pixels() * 255).round().byte()
    assert [known[image.numpy().tobytes()] for image in pixels] == real.targets.tolist()
    again, other = (RealImages(data, learned, how).coreset(seed) for seed in (0, 1))
    assert torch.equal(again.inputs, real.inputs)
    assert torch.equal(other.inputs, real.inputs) == (how == "herding")


def test_herding_on_pixels_picks_what_the_zoo_picked():
    coreset = load_coreset("fashion-mnist/herding-1")
    vectors = torch.cat([coreset.pixels().flatten(1), torch.rand(40, 784, generator=torch.Generator().manual_seed(0))])
    chosen, total = [], torch.zeros(784)
    for picked in range(1, 6):  # written out
        distances = [
            (((total + v) / picked - vectors.mean(0)).norm().item(), i)
            for i, v in enumerate(vectors)
            if i not in chosen
        ]
        chosen.append(min(distances)[1])
        total += vectors[chosen[-1]]
    assert herded(vectors, 5).tolist() == chosen


def test_evaluate_puts_random_and_herded_images_in_the_same_table(tmp_path):
    output = tmp_path / "results.json"
    run = {"networks": ["convnet", "vgg"], "widths": (4, 8), "against": ("random", "herding"), "seeds": 2, **QUICK}
    results = evaluate("digits/vbpc-1", "digits", output=output, progress=False, **run)
    table = str(results).splitlines()
    assert table[0].split("  ")[0] == "network"
    assert "trained on" in table[0]
    assert "training" in table[0]
    assert [(row["network"], row["by"]) for row in results.summary()[::3]] == [
        ("convnet", "sgd"), ("convnet", "last-layer"), ("convnet", "recipe"), ("vgg", "recipe")
    ]  # fmt: skip
    per_network = results.per_network()
    assert per_network.keys() == {"convnet", "vgg"}
    assert all(sources.keys() == {"the coreset", "random", "herding"} for sources in per_network.values())
    assert all(0 <= row["train_accuracy"] <= 1 for row in results)
    said = []
    again = evaluate("digits/vbpc-1", "digits", output=output, progress=said.append, **run)
    assert again == results
    assert sum("done before" in line for line in said) == len(results)


def test_train_accuracy_is_that_on_the_images_trained_on():
    coreset = load_coreset("digits/k-center-1")
    (row,) = evaluate(coreset, "digits", by=["recipe"], widths=(16, 32), seeds=1, progress=False)
    assert row["train_accuracy"] == 1
    assert 0.5 < row["accuracy"] < 0.95


def test_norms_are_exchanged_and_said(capsys):
    said = []
    results = evaluate("digits/vbpc-1", "digits", widths=(8, 8), norm="batch", seeds=1, progress=said.append, **QUICK)
    assert [row["by"] for row in results] == ["recipe"]  # BatchNorm is not its home
    assert said[0] == "convnet: widths 8 8, asked for; batch norm"
    assert "convnet, batch norm" in str(results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"against": ["k-center"]}, "against must be of random, herding, random-packed, got 'k-center'"),
        ({"norm": "layer"}, "norm must be one of instance, batch, group, got 'layer'"),
        ({"networks": ["hf:nowhere"]}, "hf:DIR must be a folder with a config.json, got 'nowhere'"),
        ({"networks": ["keras:resnet"]}, "unknown network 'keras:resnet'; known: convnet.*timm:MODEL, hf:DIR"),
        ({"networks": {"mine": lambda: None}, "norm": "batch"}, "widths and norm must be left out"),
        ({"corruptions": ["fog"], "severity": [1, 9]}, "severity must be 1 to 5, got 9"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate("digits/vbpc-1", "digits", progress=False, **arguments)


@pytest.mark.integration
def test_networks_of_timm_and_hugging_face_are_made_for_the_images(tmp_path, capsys):
    pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=224, patch_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    config.save_pretrained(tmp_path)
    names = f"timm:test_resnet,timm:vit_tiny_patch16_224+depth=1+embed_dim=12,hf:{tmp_path}"
    command = ["evaluate", "digits/vbpc-1", "--data", "digits", "--networks", names, "--seeds", "1"]
    assert main([*command, "--against", "random", "--set", "recipe.steps=2"]) == 0
    out, err = capsys.readouterr()
    assert "num_classes 10, in_chans 1, img_size 8, patch_size 2, depth 1, embed_dim 12" in err
    assert "vit, num_labels 10, num_channels 1, image_size 8, patch_size 2; random weights" in err
    assert out.count("random real images") == 3
    assert main([*command[:5], "timm:resnet81", "--seeds", "1"]) == 1
    assert "timm has no model 'resnet81'; there are resnet" in capsys.readouterr().err
    assert main([*command[:5], "timm:resnet10t+depth=x", "--seeds", "1"]) == 1
    assert "timm:MODEL+NAME=VALUE takes numbers" in capsys.readouterr().err
    assert main([*command[:5], "timm:vit_tiny_patch16_224+depth=1+patch_size=16", "--seeds", "1"]) == 1
    assert "does not take images of 8 pixels with 1 channel(s)" in capsys.readouterr().err


@pytest.mark.integration
def test_a_small_stem_keeps_the_image_at_its_size():
    pytest.importorskip("timm")
    from coreset_sampler.synthetic.other_networks import other_network

    plain, small = (other_network(f"timm:test_resnet{more}", 3, 10, 32)[0]().eval() for more in ("", "+small_stem"))
    x = torch.zeros(1, 3, 32, 32)
    assert small.forward_features(x).shape[-1] == 4 * plain.forward_features(x).shape[-1]


def test_severities_are_taken_as_a_list(monkeypatch):
    from coreset_sampler.cli import main as cli

    parse = cli.parser().parse_args
    start = ["evaluate", "FILE", "--data", "digits", "--severity"]
    assert parse([*start, "1,2,3,4,5"]).severity == (1, 2, 3, 4, 5)
    assert parse([*start, "4"]).severity == 4


def test_show_says_pixels_outside_and_networks(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["show", "fashion-mnist/vbpc-1", "-o", str(tmp_path / "grid.png")]) == 0
    out = capsys.readouterr().out
    assert "of its pixels lie outside [0, 1] (from -" in out
    assert "made for one kind of network: convnet with instance norm" in out
    assert remarks(load_coreset("digits/k-center-1")) == []


def test_pixels_outside_are_counted():
    pixels = torch.full((1, 1, 2, 2), 0.5)
    pixels[0, 0, 0] = torch.tensor([1.5, 1.0001])
    coreset = SyntheticCoreset(pixels, torch.tensor([0]), preprocessing=Raw(), provenance={"networks": ["vgg", "vit"]})
    assert outside_pixels(coreset).startswith("25% of its pixels lie outside [0, 1] (from 0.50 to 1.50)")
    assert made_for(coreset) == "made for 2 kind(s) of networks: vgg, vit"
    assert "not recorded" in made_for(SyntheticCoreset(pixels, torch.tensor([0]), preprocessing=Raw()))


def test_the_zoo_says_the_range_over_networks_and_not_the_best_one(capsys):
    def figures(mean):
        return {"mean": mean, "std": 0.01, "n": 3}

    networks = {
        "vit": {"the coreset": figures(0.6), "random": figures(0.58)},
        "vgg": {"the coreset": figures(0.75), "random": figures(0.7)},
    }
    text = accuracy_range(figures(0.86) | {"networks": networks})
    assert text == "60.0% to 75.0% over 2 networks (random real images 58.0% to 70.0%)"
    assert accuracy_range(figures(0.86)) == "86.0% ± 1.0% (n=3), ConvNet only"
    assert accuracy_range({}) == "not measured"
    assert main(["zoo"]) == 0
    assert "ConvNet only" in capsys.readouterr().out


def test_the_index_is_json_that_per_network_figures_fit_into():
    results = evaluate("digits/vbpc-1", "digits", widths=(4,), against=["random"], seeds=1, progress=False, **QUICK)
    measured = {"networks": json.loads(json.dumps(results.per_network()))}
    assert "over 1 networks (random real images" in accuracy_range(measured)
