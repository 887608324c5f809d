"""The operations: a record for each, which the self-check, the benchmarks, autofuse and the tests go through.

record         what a record has
softmax        softmax, log_softmax
relu           relu, add_relu
norm           layer_norm, rms_norm
batch_norm     batch_norm, batch_norm_inference
cross_entropy  softmax_cross_entropy
"""

from jaxnorm._ops import batch_norm, cross_entropy, norm, relu, softmax
from jaxnorm._ops.record import Operation

_MODULES = (softmax, relu, norm, batch_norm, cross_entropy)


__all__ = ["OPERATIONS", "Operation"]

OPERATIONS: dict[str, Operation] = {op.name: op for m in _MODULES for op in m.OPERATIONS}
