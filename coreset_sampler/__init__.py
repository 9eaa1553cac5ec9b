"""Train on less data: choose the examples worth training on, or load distilled ones."""

from importlib import import_module
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
from .synthetic.preprocessing import ZCA, Normalize, Raw

if TYPE_CHECKING:
    from .synthetic.batchnorm import calibrate_batchnorm
    from .synthetic.evaluation import evaluate
    from .synthetic.fitting import fit
    from .synthetic.formats import read_experts, read_published
    from .synthetic.labelling import label_views
    from .synthetic.pipeline import distill
    from .synthetic.teaching import teach
    from .synthetic.training import TrainingRecipe, recipe_for
    from .synthetic.views import Views

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
    "TrainingRecipe",
    "Trajectory",
    "Views",
    "WeightedDataset",
    "__version__",
    "calibrate_batchnorm",
    "cover",
    "distill",
    "evaluate",
    "facility_location",
    "facility_location_pools",
    "fit",
    "label_views",
    "load_coreset",
    "read_experts",
    "read_published",
    "recipe_for",
    "strategies",
    "teach",
]

_LATER = {  # these bring modules that a training script which selects does not need
    "TrainingRecipe": "training",
    "Views": "views",
    "calibrate_batchnorm": "batchnorm",
    "distill": "pipeline",
    "evaluate": "evaluation",
    "fit": "fitting",
    "label_views": "labelling",
    "read_experts": "formats",
    "read_published": "formats",
    "recipe_for": "training",
    "teach": "teaching",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f".synthetic.{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
