// Operands on the device: which element belongs to a row, by fast division, and loads of it at any alignment.
#ifndef JAXNORM_CUDA_OPERAND_CUH_
#define JAXNORM_CUDA_OPERAND_CUH_

#include "call.h"
#include "vec.cuh"

namespace jaxnorm {

// An array that has all rows, one behind the other. Kernels of such arrays take no more than this of each: so what they are
// given is in few lines of the constant cache.
template <typename T>
struct DenseOperand {
  const T* data = nullptr;
  int64_t elements = 0;  // of the array itself

  DenseOperand() = default;
  DenseOperand(const Operand& operand, int64_t /*rows*/)
      : data(static_cast<const T*>(operand.data)), elements(operand.elements) {}
};

// jaxnorm::Broadcast for device code. FastDiv takes dividends up to INT32_MAX; more rows than that use 64-bit
// division, which is slow and right.
template <typename T>
struct DeviceOperand : DenseOperand<T> {
  int ndim = 0;
  bool wide = false;
  FastDiv digit[kMaxBroadcastDims];
  int64_t size[kMaxBroadcastDims];
  int64_t stride[kMaxBroadcastDims];
  int64_t axis_stride = 0;

  DeviceOperand() = default;
  DeviceOperand(const Operand& operand, int64_t rows)
      : DenseOperand<T>(operand, rows),
        ndim(operand.view.ndim),
        wide(rows > INT32_MAX),
        axis_stride(operand.view.axis_stride) {
    for (int d = 0; d < ndim; ++d) {
      size[d] = operand.view.size[d];
      stride[d] = operand.view.stride[d];
      if (!wide) digit[d] = FastDiv(static_cast<int32_t>(size[d]));
    }
  }

  // Not unrolled: four copies of a 64-bit division for each row of each operand made kernels of 266 KB, whose file took twice as
  // long to compile, and which took up to 1.3 times as long to run.
  __device__ __forceinline__ int64_t RowOffset(int64_t row) const {
    int64_t offset = 0;
    if (wide) {
#pragma unroll 1
      for (int d = ndim - 1; d > 0; --d) {
        offset += (row % size[d]) * stride[d];
        row /= size[d];
      }
    } else {
#pragma unroll 1
      for (int d = ndim - 1; d > 0; --d) {
        uint32_t remainder;
        row = digit[d].DivMod(static_cast<uint32_t>(row), &remainder);
        offset += remainder * stride[d];
      }
    }
    return ndim > 0 ? offset + row * stride[0] : 0;
  }
};

// One row of an operand that is read along its last axis.
template <typename T>
struct OperandRow {
  const T* row = nullptr;
  int begin = 0, end = 0;  // elements [begin, end) around `row` exist; what lies beside the row itself is not looked at
  bool varies = false;     // false: one element for the whole row

  OperandRow() = default;
  __device__ __forceinline__ OperandRow(const DeviceOperand<T>& operand, int64_t index) {
    if (operand.data == nullptr) return;
    const int64_t offset = operand.RowOffset(index);
    row = operand.data + offset;
    begin = -static_cast<int>(min(offset, int64_t{kVecBytes}));
    end = static_cast<int>(min(operand.elements - offset, int64_t{INT32_MAX}));
    varies = operand.axis_stride != 0;
  }

  // A row of an array that has all rows, `offset` elements from its start.
  static __device__ __forceinline__ OperandRow Full(const DenseOperand<T>& operand, int64_t offset) {
    OperandRow r;
    r.row = operand.data + offset;
    r.end = static_cast<int>(min(operand.elements - offset, int64_t{INT32_MAX}));
    r.varies = true;
    return r;
  }

  // Whether elements [first, first + kN) exist and lie in one aligned vector.
  template <int kN = kVecSize<T>>
  __device__ __forceinline__ bool Vectorizable(int first) const {
    return varies && first >= begin && first + kN <= end &&
           reinterpret_cast<uintptr_t>(row + first) % sizeof(Vec<T, kN>) == 0;
  }

  // Elements [first, first + kN): one load where they exist and are aligned, else one by one (T() for what is missing).
  template <int kN>
  __device__ __forceinline__ Vec<T, kN> Load(int first) const {
    Vec<T, kN> values;
    if (Vectorizable<kN>(first)) return *reinterpret_cast<const Vec<T, kN>*>(row + first);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const int c = varies ? first + i : 0;
      values.v[i] = c >= begin && c < end ? row[c] : T();
    }
    return values;
  }
};

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_OPERAND_CUH_
