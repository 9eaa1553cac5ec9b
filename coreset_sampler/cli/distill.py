"""`coreset-sampler distill`: learns a coreset, saves itself on the way and goes on when asked to."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..synthetic import distillers as distill
from ..synthetic.distillers import checkpoint
from ..synthetic.distillers.checkpoint import Progress
from ..synthetic.distillers.claim import claimed
from ..synthetic.distillers.experts import Experts, read_description, untrained
from ..synthetic.distillers.film import draw_film
from ..synthetic.distillers.presets import METHODS, PRESETS, Preset
from ..synthetic.distillers.run import (
    StoppedError,
    as_coreset,
    checkpoint_beside,
    held_out_accuracy,
    run,
    saver,
    settings_of,
    start,
)
from ..synthetic.distillers.state import Distiller, DivergedError, Source, State
from ..synthetic.networks import description
from .experts import make_experts
from .problem import Problem, add_problem, open_problem

_ENDING = ".safetensors"


def add_distill(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "distill",
        help="learn a handful of images to train on in place of all",
        description="Learns a coreset. Ctrl-C saves; --resume goes on to the same bits as without an interruption.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  coreset-sampler distill fashion-mnist --data DIR --method vbpc --ipc 10 -o fmnist.safetensors",
    )
    add_problem(command)
    command.add_argument("--method", choices=list(METHODS), default="vbpc", help="how (default vbpc)")
    command.add_argument("--ipc", type=int, default=10, help="images per class (default 10)")
    command.add_argument("-o", "--output", required=True, metavar="FILE", help=f"coreset to write ({_ENDING})")
    command.add_argument("--steps", type=int, help="how many in all (default: the preset's)")
    command.add_argument("--minutes", type=float, help="stop stepping after so long in all")
    command.add_argument("--preset", choices=list(PRESETS), default="cpu", help="settings (default cpu: minutes)")
    command.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the method, over the preset's: lr=300"
    )
    command.add_argument("--experts", metavar="DIR", help="their folder; what is missing there is trained first")
    command.add_argument("--resume", action="store_true", help="go on where a run that writes FILE stopped")
    command.add_argument("--force", action="store_true", help="begin anew even if FILE or a run under way is there")
    command.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS", help="(default 120)")
    command.add_argument("--judge-every", type=int, metavar="STEPS", help="held-out accuracy (default: ten times)")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if output.suffix != _ENDING:
        raise ValueError(f"FILE must end in {_ENDING}, got {output}")
    with claimed(output, checkpoint_beside(output)):
        _distill(options, output)


def _distill(options: argparse.Namespace, output: Path) -> None:
    _check_there(options, output)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("distill runs in one process; under torchrun only experts are split")
    preset = PRESETS[options.preset](METHODS[options.method], options.name, options.ipc)
    if options.widths is None and options.net == "convnet" and preset.widths:
        options.widths = list(preset.widths)
    problem = open_problem(options)
    problem.check_per_class(options.ipc)
    steps = options.steps or preset.steps
    # variational lets its rates fall until the last step
    decay = {"decay": steps} if options.method == "vbpc" else {}
    distiller = build(METHODS[options.method], problem, preset.settings | decay | _settings(options.set))
    source = _source(options, problem, preset)
    progress, settings = _progress(options, output, problem, distiller)
    progress = _stepped(
        options, problem, distiller, progress, source, saver(checkpoint_beside(output), settings), steps
    )
    even = len(progress.state.inputs) == options.ipc * len(problem.classes)
    coreset = as_coreset(
        distiller,
        progress.state,
        preprocessing=problem.preprocessing,
        classes=problem.classes,
        images_per_class=options.ipc if even else None,
        provenance=_provenance(options, problem, progress, settings),
    )
    coreset.save(output)
    _film(output, progress, problem, f"{options.name}  ·  {coreset.method}  ·  {options.ipc} per class, by step")
    sys.stdout.write(f"wrote {output}: {coreset}\n")


def _stepped(
    options: argparse.Namespace,
    problem: Problem,
    distiller: Distiller,
    progress: Progress,
    source: Source,
    save: Callable[[Progress], None],
    steps: int,
) -> Progress:
    """Goes on to the last step; an exit or an error says how to resume."""
    try:
        return run(
            distiller,
            progress,
            source,
            steps=steps,
            minutes=options.minutes,
            save=save,
            save_every=options.save_every,
            judge=lambda state: judge(distiller, state, problem),
            judge_every=options.judge_every,
            report=_report(),
        )
    except StoppedError as stopped:
        sys.stderr.write(f"\ncoreset-sampler: {stopped}. To go on, give the same command with --resume.\n")
        raise SystemExit(130) from None
    except DivergedError as error:
        again = "; the same command with --resume and another --set NAME=VALUE goes on from before it"
        raise DivergedError(f"{error}{again}") from error
    except OSError as error:
        kept = checkpoint_beside(Path(options.output))
        again = f"{kept} is the last that was saved; --resume goes on from it" if kept.exists() else "nothing was saved"
        raise OSError(f"{error}: {again}") from error


def _check_there(options: argparse.Namespace, output: Path) -> None:
    under_way = checkpoint_beside(output)
    if options.resume and not under_way.exists():
        raise ValueError(f"nothing to resume: there is no {under_way}; leave --resume away to begin")
    if not (options.resume or options.force) and (output.exists() or under_way.exists()):
        there = output if output.exists() else under_way
        raise ValueError(f"{there} is there already: --resume goes on, --force begins anew")


def build(method: str, problem: Problem, settings: dict[str, Any]) -> Distiller:
    """The distiller by its name; an unknown setting lists the known ones."""
    make = getattr(distill, method)
    if is_dataclass(make):
        known = [f.name for f in fields(make) if f.name != "network"]
        for name in settings:
            if name not in known:
                raise ValueError(f"{method} has no setting {name!r}; it has {', '.join(known)}")
    distiller: Distiller = make(problem.network, **settings)
    return distiller


def _settings(said: list[str]) -> dict[str, Any]:
    values = {}
    for each in said:
        name, _, value = each.partition("=")
        try:
            values[name] = json.loads(value)
        except ValueError:
            raise ValueError(f"--set takes NAME=VALUE with a number, true, false or null, got {each!r}") from None
    return values


def _source(options: argparse.Namespace, problem: Problem, preset: Preset) -> Source:
    """Real data, and for the methods that imitate them experts too, trained now where they are missing."""
    if not preset.experts:
        return problem.train
    folder = _experts_folder(options, problem)
    if not (options.experts and folder.is_dir() and any(folder.iterdir())):
        make_experts(
            problem,
            folder,
            experts=preset.experts,
            epochs=preset.epochs,
            rate=preset.expert_rate,
            batch=preset.expert_batch,
            examples=preset.examples,
            seed=0,
        )
    experts = Experts(folder, problem.train, max_start=preset.max_start)
    if warning := untrained(experts, problem.network, problem.held_out):
        sys.stderr.write(f"coreset-sampler: {warning}\n")
    return experts


def _experts_folder(options: argparse.Namespace, problem: Problem) -> Path:
    """Beside the output, one for each data set and network, unless it was said."""
    if options.experts:
        return Path(options.experts)
    parts = ["experts", options.name, options.net, *map(str, problem.net["widths"] or ())]
    return Path(options.output).with_name("-".join(parts))


def _progress(
    options: argparse.Namespace, output: Path, problem: Problem, distiller: Distiller
) -> tuple[Progress, dict[str, Any]]:
    """Where to begin, and what the run is in plain values."""
    own = {"method": METHODS[options.method], "data": options.name, "ipc": options.ipc, "seed": options.seed}
    settings = own | problem.net | {"settings": [[0, settings_of(distiller)]]}
    if not options.resume:
        return start(distiller, problem.train, options.ipc, seed=options.seed), settings
    progress, before = checkpoint.load(checkpoint_beside(output), device=options.device)
    for name in (*own, *problem.net):
        if before.get(name) != settings[name]:
            raise ValueError(f"the run to resume has {name} {before.get(name)!r}, this command {settings[name]!r}")
    changes = before["settings"]
    if changes[-1][1] != settings_of(distiller):
        changes = [*changes, [progress.state.step, settings_of(distiller)]]
    return progress, settings | {"settings": changes}


def judge(distiller: Distiller, state: State, problem: Problem) -> float:
    """Accuracy on the images held out, of one fresh network trained on the coreset."""
    coreset = as_coreset(distiller, state, preprocessing=problem.preprocessing, classes=problem.classes)
    return held_out_accuracy(problem.network, coreset, problem.held_out)


def _provenance(
    options: argparse.Namespace, problem: Problem, progress: Progress, settings: dict[str, Any]
) -> dict[str, Any]:
    """How the set was made, without the paths of this machine."""
    said = [f"--{name} {getattr(options, name)}" for name in ("size", "minutes") if getattr(options, name)]
    said += ["--widths " + " ".join(map(str, options.widths))] if options.widths else []
    said += ["--set " + " ".join(options.set)] if options.set else []
    data = [] if options.data is None else ["--data DIR"]
    words = ["coreset-sampler distill", options.name, *data, f"--method {options.method} --ipc {options.ipc}"]
    words += [f"--net {options.net} --preset {options.preset} --steps {progress.state.step} --seed {options.seed}"]
    described = read_description(_experts_folder(options, problem)) if options.method != "vbpc" else {}
    return {
        "data": options.name,
        "command": " ".join([*words, *said, "-o FILE"]),
        "version": __version__,
        "settings": settings["settings"][-1][1] if len(settings["settings"]) == 1 else settings["settings"],
        "network": description(settings["net"], settings["widths"]),
        **({"image_size": options.size} if options.size else {}),
        "seed": options.seed,
        "steps": progress.state.step,
        "minutes": round(progress.seconds / 60, 2),
        "held_out": progress.history,
        **({"experts": described} if described else {}),
    }


def _film(output: Path, progress: Progress, problem: Problem, title: str) -> None:
    try:
        draw_film(progress.frames, output.with_suffix(".png"), preprocessing=problem.preprocessing, title=title)
    except ImportError as error:
        sys.stderr.write(f"no picture: {error}\n")


def _report() -> Any:
    """One line that is written over on a terminal, lines in a file."""
    terminal = sys.stderr.isatty()

    def report(line: str) -> None:
        sys.stderr.write(f"\r\033[K{line}" if terminal else line + "\n")
        sys.stderr.flush()

    return report
