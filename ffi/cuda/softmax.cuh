// What softmax and cross-entropy, forward and backward, share: exponentials, the (maximum, sum) partial, and launching.
#ifndef JAXNORM_CUDA_SOFTMAX_CUH_
#define JAXNORM_CUDA_SOFTMAX_CUH_

#include <cmath>

#include "operand.cuh"
#include "rows.cuh"
#include "softmax_args.h"
#include "strided.cuh"

namespace jaxnorm {

// Exponents are kept in units that make exp cheap: for the 16-bit types in powers of two, where exp is one MUFU
// instruction; otherwise natural. z is multiplied by kUnit once, when it is decoded. The rounding of that product, 2^-24
// relative, is below what the 16-bit types resolve at any offset.
inline constexpr float kLog2E = 1.44269504f;
template <typename T>
inline constexpr AccT<T> kUnit = sizeof(T) == 2 ? kLog2E : AccT<T>(1);

// 2^x in one instruction.
__device__ __forceinline__ float ApproximateExp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// exp of a number of units.
template <typename T>
__device__ __forceinline__ AccT<T> Exp(AccT<T> x) {
  if constexpr (sizeof(T) == 2) {
    return ApproximateExp2(x);
  } else {
    return exp(x);
  }
}

// The same of x <= 0, as one of many terms of a sum that has a term of 1. For float32 it is off by a share of |x| 2^-24,
// which is least where the term counts: |x| exp(x) is never more than 0.4.
template <typename T>
__device__ __forceinline__ AccT<T> ExpOfTerm(AccT<T> x) {
  if constexpr (std::is_same_v<T, float>) {
    return ApproximateExp2(x * kLog2E);
  } else {
    return Exp<T>(x);
  }
}

// 1 / x; for the 16-bit types one instruction, off by less than 2^-23.
template <typename T>
__device__ __forceinline__ AccT<T> Reciprocal(AccT<T> x) {
  if constexpr (sizeof(T) == 2) {
    return ApproximateReciprocal(x);
  } else {
    return 1 / x;
  }
}

// Masks of the elements of a slot that `where` keeps, in kOperands: what is masked is replaced as words, a quarter of the
// instructions that selecting elements takes.
template <typename T>
struct KeptBits {
  uint32_t word[kVecBytes / sizeof(uint32_t)];

  __device__ __forceinline__ explicit KeptBits(WhereBytes<T> where) {
    constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
    const auto bytes = std::bit_cast<WordsOf<WhereBytes<T>>>(where);
#pragma unroll
    for (int i = 0; i < kVecBytes / static_cast<int>(sizeof(uint32_t)); ++i) {
      // true is 1: the upper bit of its byte becomes set, and then fills all of its element's bytes.
      const uint32_t upper = bytes.w[i * kPerWord / 4] + 0x7f7f7f7fu;
      const int byte = i * kPerWord % 4;
      const uint32_t selector = kPerWord == 2 ? 0x9988u + 0x1111u * byte : 0x8888u + 0x1111u * byte;
      asm("prmt.b32 %0, %1, %1, %2;" : "=r"(word[i]) : "r"(upper), "r"(selector));
    }
  }

  // x, or `masked` where an element is not kept.
  __device__ __forceinline__ uint4 Select(uint4 x, T masked) const {
    const uint32_t other = SplatWords(masked).x;
    const auto select = [&](uint32_t a, uint32_t bits) { return (a & bits) | (other & ~bits); };
    return {select(x.x, word[0]), select(x.y, word[1]), select(x.z, word[2]), select(x.w, word[3])};
  }
  __device__ __forceinline__ Vec<T, kVecSize<T>> Select(const Vec<T, kVecSize<T>>& x, T masked) const {
    return std::bit_cast<Vec<T, kVecSize<T>>>(Select(std::bit_cast<uint4>(x), masked));
  }
};

// Whether an optional operand has an aligned vector for each slot of every row, or is not there.
template <typename T, typename E>
bool IsOnSlots(const DeviceOperand<E>& operand) {
  if (operand.data == nullptr) return true;
  bool aligned = operand.axis_stride == 1 && reinterpret_cast<uintptr_t>(operand.data) % (sizeof(E) * kVecSize<T>) == 0;
  for (int d = 0; d < operand.ndim; ++d) aligned = aligned && operand.stride[d] % kVecSize<T> == 0;
  return aligned;
}

template <typename Acc>
__device__ __forceinline__ Acc Max(Acc a, Acc b) {
  return fmax(a, b);
}

// Larger elements of two vectors; NaN loses.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> MaxVec(const Vec<T, N>& a, const Vec<T, N>& b) {
  Vec<T, N> out;
  if constexpr (sizeof(T) == 2) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const Pair m = __hmax2(Pair(a.v[i], a.v[i + 1]), Pair(b.v[i], b.v[i + 1]));
      out.v[i] = m.x;
      out.v[i + 1] = m.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.v[i] = Max(a.v[i], b.v[i]);
  }
  return out;
}

// Largest element; NaN loses.
template <typename T, int N>
__device__ __forceinline__ T MaxElement(const Vec<T, N>& a) {
  if constexpr (N == 1) {
    return a.v[0];
  } else {
    Vec<T, N / 2> low, high;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      low.v[i] = a.v[i];
      high.v[i] = a.v[i + N / 2];
    }
    if constexpr (N == 2 && sizeof(T) == 2) return __hmax(low.v[0], high.v[0]);
    return MaxElement(MaxVec(low, high));
  }
}

// m if it can be subtracted. A maximum of -inf means that every element is; subtracting 0 then leaves exp = 0 for them,
// where -inf - -inf would be NaN before all of the row is known.
template <typename Acc>
__device__ __forceinline__ Acc Finite(Acc m) {
  return m == -Acc(INFINITY) ? Acc(0) : m;
}

// Maximum m and sum of exp(z - m) of some elements z, in units. NaN is not carried by m but by the sum: fmax drops it, exp keeps it.
template <typename T>
struct MaxSum {
  using Acc = AccT<T>;
  Acc max, sum;

  static __device__ __forceinline__ MaxSum Identity() { return {-Acc(INFINITY), 0}; }
  // Equal maxima, infinite ones too, need no rescaling (and inf - inf would be NaN).
  static __device__ __forceinline__ Acc Rescale(Acc from, Acc to) { return from == to ? Acc(1) : Exp<T>(from - to); }
  static __device__ __forceinline__ MaxSum Merge(MaxSum a, MaxSum b) {
    const Acc m = Max(a.max, b.max);
    return {m, a.sum * Rescale(a.max, m) + b.sum * Rescale(b.max, m)};
  }
  // Of equal maxima.
  static __device__ __forceinline__ MaxSum AddSums(MaxSum a, MaxSum b) { return {a.max, a.sum + b.sum}; }
  static __device__ __forceinline__ MaxSum MergeLanes(MaxSum p, int width) {
    const Acc m = LaneReduce(p.max, width, [](Acc a, Acc b) { return Max(a, b); });
    return {m, LaneReduce(p.sum * Rescale(p.max, m), width, [](Acc a, Acc b) { return a + b; })};
  }
};

// Largest z of some slots: their v where kDecoded, else their x times the factor, which is positive.
template <typename T, bool kDecoded, typename Slot, int kN>
__device__ __forceinline__ AccT<T> MaxOfSlots(const Slot (&slots)[kN], AccT<T> factor) {
  constexpr int kVec = kVecSize<T>;
  if constexpr (kDecoded) {
    AccT<T> m = slots[0].v[0];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) m = Max(m, slots[j].v[i]);
    }
    return m;
  } else {
    // Compared as stored, two at a time for the 16-bit types; multiplied once.
    Vec<T, kVec> m = slots[0].x;
#pragma unroll
    for (int j = 1; j < kN; ++j) m = MaxVec(m, slots[j].x);
    return ToAcc(MaxElement(m)) * factor;
  }
}

// Op::ReduceColumns (strided.cuh) to a maximum and a sum, of z = op.ColumnZ(raw, column, a, masked) in kGeneral and
// z = factor * raw elsewhere. more(v, raw, masked) is called for each element of column v.
template <typename Op, typename Partial, int kN, typename ForParts, typename ForAll, typename BlockReduce,
          typename More>
__device__ __forceinline__ void ReduceColumnsToMaxSum(const Op& op, const typename Op::Column& column,
                                                      typename Op::Acc factor, ForParts for_parts, ForAll for_all,
                                                      BlockReduce block_reduce, PerColumn<Partial, kN>& total,
                                                      More more) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  bool masked;
  if constexpr (Op::kMode == Mode::kGeneral) {
    Vec<Acc, 1> m = {{-Acc(INFINITY)}};
    for_parts(
        [&](int a, const Vec<T, 1>(&raw)[1]) { m.v[0] = Max(m.v[0], op.ColumnZ(raw[0].v[0], column, a, masked)); });
    total.v[0].max = block_reduce(m, MaxVec<Acc, 1>).v[0];
  } else {
    auto m = std::bit_cast<Vec<T, kN>>(SplatWords(Op::NeutralInput()));
    for_parts([&](int, const Vec<T, kN>(&raw)[1]) { m = MaxVec(m, raw[0]); });
    m = block_reduce(m, MaxVec<T, kN>);
#pragma unroll
    for (int v = 0; v < kN; ++v) total.v[v].max = ToAcc(m.v[v]) * factor;
  }
  Acc reference[kN];
#pragma unroll
  for (int v = 0; v < kN; ++v) {
    total.v[v].sum = 0;
    reference[v] = Finite(total.v[v].max);
  }
  for_all([&](int a, const Vec<T, kN>(&raw)[1]) {
#pragma unroll
    for (int v = 0; v < kN; ++v) {
      total.v[v].sum += Exp<T>(op.ColumnShifted(raw[0].v[v], column, a, reference[v], masked));
      more(v, raw[0].v[v], masked);
    }
  });
}

template <typename T>
struct Sum {
  using Acc = AccT<T>;
  Acc sum;
  static __device__ __forceinline__ Sum Identity() { return {0}; }
  static __device__ __forceinline__ Sum Merge(Sum a, Sum b) { return {a.sum + b.sum}; }
  static __device__ __forceinline__ Sum AddSums(Sum a, Sum b) { return Merge(a, b); }
  static __device__ __forceinline__ Sum MergeLanes(Sum p, int width) {
    return {LaneReduce(p.sum, width, [](Acc a, Acc b) { return a + b; })};
  }
};

// Runs such an operation along the axis of args.shape. `simple`: no optional operand, none that broadcasts.
// float64 takes the general mode always: it is there to be right, not to fill the code with more kernels.
template <template <typename, Mode> typename Op, typename Args>
ffi::Error LaunchSoftmax(cudaStream_t stream, const Args& args, bool simple, ffi::AnyBuffer scratch, const char* name) {
  const AxisShape& shape = args.shape;
  JAXNORM_CHECK(shape.axis < INT32_MAX / 2);  // positions within a row are 32-bit; Python lowers the formula instead
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) -> ffi::Error {
    using General = Op<T, Mode::kGeneral>;
    constexpr int kVec = kVecSize<T>;
    const General general(args);
    bool full = IsVecAligned(general.Output());
    for (int k = 0; k < General::kColumnInputs; ++k) {
      full = full && IsVecAligned(general.Input(k).data) && general.Input(k).elements == shape.size();
    }
    const bool last = shape.inner == 1;
    const bool whole = (last ? shape.axis : shape.inner) % kVec == 0;
    const int slots = static_cast<int>(CeilDiv(shape.axis, kVec)) + (full && whole ? 0 : 1);
    const bool split = last && slots > MaxRowSlots(general, *device);
    if constexpr (!std::is_same_v<T, double>) {
      if constexpr (requires { general.OnSlots(); }) {
        using Operands = Op<T, Mode::kOperands>;
        if (!simple && full && last && whole && !split && general.OnSlots()) {
          return LaunchRow(*device, stream, Operands(args), slots, name);
        }
      }
      using Ragged = Op<T, Mode::kRagged>;
      using Plain = Op<T, Mode::kPlain>;
      full = full && simple;
      if (full && split) return LaunchSplit(*device, stream, Ragged(args), slots, scratch, name);
      if (full && last && whole) return LaunchRow(*device, stream, Plain(args), slots, name);
      if (full && last) return LaunchRow(*device, stream, Ragged(args), slots, name);
      if (full && whole) return LaunchStrided<Plain, kVec>(*device, stream, Plain(args), shape, name);
    }
    if (split) return LaunchSplit(*device, stream, general, slots, scratch, name);
    if (last) return LaunchRow(*device, stream, general, slots, name);
    return LaunchStrided<General, 1>(*device, stream, general, shape, name);
  });
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_SOFTMAX_CUH_
