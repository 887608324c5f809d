"""Measures jaxnorm against XLA and other libraries: `python -m bench`."""
