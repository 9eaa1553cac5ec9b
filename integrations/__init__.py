"""Adapters to other libraries, each imported only when asked for. They adapt, they hold no algorithm."""
