// ReLU on the bits of numbers, and masks of one bit per element (relu_args.h says how they are packed).
//
// Sign-magnitude order makes x > 0 an integer comparison, which is exact for subnormals (XLA's threads flush them in
// float arithmetic).
#ifndef JAXNORM_CPU_BITS_H_
#define JAXNORM_CPU_BITS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace jaxnorm {

template <typename T>
using BitsOf = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

template <typename T>
inline constexpr BitsOf<T> kInfinityBits = 0x7f800000u;
template <>
inline constexpr uint16_t kInfinityBits<F16> = 0x7c00u;
template <>
inline constexpr uint16_t kInfinityBits<BF16> = 0x7f80u;
template <>
inline constexpr uint64_t kInfinityBits<double> = 0x7ff0000000000000u;

// x > 0; false for NaN. Zero wraps around to the largest integer.
template <typename T>
JAXNORM_INLINE bool IsPositive(BitsOf<T> x) {
  return static_cast<BitsOf<T>>(x - 1) < kInfinityBits<T>;
}

// max(x, 0); NaN stays. Negative numbers, -0 and -inf lie between the sign bit and the negative infinity.
template <typename T>
JAXNORM_INLINE BitsOf<T> MaxWithZero(BitsOf<T> x) {
  constexpr auto kSign = static_cast<BitsOf<T>>(~(static_cast<BitsOf<T>>(~BitsOf<T>{0}) >> 1));
  return static_cast<BitsOf<T>>(x - kSign) <= kInfinityBits<T> ? BitsOf<T>{0} : x;
}

// Packs eight bytes, each 0 or 1, into the bits of one: pairs, then pairs of pairs, then both halves.
JAXNORM_INLINE uint8_t PackBits(uint64_t bytes) {
  bytes |= bytes >> 7;
  bytes |= bytes >> 14;
  bytes |= bytes >> 28;
  return static_cast<uint8_t>(bytes);
}

// Spreads the bits of a byte over eight bytes, each 0 or not: a copy of the byte each, of which one bit is kept.
JAXNORM_INLINE uint64_t SpreadBits(uint64_t bits) {
  bits |= bits << 8;
  bits |= bits << 16;
  bits |= bits << 32;
  return bits & 0x8040201008040201u;
}

// Work goes in blocks whose flags, a byte per element, stay in the first-level cache: whole rows, or a part of one.
inline constexpr int64_t kBlockElements = 2048;

// From the mask of adjoining rows to a flag per element. Those of a row end in up to seven bytes too many, which the
// next row overwrites.
JAXNORM_INLINE void UnpackMask(const uint8_t* mask, int64_t rows, int64_t cols, uint8_t* flags) {
  const int64_t bytes = (cols + 7) / 8;
  for (int64_t row = 0; row < rows; ++row) {
#pragma omp simd
    for (int64_t b = 0; b < bytes; ++b) {
      const uint64_t eight = SpreadBits(mask[row * bytes + b]);
      std::memcpy(flags + row * cols + 8 * b, &eight, 8);
    }
  }
}

JAXNORM_INLINE void PackMask(const uint8_t* flags, int64_t rows, int64_t cols, uint8_t* mask) {
  const int64_t whole = cols / 8, spare_bits = 64 - cols % 8 * 8;
  for (int64_t row = 0; row < rows; ++row) {
#pragma omp simd
    for (int64_t b = 0; b < whole; ++b) {
      uint64_t eight;
      std::memcpy(&eight, flags + row * cols + 8 * b, 8);
      mask[b] = PackBits(eight);
    }
    mask += whole;
    if (cols % 8 != 0) {
      uint64_t eight;
      std::memcpy(&eight, flags + row * cols + 8 * whole, 8);
      *mask++ = PackBits(eight << spare_bits >> spare_bits);
    }
  }
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_BITS_H_
