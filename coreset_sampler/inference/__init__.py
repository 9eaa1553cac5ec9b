"""Posteriors over network parameters, given a coreset: closed form over the last layer, HMC, SGHMC, ensembles."""
