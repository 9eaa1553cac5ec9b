"""Fashion-MNIST with wrong labels: 10 % of the data an epoch, chosen by uniform, CREST, CRAIG or stable sampling.

    python benchmarks/fashion_mnist.py run --data DIR --noise 0.5 --strategy stable
    python benchmarks/fashion_mnist.py tune --data DIR        # every contestant, the same trials, on validation data
    python benchmarks/fashion_mnist.py table --data DIR       # the tuned contestants on the test set, n = 5
    python benchmarks/fashion_mnist.py ablation --data DIR --noise 0.5    # one setting of stable changed at a time

DIR is a folder, or a hub id such as zalando-datasets/fashion_mnist, that `datasets.load_dataset` opens. 5,000 training
examples, a share of their labels replaced by another class at random; 5,000 others, clean, for validation; the whole
test set for the table. The contestants differ in the sampler alone. (Clean labels were counted in the last epoch when this
was measured; now they are the mean of all epochs.)

Measured (table, n = 5 seeds, mean ± standard deviation, whole test set; every contestant tuned on validation data):

    noise   uniform          CREST            CRAIG            stable           + confidence     (selection's share)
    0       0.878 ± 0.002    0.874 ± 0.004    0.863 ± 0.004    0.872 ± 0.003    0.877 ± 0.004    27 %
    0.3     0.838 ± 0.004    0.845 ± 0.005    0.720 ± 0.008    0.843 ± 0.005    0.856 ± 0.004    27 %
    0.5     0.797 ± 0.010    0.802 ± 0.008    0.540 ± 0.033    0.816 ± 0.006    0.832 ± 0.006    29 %

So with half the labels wrong stable with confidence_exponent=2 is 3.5 points over tuned uniform sampling and 3.0 over
tuned CREST; at 0.3 it
is 1.8 and 1.1 over them, and on clean data level with uniform. Without it the lead over CREST is one of tuning: at the
same settings CREST is level with stable, and so it is when both have it (ablation). Two CPU cores, one thread a run;
"stable, exponent 2" was measured while other work ran on them, which raises its share.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from harness import Row, Study, main
from image_training import Contestant, ImageSetting, more_options, train
from torch import nn

from coreset_sampler import SphericalGaussian, strategies


def network() -> nn.Sequential:
    """Four convolutions with BatchNorm, 61,000 parameters."""
    layers: list[nn.Module] = []
    channels = 1
    for width, pool in ((16, True), (32, True), (64, True), (64, False)):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        layers += [nn.MaxPool2d(2)] if pool else []
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers)


def trial(lr: float, batch_size: int, passes: float) -> Row:
    return dict(lr=lr, batch_size=batch_size, passes=passes)


TRIALS = [
    (0.05, 16, 2), (0.05, 16, 4), (0.05, 16, 8), (0.02, 16, 4), (0.02, 16, 8), (0.1, 64, 4), (0.1, 64, 8), (0.05, 64, 4),
]  # fmt: skip
# Chosen by `tune`: noise, strategy -> the best of TRIALS on validation data.
TUNED: dict[tuple[float, str], tuple[float, int, float]] = {
    (0.0, "uniform"): (0.1, 64, 8),  # validation 0.8902
    (0.0, "crest"): (0.02, 16, 8),  # validation 0.8854
    (0.0, "craig"): (0.05, 16, 8),  # validation 0.8738
    (0.0, "stable"): (0.1, 64, 8),  # validation 0.8878
    (0.3, "uniform"): (0.02, 16, 8),  # validation 0.8550
    (0.3, "crest"): (0.05, 16, 8),  # validation 0.8674
    (0.3, "craig"): (0.1, 64, 4),  # validation 0.7492
    (0.3, "stable"): (0.02, 16, 8),  # validation 0.8578
    (0.5, "uniform"): (0.1, 64, 8),  # validation 0.8254
    (0.5, "crest"): (0.1, 64, 8),  # validation 0.8330
    (0.5, "craig"): (0.05, 16, 2),  # validation 0.6206
    (0.5, "stable"): (0.02, 16, 4),  # validation 0.8340
    # of three trials, those of 8 passes with which others did best, not of all eight
    (0.0, "stable, exponent 2"): (0.05, 16, 8),  # validation 0.8908
    (0.3, "stable, exponent 2"): (0.05, 16, 8),  # validation 0.8678
    (0.5, "stable, exponent 2"): (0.05, 16, 8),  # validation 0.8486
    (0.5, "any"): (0.02, 16, 4),  # the ablation: stable's
}
GAUSSIAN = partial(SphericalGaussian, layers="norm", redraw=1)
SETTINGS = {
    "cpu": ImageSetting(
        network=network, mode="L", mean=0.286, std=0.353, n=5_000, passes=4, noises=(0.0, 0.3, 0.5),
        pools=dict(pool_size=100, keep=20, rescore_every=10), posterior=GAUSSIAN(0.1),
        trials=tuple(trial(*values) for values in TRIALS),
        tuned={cell: trial(*values) for cell, values in TUNED.items()},
    ),
}  # fmt: skip
CONTESTANTS = ("uniform", "crest", "craig", "stable", "stable, exponent 2")


def contestants(setting: ImageSetting) -> dict[str, Contestant]:
    """The first five are the table's; of the others each differs from stable in one thing."""

    def stable(weighting: str = "resample", reselect_every: int = 1, **changes: Any) -> Contestant:
        settings = dict(posterior=setting.posterior, draws=4) | setting.pools | changes
        return Contestant(partial(strategies.Stable, **settings), weighting=weighting, reselect_every=reselect_every)

    noiseless = dict(posterior=SphericalGaussian(0.0), draws=1)
    return {
        "uniform": Contestant(strategies.Uniform),
        "crest": Contestant(partial(strategies.Crest, **setting.pools)),
        "craig": Contestant(strategies.Craig, reselect_every=10),  # epochs; it scores all examples each time
        "stable": stable(),
        "stable, exponent 2": stable(confidence_exponent=2),
        "stable as in the table": stable(),
        "no noise (CREST)": stable(**noiseless),
        "scale 0.01": stable(posterior=GAUSSIAN(0.01)),
        "scale 0.3": stable(posterior=GAUSSIAN(0.3)),
        "independent draws in all norm layers": stable(posterior=SphericalGaussian(0.1, "norm")),
        "2 draws": stable(draws=2),
        "8 draws": stable(draws=8),
        "head": stable(posterior=SphericalGaussian(0.1, "head")),
        "all layers, scale 0.02": stable(posterior=SphericalGaussian(0.02, "all")),
        "pools of 50": stable(pool_size=50),
        "pools of 200": stable(pool_size=200),
        "scored every epoch": stable(rescore_every=1),
        "scored every 20 epochs": stable(rescore_every=20),
        "scored every epoch, same coreset for 4 epochs": stable(rescore_every=1, reselect_every=4),
        "weights in the loss": stable(weighting="loss"),
        "weights none": stable(weighting="none"),
        "confidence exponent 1": stable(confidence_exponent=1),
        "confidence exponent 2": stable(confidence_exponent=2),
        "no noise, confidence exponent 2": stable(**noiseless, confidence_exponent=2),
    }


def one_run(job: Row, args: argparse.Namespace) -> Row:
    setting = SETTINGS[job["setting"]]
    return train("fashion_mnist", job, args, setting, contestants(setting)[job["strategy"]])


ABLATION = list(contestants(SETTINGS["cpu"]))[len(CONTESTANTS) :]
STUDY = Study("fashion_mnist", "images", SETTINGS, CONTESTANTS, ABLATION, one_run, seeds=5)

if __name__ == "__main__":
    main(STUDY, __doc__, more_options)
