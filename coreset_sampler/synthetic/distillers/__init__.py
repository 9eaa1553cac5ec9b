"""Learns a handful of synthetic examples whose posterior matches that of the full data.

Each method is a distiller: it holds settings, `init` makes a `State` and `step` the next one from it.
"""

from .augment import augment
from .contrastive_divergence import ContrastiveDivergence, CrossEntropy, Focal, Margin, contrastive_divergence
from .experts import Experts, train_experts
from .forward_kl import ForwardKL, forward_kl
from .real_data import RealData
from .reverse_kl import ReverseKL, reverse_kl
from .state import Distiller, DivergedError, Info, Source, State
from .variational import Variational, variational
from .wasserstein import Wasserstein, wasserstein

__all__ = [
    "ContrastiveDivergence",
    "CrossEntropy",
    "Distiller",
    "DivergedError",
    "Experts",
    "Focal",
    "ForwardKL",
    "Info",
    "Margin",
    "RealData",
    "ReverseKL",
    "Source",
    "State",
    "Variational",
    "Wasserstein",
    "augment",
    "contrastive_divergence",
    "forward_kl",
    "reverse_kl",
    "train_experts",
    "variational",
    "wasserstein",
]
