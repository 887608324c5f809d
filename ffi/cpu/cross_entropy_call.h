// The cross-entropy calls: their formulas, and the arguments that kernels get.
//
// With p = softmax(x) along `axis` over the classes that `where` keeps, n their number, and
// q = (1 - smoothing) * onehot(label) + smoothing / n,
//
// jaxnorm_cross_entropy_fwd: operands x, labels, [where]; results nll = lse - sum(q * x) and lse = log(sum(e^x)).
//   A row whose label is not a class has a NaN for nll.
// jaxnorm_cross_entropy_bwd: operands x, lse, labels, a, b, [where]; result a * p - b * q with p = e^(x - lse).
//   Masked elements, and rows whose label is not a class, are exactly 0 whatever the operands hold there.
//
// labels are int32; lse, nll, a and b are float32 (float64 for float64). All five are numbers per row, with size 1
// along `axis`.
#ifndef JAXNORM_CPU_CROSS_ENTROPY_CALL_H_
#define JAXNORM_CPU_CROSS_ENTROPY_CALL_H_

#include "buffers.h"

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

// ---- decoding and checks ----

// A full or broadcast operand. With `per_row` it must have size 1 along `axis`.
inline Error CrossEntropyOperand(ffi::AnyBuffer buffer, DataType dtype, Dims full, int64_t axis, bool per_row,
                                 Operand* out) {
  JAXNORM_RETURN_IF_ERROR(MakeOperand(buffer, dtype, full, axis, out));
  JAXNORM_CHECK(!per_row || buffer.dimensions()[axis] == 1);
  return Error::Success();
}

inline Error CrossEntropyWhere(ffi::RemainingArgs rest, Dims full, int64_t axis, Operand* where) {
  JAXNORM_CHECK(rest.size() <= 1);
  if (rest.size() == 0) return Error::Success();
  auto buffer = rest.get<ffi::AnyBuffer>(0);
  if (buffer.has_error()) return FromFfi(buffer.error());
  return CrossEntropyOperand(*buffer, DataType::kPred, full, axis, false, where);
}

// The full shape of the forward is the shape of `nll`, with x's size along `axis`: results have size 1 along `axis`,
// and x may be broadcast along the other dimensions.
inline Error ParseCrossEntropyFwd(ffi::AnyBuffer x, ffi::AnyBuffer labels, ffi::RemainingArgs rest, ffi::AnyBuffer nll,
                                  ffi::AnyBuffer lse, int64_t axis, double smoothing, CrossEntropyArgs* args) {
  args->dtype = TypeOf(x);
  const DataType acc = AccDtype(args->dtype);
  JAXNORM_CHECK(TypeOf(nll) == acc && TypeOf(lse) == acc);
  JAXNORM_CHECK(SameDims(nll.dimensions(), lse.dimensions()));
  const Dims rows = nll.dimensions();
  JAXNORM_CHECK(rows.size() <= 64 && x.dimensions().size() == rows.size());
  JAXNORM_CHECK(axis >= 0 && axis < static_cast<int64_t>(rows.size()));
  JAXNORM_CHECK(rows[axis] == 1);
  int64_t dims[64];
  for (size_t i = 0; i < rows.size(); ++i) dims[i] = rows[i];
  dims[axis] = x.dimensions()[axis];
  const Dims full(dims, rows.size());
  JAXNORM_RETURN_IF_ERROR(SplitAtAxis(full, axis, &args->shape));
  args->nll = nll.untyped_data();
  args->lse_out = lse.untyped_data();
  args->smoothing = smoothing;
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(x, args->dtype, full, axis, false, &args->x));
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(labels, DataType::kS32, full, axis, true, &args->labels));
  return CrossEntropyWhere(rest, full, axis, &args->where);
}

inline Error ParseCrossEntropyBwd(ffi::AnyBuffer x, ffi::AnyBuffer lse, ffi::AnyBuffer labels, ffi::AnyBuffer a,
                                  ffi::AnyBuffer b, ffi::RemainingArgs rest, ffi::AnyBuffer out, int64_t axis,
                                  double smoothing, CrossEntropyArgs* args) {
  args->dtype = TypeOf(x);
  const DataType acc = AccDtype(args->dtype);
  JAXNORM_CHECK(TypeOf(out) == args->dtype);
  const Dims full = out.dimensions();
  JAXNORM_RETURN_IF_ERROR(SplitAtAxis(full, axis, &args->shape));
  JAXNORM_CHECK(x.dimensions().size() == full.size() && x.dimensions()[axis] == full[axis]);
  args->out = out.untyped_data();
  args->smoothing = smoothing;
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(x, args->dtype, full, axis, false, &args->x));
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(lse, acc, full, axis, true, &args->lse));
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(labels, DataType::kS32, full, axis, true, &args->labels));
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(a, acc, full, axis, true, &args->a));
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(b, acc, full, axis, true, &args->b));
  return CrossEntropyWhere(rest, full, axis, &args->where);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_CROSS_ENTROPY_CALL_H_
