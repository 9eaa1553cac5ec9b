"""Ways to choose: each is a function that builds a `Strategy`, one file each."""

from .believed import believed
from .craig import craig
from .crest import crest
from .forgetting import forgetting
from .herding import herding
from .k_center import k_center
from .stable import stable
from .uniform import uniform
from .warm_up import warm_up

__all__ = ["believed", "craig", "crest", "forgetting", "herding", "k_center", "stable", "uniform", "warm_up"]
