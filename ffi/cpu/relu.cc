// ReLU with a saved bit per element.
//
// Everything but the sum of the two-operand form works on the bits of the numbers (bits.h), so that 16-bit types need
// no conversion to float32.
#include <type_traits>

#include "bits.h"
#include "parallel.h"
#include "relu_call.h"
#include "simd.h"

namespace jaxnorm {
namespace {

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
    if constexpr (kAdd && std::is_same_v<T, F16>) {  // float16 conversions are fast in bulk only: see ToAccRun
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

// Runs rows [begin, end) of an array of `size` elements in rows of `cols`. The last row may be shorter.
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
Error RunRows(ffi::ThreadPool& pool, const ReluArgs& args, const Block& block) {
  // Where cols % 8 == 0 the masks of all rows adjoin, so the array is one row: cut it anew, into pieces for threads.
  const int64_t cols = args.cols % 8 == 0 ? kGrainElements : args.cols;
  ParallelFor(pool, (args.size() + cols - 1) / cols, cols,
              [&](int64_t begin, int64_t end) { RunBlocks(block, args.size(), cols, begin, end); });
  return Error::Success();
}

Error ReluFwd(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
              ffi::Result<ffi::AnyBuffer> mask) {
  ReluArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseReluFwd(x, rest, *y, *mask, &args));
  if (args.size() == 0) return Error::Success();
  return DispatchFloat(args.dtype, [&]<typename T>(T) {
    return args.z == nullptr ? RunRows(pool, args, ReluFwdBlock<T, false>{args.x, nullptr, args.y, args.mask})
                             : RunRows(pool, args, ReluFwdBlock<T, true>{args.x, args.z, args.y, args.mask});
  });
}

Error ReluBwd(ffi::ThreadPool pool, ffi::AnyBuffer mask, ffi::AnyBuffer t, ffi::Result<ffi::AnyBuffer> out) {
  ReluArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseRelu(t, *out, mask, &args));
  if (args.size() == 0) return Error::Success();
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
