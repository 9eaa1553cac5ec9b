"""Choosing real examples: `CoresetSampler` and what it stands on."""
