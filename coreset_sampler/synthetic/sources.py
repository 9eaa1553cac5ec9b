"""What a run begins with and learns from: real images with a teacher's labels, and experts where a method needs them."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from .distillers.checkpoint import Progress as Run
from .distillers.expert_checks import check_made_for, names, untrained
from .distillers.experts import Experts, read_description, train_experts, unfinished
from .distillers.presets import ExpertPreset
from .distillers.run import start
from .distillers.state import Distiller, Source
from .distillers.teacher import Teacher, taught, train_teacher
from .networks import network
from .problem import Problem
from .reporting import Reporter


def beginning(
    distiller: Distiller, problem: Problem, images_per_class: int, teacher: Teacher | None, seed: int, report: Reporter
) -> Run:
    """The run before its first step: random real images, with the probabilities of a teacher where there is one.

    The teacher is trained now, on the images that are learned from; what is held out it does not see either.
    """
    if teacher is None:
        return start(distiller, problem.train, images_per_class, seed=seed)
    about = problem.about_network
    make = network(teacher.network, about["channels"], about["num_classes"], about["image_size"])
    model = train_teacher(teacher, make, problem.train, seed=seed, report=report.note)
    return start(distiller, problem.train, images_per_class, seed=seed, label=lambda x: taught(teacher, model, x))


def make_experts(
    problem: Problem,
    folder: Path,
    *,
    examples: int | None = None,
    seed: int = 0,
    report: Reporter,
    **training: Any,
) -> Experts:
    """Trains the experts that are missing in the folder, on a part of the data if asked to, and says how it goes.

    Args:
        problem: the data and the networks; of several kinds the experts are by turns.
        folder: where trajectories are kept.
        examples: train on a random part of so many images.
        seed: of everything random.
        report: gets a line after every epoch.
        training: more arguments of `train_experts`: experts, epochs, lr, batch.
    """
    about = {"data": problem.name, **problem.about_network}
    part = problem.part(examples)
    return train_experts(problem.networks, part, folder, seed=seed, about=about, report=report.note, **training)


def warn_if_untrained(experts: Experts, problem: Problem, report: Reporter) -> None:
    """Says so of each kind of network whose experts are no better on held-out images than guessing."""
    data = problem.train if problem.held_out is None else problem.held_out
    several = len(problem.networks) > 1
    for kind, (make, (name, _)) in enumerate(zip(problem.networks, names(problem.about_network), strict=True)):
        if warning := untrained(experts, make, data, kind=kind, called=f"{name} experts" if several else "experts"):
            report.note(warning)


def experts_name(problem: Problem) -> str:
    """A folder for each data set and network."""
    about = problem.about_network
    one = "network" in about
    return "-".join(
        ["experts", problem.name, about["network"] if one else "many", *map(str, about.get("widths") or ())]
    )


def source_of(
    problem: Problem,
    plan: ExpertPreset | None,
    folder: Path,
    given: bool,
    settings: Mapping[str, Any],
    report: Reporter,
) -> Source:
    """Real data, and for the methods that imitate them experts too, trained now where they are missing."""
    if plan is None:
        return problem.train
    training = {"examples": plan.examples, **plan.training, **settings}
    if not (given and folder.is_dir() and any(folder.iterdir())) or _stopped(folder, training):
        make_experts(problem, folder, report=report, **training)
    experts = Experts(folder, problem.train, max_start=plan.max_start)
    check_made_for(experts, problem.about_network)
    warn_if_untrained(experts, problem, report)
    return experts


def _stopped(folder: Path, training: Mapping[str, Any]) -> bool:
    """True if just this training of experts was begun in the folder and not finished."""
    described, defaults = read_description(folder), signature(train_experts).parameters
    asked = {name: training.get(name, defaults[name].default) for name in ("experts", "epochs", "lr", "batch")}
    return all(described.get(name) == value for name, value in asked.items()) and unfinished(folder)
