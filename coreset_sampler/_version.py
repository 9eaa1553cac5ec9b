"""The version, in one place that setuptools can read without importing torch."""

__version__ = "0.1.0"
