"""Posteriors over network parameters, given a coreset: closed form over the last layer, HMC, SGHMC, ensembles."""

from .hmc import hmc
from .last_layer import LastLayerPosterior, features_of
from .sghmc import sghmc

__all__ = ["LastLayerPosterior", "features_of", "hmc", "sghmc"]
