// The ReLU calls, as the CPU and the CUDA kernels get them.
//
// jaxnorm_relu_fwd: operands x, or x and z; results y = max(s, 0) with s = x or x + z (NaN passes through), and the mask
//   numpy.packbits(s > 0, axis=-1, bitorder="little"): bit j % 8 of byte j / 8 of a row is column j; spare bits are 0.
// jaxnorm_relu_bwd: operands mask and t; result t where the bit is set, else 0 (selected, so inf and NaN do not leak).
#ifndef JAXNORM_RELU_ARGS_H_
#define JAXNORM_RELU_ARGS_H_

#include "call.h"

namespace jaxnorm {

struct ReluArgs {
  DataType dtype;
  int64_t rows = 0, cols = 0;
  int64_t mask_cols() const { return (cols + 7) / 8; }  // bytes of mask per row
  int64_t size() const { return rows * cols; }
  const void* x = nullptr;  // forward: x; backward: t
  const void* z = nullptr;  // forward: the second addend, or nullptr
  void* y = nullptr;
  uint8_t* mask = nullptr;
};

}  // namespace jaxnorm

#endif  // JAXNORM_RELU_ARGS_H_
