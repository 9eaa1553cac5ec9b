"""`teach`: a few real images of each class, with labels for many views by a network that was trained on all of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from .checks import check_views, most_views
from .dataset import SyntheticCoreset
from .distillers.presets import TEACHERS
from .distillers.teacher import Teacher, train_teacher
from .fitting import accuracy_on
from .image_data import Images, open_images
from .labelling import check_temperature, evaluating, label_views
from .networks import network
from .problem import Problem, make_problem
from .reporting import Progress, Reporter
from .views import Views, keep_class_mirrored

_PER_CLASS = 1280  # views of all images of a class, if not said
_FEWEST, _MOST = 16, 512  # of an image
_STEPS = 1_000  # of a teacher, at least


def teach(
    data: Images,
    *,
    images_per_class: int = 10,
    views: int | Views | None = None,
    teacher: nn.Module | None = None,
    settings: Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    image_size: int | None = None,
    held_out: float = 0.1,
    name: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = True,
) -> SyntheticCoreset:
    """A small set for networks of any kind: random real images, and what a teacher says of many views of each.

    Nothing in it depends on the kind of network that will be trained on it, so it carries over where images that were
    learned with one kind do not (docs/cards/views.md). The same arguments and number of threads give the same set.

    Args:
        data: a folder that `datasets.load_dataset` opens, `"digits"`, or `(images, labels)`.
        images_per_class: how many to keep.
        views: of each image; 1,280 for each class if not said, at least 16 and at most 512 of an image, and
            fewer where they would not go into 4 GiB.
        teacher: your own classifier, trained on such images normalised by their mean and deviation
            (`open_images(data).normalize()`), left as it was; without it one is trained here, in minutes.
        settings: of the teacher that is trained: network, epochs, lr, batch, mirror.
        temperature: that its logits are divided by.
        image_size: scale and crop images to so many pixels.
        held_out: share of the training images that nobody learns from; the teacher's accuracy on them is reported.
        name: what to call the data; by default the folder's name. The teacher's settings go by it.
        seed: of everything random.
        device: such as `"cuda"`.
        progress: True for lines on stderr, or a function that gets them.

    Example:
        >>> coreset = teach("digits", images_per_class=1)
        >>> coreset.save("digits-views-1.safetensors")
        >>> print(evaluate(coreset, "digits", networks=["convnet", "timm:resnet10t"], against=["random"]))
    """
    images = open_images(data, image_size=image_size)
    problem, report = make_problem(images, name=name, held_out=held_out, device=device), Reporter(progress)
    problem.check_images_per_class(images_per_class)
    check_temperature(temperature)
    names = images.class_names if images.named else None
    if teacher is not None and settings:
        raise ValueError(
            f"settings are for a teacher that is trained here, got {dict(settings)}; leave one of both out"
        )
    inputs, targets = problem.train.per_class(images_per_class, torch.Generator().manual_seed(seed))
    made = views if isinstance(views, Views) else _views(names, inputs, images_per_class, views, seed)
    check_views(inputs, made.count, 1, problem.preprocessing)  # before minutes of training
    plan = _plan(problem, settings or {}, made.mirror)
    model = _trained(plan, problem, seed, report) if teacher is None else teacher
    few = SyntheticCoreset(
        inputs.cpu(),
        targets.cpu(),
        preprocessing=problem.preprocessing,
        class_names=names,
        num_classes=images.num_classes,
        method="views",
        images_per_class=images_per_class,
        provenance={
            "data": problem.name,
            "version": __version__,
            "made": "real images; a trained network labelled views of them",
            "settings": {"temperature": temperature},
            "teacher": asdict(plan) if teacher is None else type(teacher).__name__,
            "seed": seed,
            **_tested(model, problem, report),
            **({"image_size": image_size} if image_size else {}),
        },
    )
    return label_views(few, model, made, temperature=temperature)


def _views(names: Sequence[str] | None, inputs: Tensor, per_class: int, asked: int | None, seed: int) -> Views:
    usual = min(_MOST, max(_FEWEST, _PER_CLASS // per_class), max(1, most_views(inputs)))
    return Views(usual if asked is None else asked, seed=seed, mirror=keep_class_mirrored(names))


def _plan(problem: Problem, settings: Mapping[str, Any], mirror: bool) -> Teacher:
    """What is known of these data, with these settings over it."""
    known = [each.name for each in fields(Teacher)]
    for unknown in (each for each in settings if each not in known):
        raise ValueError(f"the teacher has no setting {unknown!r}; it has {', '.join(known)}")
    plan = replace(TEACHERS.get(problem.name, Teacher(mirror=mirror)), **settings)
    if problem.name in TEACHERS or "epochs" in settings:
        return plan
    batch = min(plan.batch, problem.train.n)
    return replace(plan, epochs=max(plan.epochs, math.ceil(_STEPS * batch / problem.train.n)))  # of few images more


def _trained(plan: Teacher, problem: Problem, seed: int, report: Reporter) -> nn.Module:
    about = problem.about_network
    make = network(plan.network, about["channels"], about["num_classes"], about["image_size"])
    return train_teacher(plan, make, problem.train, seed=seed, report=report.note)


def _tested(model: nn.Module, problem: Problem, report: Reporter) -> dict[str, float]:
    """The teacher's accuracy on images held out, if any are."""
    if problem.held_out is None:
        return {}
    held_out = problem.held_out
    with evaluating(model):
        right = accuracy_on(model, (held_out.rows(part) for part in torch.arange(held_out.n).split(250)))
    report.note(f"teacher: accuracy {right:.1%} on images held out")
    return {"teacher_accuracy": round(right, 4)}
