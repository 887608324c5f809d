// ReLU on the bits of numbers, and masks of one bit per element (relu_call.h says how they are packed).
//
// Sign-magnitude order makes x > 0 an integer comparison, which is exact for subnormals (XLA's threads flush them in
// float arithmetic).
#ifndef JAXNORM_CPU_BITS_H_
#define JAXNORM_CPU_BITS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

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

// Spreads the bits of a byte over eight bytes, each zero or nonzero: byte i is a copy of the byte with only bit i kept.
JAXNORM_INLINE uint64_t SpreadBits(uint64_t bits) {
  bits |= bits << 8;
  bits |= bits << 16;
  bits |= bits << 32;
  return bits & 0x8040201008040201u;
}

// Elements of a block, which is whole rows or a part of one row. Its flags, a byte per element, stay in the first-level
// cache.
inline constexpr int64_t kBlockElements = 2048;

// Packs flags into a run of bits, and back, eight flags at a time.
JAXNORM_INLINE void PackRun(const uint8_t* flags, int64_t bytes, uint8_t* bits) {
#pragma omp simd
  for (int64_t b = 0; b < bytes; ++b) {
    uint64_t eight;
    std::memcpy(&eight, flags + 8 * b, 8);
    bits[b] = PackBits(eight);
  }
}
JAXNORM_INLINE void UnpackRun(const uint8_t* bits, int64_t bytes, uint8_t* flags) {
#pragma omp simd
  for (int64_t b = 0; b < bytes; ++b) {
    const uint64_t eight = SpreadBits(bits[b]);
    std::memcpy(flags + 8 * b, &eight, 8);
  }
}

// Rows with up to this many bytes of mask are short: a loop over the bytes of a row would cost more than the bytes do,
// so the number of bytes is a compile-time constant.
inline constexpr int64_t kShortRowBytes = 8;

template <int kBytes>
JAXNORM_INLINE void UnpackRows(const uint8_t* mask, int64_t rows, int64_t cols, uint8_t* flags) {
  for (int64_t row = 0; row < rows; ++row) {
#pragma GCC unroll 8
    for (int b = 0; b < kBytes; ++b) {
      const uint64_t eight = SpreadBits(mask[row * kBytes + b]);
      std::memcpy(flags + row * cols + 8 * b, &eight, 8);
    }
  }
}
template <int kBytes>
JAXNORM_INLINE void PackRows(const uint8_t* flags, int64_t rows, int64_t cols, uint8_t* mask) {
  const int64_t spare_bits = 64 * kBytes - 8 * cols;
  for (int64_t row = 0; row < rows; ++row) {
#pragma GCC unroll 8
    for (int b = 0; b < kBytes; ++b) {
      uint64_t eight;
      std::memcpy(&eight, flags + row * cols + 8 * b, 8);
      if (b == kBytes - 1) eight = eight << spare_bits >> spare_bits;
      mask[row * kBytes + b] = PackBits(eight);
    }
  }
}

// Calls body(integral constant) with `bytes`, which is at most kShortRowBytes.
template <typename Body>
JAXNORM_INLINE void WithBytes(int64_t bytes, const Body& body) {
  const auto call = [&]<int... kBytes>(std::integer_sequence<int, kBytes...>) JAXNORM_INLINE_LAMBDA {
    ((bytes == kBytes + 1 ? body(std::integral_constant<int, kBytes + 1>()) : void()), ...);
  };
  call(std::make_integer_sequence<int, kShortRowBytes>());
}

// Not inlined: there is nothing to vectorise, and many callers.
__attribute__((noinline)) inline void UnpackShortRows(const uint8_t* mask, int64_t rows, int64_t cols, uint8_t* flags) {
  WithBytes((cols + 7) / 8, [&](auto bytes) JAXNORM_INLINE_LAMBDA { UnpackRows<bytes>(mask, rows, cols, flags); });
}
__attribute__((noinline)) inline void PackShortRows(const uint8_t* flags, int64_t rows, int64_t cols, uint8_t* mask) {
  WithBytes((cols + 7) / 8, [&](auto bytes) JAXNORM_INLINE_LAMBDA { PackRows<bytes>(flags, rows, cols, mask); });
}

// Unpacks the mask of adjoining rows to a flag per element. A row writes up to seven flags too many, which the next row
// overwrites.
JAXNORM_INLINE void UnpackMask(const uint8_t* mask, int64_t rows, int64_t cols, uint8_t* flags) {
  const int64_t bytes = (cols + 7) / 8;
  if (rows > 1 && bytes <= kShortRowBytes) {
    UnpackShortRows(mask, rows, cols, flags);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) UnpackRun(mask + row * bytes, bytes, flags + row * cols);
}

// Reads up to seven bytes too many.
JAXNORM_INLINE void PackMask(const uint8_t* flags, int64_t rows, int64_t cols, uint8_t* mask) {
  const int64_t bytes = (cols + 7) / 8, whole = cols / 8, spare_bits = 64 - cols % 8 * 8;
  if (rows > 1 && bytes <= kShortRowBytes) {
    PackShortRows(flags, rows, cols, mask);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    PackRun(flags + row * cols, whole, mask + row * bytes);
    if (cols % 8 != 0) {
      uint64_t eight;
      std::memcpy(&eight, flags + row * cols + 8 * whole, 8);
      mask[row * bytes + whole] = PackBits(eight << spare_bits >> spare_bits);
    }
  }
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_BITS_H_
