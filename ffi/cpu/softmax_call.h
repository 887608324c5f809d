// The softmax calls: their formulas, and the arguments that kernels get.
//
// jaxnorm_softmax_fwd: operands x, [where], [scale], [bias], as the attribute `operands` names them; result y.
//   z = factor * scale * x + bias;  y = softmax(z) or log_softmax(z) along `axis`, over the elements that `where`
//   keeps. Masked elements get 0 (softmax) or -inf (log_softmax).
// jaxnorm_softmax_bwd: operands y (the forward's result), t (a tangent or a cotangent), [where]; result
//   kSoftmax:  factor * y * (t - sum(y * t))       the Jacobian is symmetric: forward and reverse mode are one formula
//   kLogJvp:   factor * (t - sum(exp(y) * t))
//   kLogVjp:   factor * (t - exp(y) * sum(t))
//   Sums run over the elements that `where` keeps; masked elements give exactly 0 whatever t holds there.
#ifndef JAXNORM_CPU_SOFTMAX_CALL_H_
#define JAXNORM_CPU_SOFTMAX_CALL_H_

#include <tuple>

#include "buffers.h"

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

// ---- decoding and checks ----

inline Error ParseSoftmaxFwd(ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::AnyBuffer y, int64_t axis, double factor,
                             bool log, int64_t operands, SoftmaxFwdArgs* args) {
  const Dims full = y.dimensions();
  args->dtype = TypeOf(x);
  JAXNORM_CHECK(TypeOf(y) == args->dtype);
  JAXNORM_RETURN_IF_ERROR(SplitAtAxis(full, axis, &args->shape));
  if (args->shape.size() == 0) return Error::Success();
  JAXNORM_RETURN_IF_ERROR(MakeOperand(x, args->dtype, full, axis, &args->x));
  size_t next = 0;
  for (auto [bit, dtype, operand] :
       {std::tuple{kWhere, DataType::kPred, &args->where}, std::tuple{kScale, args->dtype, &args->scale},
        std::tuple{kBias, args->dtype, &args->bias}}) {
    if (!(operands & bit)) continue;
    auto buffer = rest.get<ffi::AnyBuffer>(next++);
    if (buffer.has_error()) return FromFfi(buffer.error());
    JAXNORM_RETURN_IF_ERROR(MakeOperand(*buffer, dtype, full, axis, operand));
  }
  JAXNORM_CHECK(next == rest.size());
  args->y = y.untyped_data();
  args->factor = factor;
  args->log = log;
  return Error::Success();
}

inline Error ParseSoftmaxBwd(ffi::AnyBuffer y, ffi::AnyBuffer t, ffi::RemainingArgs rest, ffi::AnyBuffer out,
                             int64_t axis, double factor, int64_t form, SoftmaxBwdArgs* args) {
  const Dims full = out.dimensions();
  args->dtype = TypeOf(y);
  JAXNORM_CHECK(TypeOf(out) == args->dtype);
  JAXNORM_CHECK(form >= 0 && form <= 2);
  JAXNORM_CHECK(rest.size() <= 1);
  JAXNORM_RETURN_IF_ERROR(SplitAtAxis(full, axis, &args->shape));
  if (args->shape.size() == 0) return Error::Success();
  JAXNORM_RETURN_IF_ERROR(MakeOperand(y, args->dtype, full, axis, &args->y));
  JAXNORM_RETURN_IF_ERROR(MakeOperand(t, args->dtype, full, axis, &args->t));
  if (rest.size() == 1) {
    auto where = rest.get<ffi::AnyBuffer>(0);
    if (where.has_error()) return FromFfi(where.error());
    JAXNORM_RETURN_IF_ERROR(MakeOperand(*where, DataType::kPred, full, axis, &args->where));
  }
  args->out = out.untyped_data();
  args->factor = factor;
  args->form = static_cast<SoftmaxForm>(form);
  return Error::Success();
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_SOFTMAX_CALL_H_
