// Arithmetic that the compiler turns into vector code: element types, their conversions, exp, and the dtype dispatch.
//
// Loops marked `#pragma omp simd` sit in functions that are compiled once per instruction set (JAXNORM_SIMD_CLONES). A
// clone is picked when the module loads. All code that a clone calls is branch-free and inlined (JAXNORM_INLINE),
// because a call to a function outside the clone would fall back to the baseline instruction set. Only conversions of
// 16-bit floats use intrinsics.
#ifndef JAXNORM_CPU_SIMD_H_
#define JAXNORM_CPU_SIMD_H_

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "call.h"

#define JAXNORM_INLINE inline __attribute__((always_inline))
// The same for lambdas, where the attribute follows the parameter list.
#define JAXNORM_INLINE_LAMBDA __attribute__((always_inline))

// Picking a clone when the module loads takes an ifunc, which glibc has. aarch64 has NEON in its baseline.
#if defined(__x86_64__) && defined(__GLIBC__)
#define JAXNORM_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JAXNORM_SIMD_CLONES
#endif

namespace jaxnorm {

// The 16-bit floats are plain bits here: GCC 12 does not vectorise conversions from and to its own _Float16.
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

template <typename T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
// The type of arithmetic on T.
template <typename T>
using Acc = typename AccOf<T>::type;

// Rows are processed in blocks of this many elements: a whole 64-byte vector of T, so that a loop over blocks has no
// remainder in any clone.
template <typename T>
inline constexpr int64_t kLanes = 64 / sizeof(T);

// The terms, or the results, of a loop that adds up two sums.
template <typename A>
struct Two {
  A first, second;
};

template <typename T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

JAXNORM_INLINE float ToAcc(float x) { return x; }
JAXNORM_INLINE double ToAcc(double x) { return x; }
JAXNORM_INLINE float ToAcc(BF16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
JAXNORM_INLINE float ToAcc(F16 x) {
  constexpr uint32_t kRebias = (127 - 15) << 23;
  const uint32_t magnitude = x.bits & 0x7fffu;
  // Subnormals go through an integer conversion, since XLA's threads flush subnormal float32 inputs to zero.
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t normal = (magnitude << 13) + kRebias + (magnitude >= 0x7c00u ? kRebias : 0);
  const uint32_t bits = magnitude < 0x0400u ? std::bit_cast<uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(bits | (static_cast<uint32_t>(x.bits & 0x8000u) << 16));
}

// Rounds to nearest even; NaN stays NaN.
template <typename T>
T FromAcc(Acc<T> x);
template <>
JAXNORM_INLINE float FromAcc<float>(float x) {
  return x;
}
template <>
JAXNORM_INLINE double FromAcc<double>(double x) {
  return x;
}
template <>
JAXNORM_INLINE BF16 FromAcc<BF16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7fc0u : rounded)};
}
template <>
JAXNORM_INLINE F16 FromAcc<F16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - ((127 - 15) << 10);
  normal = magnitude >= 0x47800000u ? 0x7c00u : normal;  // from 65536 on; 65520 and above round to 0x7c00 by themselves
  // Adding 0.5, whose last place is 2^-24, rounds to a multiple of float16's smallest subnormal.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return {static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u))};
}

// to[i] = from[i] for n elements.
template <typename T>
JAXNORM_INLINE void ToAccRun(const T* from, Acc<T>* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = ToAcc(from[i]);
}
template <typename T>
JAXNORM_INLINE void FromAccRun(const Acc<T>* from, T* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = FromAcc<T>(from[i]);
}

#ifdef __x86_64__
// GCC 12 does not use the conversion instructions for float16, which are several times as fast as the integer
// arithmetic above. For bfloat16 it emits twice as many instructions as needed.
inline const bool kHasF16C = __builtin_cpu_supports("f16c"), kHasAvx2 = __builtin_cpu_supports("avx2");

// n is at least 8. The last vector may overlap the vector before it.
__attribute__((target("avx,f16c"))) inline void ConvertRun(const F16* from, float* to, int64_t n) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < n - 8; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  _mm256_storeu_ps(to + n - 8, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + n - 8))));
}
__attribute__((target("avx,f16c"))) inline void ConvertRun(const float* from, F16* to, int64_t n) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < n - 8; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + n - 8), _mm256_cvtps_ph(_mm256_loadu_ps(from + n - 8), 0));
}
__attribute__((target("avx2"))) inline void ConvertEight(const BF16* from, float* to) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
}
__attribute__((target("avx2"))) inline void ConvertEight(const float* from, BF16* to) {
  const __m256 x = _mm256_loadu_ps(from);
  const __m256i bits = _mm256_castps_si256(x),
                odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1)));
}
template <typename From, typename To>
__attribute__((target("avx2"))) void ConvertRun(const From* from, To* to, int64_t n) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < n - 8; i += 8) ConvertEight(from + i, to + i);
  ConvertEight(from + n - 8, to + n - 8);
}
template <>
JAXNORM_INLINE void ToAccRun<F16>(const F16* from, float* to, int64_t n) {
  if (kHasF16C && n >= 8) return ConvertRun(from, to, n);
  for (int64_t i = 0; i < n; ++i) to[i] = ToAcc(from[i]);
}
template <>
JAXNORM_INLINE void FromAccRun<F16>(const float* from, F16* to, int64_t n) {
  if (kHasF16C && n >= 8) return ConvertRun(from, to, n);
  for (int64_t i = 0; i < n; ++i) to[i] = FromAcc<F16>(from[i]);
}
template <>
JAXNORM_INLINE void ToAccRun<BF16>(const BF16* from, float* to, int64_t n) {
  if (kHasAvx2 && n >= 8) return ConvertRun(from, to, n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = ToAcc(from[i]);
}
template <>
JAXNORM_INLINE void FromAccRun<BF16>(const float* from, BF16* to, int64_t n) {
  if (kHasAvx2 && n >= 8) return ConvertRun(from, to, n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = FromAcc<BF16>(from[i]);
}
#endif

// e^x for x <= 88 or NaN, which is all that softmax needs: 2^n * e^r with n = round(x / ln 2) and r = x - n ln 2 in
// [-ln2/2, ln2/2], where e^r is 1 + r + a minimax polynomial. Adding 1.5 * 2^(mantissa bits) rounds to an integer in
// the low bits; with the exponent bias added as well, shifting those bits into the exponent gives 2^n. The clamp makes
// n reach the value for which that is 0; it is written so that NaN passes. ln 2 is split so that n * kLn2High is exact
// without FMA.
// float32: error below 2 ulp down to the smallest normal number, 0 below.
JAXNORM_INLINE float Exp(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 0x1.8p23f + 127;
  x = x < -88.0f ? -88.0f : x;
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 0.001381454f;
  p = p * r + 0.008368745f;
  p = p * r + 0.04166839f;
  p = p * r + 0.16666521f;
  p = p * r + 0.49999994f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * std::bit_cast<float>(std::bit_cast<uint32_t>(shifted) << 23);
}
// float64: relative error about 1e-15.
JAXNORM_INLINE double Exp(double x) {
  constexpr double kLog2E = 0x1.71547652b82fep0, kLn2High = 0x1.62e42fefa0000p-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
  constexpr double kRound = 0x1.8p52 + 1023;
  x = x < -709.0 ? -709.0 : x;
  const double shifted = x * kLog2E + kRound;
  const double n = shifted - kRound;
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double p = 0x1.8d9547c59fa95p-26;
  p = p * r + 0x1.28d9c7700a9d4p-22;
  p = p * r + 0x1.71f6931651577p-19;
  p = p * r + 0x1.a0195f79927e9p-16;
  p = p * r + 0x1.a019f4eaa4da0p-13;
  p = p * r + 0x1.6c16c19fbaebdp-10;
  p = p * r + 0x1.11111113d3583p-7;
  p = p * r + 0x1.5555555545830p-5;
  p = p * r + 0x1.555555555488dp-3;
  p = p * r + 0x1.000000000003ap-1;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return p * std::bit_cast<double>(std::bit_cast<uint64_t>(shifted) << 52);
}

// log x for normal x, 0, infinity or NaN: x = 2^n * m with m in [sqrt(1/2), sqrt(2)), and a minimax polynomial in m - 1
// (Cephes' logf). float32: error below 2 ulp. There is no vector code for float64.
JAXNORM_INLINE float Log(float x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3u;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const uint32_t bits = std::bit_cast<uint32_t>(x) - kSqrtHalf;
  const float n = static_cast<float>(static_cast<int32_t>(bits) >> 23);
  const float f = std::bit_cast<float>((bits & 0x7fffffu) + kSqrtHalf) - 1.0f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const float square = f * f;
  const float log = (f + ((square * f * p + n * kLn2Low) - 0.5f * square)) + n * kLn2High;
  return x == 0.0f ? -kInfinity<float> : x <= std::numeric_limits<float>::max() ? log : x;
}
JAXNORM_INLINE double Log(double x) { return std::log(x); }

// Calls body(T{}) with the element type that `dtype` names; body returns an Error.
template <typename Body>
Error DispatchFloat(DataType dtype, Body&& body) {
  switch (dtype) {
    case DataType::kF16:
      return body(F16{});
    case DataType::kBF16:
      return body(BF16{});
    case DataType::kF32:
      return body(float{});
    case DataType::kF64:
      return body(double{});
    default:
      return Error::InvalidArgument("jaxnorm: the dtype must be float16, bfloat16, float32 or float64");
  }
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_SIMD_H_
