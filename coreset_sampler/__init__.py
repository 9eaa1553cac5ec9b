"""Train on less data: choose the examples worth training on, or load distilled ones."""

from . import strategies
from ._version import __version__
from .coreset import Coreset
from .facility_location import cover, facility_location, facility_location_pools
from .posterior import DiagonalLaplace, PointMass, Snapshots, SphericalGaussian
from .sampler import CoresetSampler, DistributedCoresetSampler
from .weighted import Weighted

__all__ = [
    "Coreset",
    "CoresetSampler",
    "DiagonalLaplace",
    "DistributedCoresetSampler",
    "PointMass",
    "Snapshots",
    "SphericalGaussian",
    "Weighted",
    "__version__",
    "cover",
    "facility_location",
    "facility_location_pools",
    "strategies",
]
