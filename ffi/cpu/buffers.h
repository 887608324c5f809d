// Conversion of XLA's buffers to kernel operands, with checks that make a malformed call an error instead of a wrong
// address.
#ifndef JAXNORM_CPU_BUFFERS_H_
#define JAXNORM_CPU_BUFFERS_H_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "call.h"
#include "registry.h"

namespace jaxnorm {

using Dims = ffi::AnyBuffer::Dimensions;

inline DataType TypeOf(const ffi::AnyBuffer& buffer) { return static_cast<DataType>(buffer.element_type()); }

inline bool SameDims(Dims a, Dims b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

// a * b into *out; false where the product does not fit (or a factor is negative).
inline bool CheckedMul(int64_t a, int64_t b, int64_t* out) {
  return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, out);
}

inline Error SplitAtAxis(Dims dims, int64_t axis, AxisShape* shape) {
  JAXNORM_CHECK(axis >= 0 && axis < static_cast<int64_t>(dims.size()));
  AxisShape s;
  s.axis = dims[axis];
  int64_t size = 1;  // with 1 in place of 0, so that products of any of the dimensions fit
  for (int64_t i = 0; i < static_cast<int64_t>(dims.size()); ++i) {
    JAXNORM_CHECK(dims[i] >= 0 && CheckedMul(size, std::max<int64_t>(1, dims[i]), &size));
    if (i < axis) s.outer *= dims[i];
    if (i > axis) s.inner *= dims[i];
  }
  JAXNORM_CHECK(size <= std::numeric_limits<int64_t>::max() / 16);  // byte offsets fit too
  *shape = s;
  return Error::Success();
}

// View of an operand with dimensions `operand` (each 1 or equal to the one of `full`) in a call over `full` along
// `axis`.
inline Error MakeBroadcast(Dims full, int64_t axis, Dims operand, Broadcast* out) {
  JAXNORM_CHECK(full.size() == operand.size());
  int64_t sizes[64], strides[64];  // innermost first
  JAXNORM_CHECK(full.size() <= 64);
  int n = 0;
  int64_t step = 1;
  Broadcast b;
  for (int64_t i = static_cast<int64_t>(full.size()) - 1; i >= 0; --i) {
    JAXNORM_CHECK(operand[i] == full[i] || operand[i] == 1);
    const int64_t stride = operand[i] == 1 ? 0 : step;
    step *= operand[i];
    if (i == axis) {
      b.axis_stride = stride;
    } else if (full[i] != 1) {
      if (n > 0 && stride == sizes[n - 1] * strides[n - 1]) {
        sizes[n - 1] *= full[i];
      } else {
        sizes[n] = full[i];
        strides[n++] = stride;
      }
    }
  }
  JAXNORM_CHECK(n <= kMaxBroadcastDims);
  b.ndim = n;
  for (int d = 0; d < n; ++d) {
    b.size[d] = sizes[n - 1 - d];
    b.stride[d] = strides[n - 1 - d];
  }
  *out = b;
  return Error::Success();
}

inline Error MakeOperand(ffi::AnyBuffer buffer, DataType dtype, Dims full, int64_t axis, Operand* out) {
  JAXNORM_CHECK(TypeOf(buffer) == dtype);
  JAXNORM_RETURN_IF_ERROR(MakeBroadcast(full, axis, buffer.dimensions(), &out->view));
  out->data = buffer.untyped_data();
  out->elements = static_cast<int64_t>(buffer.element_count());
  return Error::Success();
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_BUFFERS_H_
