"""`teach`: the set is real images with a teacher's labels, the same for the same arguments, from Python and the shell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from coreset_sampler import SyntheticCoreset, Views, teach
from coreset_sampler.cli.main import main
from coreset_sampler.synthetic import checks
from coreset_sampler.synthetic.image_data import open_images
from coreset_sampler.synthetic.problem import make_problem
from coreset_sampler.synthetic.teaching import _plan

pytest.importorskip("sklearn")
QUICK = {"network": "convnet-batch:8-16", "epochs": 3}


def test_images_are_real_and_labels_those_of_a_teacher_that_has_learned():
    lines: list[str] = []
    coreset = teach("digits", images_per_class=2, views=32, settings=QUICK | {"epochs": 12}, progress=lines.append)
    assert coreset.size == "20 images, 640 examples"
    assert (coreset.method, coreset.images_per_class, coreset.target_kind) == ("views", 2, "soft")
    assert coreset.views == Views(32, mirror=False)  # digits have no mirror images
    real = {image.numpy().tobytes() for image in open_images("digits").train[0]}
    bytes_of = (coreset.exact_pixels(stored=True) * 255).round().to(torch.uint8)
    assert all(image.numpy().tobytes() in real for image in bytes_of)
    # a view that is mostly its own image is labelled as it is
    labels = torch.arange(10).repeat_interleave(2)
    modal = coreset.targets.argmax(1).view(20, 32).mode(1).values
    assert float((modal == labels).double().mean()) > 0.8
    assert coreset.provenance["teacher_accuracy"] > 0.8
    assert any("images held out" in line for line in lines)


def test_the_same_arguments_give_the_same_set_and_another_seed_other_images():
    one, same, other = (
        teach("digits", images_per_class=1, views=4, settings=QUICK, seed=seed, progress=False) for seed in (0, 0, 1)
    )
    assert one.equal(same)
    assert not torch.equal(one.stored, other.stored)


def test_your_own_teacher_labels_and_is_named():
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    coreset = teach("digits", images_per_class=1, views=4, teacher=mine, held_out=0.0, progress=False)
    torch.testing.assert_close(coreset.targets, mine(coreset.inputs).softmax(1))
    assert coreset.provenance["teacher"] == "Sequential"
    assert "teacher_accuracy" not in coreset.provenance


def test_your_own_teacher_is_left_in_the_modes_that_it_was_in():
    mine = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10), nn.Dropout(0.5)).train()
    mine[3].eval()
    modes = [module.training for module in mine.modules()]
    statistics = mine[2].running_mean.clone()
    teach("digits", images_per_class=1, views=4, teacher=mine, progress=False)  # tested on images held out, too
    assert [module.training for module in mine.modules()] == modes
    assert torch.equal(mine[2].running_mean, statistics)


@pytest.mark.parametrize(("count", "views"), [(1, 512), (10, 128), (50, 25), (100, 16)])
def test_views_that_are_not_said_are_as_many_in_each_class(count, views):
    mine = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    coreset = teach("digits", images_per_class=count, teacher=mine, held_out=0.0, progress=False)
    assert coreset.views == Views(views, mirror=False)


def byte_images(labels: torch.Tensor, side: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (len(labels), 1, side, side), dtype=torch.uint8, generator=generator), labels


def linear(classes: int, side: int = 8, channels: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * side**2, classes))


def test_images_held_out_are_of_all_classes_where_the_data_are_sorted_by_class():
    problem = make_problem(open_images(byte_images(torch.arange(20_000) // 2_000, side=2)))
    assert problem.held_out is not None
    assert problem.held_out.n == 1000
    assert int(problem.held_out.targets.bincount(minlength=10).min()) > 70


def test_the_last_image_of_a_class_is_not_held_out():
    data = byte_images(torch.tensor([0] * 20 + [1] * 20 + [2]))
    coreset = teach(data, images_per_class=1, views=2, teacher=linear(3), progress=False)
    assert (len(coreset.stored), coreset.num_classes) == (3, 3)
    with pytest.raises(ValueError, match="class '2' has 1 besides those held out"):
        teach(data, images_per_class=2, views=2, teacher=linear(3), progress=False)
    with pytest.raises(ValueError, match="no image can be held out: every class has one image"):
        open_images(byte_images(torch.arange(3))).validation_split()


def test_a_class_without_images_is_refused():
    with pytest.raises(ValueError, match="got 1: class '1' has none besides"):
        teach(byte_images(torch.arange(20) % 2 * 2), images_per_class=1, teacher=linear(3), progress=False)


def test_views_that_are_not_said_go_into_memory(monkeypatch):
    monkeypatch.setattr(checks, "MOST_PIXELS", 10 * 64 * 20)
    coreset = teach("digits", images_per_class=1, teacher=linear(10), held_out=0.0, progress=False)
    assert coreset.views == Views(20, mirror=False)


def test_views_that_do_not_go_into_memory_are_refused_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr(checks, "MOST_PIXELS", 10 * 64 * 20)
    lines: list[str] = []
    with pytest.raises(ValueError, match="make fewer of each, 20 at most"):
        teach("digits", images_per_class=1, views=21, settings=QUICK, progress=lines.append)
    assert not lines


@pytest.mark.parametrize("classes", [10, 11])
def test_classes_without_names_are_not_taken_for_digits(classes):
    data = byte_images(torch.arange(4 * classes) % classes)
    coreset = teach(data, images_per_class=1, views=2, teacher=linear(classes), progress=False)
    assert (coreset.views, coreset.class_names, coreset.num_classes) == (Views(2, mirror=True), None, classes)


def test_open_images_are_not_said_to_be_scaled():
    data = open_images(byte_images(torch.arange(40) % 2))
    with pytest.raises(ValueError, match="image_size must be left out .* of 8 pixels, got 32"):
        teach(data, images_per_class=1, views=2, teacher=linear(2), image_size=32, progress=False)
    assert (
        teach(data, images_per_class=1, views=2, teacher=linear(2), image_size=8, progress=False).stored.shape[-1] == 8
    )


def test_the_seed_is_that_of_the_views_as_well():
    coreset = teach("digits", images_per_class=1, views=2, teacher=linear(10), seed=7, progress=False)
    assert coreset.views == Views(2, seed=7, mirror=False)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, (1000, 1100)), ({"batch": 512}, (1000, 1400)), ({"batch": 10_000}, (1000, 1000)), ({"epochs": 2}, (20, 24))],
)
def test_a_teacher_of_few_images_takes_a_thousand_steps_of_any_batch(settings, steps):
    problem = make_problem(replace(open_images("digits"), name="unknown"))
    plan = _plan(problem, settings, False)
    assert steps[0] <= plan.epochs * -(-problem.train.n // plan.batch) <= steps[1] * 1.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(images_per_class=500), "images_per_class must be at most the training images"),
        (dict(images_per_class=0), "images_per_class must be at least 1"),
        (dict(settings={"steps": 3}), "the teacher has no setting 'steps'; it has network, epochs"),
        (dict(settings={"epochs": 3}, teacher=nn.Linear(1, 1)), "settings are for a teacher that is trained here"),
        (dict(settings={"epochs": 0}), "epochs of the teacher must be positive, got 0"),
        (dict(settings={"epochs": None}), "epochs of the teacher must be a whole number, got None"),
        (dict(settings={"epochs": 2.5}), "epochs of the teacher must be a whole number, got 2.5"),
        (dict(settings={"batch": "x"}), "batch of the teacher must be a whole number, got 'x'"),
        (dict(settings={"batch": True}), "batch of the teacher must be a whole number, got True"),
        (dict(settings={"lr": "fast"}), "lr of the teacher must be a number, got 'fast'"),
        (dict(settings={"lr": float("inf")}), "lr of the teacher must be positive"),
        (dict(settings={"mirror": 1}), "mirror of the teacher must be True or False, got 1"),
        (dict(settings={"network": 5}), "network of the teacher must be text, got 5"),
        (dict(settings={"network": "convnets"}), "convnet"),
        (dict(views=0), "views must be an integer from 1"),
        (dict(temperature=-1.0), "temperature must be positive"),
        (dict(device="nowhere"), "device must be one that torch finds here"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_trained(change, message):
    lines: list[str] = []
    with pytest.raises(ValueError, match=message):
        teach("digits", progress=lines.append, **change)
    assert not lines


def test_a_teacher_that_diverges_says_what_to_lower():
    with pytest.raises(ValueError, match="the teacher's loss became .*lower its lr, which is 1e\\+12"):
        teach("digits", settings=QUICK | {"lr": 1e12}, views=16, progress=False)


def test_from_the_shell(tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    words = ["teach", "digits", "--images-per-class", "1", "--views", "4", "--set", "epochs=2", "-o", str(path)]
    assert main(words) == 0
    assert "10 images, 40 examples" in capsys.readouterr().out
    assert len(SyntheticCoreset.load(path)) == 40
    assert main(words) == 1
    assert "exists already: --force" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "a.pt")]) == 1
    assert "FILE must end in .safetensors" in capsys.readouterr().err
    assert main(["info", str(path)]) == 0
    assert main(["show", str(path), "-o", str(tmp_path / "a.png")]) == 0
    shown = capsys.readouterr().out
    assert "each image gives 4 views" in shown
    assert "made for networks of any kind" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "epochs=null"], "epochs of the teacher must be a whole number, got None"),
        (["--set", 'epochs="x"'], "epochs of the teacher must be a whole number, got 'x'"),
        (["--set", "epochs=2.5"], "epochs of the teacher must be a whole number, got 2.5"),
        (["--set", "epochs=many"], "--set takes NAME=VALUE with a number"),
        (["--set", "network=vggs"], "vggs"),
        (["--threads", "-1"], "--threads must be at least 1, got -1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
    ],
)
def test_bad_words_from_the_shell_end_in_a_message(words, message, tmp_path, capsys):
    assert main(["teach", "digits", "--images-per-class", "1", *words, "-o", str(tmp_path / "a.safetensors")]) == 1
    assert message in capsys.readouterr().err


def test_a_network_is_named_without_quotes(tmp_path):
    path = tmp_path / "a.safetensors"
    words = ["--views", "2", "--set", "network=convnet-batch:4-4", "epochs=1", "-o", str(path)]
    assert main(["teach", "digits", "--images-per-class", "1", *words]) == 0
    assert SyntheticCoreset.load(path).provenance["teacher"]["network"] == "convnet-batch:4-4"


def test_an_interruption_is_a_message_and_no_traceback(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("coreset_sampler.cli.teach.teach", interrupted)
    assert main(["teach", "digits", "-o", str(tmp_path / "t.safetensors")]) == 130
    assert capsys.readouterr().err.strip() == "coreset-sampler: stopped"
