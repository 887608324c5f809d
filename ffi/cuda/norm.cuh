// Parameters of layer_norm and rms_norm: loading a slot's share of scale and bias, however they lie.
#ifndef JAXNORM_CUDA_NORM_CUH_
#define JAXNORM_CUDA_NORM_CUH_

#include "calls.h"
#include "norm_args.h"
#include "rows.cuh"

namespace jaxnorm {

// Adds up each of kCount numbers over kLanes lanes, with fewer shuffles than one by one: lane i gets the sum of number
// i / (kLanes / kCount).
template <int kLanes, int kCount, typename Acc>
__device__ __forceinline__ Acc SumOverLanes(Acc (&numbers)[kCount], int lane) {
  static_assert(kCount <= kLanes);
#pragma unroll
  for (int n = kCount / 2, offset = kLanes / 2; n > 0; n /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const Acc sent = upper ? numbers[i] : numbers[i + n];
      numbers[i] = (upper ? numbers[i + n] : numbers[i]) + __shfl_xor_sync(kAllLanes, sent, offset);
    }
  }
#pragma unroll
  for (int offset = kLanes / kCount / 2; offset > 0; offset /= 2) {
    numbers[0] += __shfl_xor_sync(kAllLanes, numbers[0], offset);
  }
  return numbers[0];
}

// Moves words to places lower by kStep, where `shift`.
template <int kStep, int kCount>
__device__ __forceinline__ void ShiftWords(uint32_t (&words)[kCount], bool shift) {
#pragma unroll
  for (int i = 0; i + kStep < kCount; ++i) words[i] = shift ? words[i + kStep] : words[i];
}

// Elements [first, first + kVec) of a row of `cols`. kAligned: that is a whole number of 16-byte vectors.
//
// Otherwise, inside the row, the aligned vectors around them are loaded and shifted into place: loads one by one would
// take several times as many passes through L1. At the row's ends, where these vectors could reach beyond the array,
// elements are loaded one by one, and are 0 outside the row.
template <typename U, int kVec, bool kAligned>
__device__ __forceinline__ Vec<U, kVec> LoadColumns(const U* row, int first, int cols) {
  constexpr int kWide = kVecSize<U>;
  constexpr int kVectors = kVec / kWide;
  constexpr int kWordsPerVector = kVecBytes / sizeof(uint32_t);
  const auto load_vectors = [&] {
    constexpr int kWords = kVectors * kWordsPerVector, kMoreWords = kWords + kWordsPerVector;
    const int excess = kAligned ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(row + first) % kVecBytes);
    const auto* vectors = reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(row + first) - excess);
    uint32_t words[kMoreWords];
#pragma unroll
    for (int k = 0; k <= kVectors; ++k) {
      uint4 vector = {};
      if (k < kVectors || excess != 0) vector = __ldg(vectors + k);
      words[4 * k] = vector.x;
      words[4 * k + 1] = vector.y;
      words[4 * k + 2] = vector.z;
      words[4 * k + 3] = vector.w;
    }
    if constexpr (!kAligned) {
      ShiftWords<2>(words, excess / sizeof(uint32_t) & 2);
      ShiftWords<1>(words, excess / sizeof(uint32_t) & 1);
      if constexpr (sizeof(U) < sizeof(uint32_t)) {
        const int bits = excess % sizeof(uint32_t) * 8;
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], bits);
      }
    }
    Words<kWords> inside;
#pragma unroll
    for (int i = 0; i < kWords; ++i) inside.w[i] = words[i];
    return std::bit_cast<Vec<U, kVec>>(inside);
  };
  if constexpr (kAligned) {
    return load_vectors();
  } else {
    if (first >= kWide && first + kVec + kWide <= cols) return load_vectors();
    Vec<U, kVec> values;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      values.v[i] = first + i >= 0 && first + i < cols ? row[first + i] : FromAcc<U>(AccT<U>(0));
    }
    return values;
  }
}

// A row of parameters is copied once for each way in which rows of odd length lie on the grid of 16-byte slots. With the
// copy that lies as they do, the parameters of a slot are whole vectors: shifting them into place for each slot took up to
// a fifth of the time.
struct ShiftedCopies {
  static constexpr int kMargin = 8;  // elements before the first column and after the last one, of slots that have some

  static __host__ __device__ __forceinline__ int64_t Pitch(int64_t cols, int copies) {
    return (2 * kMargin + cols + copies + kMargin - 1) / kMargin * kMargin;
  }
  // Elements from the first copy to column 0 of that for rows which begin `skew` elements after a slot.
  static __device__ __forceinline__ int64_t Column0(int skew, int64_t cols, int copies) {
    const int copy = skew & (copies - 1);
    return copy * Pitch(cols, copies) + kMargin + copy;
  }
};

inline constexpr int kShiftThreads = 256;
template <typename U>
__global__ void __launch_bounds__(kShiftThreads)
    ShiftParametersKernel(const U* scale, const U* bias, U* copies, int cols) {
  constexpr int kCopies = kVecSize<U>;
  const int64_t pitch = ShiftedCopies::Pitch(cols, kCopies), i = int64_t{blockIdx.x} * kShiftThreads + threadIdx.x;
  if (i >= pitch) return;
  const U* const from[] = {scale, bias};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (from[k] == nullptr) continue;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      const int64_t column = i - ShiftedCopies::kMargin - copy;
      copies[(k * kCopies + copy) * pitch + i] = column >= 0 && column < cols ? from[k][column] : U();
    }
  }
}

// Scale or bias of a call on arrays of T: one row of T (narrow) or of the arithmetic's dtype for each group, or for
// all of them.
template <typename T>
struct DeviceParameter {
  const void* data = nullptr;
  int64_t group_bytes = 0;

  DeviceParameter(const NormParameter& parameter, bool narrow)
      : data(parameter.data),
        group_bytes(parameter.group_stride * static_cast<int64_t>(narrow ? sizeof(T) : sizeof(AccT<T>))) {}

  bool VecAligned() const { return IsVecAligned(data) && group_bytes % kVecBytes == 0; }

  __device__ __forceinline__ const void* Row(int64_t group) const {
    const char* row = static_cast<const char*>(data) + group * group_bytes;
    asm("" : "+l"(row));  // else the compiler computes it again for each slot
    return row;
  }

  template <bool kAligned>
  static __device__ __forceinline__ void Load(bool narrow, const void* row, int first, int cols,
                                              AccT<T> (&values)[kVecSize<T>]) {
    if (std::is_same_v<T, AccT<T>> || narrow) {  // not the same code twice
      ToAccAll(LoadColumns<T, kVecSize<T>, kAligned>(static_cast<const T*>(row), first, cols), values);
    } else {
      ToAccAll(LoadColumns<AccT<T>, kVecSize<T>, kAligned>(static_cast<const AccT<T>*>(row), first, cols), values);
    }
  }
};

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_NORM_CUH_
