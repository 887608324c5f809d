// The ReLU calls: their formulas, and the arguments that kernels get.
//
// jaxnorm_relu_fwd: operands x, or x and z; results y = max(s, 0) with s = x or x + z (NaN passes through), and the
//   mask numpy.packbits(s > 0, axis=-1, bitorder="little"): bit j % 8 of byte j / 8 of a row is column j; spare bits
//   are 0.
// jaxnorm_relu_bwd: operands mask and t; result t where the bit is set, else 0 (a select, so inf and NaN do not leak).
#ifndef JAXNORM_CPU_RELU_CALL_H_
#define JAXNORM_CPU_RELU_CALL_H_

#include "buffers.h"

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

// ---- decoding and checks ----

inline Error ParseRelu(ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::AnyBuffer mask, ReluArgs* args) {
  const Dims dims = x.dimensions(), mask_dims = mask.dimensions();
  JAXNORM_CHECK(dims.size() >= 1 && SameDims(dims, y.dimensions()));
  AxisShape shape;
  JAXNORM_RETURN_IF_ERROR(SplitAtAxis(dims, static_cast<int64_t>(dims.size()) - 1, &shape));
  args->rows = shape.outer;
  args->cols = shape.axis;
  JAXNORM_CHECK(TypeOf(mask) == DataType::kU8 && mask_dims.size() == dims.size());
  for (size_t i = 0; i + 1 < dims.size(); ++i) JAXNORM_CHECK(mask_dims[i] == dims[i]);
  JAXNORM_CHECK(mask_dims.back() == args->mask_cols());
  args->dtype = TypeOf(x);
  JAXNORM_CHECK(TypeOf(y) == args->dtype);
  args->x = x.untyped_data();
  args->y = y.untyped_data();
  args->mask = static_cast<uint8_t*>(mask.untyped_data());
  return Error::Success();
}

inline Error ParseReluFwd(ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::AnyBuffer y, ffi::AnyBuffer mask,
                          ReluArgs* args) {
  JAXNORM_RETURN_IF_ERROR(ParseRelu(x, y, mask, args));
  JAXNORM_CHECK(rest.size() <= 1);
  if (rest.size() == 1) {
    auto z = rest.get<ffi::AnyBuffer>(0);
    if (z.has_error()) return FromFfi(z.error());
    JAXNORM_CHECK(TypeOf(*z) == args->dtype && SameDims(z->dimensions(), x.dimensions()));
    args->z = z->untyped_data();
  }
  return Error::Success();
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_RELU_CALL_H_
