"""Learns a handful of synthetic examples whose posterior matches that of the full data.

Each method is a distiller: it holds settings, `init` makes a `State` and `step` the next one from it.
"""

from .augment import augment
from .contrastive_divergence import ContrastiveDivergence, CrossEntropy, Focal, Margin
from .experts import Experts, train_experts
from .forward_kl import ForwardKL
from .real_data import RealData
from .reverse_kl import ReverseKL
from .state import Distiller, DivergedError, Info, Source, State
from .variational import Variational
from .wasserstein import Wasserstein

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
    "train_experts",
]
