"""Learns a handful of synthetic examples whose posterior matches that of the full data."""
