// The layer_norm and rms_norm calls: their formulas, and the arguments that kernels get.
//
// s = x, or x + residual rounded to x's dtype. mean (0 unless `center`) and
// rstd = (mean of (s - mean)^2 + epsilon)^-1/2 are taken along the dimensions from `axis` on, over the elements that
// the mask keeps. xhat = (s - mean) * rstd for all elements. Arithmetic is float32, or float64 for float64 (A below).
// The attribute `operands` names the optional operands that are present.
//
// jaxnorm_norm_fwd: operands x, [residual], [mask], [scale], [bias]; results
//   y = xhat * (scale + scale_offset) + bias, [s] if there is a residual, [mean] if `center`, rstd. Without a scale the
//   factor is 1, whatever scale_offset is.
// jaxnorm_norm_bwd: operands s, dy, [mean] if `center`, rstd, [dsum] (bit kResidual), [mask], [scale]; results [dx],
//   [dscale], [dbias], as the attribute `need` names them:
//   dx = dsum + rstd * (w - keep * (sum(w) / n + xhat * sum(w * xhat) / n)),   w = dy * (scale + scale_offset),
//        with keep = 1 where the mask is on and 0 elsewhere, n = sum(keep), and sum(w) only if `center`; the sums run
//        over all elements of the row;
//   dscale = sum over rows of dy * xhat,   dbias = sum over rows of dy.
//   dscale and dbias need none of dsum, mask and scale, which may be present all the same.
//
// Shapes: the first `groups` dimensions are the groups, then come the rows, and from `axis` on the columns. Results of
// full shape are dense. Row operands (x, residual, mask, dy, dsum, mean, rstd) have the full shape or size 1 in some
// dimensions. In the columns, mean and rstd have size 1, the mask has the full size in all or size 1 in all, and the
// other row operands have the full size. scale, bias, dscale and dbias have size 1 in the row dimensions. In the group
// dimensions, scale and bias have the full size in all or size 1 in all, and dscale and dbias have the full size. An
// empty array (a size known only when an exported program runs) still gives statistics (NaN without columns) and
// parameter gradients (0 without rows).
//
// The dtype of scale and bias is x's or A. The dtype of dscale and dbias is x's or A, and may differ from the dtype of
// scale and bias.
#ifndef JAXNORM_CPU_NORM_CALL_H_
#define JAXNORM_CPU_NORM_CALL_H_

#include <utility>
#include <vector>

#include "buffers.h"

namespace jaxnorm {

// Bits of the attributes `operands` and `need`.
enum NormBits : int64_t { kNormX = 1, kNormResidual = 2, kNormMask = 4, kNormScale = 8, kNormBias = 16 };

// rows_per_group rows of each of `groups` groups; rows are numbered through all groups.
struct NormShape {
  int64_t groups = 1, rows_per_group = 1, cols = 1;
  int64_t rows() const { return groups * rows_per_group; }
  int64_t size() const { return rows() * cols; }
};

// One row of parameters for all groups (group_stride == 0), or one for each group (group_stride == cols).
struct NormParameter {
  const void* data = nullptr;
  int64_t group_stride = 0;
  explicit operator bool() const { return data != nullptr; }
};

struct NormFwdArgs {
  DataType dtype, parameter_dtype;  // of x; of scale and bias (x's if there are none)
  NormShape shape;
  bool center = true;
  double epsilon = 0, scale_offset = 0;
  Operand x, residual, mask;
  NormParameter scale, bias;
  void* y = nullptr;
  void* sum = nullptr;   // nullptr without a residual
  void* mean = nullptr;  // A, [rows]; nullptr unless center
  void* rstd = nullptr;  // A, [rows]
};

struct NormBwdArgs {
  DataType dtype, parameter_dtype, gradient_dtype;  // of x; of scale; of dscale and dbias (x's if there are none)
  NormShape shape;
  bool center = true;
  double scale_offset = 0;
  Operand x, dy, dsum, mask, mean, rstd;
  NormParameter scale;
  void* dx = nullptr;      // these three: nullptr if not needed
  void* dscale = nullptr;  // [groups][cols]
  void* dbias = nullptr;
};

// ---- decoding and checks ----

namespace norm_internal {

inline Dims Span(const std::vector<int64_t>& dims) { return Dims(dims.data(), dims.size()); }

// The next of the remaining operands or results.
inline Error Next(const ffi::RemainingArgs& remaining, size_t* index, ffi::AnyBuffer* out) {
  auto buffer = remaining.get<ffi::AnyBuffer>((*index)++);
  if (buffer.has_error()) return FromFfi(buffer.error());
  *out = *buffer;
  return Error::Success();
}
inline Error Next(const ffi::RemainingRets& remaining, size_t* index, ffi::AnyBuffer* out) {
  auto buffer = remaining.get<ffi::AnyBuffer>((*index)++);
  if (buffer.has_error()) return FromFfi(buffer.error());
  *out = **buffer;
  return Error::Success();
}

// Dimensions [groups..., rows..., columns...] of the full shape.
struct Layout {
  std::vector<int64_t> full;
  int64_t groups, axis;

  // Widens the full shape to what one more operand broadcasts to.
  Error Include(Dims dims) {
    JAXNORM_CHECK(dims.size() == full.size());
    for (size_t i = 0; i < full.size(); ++i) {
      if (full[i] == 1) full[i] = dims[i];
    }
    return Error::Success();
  }

  // `dims` with the dimensions from `axis` on merged into one, the columns.
  Error Merge(Dims dims, std::vector<int64_t>* out) const {
    JAXNORM_CHECK(dims.size() == full.size());
    out->assign(dims.begin(), dims.begin() + axis);
    int64_t cols = 1;
    for (size_t i = axis; i < dims.size(); ++i) JAXNORM_CHECK(CheckedMul(cols, dims[i], &cols));
    out->push_back(cols);
    return Error::Success();
  }

  Error Shape(NormShape* shape) const {
    JAXNORM_CHECK(0 <= groups && groups <= axis && axis < static_cast<int64_t>(full.size()));
    AxisShape rows;
    std::vector<int64_t> merged;
    JAXNORM_RETURN_IF_ERROR(Merge(Span(full), &merged));
    JAXNORM_RETURN_IF_ERROR(SplitAtAxis(Span(merged), axis, &rows));
    shape->cols = rows.axis;
    shape->groups = shape->rows_per_group = 1;
    for (int64_t i = 0; i < axis; ++i) (i < groups ? shape->groups : shape->rows_per_group) *= full[i];
    return Error::Success();
  }

  // An operand with the rows' dimensions. In the columns it has the full size or, if `one_column`, size 1.
  Error Row(ffi::AnyBuffer buffer, DataType dtype, bool one_column, Operand* out) const {
    JAXNORM_CHECK(TypeOf(buffer) == dtype);
    std::vector<int64_t> dims, all;
    JAXNORM_RETURN_IF_ERROR(Merge(buffer.dimensions(), &dims));
    JAXNORM_RETURN_IF_ERROR(Merge(Span(full), &all));
    JAXNORM_CHECK(dims.back() == (one_column ? 1 : all.back()));
    JAXNORM_RETURN_IF_ERROR(MakeBroadcast(Span(all), axis, Span(dims), &out->view));
    out->data = buffer.untyped_data();
    out->elements = static_cast<int64_t>(buffer.element_count());
    return Error::Success();
  }

  Error Mask(ffi::AnyBuffer buffer, Operand* out) const {
    const Dims dims = buffer.dimensions();
    JAXNORM_CHECK(dims.size() == full.size());
    bool one_column = true;
    for (size_t i = axis; i < dims.size(); ++i) one_column = one_column && dims[i] == 1;
    return Row(buffer, DataType::kPred, one_column, out);
  }

  Error Parameter(ffi::AnyBuffer buffer, DataType dtype, NormParameter* out) const {
    JAXNORM_CHECK(TypeOf(buffer) == dtype);
    const Dims dims = buffer.dimensions();
    JAXNORM_CHECK(dims.size() == full.size());
    bool own = true, shared = true;
    int64_t cols = 1;
    for (int64_t i = 0; i < static_cast<int64_t>(dims.size()); ++i) {
      if (i < groups) {
        own = own && dims[i] == full[i];
        shared = shared && dims[i] == 1;
      } else if (i < axis) {
        JAXNORM_CHECK(dims[i] == 1);
      } else {
        JAXNORM_CHECK(dims[i] == full[i]);
        cols *= dims[i];
      }
    }
    JAXNORM_CHECK(own || shared);
    out->data = buffer.untyped_data();
    out->group_stride = shared ? 0 : cols;
    return Error::Success();
  }

  Error FullResult(ffi::AnyBuffer buffer, DataType dtype, void** out) const {
    JAXNORM_CHECK(TypeOf(buffer) == dtype && SameDims(buffer.dimensions(), Span(full)));
    *out = buffer.untyped_data();
    return Error::Success();
  }

  // One element per row.
  Error Statistic(ffi::AnyBuffer buffer, DataType dtype, const NormShape& shape, void** out) const {
    JAXNORM_CHECK(TypeOf(buffer) == dtype);
    JAXNORM_CHECK(static_cast<int64_t>(buffer.element_count()) == shape.rows());
    *out = buffer.untyped_data();
    return Error::Success();
  }
};

}  // namespace norm_internal

inline Error ParseNormFwd(ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::AnyBuffer y, ffi::RemainingRets results,
                          int64_t axis, int64_t groups, bool center, double epsilon, double scale_offset,
                          int64_t operands, NormFwdArgs* args) {
  using norm_internal::Next;
  const Dims full = y.dimensions();
  const norm_internal::Layout layout{{full.begin(), full.end()}, groups, axis};
  const DataType dtype = TypeOf(x), acc = AccDtype(dtype);
  JAXNORM_RETURN_IF_ERROR(layout.Shape(&args->shape));
  args->dtype = args->parameter_dtype = dtype;
  args->center = center;
  args->epsilon = epsilon;
  args->scale_offset = scale_offset;
  JAXNORM_RETURN_IF_ERROR(layout.Row(x, dtype, /*one_column=*/false, &args->x));
  ffi::AnyBuffer buffer = x;
  size_t next = 0;
  if (operands & kNormResidual) {
    JAXNORM_RETURN_IF_ERROR(Next(rest, &next, &buffer));
    JAXNORM_RETURN_IF_ERROR(layout.Row(buffer, dtype, /*one_column=*/false, &args->residual));
  }
  if (operands & kNormMask) {
    JAXNORM_RETURN_IF_ERROR(Next(rest, &next, &buffer));
    JAXNORM_RETURN_IF_ERROR(layout.Mask(buffer, &args->mask));
  }
  for (auto [bit, parameter] : {std::pair{kNormScale, &args->scale}, std::pair{kNormBias, &args->bias}}) {
    if (!(operands & bit)) continue;
    JAXNORM_RETURN_IF_ERROR(Next(rest, &next, &buffer));
    const bool first = !args->scale;
    if (first) args->parameter_dtype = TypeOf(buffer);
    JAXNORM_CHECK(args->parameter_dtype == dtype || args->parameter_dtype == acc);
    JAXNORM_RETURN_IF_ERROR(layout.Parameter(buffer, args->parameter_dtype, parameter));
  }
  JAXNORM_CHECK(next == rest.size());
  JAXNORM_RETURN_IF_ERROR(layout.FullResult(y, dtype, &args->y));
  next = 0;
  if (operands & kNormResidual) {
    JAXNORM_RETURN_IF_ERROR(Next(results, &next, &buffer));
    JAXNORM_RETURN_IF_ERROR(layout.FullResult(buffer, dtype, &args->sum));
  }
  if (center) {
    JAXNORM_RETURN_IF_ERROR(Next(results, &next, &buffer));
    JAXNORM_RETURN_IF_ERROR(layout.Statistic(buffer, acc, args->shape, &args->mean));
  }
  JAXNORM_RETURN_IF_ERROR(Next(results, &next, &buffer));
  JAXNORM_RETURN_IF_ERROR(layout.Statistic(buffer, acc, args->shape, &args->rstd));
  JAXNORM_CHECK(next == results.size());
  return Error::Success();
}

inline Error ParseNormBwd(ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::RemainingArgs rest, ffi::RemainingRets results,
                          int64_t axis, int64_t groups, bool center, double scale_offset, int64_t operands,
                          int64_t need, NormBwdArgs* args) {
  using norm_internal::Next;
  ffi::AnyBuffer buffer = x;
  // The full shape need not be the shape of any operand.
  const Dims dims = x.dimensions();
  norm_internal::Layout layout{{dims.begin(), dims.end()}, groups, axis};
  JAXNORM_RETURN_IF_ERROR(layout.Include(dy.dimensions()));
  for (size_t i = 0; i < rest.size();) {
    JAXNORM_RETURN_IF_ERROR(Next(rest, &i, &buffer));
    JAXNORM_RETURN_IF_ERROR(layout.Include(buffer.dimensions()));
  }
  const DataType dtype = TypeOf(x), acc = AccDtype(dtype);
  JAXNORM_RETURN_IF_ERROR(layout.Shape(&args->shape));
  args->dtype = args->parameter_dtype = args->gradient_dtype = dtype;
  args->center = center;
  args->scale_offset = scale_offset;
  JAXNORM_RETURN_IF_ERROR(layout.Row(x, dtype, /*one_column=*/false, &args->x));
  JAXNORM_RETURN_IF_ERROR(layout.Row(dy, dtype, /*one_column=*/false, &args->dy));
  size_t next = 0;
  if (center) {
    JAXNORM_RETURN_IF_ERROR(Next(rest, &next, &buffer));
    JAXNORM_RETURN_IF_ERROR(layout.Row(buffer, acc, /*one_column=*/true, &args->mean));
  }
  JAXNORM_RETURN_IF_ERROR(Next(rest, &next, &buffer));
  JAXNORM_RETURN_IF_ERROR(layout.Row(buffer, acc, /*one_column=*/true, &args->rstd));
  if (operands & kNormResidual) {
    JAXNORM_RETURN_IF_ERROR(Next(rest, &next, &buffer));
    JAXNORM_RETURN_IF_ERROR(layout.Row(buffer, dtype, /*one_column=*/false, &args->dsum));
  }
  if (operands & kNormMask) {
    JAXNORM_RETURN_IF_ERROR(Next(rest, &next, &buffer));
    JAXNORM_RETURN_IF_ERROR(layout.Mask(buffer, &args->mask));
  }
  if (operands & kNormScale) {
    JAXNORM_RETURN_IF_ERROR(Next(rest, &next, &buffer));
    args->parameter_dtype = TypeOf(buffer);
    JAXNORM_CHECK(args->parameter_dtype == dtype || args->parameter_dtype == acc);
    JAXNORM_RETURN_IF_ERROR(layout.Parameter(buffer, args->parameter_dtype, &args->scale));
  }
  JAXNORM_CHECK(next == rest.size());
  next = 0;
  if (need & kNormX) {
    JAXNORM_RETURN_IF_ERROR(Next(results, &next, &buffer));
    JAXNORM_RETURN_IF_ERROR(layout.FullResult(buffer, dtype, &args->dx));
  }
  for (auto [bit, result] : {std::pair{kNormScale, &args->dscale}, std::pair{kNormBias, &args->dbias}}) {
    if (!(need & bit)) continue;
    JAXNORM_RETURN_IF_ERROR(Next(results, &next, &buffer));
    if (args->dscale == nullptr) args->gradient_dtype = TypeOf(buffer);
    JAXNORM_CHECK(args->gradient_dtype == dtype || args->gradient_dtype == acc);
    JAXNORM_CHECK(TypeOf(buffer) == args->gradient_dtype);
    JAXNORM_CHECK(static_cast<int64_t>(buffer.element_count()) == args->shape.groups * args->shape.cols);
    *result = buffer.untyped_data();
  }
  JAXNORM_CHECK(next > 0 && next == results.size());
  return Error::Success();
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_NORM_CALL_H_
