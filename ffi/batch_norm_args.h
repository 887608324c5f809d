// The batch_norm calls, as the CPU kernels get them. (Those of CUDA: jaxnorm/_kernels/batch_norm.py.)
//
// An array of x's shape is seen as [groups][outer][channels][inner]. The first `groups` dimensions are those that vmap
// mapped: each group is a batch of its own. Dimensions [axis, end) are the features ("channels"), all others are
// reduced: outer before them, inner after them. Arithmetic is float32, or float64 for float64 (A below).
//
// With n the number of elements that count for a channel, rstd = (var + epsilon)^-1/2, xhat = (x - mean) * rstd, and
// g = dy where the bit is set, else 0 (selected; dy itself without bits):
//
// jaxnorm_batch_norm_stats: operands x, [mask]; results mean, var = mean of (x - mean)^2, [count] = n with a mask. The
//   mask says which elements count. Without any, mean and var are NaN.
// jaxnorm_batch_norm_fwd: operands x, mean, var, [scale], [bias], [residual]; results y, [bits].
//   y = (x - mean) * rstd * scale + bias + residual, then max(y, 0) if `relu` (NaN passes); bits = packbits(y > 0) as in
//   relu_args.h, of y as it is rounded. Without `relu` there are no bits.
// jaxnorm_batch_norm_sums: operands dy, [bits], and for dscale x, mean, var; results those of dbias = sum of g and
//   dscale = sum of g * xhat that are asked for.
// jaxnorm_batch_norm_dx: operands dy, [bits], [x], [mask, count], [mean], [var], [scale], [dbias, dscale], [dmean, dvar];
//   results those that are asked for of
//   dx = rstd * scale * g - keep / n * (rstd * scale * (dbias + xhat * dscale) - dmean - 2 * (x - mean) * dvar),
//   dresidual = g,
//   with keep = 1 where the mask is on and 0 elsewhere (selected), and the terms of absent operands left out. n is the
//   count, or without a mask outer * inner * `replicas`. Var (and scale) are there for dx with dy; x and mean if dbias or
//   dmean is; operands beyond what is needed may be there all the same.
//
// Operands and results are those that the attributes `operands` and `results` name, in the order of the bits below.
// Arrays (x, dy, residual, y, dx, dresidual) are of one dtype. mean, var, count, scale, bias and the gradients of mean,
// var, scale and bias are A, with size 1 in the reduced dimensions. Operands have size 1 in those of the groups'
// dimensions in which they were not mapped; results have none. The mask has size 1 or the full size in any dimension, but
// all or none of the features' if there is no inner dimension, else all or none of the inner dimensions'.
#ifndef JAXNORM_BATCH_NORM_ARGS_H_
#define JAXNORM_BATCH_NORM_ARGS_H_

#include "call.h"

namespace jaxnorm {

// jaxnorm/_batch_norm_primitives.py holds the same numbers.
enum BatchNormName : int64_t {
  kBatchNormX = 1 << 0,
  kBatchNormDy = 1 << 1,
  kBatchNormY = 1 << 2,
  kBatchNormBits = 1 << 3,
  kBatchNormMask = 1 << 4,
  kBatchNormMean = 1 << 5,
  kBatchNormVar = 1 << 6,
  kBatchNormCount = 1 << 7,
  kBatchNormScale = 1 << 8,
  kBatchNormBias = 1 << 9,
  kBatchNormResidual = 1 << 10,
  kBatchNormDbias = 1 << 11,
  kBatchNormDscale = 1 << 12,
  kBatchNormDmean = 1 << 13,
  kBatchNormDvar = 1 << 14,
  kBatchNormDx = 1 << 15,
  kBatchNormDresidual = 1 << 16,
};
inline constexpr int kBatchNormNames = 17;

struct BatchNormShape {
  int64_t groups = 1, outer = 1, channels = 1, inner = 1;
  int64_t last = 1;  // length of the last dimension, whose bits are packed
  int64_t reduced() const { return outer * inner; }
  int64_t group_size() const { return outer * channels * inner; }
  int64_t bits_cols() const { return (last + 7) / 8; }  // bytes of bits for one run along the last dimension
};

// What one group has of an operand or result lies at data + groups.RowOffset(group) elements.
struct BatchNormBuffer {
  void* data = nullptr;
  int64_t item_bytes = 0;  // of an element
  Broadcast groups;
  explicit operator bool() const { return data != nullptr; }

  template <typename T>
  T* Group(int64_t group) const {
    return static_cast<T*>(data) + groups.RowOffset(group);
  }
};

struct BatchNormArgs {
  DataType dtype;
  BatchNormShape shape;
  BatchNormBuffer x, dy, y, bits, mean, var, count, scale, bias, residual, dbias, dscale, dmean, dvar, dx, dresidual;
  // Rows are (group, outer) with channels as columns if inner is 1, else (group, outer, channel) with inner as columns.
  Operand mask;
};

}  // namespace jaxnorm

#endif  // JAXNORM_BATCH_NORM_ARGS_H_
