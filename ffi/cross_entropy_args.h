// The cross-entropy calls, as the CPU and the CUDA kernels get them.
//
// With p = softmax(x) along `axis` over the classes that `where` keeps, n their number, and
// q = (1 - smoothing) * onehot(label) + smoothing / n,
//
// jaxnorm_cross_entropy_fwd: operands x, labels, [where]; results nll = lse - sum(q * x) and lse = log(sum(e^x)).
//   A row whose label is not a class has a NaN for nll.
// jaxnorm_cross_entropy_bwd: operands x, lse, labels, a, b, [where]; result a * p - b * q with p = e^(x - lse).
//   On CUDA without lse: the kernel has the row on chip, and sums it again. So a gradient whose loss nobody looks at
//   needs no forward call.
//   Masked elements, and rows whose label is not a class, are exactly 0 whatever the operands hold there.
//
// labels are int32; lse, nll, a and b are float32 (float64 for float64). All of them, which are numbers per row, have
// size 1 along `axis`.
#ifndef JAXNORM_CROSS_ENTROPY_ARGS_H_
#define JAXNORM_CROSS_ENTROPY_ARGS_H_

#include "call.h"

namespace jaxnorm {

struct CrossEntropyArgs {
  DataType dtype;
  AxisShape shape;
  Operand x, lse, labels, a, b, where;
  void* nll = nullptr;      // forward
  void* lse_out = nullptr;  // forward
  void* out = nullptr;      // backward
  double smoothing = 0;
};

}  // namespace jaxnorm

#endif  // JAXNORM_CROSS_ENTROPY_ARGS_H_
