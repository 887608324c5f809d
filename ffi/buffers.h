// Shapes as the kernels see them, and the checks that make a malformed call an error instead of a wrong address.
#ifndef JAXNORM_BUFFERS_H_
#define JAXNORM_BUFFERS_H_

#include <cstdint>
#include <limits>
#include <string>

#include "registry.h"

// Returns ffi::Error naming the expression that failed. Python checks the same things first, with friendlier words;
// this guards deserialised programs and direct ffi_call users.
#define JAXNORM_CHECK(condition)                                                          \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      return ::jaxnorm::ffi::Error::InvalidArgument(std::string("jaxnorm: ") + __func__ + \
                                                    ": check failed: " #condition);       \
    }                                                                                     \
  } while (false)

#define JAXNORM_RETURN_IF_ERROR(expression)                                           \
  do {                                                                                \
    if (::jaxnorm::ffi::Error error_ = (expression); error_.failure()) return error_; \
  } while (false)

namespace jaxnorm {

using Dims = ffi::AnyBuffer::Dimensions;

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

// An array seen around one of its axes: element (o, a, i) lies at (o * axis + a) * inner + i.
struct AxisShape {
  int64_t outer = 1, axis = 1, inner = 1;
  int64_t rows() const { return outer * inner; }
  int64_t size() const { return outer * axis * inner; }
};

inline ffi::Error SplitAtAxis(Dims dims, int64_t axis, AxisShape* shape) {
  JAXNORM_CHECK(axis >= 0 && axis < static_cast<int64_t>(dims.size()));
  AxisShape s;
  s.axis = dims[axis];
  int64_t size = 1;
  for (int64_t i = 0; i < static_cast<int64_t>(dims.size()); ++i) {
    JAXNORM_CHECK(CheckedMul(size, dims[i], &size));
    if (i < axis) JAXNORM_CHECK(CheckedMul(s.outer, dims[i], &s.outer));
    if (i > axis) JAXNORM_CHECK(CheckedMul(s.inner, dims[i], &s.inner));
  }
  JAXNORM_CHECK(size <= std::numeric_limits<int64_t>::max() / 16);  // byte offsets fit too
  *shape = s;
  return ffi::Error::Success();
}

// Dimensions left after neighbours with one common stride are merged; Python materialises operands of higher rank.
inline constexpr int kMaxBroadcastDims = 8;

// Where the operand's element for row r (an index over all dimensions but the axis, row-major) and axis position a
// lies: at the sum over d of digit_d(r) * stride[d], plus a * axis_stride. Broadcast dimensions have stride 0.
struct Broadcast {
  int ndim = 0;                       // merged dimensions, outermost first
  int64_t size[kMaxBroadcastDims];    // digits of r
  int64_t stride[kMaxBroadcastDims];  // in elements
  int64_t axis_stride = 0;

  int64_t RowOffset(int64_t row) const {
    int64_t offset = 0;
    for (int d = ndim - 1; d > 0; --d) {
      offset += (row % size[d]) * stride[d];
      row /= size[d];
    }
    return ndim > 0 ? offset + row * stride[0] : 0;
  }
};

// View of an operand with dimensions `operand` (each 1 or that of `full`) in a call over `full` along `axis`.
inline ffi::Error MakeBroadcast(Dims full, int64_t axis, Dims operand, Broadcast* out) {
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
  return ffi::Error::Success();
}

// An input of a row-wise call: absent (data == nullptr), full, or broadcast.
struct Operand {
  const void* data = nullptr;
  int64_t elements = 0;  // of the array itself
  Broadcast view;
  explicit operator bool() const { return data != nullptr; }
};

inline ffi::Error MakeOperand(ffi::AnyBuffer buffer, ffi::DataType dtype, Dims full, int64_t axis, Operand* out) {
  JAXNORM_CHECK(buffer.element_type() == dtype);
  JAXNORM_RETURN_IF_ERROR(MakeBroadcast(full, axis, buffer.dimensions(), &out->view));
  out->data = buffer.untyped_data();
  out->elements = static_cast<int64_t>(buffer.element_count());
  return ffi::Error::Success();
}

// What values of `dtype` are summed in, and numbers per row or channel are.
inline ffi::DataType AccDtype(ffi::DataType dtype) { return dtype == ffi::F64 ? ffi::F64 : ffi::F32; }

}  // namespace jaxnorm

#endif  // JAXNORM_BUFFERS_H_
