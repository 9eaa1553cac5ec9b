"""`distill`: from real images to a coreset, with progress, checkpoints and a record of how it was made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .._version import __version__
from .dataset import SyntheticCoreset
from .distillers import checkpoint
from .distillers.checkpoint import Progress as Run
from .distillers.claim import claimed
from .distillers.experts import read_description
from .distillers.film import draw_film
from .distillers.presets import METHODS, Method, PresetName
from .distillers.presets import preset as look_up
from .distillers.run import StoppedError, as_coreset, held_out_accuracy, run, saver, settings_of
from .distillers.state import Distiller, State
from .image_data import Images, open_images
from .networks import description, kinds
from .problem import Problem, make_problem
from .reporting import Progress, Reporter
from .sources import beginning, experts_name, source_of

_ENDING = ".safetensors"


def distill(
    data: Images,
    *,
    method: Method = "vbpc",
    images_per_class: int = 10,
    minutes: float | None = None,
    steps: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    preset: PresetName = "cpu",
    settings: Mapping[str, Any] | None = None,
    experts: str | os.PathLike[str] | None = None,
    expert_settings: Mapping[str, Any] | None = None,
    networks: str | Sequence[str] = "convnet",
    widths: Sequence[int] | None = None,
    image_size: int | None = None,
    held_out: float = 0.1,
    evaluate_every: int | None = None,
    save_every: float = 120.0,
    film: str | os.PathLike[str] | None = None,
    name: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = True,
) -> SyntheticCoreset:
    """A handful of images per class, learned so that training on them does what training on all of the data does.

    The same arguments and number of threads give the same coreset, also when the run was interrupted in between
    (`minutes` is a limit by the clock and depends on the machine). Ctrl-C finishes the step, saves to `resume` and
    raises `StoppedError`.

    Args:
        data: a folder that `datasets.load_dataset` opens, `"digits"`, or `(images, labels)` to learn from.
        method: `"vbpc"`, or one that learns from experts: `"fkl"`, `"cd"`, `"w"`, `"rkl"` (docs/choosing_a_distiller.md).
        images_per_class: how many to learn.
        minutes: stop stepping after so long in all.
        steps: how many in all; the preset's if not said.
        resume: folder where the run saves itself. The same call again continues from what is there. A path that ends in
            `.safetensors` is taken for the checkpoint itself.
        overwrite: begin anew even if `resume` holds a run.
        preset: `"cpu"` for minutes of one core, `"paper"` for the paper's settings.
        settings: of the method, over the preset's: `{"lr": 300}`.
        experts: folder of experts, ours or MTT's; what is missing there is trained first. By default in `resume`.
        expert_settings: over the preset's: experts, epochs, lr, batch.
        networks: what the coreset should work for: one of `NETWORKS`, `"many"`, or several kinds, as in
            `["convnet", "resnet-batch:16-32"]` (docs/choosing_a_distiller.md). Experts are trained of each kind.
        widths: channels of the one network's blocks; the preset's if not said.
        image_size: scale and crop images to so many pixels.
        held_out: share of the training images on which accuracy is measured on the way, and nothing is learned; 0 for none.
        evaluate_every: steps between two of these measurements; by default ten in all.
        save_every: seconds between two checkpoints.
        film: picture to write of how the images changed (.png, .pdf, .svg).
        name: what to call the data; by default the folder's name. Presets go by it.
        seed: of everything random.
        device: such as `"cuda"`.
        progress: True for lines on stderr, or a function that gets them.

    Example:
        >>> coreset = distill("digits", images_per_class=1, minutes=2, resume="run/")
        >>> coreset.save("digits-1.safetensors")
        >>> print(evaluate(coreset, "digits"))
    """
    images = open_images(data, image_size=image_size)
    named = kinds(networks)
    plan = look_up(preset, method, name or images.name, images_per_class, kinds=len(named)).over(steps, settings or {})
    widths = widths or (plan.widths if named == ("convnet",) else None)
    problem = make_problem(images, name=name, networks=networks, widths=widths, held_out=held_out, device=device)
    distiller = build(method, problem, plan.settings)
    problem.check_images_per_class(images_per_class, each=getattr(distiller, "tiles", 1) ** 2)
    report = Reporter(progress)
    with _workplace(resume) as place:
        folder = place.folder / experts_name(problem) if experts is None else Path(experts)
        source = source_of(problem, plan.experts, folder, experts is not None, expert_settings or {}, report)
        record = {"method": method, "data": problem.name, "images_per_class": images_per_class, "seed": seed}
        record |= problem.about_network | {"teacher": None if plan.teacher is None else asdict(plan.teacher)}
        begin = partial(beginning, distiller, problem, images_per_class, plan.teacher, seed, report)
        begun, record = _begun(None if overwrite else place.checkpoint, record, distiller, problem, plan.steps, begin)
        with _said_where(place.checkpoint):
            done = run(
                distiller,
                begun,
                source,
                steps=plan.steps,
                minutes=minutes,
                save=None if place.checkpoint is None else saver(place.checkpoint, record),
                save_every=save_every,
                judge=None if problem.held_out is None else partial(judge, distiller, problem),
                judge_every=evaluate_every,
                report=report.status,
            )
        about_experts = {"experts": read_description(folder)} if plan.experts else {}
    even = len(done.state.inputs) == images_per_class * images.num_classes
    coreset = as_coreset(
        distiller,
        done.state,
        preprocessing=problem.preprocessing,
        class_names=images.class_names if images.named else None,
        num_classes=images.num_classes,
        images_per_class=images_per_class if even else None,
        provenance=_provenance(record, done) | ({"image_size": image_size} if image_size else {}) | about_experts,
    )
    if film is not None:
        _film(film, done, problem, coreset.method, images_per_class, report)
    return coreset


def judge(distiller: Distiller, problem: Problem, state: State) -> float:
    """Accuracy on the images held out, of one fresh network trained on the coreset."""
    assert problem.held_out is not None
    coreset = as_coreset(distiller, state, preprocessing=problem.preprocessing, class_names=problem.class_names)
    return held_out_accuracy(problem.network, coreset, problem.held_out)


def build(method: Method, problem: Problem, settings: Mapping[str, Any]) -> Distiller:
    """The distiller by its name; an unknown setting lists the known ones."""
    make = METHODS[method]
    if is_dataclass(make):
        known = [f.name for f in fields(make) if f.name != "network"]
        for name in settings:
            if name not in known:
                raise ValueError(f"{method} has no setting {name!r}; it has {', '.join(known)}")
    if len(problem.networks) == 1:
        return make(problem.network, **settings)
    return make(problem.networks, **{"bounds": problem.pixel_bounds, **settings})


@dataclass(frozen=True)
class _Workplace:
    """Where a run keeps its checkpoint, if anywhere, and its experts."""

    folder: Path
    checkpoint: Path | None = None


@contextmanager
def _workplace(resume: str | os.PathLike[str] | None) -> Iterator[_Workplace]:
    if resume is None:
        with tempfile.TemporaryDirectory() as folder:
            yield _Workplace(Path(folder))
        return
    path = Path(resume)
    path = path if path.suffix == _ENDING else path / f"checkpoint{_ENDING}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with claimed(path):
        yield _Workplace(path.parent, path)


@contextmanager
def _said_where(path: Path | None) -> Iterator[None]:
    """An interruption says what is kept of the run."""
    try:
        yield
    except StoppedError as stopped:
        kept = "nothing was saved: pass resume= with a folder" if path is None else f"saved in {path}"
        raise StoppedError(f"{stopped}; {kept}") from None


def _begun(
    path: Path | None,
    record: dict[str, Any],
    distiller: Distiller,
    problem: Problem,
    steps: int,
    begin: Callable[[], Run],
) -> tuple[Run, dict[str, Any]]:
    """Where to begin, and the record of what the run is, with the settings by the step from which on they held."""
    settings = settings_of(distiller)
    if path is None or not path.exists():
        return begin(), record | {"settings": [[0, settings]]}
    begun, before = checkpoint.load(path, device=problem.train.device)
    if begun.state.step > steps:
        raise ValueError(
            f"steps must be at least the {begun.state.step} that the run to resume has taken, got {steps}: pass as many, "
            "name another place, or overwrite it"
        )
    for name, value in record.items():
        if before.get(name) != value:
            raise ValueError(
                f"the run to resume has {name} {before.get(name)!r}, asked for {value!r}: pass what it has, name another "
                "place, or overwrite it"
            )
    changes = before["settings"]
    changes = changes if changes[-1][1] == settings else [*changes, [begun.state.step, settings]]
    return begun, record | {"settings": changes}


def _provenance(record: dict[str, Any], done: Run) -> dict[str, Any]:
    """How the set was made, without the paths of this machine."""
    changes = record["settings"]
    return {
        "data": record["data"],
        "version": __version__,
        "settings": changes[0][1] if len(changes) == 1 else changes,
        **_about_networks(record),
        **({"teacher": record["teacher"]} if record["teacher"] else {}),
        "seed": record["seed"],
        "steps": done.state.step,
        "minutes": round(done.seconds / 60, 2),
        "held_out": done.history,
    }


def _about_networks(record: dict[str, Any]) -> dict[str, Any]:
    """What the set was made for: the network, or all kinds and the first of them."""
    if "networks" not in record:
        return {"network": description(record["network"], record["widths"])}
    return {"networks": record["networks"], "network": description(record["networks"][0])}


def _film(
    path: str | os.PathLike[str],
    done: Run,
    problem: Problem,
    method: str | None,
    images_per_class: int,
    report: Reporter,
) -> None:
    title = f"{problem.name}  ·  {method}  ·  {images_per_class} per class, by step"
    try:
        draw_film(done.frames, path, preprocessing=problem.preprocessing, title=title)
    except ImportError as error:
        report.note(f"no picture: {error}")
