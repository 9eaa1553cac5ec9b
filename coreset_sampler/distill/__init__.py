"""Learns a handful of synthetic examples whose posterior matches that of the full data.

Each method is a distiller: it holds settings, `init` makes a `State` and `step` the next one from it.
"""

from .augment import augment
from .contrastive_divergence import ContrastiveDivergence, CrossEntropy, Focal, Margin, contrastive_divergence
from .forward_kl import ForwardKL, forward_kl
from .reverse_kl import ReverseKL, reverse_kl
from .state import Distiller, DivergedError, Info, Source, State
from .wasserstein import Wasserstein, wasserstein

__all__ = [
    "ContrastiveDivergence",
    "CrossEntropy",
    "Distiller",
    "DivergedError",
    "Focal",
    "ForwardKL",
    "Info",
    "Margin",
    "ReverseKL",
    "Source",
    "State",
    "Wasserstein",
    "augment",
    "contrastive_divergence",
    "forward_kl",
    "reverse_kl",
    "wasserstein",
]
