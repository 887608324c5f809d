// The layer_norm and rms_norm calls, as the CPU and the CUDA kernels get them.
//
// s = x, or x + residual rounded to x's dtype; along the dimensions from `axis` on, over the elements that the mask
// keeps, mean (0 unless `center`) and rstd = (mean of (s - mean)^2 + epsilon)^-1/2; xhat = (s - mean) * rstd of all
// elements. Arithmetic is float32, or float64 for float64 (A below).
//
// jaxnorm_norm_fwd: operands x, then those of residual, mask, scale, bias that the attribute `operands` names; results
//   y = xhat * (scale + scale_offset) + bias, [s] if there is a residual, [mean] if `center`, rstd. Without a scale
//   the factor is 1, whatever scale_offset is.
// jaxnorm_norm_bwd: operands s, dy, [mean] if `center`, rstd, then those of dsum (bit kResidual), mask, scale that
//   `operands` names; results those that `need` names, of
//   dx = dsum + rstd * (w - keep * (sum(w) / n + xhat * sum(w * xhat) / n)),   w = dy * (scale + scale_offset),
//        with keep = 1 where the mask is on and 0 elsewhere, n = sum(keep), and sum(w) only if `center`; the sums run
//        over all elements of the row;
//   dscale = sum over rows of dy * xhat,   dbias = sum over rows of dy.
//   Dscale and dbias need neither dsum, nor the scale, nor the mask (which may be there all the same).
//
// Shapes: with d dimensions, `groups` leading ones, then rows, then from `axis` on the columns. Results of full shape
// are dense. Row operands (x, residual, mask, dy, dsum, mean, rstd) have the full shape or size 1 in some dimensions;
// mean and rstd have size 1 in all columns, all others but the mask have full columns, the mask has all or none.
// scale, bias, dscale and dbias have size 1 in the row dimensions; scale and bias also have it in either all or none of
// the groups' dimensions, dscale and dbias in none. An empty array (a size known only when an exported program runs)
// still gives statistics (NaN without columns) and parameter gradients (0 without rows).
//
// Scale and bias have one dtype: x's or A. Gradients of parameters have one dtype: x's or A, which need not be the same.
#ifndef JAXNORM_NORM_ARGS_H_
#define JAXNORM_NORM_ARGS_H_

#include "call.h"

namespace jaxnorm {

// Also what `need` is made of.
enum NormBits : int64_t { kNormX = 1, kNormResidual = 2, kNormMask = 4, kNormScale = 8, kNormBias = 16 };

// rows_per_group rows of each of `groups` groups; rows are numbered through all groups.
struct NormShape {
  int64_t groups = 1, rows_per_group = 1, cols = 1;
  int64_t rows() const { return groups * rows_per_group; }
  int64_t size() const { return rows() * cols; }
};

// One row of parameters for all groups (group_stride == 0) or for each (cols).
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

}  // namespace jaxnorm

#endif  // JAXNORM_NORM_ARGS_H_
