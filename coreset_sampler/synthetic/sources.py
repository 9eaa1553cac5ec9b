"""What a run begins with and learns from: real images with a teacher's labels, and experts where a method needs them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .distillers.checkpoint import Progress as Run
from .distillers.experts import Experts, train_experts, untrained
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
        problem: the data and the network.
        folder: where trajectories are kept.
        examples: train on a random part of so many images.
        seed: of everything random.
        report: gets a line after every epoch.
        training: more arguments of `train_experts`: experts, epochs, lr, batch.
    """
    about = {"data": problem.name, **problem.about_network}
    part = problem.part(examples)
    return train_experts(problem.network, part, folder, seed=seed, about=about, report=report.note, **training)


def warn_if_untrained(experts: Experts, problem: Problem, report: Reporter) -> None:
    """Says so if experts are no better on held-out images than guessing."""
    data = problem.train if problem.held_out is None else problem.held_out
    if warning := untrained(experts, problem.network, data):
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
    if not (given and folder.is_dir() and any(folder.iterdir())):
        make_experts(problem, folder, report=report, **{"examples": plan.examples, **plan.training, **settings})
    experts = Experts(folder, problem.train, max_start=plan.max_start)
    warn_if_untrained(experts, problem, report)
    return experts
