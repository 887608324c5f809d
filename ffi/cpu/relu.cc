// ReLU with a saved bit per element.
//
// Everything but the sum of the two-operand form works on the bits of the numbers: sign-magnitude order makes x > 0 an
// integer comparison, which is exact for subnormals (XLA's threads flush them in float arithmetic) and lets 16-bit
// types skip the conversion to float32.
#include <cstring>
#include <type_traits>

#include "parallel.h"
#include "relu_args.h"
#include "simd.h"

namespace jaxnorm {
namespace {

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

template <typename T, bool kAdd>
struct ReluFwdBlock {
  const void* x;
  const void* z;
  void* y;
  uint8_t* mask;

  JAXNORM_INLINE void operator()(int64_t start, int64_t mask_start, int64_t rows, int64_t cols) const {
    using Bits = BitsOf<T>;
    const Bits* x_bits = static_cast<const Bits*>(x) + start;
    const T* x_values = static_cast<const T*>(x) + start;
    const T* z_values = static_cast<const T*>(z) + (kAdd ? start : 0);
    Bits* y_bits = static_cast<Bits*>(y) + start;
    alignas(64) uint8_t flags[kBlockElements + 8];
    const int64_t size = rows * cols;
    if constexpr (kAdd && std::is_same_v<T, F16>) {  // its conversions are fast in bulk only (see ToAccRun)
      alignas(64) float sum[kBlockElements], addend[kBlockElements];
      ToAccRun(x_values, sum, size);
      ToAccRun(z_values, addend, size);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) sum[i] += addend[i];
      FromAccRun(sum, static_cast<T*>(y) + start, size);
      x_bits = y_bits;
    }
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      Bits sum;
      if constexpr (kAdd && !std::is_same_v<T, F16>) {
        sum = std::bit_cast<Bits>(FromAcc<T>(ToAcc(x_values[i]) + ToAcc(z_values[i])));
      } else {
        sum = x_bits[i];
      }
      y_bits[i] = MaxWithZero<T>(sum);
      flags[i] = IsPositive<T>(sum);
    }
    PackMask(flags, rows, cols, mask + mask_start);
  }
};

template <typename T>
struct ReluBwdBlock {
  const uint8_t* mask;
  const void* t;
  void* out;

  JAXNORM_INLINE void operator()(int64_t start, int64_t mask_start, int64_t rows, int64_t cols) const {
    using Bits = BitsOf<T>;
    const Bits* t_bits = static_cast<const Bits*>(t) + start;
    Bits* out_bits = static_cast<Bits*>(out) + start;
    alignas(64) uint8_t flags[kBlockElements + 8];
    UnpackMask(mask + mask_start, rows, cols, flags);
    const int64_t size = rows * cols;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const Bits value = t_bits[i];
      out_bits[i] = flags[i] != 0 ? value : Bits{0};
    }
  }
};

// Rows [begin, end) of an array of `size` elements in rows of `cols`, of which the last may be shorter.
template <typename Block>
JAXNORM_SIMD_CLONES void RunBlocks(const Block& block, int64_t size, int64_t cols, int64_t begin, int64_t end) {
  const int64_t mask_cols = (cols + 7) / 8;
  if (cols <= kBlockElements) {
    const int64_t together = kBlockElements / cols;
    for (int64_t row = begin; row < end; row += together) {
      block(row * cols, row * mask_cols, std::min(together, end - row), cols);
    }
    return;
  }
  for (int64_t row = begin; row < end; ++row) {
    const int64_t n = std::min(cols, size - row * cols);
    for (int64_t start = 0; start < n; start += kBlockElements) {
      block(row * cols + start, row * mask_cols + start / 8, 1, std::min(kBlockElements, n - start));
    }
  }
}

template <typename Block>
ffi::Error RunRows(ffi::ThreadPool& pool, const ReluArgs& args, const Block& block) {
  // Where cols % 8 == 0 the masks of all rows adjoin, so the array is one row: cut it anew, into pieces for threads.
  const int64_t cols = args.cols % 8 == 0 ? kGrainElements : args.cols;
  ParallelFor(pool, (args.size() + cols - 1) / cols, std::max<int64_t>(1, kGrainElements / cols),
              [&](int64_t begin, int64_t end) { RunBlocks(block, args.size(), cols, begin, end); });
  return ffi::Error::Success();
}

ffi::Error ReluFwd(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                   ffi::Result<ffi::AnyBuffer> mask) {
  ReluArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseReluFwd(x, rest, *y, *mask, &args));
  if (args.size() == 0) return ffi::Error::Success();
  return DispatchFloat(args.dtype, [&]<typename T>(T) {
    return args.z == nullptr ? RunRows(pool, args, ReluFwdBlock<T, false>{args.x, nullptr, args.y, args.mask})
                             : RunRows(pool, args, ReluFwdBlock<T, true>{args.x, args.z, args.y, args.mask});
  });
}

ffi::Error ReluBwd(ffi::ThreadPool pool, ffi::AnyBuffer mask, ffi::AnyBuffer t, ffi::Result<ffi::AnyBuffer> out) {
  ReluArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseRelu(t, *out, mask, &args));
  if (args.size() == 0) return ffi::Error::Success();
  return DispatchFloat(args.dtype,
                       [&]<typename T>(T) { return RunRows(pool, args, ReluBwdBlock<T>{args.mask, args.x, args.y}); });
}

}  // namespace

JAXNORM_REGISTER(relu_fwd, ReluFwd,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>());

JAXNORM_REGISTER(
    relu_bwd, ReluBwd,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace jaxnorm
