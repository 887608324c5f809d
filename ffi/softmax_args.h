// The softmax calls, as the CPU and the CUDA kernels get them.
//
// jaxnorm_softmax_fwd: operands x, then those of where, scale, bias that the attribute `operands` names; result y.
//   z = factor * scale * x + bias;  y = softmax(z) or log_softmax(z) along `axis`, over the elements that `where` keeps.
//   Masked elements get 0 (softmax) or -inf (log_softmax).
// jaxnorm_softmax_bwd: operands y (the forward's result), t (a tangent or a cotangent), then where; result
//   kSoftmax:  factor * y * (t - sum(y * t))       the Jacobian is symmetric: forward and reverse mode are one formula
//   kLogJvp:   factor * (t - sum(exp(y) * t))
//   kLogVjp:   factor * (t - exp(y) * sum(t))
//   Sums run over the elements that `where` keeps; masked elements give exactly 0 whatever t holds there.
#ifndef JAXNORM_SOFTMAX_ARGS_H_
#define JAXNORM_SOFTMAX_ARGS_H_

#include "call.h"

namespace jaxnorm {

enum SoftmaxOperands : int64_t { kWhere = 1, kScale = 2, kBias = 4 };
enum class SoftmaxForm : int64_t { kSoftmax = 0, kLogJvp = 1, kLogVjp = 2 };

struct SoftmaxFwdArgs {
  DataType dtype;
  AxisShape shape;
  Operand x, where, scale, bias;
  void* y = nullptr;
  double factor = 1;
  bool log = false;
};

struct SoftmaxBwdArgs {
  DataType dtype;
  AxisShape shape;
  Operand y, t, where;
  void* out = nullptr;
  double factor = 1;
  SoftmaxForm form = SoftmaxForm::kSoftmax;
};

}  // namespace jaxnorm

#endif  // JAXNORM_SOFTMAX_ARGS_H_
