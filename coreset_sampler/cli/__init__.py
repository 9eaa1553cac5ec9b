"""Commands of `coreset-sampler` that are long enough for a file of their own: each adds its parser and runs it."""
