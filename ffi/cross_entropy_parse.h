// Decodes and checks the cross-entropy calls, once for both platforms.
#ifndef JAXNORM_CROSS_ENTROPY_PARSE_H_
#define JAXNORM_CROSS_ENTROPY_PARSE_H_

#include "buffers.h"
#include "cross_entropy_args.h"

namespace jaxnorm {

// A full or broadcast operand; one of numbers per row has size 1 along `axis`.
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

// The forward's results have no dimension of x's columns, and its rows may be those of another operand: all dimensions
// of `nll` but `axis`, and that of x.
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

// All but lse, which not every kernel takes.
inline Error ParseCrossEntropyBwd(ffi::AnyBuffer x, ffi::AnyBuffer labels, ffi::AnyBuffer a, ffi::AnyBuffer b,
                                  ffi::RemainingArgs rest, ffi::AnyBuffer out, int64_t axis, double smoothing,
                                  CrossEntropyArgs* args) {
  args->dtype = TypeOf(x);
  const DataType acc = AccDtype(args->dtype);
  JAXNORM_CHECK(TypeOf(out) == args->dtype);
  const Dims full = out.dimensions();
  JAXNORM_RETURN_IF_ERROR(SplitAtAxis(full, axis, &args->shape));
  JAXNORM_CHECK(x.dimensions().size() == full.size() && x.dimensions()[axis] == full[axis]);
  args->out = out.untyped_data();
  args->smoothing = smoothing;
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(x, args->dtype, full, axis, false, &args->x));
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(labels, DataType::kS32, full, axis, true, &args->labels));
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(a, acc, full, axis, true, &args->a));
  JAXNORM_RETURN_IF_ERROR(CrossEntropyOperand(b, acc, full, axis, true, &args->b));
  return CrossEntropyWhere(rest, full, axis, &args->where);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CROSS_ENTROPY_PARSE_H_
