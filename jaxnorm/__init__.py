"""Bandwidth-limit softmax and ReLU kernels as ordinary JAX functions, for CPU and CUDA."""

from importlib import metadata as _metadata

from jaxnorm._lib import status
from jaxnorm._primitive import export_checks
from jaxnorm.relu import add_relu, relu
from jaxnorm.softmax import log_softmax, softmax

__version__ = _metadata.version("jaxnorm")

__all__ = ["add_relu", "export_checks", "log_softmax", "relu", "softmax", "status"]
