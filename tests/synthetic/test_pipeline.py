"""distill() and evaluate() as one calls them from Python."""

import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from coreset_sampler import distill, evaluate, fit, load_coreset, recipe_for, teach
from coreset_sampler.synthetic.distillers import RealData, Variational
from coreset_sampler.synthetic.distillers.run import StoppedError, run, start
from coreset_sampler.synthetic.image_data import open_images
from coreset_sampler.synthetic.networks import convnet
from coreset_sampler.synthetic.problem import make_problem

SMALL = {"images_per_class": 1, "widths": (4, 6), "settings": {"pool": 2, "batch": 16, "fit_steps": 5}}
EXPERTS = {"experts": 1, "epochs": 2, "examples": 60}


def images(n=60, num_classes=3):
    pixels = torch.randint(256, (n, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return pixels, torch.arange(n) % num_classes


def small(data=None, **more):
    return distill(images() if data is None else data, **SMALL | {"steps": 6, "progress": False} | more)


def test_distill_steps_as_the_method_does_on_its_own():
    data = open_images(images())
    found = small(data, held_out=0.0, steps=4)
    distiller = Variational(
        partial(convnet, 1, 3, 8, widths=(4, 6)), decay=4, pool=2, batch=16, max_age=30, fit_steps=5
    )
    source = RealData(*data.train, preprocessing=data.normalize())
    done = run(distiller, start(distiller, source, 1), source, steps=4)
    assert torch.equal(found.inputs, done.state.inputs)
    assert torch.equal(found.targets, done.state.targets)
    assert found.provenance["held_out"][0].keys() == {"step", "loss"}


def test_a_folder_to_resume_from_makes_an_interruption_leave_no_trace(tmp_path):
    whole = small(seed=3)

    def stop(line):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(StoppedError, match=r"stopped after step 1 of 6; saved in .*checkpoint\.safetensors"):
        small(seed=3, resume=tmp_path / "run", progress=stop)
    resumed = small(seed=3, resume=tmp_path / "run")
    assert torch.equal(whole.inputs, resumed.inputs)
    assert resumed.provenance["held_out"] == whole.provenance["held_out"]
    again = small(seed=3, resume=f"{tmp_path}/run/")
    assert torch.equal(again.inputs, whole.inputs)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint.safetensors"]


def test_without_a_folder_an_interruption_says_that_nothing_was_saved():
    with pytest.raises(StoppedError, match="nothing was saved: pass resume="):
        small(progress=lambda line: os.kill(os.getpid(), signal.SIGINT))


def test_a_run_of_other_settings_is_refused_unless_it_is_overwritten(tmp_path):
    small(resume=tmp_path, steps=2)
    with pytest.raises(ValueError, match="the run to resume has seed 0, asked for 1: .*overwrite it"):
        small(resume=tmp_path, steps=2, seed=1)
    assert small(resume=tmp_path, steps=2, seed=1, overwrite=True).provenance["seed"] == 1
    assert small(resume=tmp_path, steps=2, seed=1).provenance["steps"] == 2


def test_a_run_that_has_gone_further_is_not_given_for_one_of_fewer_steps(tmp_path):
    small(resume=tmp_path, steps=3)
    with pytest.raises(ValueError, match="steps must be at least the 3 that the run to resume has taken, got 2"):
        small(resume=tmp_path, steps=2)
    assert small(resume=tmp_path, steps=2, overwrite=True).provenance["steps"] == 2


@pytest.mark.parametrize("method", ["fkl", "cd", "w", "rkl"])
def test_methods_that_need_experts_train_them_and_keep_them_only_where_asked(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = {"method": method, "settings": {"inner_steps": 2}, "expert_settings": EXPERTS, "steps": 2}
    coreset = small(**more)
    assert coreset.method == {"fkl": "forward_kl", "cd": "contrastive_divergence", "w": "wasserstein"}.get(
        method, "reverse_kl"
    )
    assert coreset.provenance["experts"]["epochs"] == 2
    assert list(tmp_path.iterdir()) == []
    kept = small(**more, resume="run")
    assert torch.equal(kept.inputs, coreset.inputs)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint.safetensors",
        "experts-images-convnet-4-6",
    ]


def test_floats_bytes_and_arrays_are_the_same_images():
    pixels, labels = images()
    one = small((pixels, labels), steps=1)
    assert torch.equal(one.inputs, small((pixels.float() / 255, labels), steps=1).inputs)
    assert torch.equal(one.inputs, small((pixels[:, 0].numpy(), labels.numpy()), steps=1).inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dc"}, "unknown method 'dc'; known: rkl, w"),
        ({"preset": "fast"}, "unknown preset 'fast'; known: cpu, paper"),
        ({"networks": "lenet"}, "unknown network 'lenet'; known: convnet"),
        ({"settings": {"speed": 1}}, "vbpc has no setting 'speed'; it has rho"),
        ({"images_per_class": 0}, "images_per_class must be at least 1, got 0"),
        ({"images_per_class": 99}, "class '0' has 18 besides those held out"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"evaluate_every": -1}, "evaluate_every must be an integer of at least 1, got -1"),
        ({"minutes": -1}, "minutes must be positive, got -1"),
        ({"data": (torch.randn(9, 1, 8, 8), torch.arange(9))}, "before they are normalised"),
        ({"data": (torch.zeros(9, 8, 9), torch.arange(9))}, r"must be squares .*got \(9, 1, 8, 9\)"),
        ({"data": (torch.zeros(9, 8, 8), torch.zeros(9))}, "labels must be class numbers"),
        ({"data": (torch.zeros(9, 8, 8),)}, r"'digits' or \(images, labels\)"),
    ],
)
def test_mistakes_are_named_with_what_to_pass_instead(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("method", "networks"), [("vbpc", "vgg-batch:4-4"), ("fkl", "convnet:4"), ("w", "convnet:4")])
def test_sets_are_learned_where_float64_is_the_default(method, networks, float64_by_default):
    settings = {"pool": 2, "batch": 16} if method == "vbpc" else {"inner_steps": 2}
    asked = {"images_per_class": 1, "steps": 2, "settings": settings, "networks": networks, "progress": False}
    coreset = distill("digits", method=method, expert_settings=EXPERTS if method != "vbpc" else None, **asked)
    assert coreset.inputs.dtype == torch.float32


def test_sets_are_labelled_and_trained_on_where_float64_is_the_default(float64_by_default):
    quick = {"network": "convnet:8-16", "epochs": 1}
    coreset = teach("digits", images_per_class=1, views=16, settings=quick, progress=False)
    assert coreset.inputs.dtype == coreset.targets.dtype == torch.float32
    model = convnet(1, 10, 8, widths=(8, 8))
    recipe = replace(recipe_for(coreset, model), steps=2)
    assert recipe.optimizer == "muon"
    fit(model, coreset, recipe)
    assert next(model.parameters()).dtype == torch.float64


def test_a_negative_number_of_examples_is_refused_and_not_taken_from_the_end():
    with pytest.raises(ValueError, match="examples must be positive, got -5"):
        make_problem(open_images("digits")).part(-5)


def test_evaluate_gives_rows_that_print_as_a_table(tmp_path):
    rows = evaluate("digits/vbpc-1", "digits", by="last-layer", seeds=[4, 5], progress=False)
    assert [row["seed"] for row in rows] == [4, 5]
    assert rows.summary()[0]["n"] == 2
    head, line = str(rows).splitlines()
    assert head.split()[:2] == ["network", "by"]
    assert line.split()[:2] == ["convnet", "last-layer"]
    assert repr(rows) == str(rows)


def test_evaluate_takes_networks_and_inferences_of_ones_own():
    coreset, seen = load_coreset("digits/k-center-1"), []

    def guess(coreset, make, seed):
        seen.append(make())
        return lambda inputs: torch.full((len(inputs), 10), 0.1)

    mine = {"mine": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}
    (row,) = evaluate(coreset, "digits", by={"guess": guess}, networks=mine, seeds=1, progress=False)
    assert (row["network"], row["by"]) == ("mine", "guess")
    assert len(seen[0]) == 2
    assert row["nll"] == pytest.approx(2.3026, abs=1e-3)
    with pytest.raises(ValueError, match="widths and norm must be left out where networks are functions"):
        evaluate(coreset, "digits", networks=mine, widths=(4,), progress=False)


def test_evaluate_continues_from_its_output_and_refuses_unknown_settings(tmp_path):
    output, lines = tmp_path / "results.json", []
    call = partial(evaluate, "digits/k-center-1", "digits", by=["sgd"], widths=(4, 4), output=output)
    once = call(seeds=1, settings={"sgd": {"steps": 2}}, progress=False)
    again = call(seeds=1, settings={"sgd": {"steps": 2}}, progress=lines.append)
    assert again == once
    assert lines[-1].endswith("done before")
    with pytest.raises(ValueError, match="sgd has no setting 'step'; it has networks, steps"):
        call(settings={"sgd": {"step": 2}})


def test_classes_without_names_get_none():
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(60, 1, 8, 8, generator=generator), torch.arange(60) % 10
    coreset = distill(data, images_per_class=1, steps=1, widths=(4,), held_out=0.0, progress=False)
    assert coreset.class_names is None
    assert coreset.num_classes == 10
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    assert recipe_for(coreset, model).augmentation == ("shift", "flip")  # no digits, as far as is known
