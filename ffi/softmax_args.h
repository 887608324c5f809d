// The softmax calls, decoded and checked once for both the CPU and the CUDA kernels.
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

#include "buffers.h"

namespace jaxnorm {

enum SoftmaxOperands : int64_t { kWhere = 1, kScale = 2, kBias = 4 };
enum class SoftmaxForm : int64_t { kSoftmax = 0, kLogJvp = 1, kLogVjp = 2 };

struct SoftmaxFwdArgs {
  ffi::DataType dtype;
  AxisShape shape;
  Operand x, where, scale, bias;
  void* y = nullptr;
  double factor = 1;
  bool log = false;
};

struct SoftmaxBwdArgs {
  ffi::DataType dtype;
  AxisShape shape;
  Operand y, t, where;
  void* out = nullptr;
  double factor = 1;
  SoftmaxForm form = SoftmaxForm::kSoftmax;
};

inline ffi::Error ParseSoftmaxFwd(ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::AnyBuffer y, int64_t axis,
                                  double factor, bool log, int64_t operands, SoftmaxFwdArgs* args) {
  const Dims full = y.dimensions();
  args->dtype = x.element_type();
  JAXNORM_CHECK(y.element_type() == args->dtype);
  JAXNORM_RETURN_IF_ERROR(SplitAtAxis(full, axis, &args->shape));
  if (args->shape.size() == 0) return ffi::Error::Success();
  JAXNORM_RETURN_IF_ERROR(MakeOperand(x, args->dtype, full, axis, &args->x));
  size_t next = 0;
  for (auto [bit, dtype, operand] :
       {std::tuple{kWhere, ffi::PRED, &args->where}, std::tuple{kScale, args->dtype, &args->scale},
        std::tuple{kBias, args->dtype, &args->bias}}) {
    if (!(operands & bit)) continue;
    auto buffer = rest.get<ffi::AnyBuffer>(next++);
    if (buffer.has_error()) return buffer.error();
    JAXNORM_RETURN_IF_ERROR(MakeOperand(*buffer, dtype, full, axis, operand));
  }
  JAXNORM_CHECK(next == rest.size());
  args->y = y.untyped_data();
  args->factor = factor;
  args->log = log;
  return ffi::Error::Success();
}

inline ffi::Error ParseSoftmaxBwd(ffi::AnyBuffer y, ffi::AnyBuffer t, ffi::RemainingArgs rest, ffi::AnyBuffer out,
                                  int64_t axis, double factor, int64_t form, SoftmaxBwdArgs* args) {
  const Dims full = out.dimensions();
  args->dtype = y.element_type();
  JAXNORM_CHECK(out.element_type() == args->dtype);
  JAXNORM_CHECK(form >= 0 && form <= 2);
  JAXNORM_CHECK(rest.size() <= 1);
  JAXNORM_RETURN_IF_ERROR(SplitAtAxis(full, axis, &args->shape));
  if (args->shape.size() == 0) return ffi::Error::Success();
  JAXNORM_RETURN_IF_ERROR(MakeOperand(y, args->dtype, full, axis, &args->y));
  JAXNORM_RETURN_IF_ERROR(MakeOperand(t, args->dtype, full, axis, &args->t));
  if (rest.size() == 1) {
    auto where = rest.get<ffi::AnyBuffer>(0);
    if (where.has_error()) return where.error();
    JAXNORM_RETURN_IF_ERROR(MakeOperand(*where, ffi::PRED, full, axis, &args->where));
  }
  args->out = out.untyped_data();
  args->factor = factor;
  args->form = static_cast<SoftmaxForm>(form);
  return ffi::Error::Success();
}

}  // namespace jaxnorm

#endif  // JAXNORM_SOFTMAX_ARGS_H_
