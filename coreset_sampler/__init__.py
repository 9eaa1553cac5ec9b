"""Train on less data: choose the examples worth training on, or load distilled ones."""

from . import strategies
from ._version import __version__
from .coreset import Coreset
from .facility_location import cover, facility_location, facility_location_pools
from .formats import read_experts, read_published
from .posterior import DiagonalLaplace, PointMass, Snapshots, SphericalGaussian
from .preprocessing import ZCA, Normalize, Raw
from .sampler import CoresetSampler, DistributedCoresetSampler
from .synthetic import SyntheticCoreset, load_coreset
from .weighted import Weighted

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
    "facility_location",
    "facility_location_pools",
    "load_coreset",
    "read_experts",
    "read_published",
    "strategies",
]
