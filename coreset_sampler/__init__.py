"""Train on less data: choose the examples worth training on, or load distilled ones."""

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .selection import strategies
from .selection.coreset import Coreset
from .selection.distributed_sampler import DistributedCoresetSampler
from .selection.facility_location import cover, facility_location, facility_location_pools
from .selection.indexed import IndexedDataset
from .selection.posterior import DiagonalLaplace, PointMass, Snapshots, SphericalGaussian, Trajectory
from .selection.sampler import CoresetSampler
from .selection.weighted import WeightedDataset
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
    "IndexedDataset",
    "Normalize",
    "PointMass",
    "Raw",
    "Snapshots",
    "SphericalGaussian",
    "SyntheticCoreset",
    "Trajectory",
    "WeightedDataset",
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
    if name == "distill":  # these two bring forty modules that a training script does not need
        from .synthetic.pipeline import distill

        return distill
    if name == "evaluate":
        from .synthetic.evaluation import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
