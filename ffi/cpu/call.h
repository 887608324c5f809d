// Types of the arguments that kernels get.
#ifndef JAXNORM_CPU_CALL_H_
#define JAXNORM_CPU_CALL_H_

#include <cstdint>

#include "errors.h"

namespace jaxnorm {

// The dtypes of calls, with XLA's numbers. A buffer may have another dtype, which then fails the checks.
enum class DataType : uint8_t {
  kPred = XLA_FFI_DataType_PRED,
  kU8 = XLA_FFI_DataType_U8,
  kS32 = XLA_FFI_DataType_S32,
  kF16 = XLA_FFI_DataType_F16,
  kBF16 = XLA_FFI_DataType_BF16,
  kF32 = XLA_FFI_DataType_F32,
  kF64 = XLA_FFI_DataType_F64,
};

inline int64_t ByteWidth(DataType dtype) {
  switch (dtype) {
    case DataType::kPred:
    case DataType::kU8:
      return 1;
    case DataType::kF16:
    case DataType::kBF16:
      return 2;
    case DataType::kS32:
    case DataType::kF32:
      return 4;
    case DataType::kF64:
      return 8;
  }
  return 0;
}

// The dtype of sums over values of `dtype`, and of numbers per row or channel.
inline DataType AccDtype(DataType dtype) { return dtype == DataType::kF64 ? DataType::kF64 : DataType::kF32; }

// An array seen around one of its axes: element (o, a, i) lies at (o * axis + a) * inner + i.
struct AxisShape {
  int64_t outer = 1, axis = 1, inner = 1;
  int64_t rows() const { return outer * inner; }
  int64_t size() const { return outer * axis * inner; }
};

// The most dimensions of an operand after neighbours with a common stride are merged. Python materialises other
// operands.
inline constexpr int kMaxBroadcastDims = 8;

// The operand's element for row r (an index over all dimensions but the axis, row-major) and axis position a lies at
// the sum over d of digit_d(r) * stride[d], plus a * axis_stride. Broadcast dimensions have stride 0.
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

// An input of a row-wise call: absent (data == nullptr), full, or broadcast.
struct Operand {
  const void* data = nullptr;
  int64_t elements = 0;  // of the array itself
  Broadcast view;
  explicit operator bool() const { return data != nullptr; }
};

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_CALL_H_
