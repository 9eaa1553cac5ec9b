"""Long work behaves: progress, checkpoints, interruption, resuming to the same bits, the command line."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gaussian_mean import GaussianMean
from torch import Generator

from coreset_sampler import load_coreset
from coreset_sampler.cli import main as cli
from coreset_sampler.synthetic import distillers
from coreset_sampler.synthetic.distillers import checkpoint
from coreset_sampler.synthetic.distillers.checkpoint import Progress, same
from coreset_sampler.synthetic.distillers.presets import METHODS, PRESETS
from coreset_sampler.synthetic.distillers.run import StoppedError, run, saver, settings_of

PROBLEM = GaussianMean()
DISTILLER = distillers.Wasserstein(
    PROBLEM.network, loss=PROBLEM.loss, lr=1.0, inner_steps=3, inner_lr=0.1, augmentation=None
)


def begin() -> Progress:
    return Progress(DISTILLER.init(*PROBLEM.coreset(), seed=0))


def test_a_run_saved_and_loaded_half_way_ends_with_the_same_bits(tmp_path):
    whole = run(DISTILLER, begin(), PROBLEM, steps=8, judge=lambda state: 0.5)
    half = run(DISTILLER, begin(), PROBLEM, steps=4)
    checkpoint.save(tmp_path / "half.safetensors", half, {"method": "w"})
    loaded, settings = checkpoint.load(tmp_path / "half.safetensors")
    assert same(loaded.state, half.state)
    assert settings == {"method": "w"}
    assert loaded.seconds == half.seconds
    assert same(run(DISTILLER, loaded, PROBLEM, steps=8).state, whole.state)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_finish_the_step_save_and_stop(tmp_path, number):
    path = tmp_path / "run.safetensors"
    handler = signal.getsignal(number)

    class Killed:
        def __init__(self) -> None:
            self.taken = 0

        def step(self, state, source):
            self.taken += 1
            if self.taken == 3:
                os.kill(os.getpid(), number)
            return DISTILLER.step(state, source)

    with pytest.raises(StoppedError, match="stopped after step 3 of 100"):
        run(Killed(), begin(), PROBLEM, steps=100, save=saver(path, {}))
    assert checkpoint.load(path)[0].state.step == 3
    assert signal.getsignal(number) is handler


def test_divergence_saves_the_state_before_it(tmp_path):
    path = tmp_path / "run.safetensors"
    wild = replace(DISTILLER, lr=1e200)
    with pytest.raises(distillers.DivergedError, match="lower lr"):
        run(wild, begin(), PROBLEM, steps=50, save=saver(path, {}))
    saved = checkpoint.load(path)[0].state
    assert bool(torch.isfinite(saved.inputs).all())
    with pytest.raises(distillers.DivergedError):
        wild.step(saved, PROBLEM)


def test_the_line_says_step_loss_rate_time_left_and_accuracy():
    lines: list[str] = []
    done = run(DISTILLER, begin(), PROBLEM, steps=5, judge=lambda state: 0.25, judge_every=2, report=lines.append)
    assert lines[-1].startswith("step 5/5  loss ")
    assert "steps/s  0m 00s left  held-out accuracy 0.250" in lines[-1]
    assert [entry["step"] for entry in done.history] == [2, 4, 5]


def test_minutes_limit_a_run_by_the_clock():
    class Slow:
        def step(self, state, source):
            time.sleep(0.02)
            return DISTILLER.step(state, source)

    done = run(Slow(), begin(), PROBLEM, steps=10_000, minutes=0.1 / 60)
    assert 1 <= done.state.step < 100
    assert done.seconds >= 0.1


def test_a_run_in_a_thread_leaves_signals_alone():
    result: list[Progress] = []
    thread = threading.Thread(target=lambda: result.append(run(DISTILLER, begin(), PROBLEM, steps=2)))
    thread.start()
    thread.join()
    assert result[0].state.step == 2


def test_a_checkpoint_is_no_coreset_and_a_coreset_no_checkpoint(tmp_path):
    from coreset_sampler.synthetic import zoo
    from coreset_sampler.synthetic.file import CoresetFileError

    checkpoint.save(tmp_path / "a.safetensors", begin(), {})
    with pytest.raises(CoresetFileError, match="no valid coreset"):
        load_coreset(tmp_path / "a.safetensors")
    with pytest.raises(CoresetFileError, match="not a distillation under way"):
        checkpoint.load(zoo.path("digits/k-center-1"))


def test_settings_are_plain_values():
    settings = settings_of(distillers.ContrastiveDivergence(PROBLEM.network, energy=distillers.Focal(gamma=3.0)))
    assert settings["energy"] == "Focal(gamma=3.0)"
    assert settings["augmentation"] == "augment"
    assert "network" not in settings


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_its_method(preset):
    for method in METHODS:
        for data in ("cifar10", "fashion-mnist", "anything"):
            for count in (1, 5, 10, 50):
                made = PRESETS[preset](method, data, count)
                assert made.steps > 0
                METHODS[method](PROBLEM.network, **made.settings)
    with pytest.raises(ValueError, match="unknown method 'dc'"):
        PRESETS[preset]("dc", "digits", 1)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    arguments = ["experts", str(folder), "digits", "--widths", "4", "4", "--experts", "1", "--epochs", "3"]
    assert cli.main([*arguments, "--lr", "0.1", "--batch", "64", "--examples", "300", "--threads", "1"]) == 0
    return folder


def distill_digits(experts, output, *more: str) -> list[str]:
    command = [
        "distill",
        "digits",
        "--method",
        "fkl",
        "--images-per-class",
        "1",
        "--widths",
        "4",
        "4",
        "--experts",
        str(experts),
    ]
    return [
        *command,
        "--set",
        "samples=2",
        "inner_steps=3",
        "--threads",
        "1",
        "--evaluate-every",
        "99",
        "-o",
        str(output),
        *more,
    ]


@pytest.mark.integration
def test_killed_and_resumed_gives_the_same_bits_as_without(experts, tmp_path):
    assert cli.main(distill_digits(experts, tmp_path / "whole.safetensors", "--steps", "25")) == 0
    arguments = distill_digits(experts, tmp_path / "killed.safetensors", "--steps", "100000", "--save-every", "0")
    under_way = tmp_path / "killed.checkpoint.safetensors"
    command = [sys.executable, "-m", "coreset_sampler.cli", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not under_way.exists() or checkpoint.load(under_way)[0].state.step < 3:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 3 <= checkpoint.load(under_way)[0].state.step < 25
    assert not (tmp_path / "killed.safetensors").exists()

    assert cli.main(distill_digits(experts, tmp_path / "killed.safetensors", "--steps", "25", "--resume")) == 0
    whole, killed = (load_coreset(tmp_path / f"{name}.safetensors") for name in ("whole", "killed"))
    assert torch.equal(whole.inputs, killed.inputs)
    assert torch.equal(whole.targets, killed.targets)
    assert whole.preprocessing.state() == killed.preprocessing.state()


def test_a_finished_coreset_says_how_it_was_made_and_names_no_path(experts, tmp_path, capsys):
    output = tmp_path / "w.safetensors"
    arguments = [
        "distill",
        "digits",
        "--method",
        "w",
        "--images-per-class",
        "2",
        "--widths",
        "4",
        "4",
        "--experts",
        str(experts),
    ]
    arguments += [
        "--set",
        "inner_steps=2",
        "--steps",
        "3",
        "--threads",
        "1",
        "--evaluate-every",
        "9",
        "-o",
        str(output),
    ]
    assert cli.main(arguments) == 0
    coreset = load_coreset(output)
    assert coreset.method == "wasserstein"
    assert coreset.images_per_class == 2
    assert coreset.learning_rate == pytest.approx(0.03, abs=0.02)
    assert coreset.provenance["steps"] == 3
    assert coreset.provenance["settings"]["inner_steps"] == 2
    assert coreset.provenance["experts"]["data"] == "digits"
    assert coreset.provenance["command"].startswith("coreset-sampler distill digits --method w --images-per-class 2")
    assert str(tmp_path) not in str(coreset.info)
    assert str(experts) not in str(coreset.info)
    assert (tmp_path / "w.png").stat().st_size > 0


def test_wrong_commands_are_told_why(experts, tmp_path, capsys):
    output = tmp_path / "a.safetensors"

    def fails(arguments: list[str]) -> str:
        assert cli.main(arguments) == 1
        return capsys.readouterr().err

    assert "nothing to resume" in fails(distill_digits(experts, output, "--resume"))
    assert "has no setting 'speed'; it has inner_steps" in fails(distill_digits(experts, output, "--set", "speed=3"))
    assert "--set takes NAME=VALUE" in fails(distill_digits(experts, output, "--set", "lr=fast"))
    assert "must end in .safetensors" in fails(distill_digits(experts, tmp_path / "a.pt"))
    assert "only digits is built in" in fails(["distill", "mnist", "-o", str(output)])
    assert "pass the network that the experts" in fails(
        distill_digits(experts, output, "--widths", "8", "--steps", "1", "--force")
    )
    assert cli.main(distill_digits(experts, output, "--steps", "2", "--force")) == 0
    assert "exists already: --resume continues the run" in fails(distill_digits(experts, output, "--steps", "2"))
    other = distill_digits(experts, output, "--steps", "9", "--resume", "--seed", "5")
    assert "the run to resume has seed 0, asked for 5" in fails(other)


def test_a_changed_setting_on_resume_is_recorded(experts, tmp_path):
    output = tmp_path / "a.safetensors"
    assert cli.main(distill_digits(experts, output, "--steps", "2")) == 0
    again = distill_digits(experts, output, "--steps", "4", "--resume")
    again[again.index("samples=2")] = "lr=1.5"
    assert cli.main(again) == 0
    (first, before), (second, after) = load_coreset(output).provenance["settings"]
    assert (first, second) == (0, 2)
    assert (before["lr"], after["lr"]) == (100.0, 1.5)


def test_real_data_alone_cannot_stand_in_for_experts():
    data = distillers.RealData(torch.zeros(3, 2), torch.arange(3))
    with pytest.raises(ValueError, match="learns from experts"):
        data.segment(1, Generator(), 0)


def test_held_out_figures_do_not_depend_on_interruptions(tmp_path):
    whole = run(DISTILLER, begin(), PROBLEM, steps=8, judge=lambda state: 0.5, judge_every=4)
    path, progress = tmp_path / "run.safetensors", begin()
    for stop in (1, 3, 6):  # in the midst of what is averaged
        progress = _stopped_after(stop, progress, path)
    resumed = run(DISTILLER, progress, PROBLEM, steps=8, judge=lambda state: 0.5, judge_every=4)
    assert resumed.history == whole.history


def _stopped_after(step, progress, path):
    class Killed:
        def step(self, state, source):
            if state.step == step - 1:
                os.kill(os.getpid(), signal.SIGINT)
            return DISTILLER.step(state, source)

    with pytest.raises(StoppedError):
        run(Killed(), progress, PROBLEM, steps=8, judge=lambda state: 0.5, judge_every=4, save=saver(path, {}))
    return checkpoint.load(path)[0]


@pytest.mark.integration
def test_a_second_process_on_the_same_output_is_refused_and_a_killed_one_is_not_waited_for(experts, tmp_path, capsys):
    output = tmp_path / "a.safetensors"
    arguments = distill_digits(experts, output, "--steps", "100000", "--save-every", "0")
    process = subprocess.Popen([sys.executable, "-m", "coreset_sampler.cli", *arguments], stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "a.checkpoint.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.02)
        assert cli.main(distill_digits(experts, output, "--steps", "2", "--force")) == 1
        assert f"another process is writing {output}" in capsys.readouterr().err
    finally:
        process.kill()
        process.wait()
    (tmp_path / ".a.checkpoint.safetensors.0123456789abcdef").write_bytes(b"half")
    (tmp_path / ".a.safetensors.0123456789abcdef").write_bytes(b"half")
    (tmp_path / ".b.safetensors.0123456789abcdef").write_bytes(b"of another output")
    assert cli.main(distill_digits(experts, output, "--steps", "2", "--force")) == 0
    hidden = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("."))
    assert hidden == [".b.safetensors.0123456789abcdef"]


@contextmanager
def nearly_full(size: int):
    """No file can be longer than so many bytes, as on a disk that is nearly full."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_noticed_at_the_start(experts, tmp_path, capsys):
    with nearly_full(0):
        assert cli.main(distill_digits(experts, tmp_path / "a.safetensors", "--steps", "2")) == 1
    said = capsys.readouterr().err
    assert said.startswith("coreset-sampler: [Errno ")
    assert str(tmp_path / "a.safetensors") in said
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_names_the_file_and_leaves_the_last_good_checkpoint(experts, tmp_path, capsys):
    output, under_way = tmp_path / "a.safetensors", tmp_path / "a.checkpoint.safetensors"
    assert cli.main(distill_digits(experts, output, "--steps", "2")) == 0
    before = under_way.read_bytes()
    again = distill_digits(experts, output, "--steps", "4", "--resume")
    with nearly_full(len(before) // 2):
        assert cli.main([*again, "--save-every", "0"]) == 1
    told = f"'{under_way}': {under_way} is the last that was saved; --resume continues from it"
    assert told in capsys.readouterr().err
    assert under_way.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.checkpoint.safetensors", "a.png", "a.safetensors"]
    assert cli.main(again) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="folders of Unix")
def test_a_folder_that_cannot_be_written_to_is_noticed_before_anything_is_trained(tmp_path, capsys):
    folder = Path("/sys") if os.geteuid() == 0 else tmp_path
    tmp_path.chmod(0o500)
    command = ["distill", "digits", "--method", "fkl", "-o", str(folder / "a.safetensors")]
    assert cli.main(command) == 1
    tmp_path.chmod(0o700)
    said = capsys.readouterr().err
    assert str(folder / "a.safetensors") in said
    assert "expert" not in said


def test_more_images_than_a_class_has_are_refused_with_class_and_count(tmp_path, capsys):
    assert cli.main(["distill", "digits", "--images-per-class", "1000", "-o", str(tmp_path / "a.safetensors")]) == 1
    said = capsys.readouterr().err
    assert "images_per_class must be at most the training images of every class, got 1000: class '8' has 113" in said


@pytest.mark.parametrize("device", ["cuda", "nonsense"])
def test_a_device_that_is_not_there_is_one_line(tmp_path, capsys, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["distill", "digits", "--device", device, "-o", str(tmp_path / "a.safetensors")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"device must be one that torch finds here, got '{device}'" in said


def test_experts_that_learned_nothing_are_warned_of(tmp_path, capsys):
    folder, output = tmp_path / "experts", tmp_path / "a.safetensors"
    arguments = ["experts", str(folder), "digits", "--widths", "4,4", "--experts", "1", "--epochs", "1"]
    assert cli.main([*arguments, "--lr", "1e-9", "--examples", "100", "--threads", "1"]) == 0
    warning = f"warning: the experts in {folder} learned nothing: accuracy 0."
    assert warning in capsys.readouterr().err
    assert cli.main(distill_digits(folder, output, "--steps", "1")) == 0
    assert warning in capsys.readouterr().err


def test_experts_that_learned_something_are_not(tmp_path, capsys):
    folder, state = tmp_path / "experts", torch.get_rng_state()
    arguments = ["experts", str(folder), "digits", "--widths", "16", "--experts", "1", "--epochs", "3"]
    assert cli.main([*arguments, "--lr", "0.1", "--batch", "32", "--threads", "1"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert torch.equal(torch.get_rng_state(), state)


def test_vbpc_says_its_name_and_its_network(tmp_path, capsys):
    output = tmp_path / "a.safetensors"
    command = [
        "distill",
        "digits",
        "--images-per-class",
        "1",
        "--widths",
        "4,6",
        "--steps",
        "2",
        "--threads",
        "1",
        "-o",
        str(output),
    ]
    assert cli.main(command) == 0
    coreset = load_coreset(output)
    assert coreset.method == "vbpc"
    network = {"net": "convnet", "widths": [4, 6], "depth": 2, "norm": "instance_norm"}
    assert coreset.provenance["network"] == network
    evaluate = ["evaluate", str(output), "--data", "digits", "--by", "last-layer", "--seeds", "1"]
    assert cli.main(evaluate) == 0
    assert "convnet: widths 4 6, what the coreset was made with" in capsys.readouterr().err
