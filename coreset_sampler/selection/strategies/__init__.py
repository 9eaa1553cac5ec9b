"""Ways to choose: one frozen dataclass per file. `available()` lists the names that `strategy=` takes."""

from .craig import Craig
from .crest import Crest
from .forgetting import Forgetting
from .herding import Herding
from .k_center import KCenter
from .label_confidence import LabelConfidence
from .loss_pruning import LossPruning
from .registry import Function, available, load_state, resolve, state_dict
from .stable import Stable
from .uniform import Uniform
from .warm_up import WarmUp

__all__ = [
    "Craig",
    "Crest",
    "Forgetting",
    "Function",
    "Herding",
    "KCenter",
    "LabelConfidence",
    "LossPruning",
    "Stable",
    "Uniform",
    "WarmUp",
    "available",
    "load_state",
    "resolve",
    "state_dict",
]
