"""Train on less data: choose the examples worth training on, or load distilled ones."""

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .selection import strategies
from .selection.coreset import Coreset
from .selection.facility_location import cover, facility_location, facility_location_pools
from .selection.posterior import DiagonalLaplace, PointMass, Snapshots, SphericalGaussian
from .selection.sampler import CoresetSampler, DistributedCoresetSampler
from .selection.weighted import Weighted
from .synthetic.dataset import SyntheticCoreset, load_coreset
from .synthetic.formats import read_experts, read_published
from .synthetic.preprocessing import ZCA, Normalize, Raw

if TYPE_CHECKING:
    from .synthetic.evaluation import evaluate
    from .synthetic.pipeline import distill

__all__ = [
    "ZCA",
    "Coreset",
    "CoresetSampler",
    "DiagonalLaplace",
    "DistributedCoresetSampler",
    "Normalize",
    "PointMass",
    "Raw",
    "Snapshots",
    "SphericalGaussian",
    "SyntheticCoreset",
    "Weighted",
    "__version__",
    "cover",
    "distill",
    "evaluate",
    "facility_location",
    "facility_location_pools",
    "load_coreset",
    "read_experts",
    "read_published",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """`distill` and `evaluate` are imported when first used, as they bring a third of the package with them."""
    if name == "distill":
        from .synthetic.pipeline import distill

        return distill
    if name == "evaluate":
        from .synthetic.evaluation import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
