"""Bandwidth-limit softmax, normalisation and ReLU kernels as ordinary JAX functions, for CPU and CUDA."""

from jaxnorm import _lib
from jaxnorm._lib import status
from jaxnorm._ops.batch_norm import batch_norm, batch_norm_inference
from jaxnorm._ops.cross_entropy import softmax_cross_entropy
from jaxnorm._ops.linear_cross_entropy import linear_cross_entropy
from jaxnorm._ops.norm import layer_norm, rms_norm
from jaxnorm._ops.relu import add_relu, relu
from jaxnorm._ops.softmax import log_softmax, softmax
from jaxnorm._primitive.define import export_checks
from jaxnorm.autofuse import autofuse
from jaxnorm.fuse import fuse

__version__ = _lib.VERSION

__all__ = [
    "add_relu",
    "autofuse",
    "batch_norm",
    "batch_norm_inference",
    "export_checks",
    "fuse",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "relu",
    "rms_norm",
    "softmax",
    "softmax_cross_entropy",
    "status",
]
