// What softmax and cross-entropy, forward and backward, share: exponentials, the (maximum, sum) partial, and launching.
#ifndef JAXNORM_CUDA_SOFTMAX_CUH_
#define JAXNORM_CUDA_SOFTMAX_CUH_

#include <cmath>
#include <limits>

#include "calls.h"
#include "operand.cuh"
#include "rows.cuh"
#include "softmax_args.h"
#include "strided.cuh"

namespace jaxnorm {

// Logits z are kept in units that make exp cheap. For the 16-bit types, whose exp is one MUFU instruction, a unit is two
// powers of 2: of two, so that no finite bfloat16 leaves float32's range. For the others it is 1.
inline constexpr float kLog2E = 1.44269504f;
template <typename T>
inline constexpr int kPowers = sizeof(T) == 2 ? 2 : 1;  // of a unit; powers of e where a unit is 1
template <typename T>
inline constexpr AccT<T> kUnit = sizeof(T) == 2 ? kLog2E / kPowers<T> : AccT<T>(1);
template <typename T>
inline constexpr AccT<T> kLogitOfUnit = 1 / kUnit<T>;
template <typename T>
inline constexpr AccT<T> kLogitOfPower = kLogitOfUnit<T> / kPowers<T>;

__device__ __forceinline__ float RoundedProduct(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double RoundedProduct(double a, double b) { return __dmul_rn(a, b); }

// 2^x in one instruction.
__device__ __forceinline__ float ApproximateExp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// exp of a number of powers.
template <typename T>
__device__ __forceinline__ AccT<T> ExpOfPowers(AccT<T> x) {
  if constexpr (sizeof(T) == 2) {
    return ApproximateExp2(x);
  } else {
    return exp(x);
  }
}

// exp of a number of units.
template <typename T>
__device__ __forceinline__ AccT<T> ExpOfUnits(AccT<T> x) {
  return ExpOfPowers<T>(x * kPowers<T>);
}

// exp of x itself.
template <typename T>
__device__ __forceinline__ AccT<T> Exp(AccT<T> x) {
  return ExpOfPowers<T>(sizeof(T) == 2 ? x * kLog2E : x);
}

// ExpOfPowers of x <= 0, as one of many terms of a sum that has a term of 1. For float32 it is off by a share of |x| 2^-24,
// which is least where the term counts: |x| exp(x) is never more than 0.4.
template <typename T>
__device__ __forceinline__ AccT<T> ExpOfTerm(AccT<T> powers) {
  if constexpr (std::is_same_v<T, float>) {
    return ApproximateExp2(powers * kLog2E);
  } else {
    return ExpOfPowers<T>(powers);
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

// The largest logit as what is subtracted from all. -inf, where every one is that, cannot be, as the NaN of -inf - -inf
// would come before all of the row is known: subtracting this in its place leaves -inf. For float16 it is in range as a
// number of powers, too.
template <typename T>
__device__ __forceinline__ AccT<T> Finite(AccT<T> m) {
  constexpr auto kLargest = std::numeric_limits<AccT<T>>::max();
  return fmax(m, std::is_same_v<T, __half> ? -kLargest / kPowers<T> : -kLargest);
}

// A row's largest logit m may be huge: masks of large finite numbers leave rows of nothing else. What is subtracted from it
// is the product of x and a factor, rounded. One instruction that multiplies and subtracts does not round the product, and
// leaves what rounding has taken: the same of every logit that is as large, so it does not matter as long as it is small.
// For bfloat16 there are three ways to keep it so. PowersOf has nothing to round; ToPowers looks whether m is huge;
// ColumnPowers subtracts before it multiplies.

// Units per x as PowersOf takes them: for bfloat16 16 bits, with which products are exact. What that takes from the factor
// is lost in the rounding of a bfloat16 result.
template <typename T>
AccT<T> UnitFactor(double factor) {
  const double units = factor * kUnit<T>;
  if (!std::is_same_v<T, __nv_bfloat16>) return static_cast<AccT<T>>(units);
  int exponent;
  const double fraction = std::frexp(units, &exponent);
  return static_cast<AccT<T>>(std::ldexp(std::nearbyint(fraction * (1 << 16)), exponent - 16));
}

// Whether products of x with a factor have the order of x, from which x can be told, and what rounding takes of a
// float16's is small.
template <typename T>
bool IsPlainFactor(double factor) {
  return factor > 0x1p-100 && factor < (std::is_same_v<T, __half> ? 64 : 0x1p100);
}

// Powers z - m of the elements of a row, from the UnitFactor and m, which is Finite and in units.
template <typename T>
struct PowersOf {
  using Acc = AccT<T>;
  Acc slope, offset;

  __device__ __forceinline__ PowersOf(Acc factor, Acc m) {
    const Acc powers = LeavesRange(m) ? 1 : kPowers<T>;
    slope = factor * powers;
    offset = m * powers;
  }

  __device__ __forceinline__ Acc operator()(Acc x) const {
    return sizeof(T) == 2 ? fma(x, slope, -offset) : RoundedProduct(x, slope) - offset;
  }

  // What a result of operator() is multiplied by to become z - m itself.
  static __device__ __forceinline__ Acc Logit(Acc m) { return LeavesRange(m) ? kLogitOfUnit<T> : kLogitOfPower<T>; }

 private:
  // Whether m is no float32 as a number of powers. Then they are units: any x but the largest is so far below that its exp
  // is 0 as well.
  static __device__ __forceinline__ bool LeavesRange(Acc m) {
    return std::is_same_v<T, __nv_bfloat16> && isinf(m * kPowers<T>);
  }
};

inline constexpr float kHugePowers = 1 << 20;  // of which rounding takes 2^-4 at most
template <typename T>
__device__ __forceinline__ bool IsHuge(AccT<T> powers) {
  return sizeof(T) == 2 && !(fabs(powers) <= kHugePowers);
}

// Makes powers z - m of numbers x, from units per x and m, which is Finite and in units.
template <typename T, int kN>
__device__ __forceinline__ void ToPowers(AccT<T> (&x)[kN], AccT<T> factor, AccT<T> m) {
  using Acc = AccT<T>;
  const Acc slope = factor * kPowers<T>, offset = m * kPowers<T>;
  if constexpr (sizeof(T) != 2) {
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = RoundedProduct(x[i], slope) - offset;
  } else if (!IsHuge<T>(offset)) {
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = fma(x[i], slope, -offset);
  } else {
    // A bfloat16 may leave float32's range as a number of powers: what does counts as the largest in it.
    constexpr Acc kLargest = std::numeric_limits<Acc>::max();
    const auto in_range = [](Acc p) { return fmin(fmax(p, -kLargest), kLargest); };
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const Acc difference = in_range(RoundedProduct(x[i], slope)) - in_range(offset);
      x[i] = fabs(x[i]) <= kLargest ? difference : x[i] > 0 ? Acc(NAN) : x[i];
    }
  }
}

// Logarithm of a sum of exponentials of which the largest is about 1, and NaN of 0 or NaN: in half the instructions of log,
// with the same error of 1 ulp.
__device__ __forceinline__ float LogOfSum(float sum) {
  // sum = (1 + f) * 2^e with f in [sqrt(1/2) - 1, sqrt(2) - 1], for which log(1 + f) = f + f^2 * (f * P(f) - 1/2).
  const int bits = __float_as_int(sum), exponent = (bits - 0x3f3504f3) & 0xff800000;
  const float f = __int_as_float(bits - exponent) - 1, f2 = f * f;
  const float p01 = fma(-0.25001746f, f, 0.33333859f), p23 = fma(-0.16565627f, f, 0.19965397f);
  const float p45 = fma(-0.14350235f, f, 0.14876981f);
  const float p = fma(fma(fma(0.08917819f, f2, p45), f2, p23), f2, p01);
  const float log = fma(fma(p, f, -0.5f), f2, f);
  return sum > 0 ? fma(static_cast<float>(exponent), 0x1p-23f * 0.693147181f, log) : NAN;
}
__device__ __forceinline__ double LogOfSum(double sum) { return ::log(sum); }

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
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const Pair<T> m = __hmax2(Pair<T>(a.v[i], a.v[i + 1]), Pair<T>(b.v[i], b.v[i + 1]));
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

// Maximum m and sum of exp(z - m) of some elements z, in units. NaN is not carried by m but by the sum: fmax drops it, exp
// keeps it. m is Finite, so that maxima can be subtracted from each other; where one is inf, the sum is NaN already.
template <typename T>
struct MaxSum {
  using Acc = AccT<T>;
  Acc max, sum;

  static __device__ __forceinline__ MaxSum Identity() { return {Finite<T>(-Acc(INFINITY)), 0}; }
  static __device__ __forceinline__ MaxSum Merge(MaxSum a, MaxSum b) {
    const Acc m = Max(a.max, b.max);
    return {m, a.sum * ExpOfUnits<T>(a.max - m) + b.sum * ExpOfUnits<T>(b.max - m)};
  }
  // Of equal maxima.
  static __device__ __forceinline__ MaxSum AddSums(MaxSum a, MaxSum b) { return {a.max, a.sum + b.sum}; }
  static __device__ __forceinline__ MaxSum MergeLanes(MaxSum p, int width) {
    const Acc m = LaneReduce(p.max, width, [](Acc a, Acc b) { return Max(a, b); });
    return {m, LaneSum(p.sum * ExpOfUnits<T>(p.max - m), width)};
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
    return RoundedProduct(ToAcc(MaxElement(m)), factor);
  }
}

// ---- Columns (strided.cuh) ----
//
// Of an Op whose z is raw * op.factor in units; in kGeneral op.ColumnZ(raw, column, a, masked), -inf where masked.

// What is subtracted in a column, given its maximum, which is Finite. Where 16-bit numbers are all there is, it is the
// largest of them: with that subtracted first, whatever is rounded is small if it counts, however huge the number is.
template <typename Op>
__device__ __forceinline__ typename Op::Acc ColumnReference(const Op& op, typename Op::Acc max) {
  using T = typename Op::T;
  if constexpr (Op::kGeneral || sizeof(T) != 2) return max;
  const auto largest = ToAcc(FromAcc<T>(max * (1 / op.factor)));
  return fmax(largest, -std::numeric_limits<typename Op::Acc>::max());
}

// z - max in powers, of one element of each column. reference(v): ColumnReference of column v.
template <typename Op, int kN, typename Reference>
__device__ __forceinline__ void ColumnPowers(const Op& op, const Vec<typename Op::T, kN>& raw,
                                             const typename Op::Column& column, int a, Reference reference,
                                             typename Op::Acc (&powers)[kN], bool& masked) {
  using T = typename Op::T;
  if constexpr (Op::kGeneral) {
    powers[0] = (op.ColumnZ(raw.v[0], column, a, masked) - reference(0)) * kPowers<T>;
  } else {
    masked = false;
    ToAccAll(raw, powers);
#pragma unroll
    for (int v = 0; v < kN; ++v) {
      if constexpr (sizeof(T) == 2) {
        powers[v] = (powers[v] - reference(v)) * (op.factor * kPowers<T>);
      } else {
        powers[v] = RoundedProduct(powers[v], op.factor) - reference(v);
      }
    }
  }
}

// Op::ReduceColumns to a maximum and a sum. more(v, raw, masked) is called for each element of column v.
template <typename Op, typename Partial, int kN, typename ForParts, typename ForAll, typename BlockReduce,
          typename More>
__device__ __forceinline__ void ReduceColumnsToMaxSum(const Op& op, const typename Op::Column& column,
                                                      ForParts for_parts, ForAll for_all, BlockReduce block_reduce,
                                                      PerColumn<Partial, kN>& total, More more) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  bool masked;
  if constexpr (Op::kGeneral) {
    Vec<Acc, 1> m = {{-Acc(INFINITY)}};
    for_parts(
        [&](int a, const Vec<T, 1>(&raw)[1]) { m.v[0] = Max(m.v[0], op.ColumnZ(raw[0].v[0], column, a, masked)); });
    total.v[0].max = Finite<T>(block_reduce(m, MaxVec<Acc, 1>).v[0]);
  } else {
    auto m = std::bit_cast<Vec<T, kN>>(SplatWords(Op::NeutralInput()));
    for_parts([&](int, const Vec<T, kN>(&raw)[1]) { m = MaxVec(m, raw[0]); });
    m = block_reduce(m, MaxVec<T, kN>);
#pragma unroll
    for (int v = 0; v < kN; ++v) total.v[v].max = Finite<T>(RoundedProduct(ToAcc(m.v[v]), op.factor));
  }
  Acc reference[kN];
#pragma unroll
  for (int v = 0; v < kN; ++v) {
    total.v[v].sum = 0;
    reference[v] = ColumnReference(op, total.v[v].max);
  }
  for_all([&](int a, const Vec<T, kN>(&raw)[1]) {
    Acc powers[kN];
    ColumnPowers(op, raw[0], column, a, [&](int v) { return reference[v]; }, powers, masked);
#pragma unroll
    for (int v = 0; v < kN; ++v) total.v[v].sum += ExpOfPowers<T>(powers[v]);
#pragma unroll
    for (int v = 0; v < kN; ++v) more(v, raw[0].v[v], masked);
  });
}

template <typename T>
struct Sum {
  using Acc = AccT<T>;
  Acc sum;
  static __device__ __forceinline__ Sum Identity() { return {0}; }
  static __device__ __forceinline__ Sum Merge(Sum a, Sum b) { return {a.sum + b.sum}; }
  static __device__ __forceinline__ Sum AddSums(Sum a, Sum b) { return Merge(a, b); }
  static __device__ __forceinline__ Sum MergeLanes(Sum p, int width) { return {LaneSum(p.sum, width)}; }
};

// Runs such an operation along the axis of args.shape. `simple`: no optional operand, none that broadcasts.
// float64 takes the general mode always: it is there to be right, not to fill the code with more kernels.
template <template <typename, Mode> typename Op, typename Args>
Error LaunchSoftmax(cudaStream_t stream, const Args& args, bool simple, Scratch scratch, const char* name) {
  const AxisShape& shape = args.shape;
  JAXNORM_CHECK(shape.axis < INT32_MAX / 2);  // positions within a row are 32-bit; Python lowers the formula instead
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) -> Error {
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
      if constexpr (requires { general.plain_factor; }) full = full && general.plain_factor;
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
