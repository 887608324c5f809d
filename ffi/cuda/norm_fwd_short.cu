// layer_norm and rms_norm, forward, of short rows.
//
// A row is in the registers of 1..32 lanes, a slot in each. Each thread works on several rows with the same columns, whose
// scale and bias it loads once: they may be larger than the rows' slots, and loading them for each row would take longer
// than all else. How many lanes a row has is known when this is compiled: a loop of shuffles that is not unrolled was
// measured to cost 4%.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

// Measured to be the fastest of 1 to 8 rows and of 64 to 256 threads; two rows are up to 20% faster than one.
inline constexpr int kShortThreads = 128;
constexpr int ShortRows(int lanes) { return lanes < kWarp ? 3 : 2; }  // of a thread

// Row r of a thread is r * kGroups after its first. (With kRows a variable, nvcc 13.0 crashes.)
template <typename Op, int kLanes, int kRows = ShortRows(kLanes)>
__global__ void __launch_bounds__(kShortThreads) NormFwdShortKernel(const __grid_constant__ Op op) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  constexpr int kVec = Op::kVec, kGroups = kShortThreads / kLanes;
  using V = Vec<T, kVec>;
  static_assert(Op::kMode == Mode::kPlain);
  const int lane = threadIdx.x % kLanes;
  const bool active = lane * kVec < op.cols;
  const int64_t first_row = int64_t{blockIdx.x} * (kGroups * kRows) + threadIdx.x / kLanes;
  const auto left = static_cast<int>(min(op.rows - first_row, int64_t{kGroups * kRows}));
  const int64_t offset = first_row * op.cols + lane * kVec;
  const auto inside = [&](int r) { return r * kGroups < left; };
  const auto at = [&](int r) { return offset + r * (kGroups * op.cols); };

  const auto load = [&](const T* from, V(&to)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // As words: a condition on a vector of 16-bit elements is compiled to one selection for each of them.
      uint4 words = {};
      if (inside(r) && active) words = std::bit_cast<uint4>(jaxnorm::Load(from + at(r)));
      to[r] = std::bit_cast<V>(words);
    }
  };
  V rows[kRows];
  load(op.x.data, rows);
  Acc factor[kVec], shift[kVec];
  op.Parameters(active ? lane * kVec : 0, factor, shift);
  if (op.Has(1)) {
    V added[kRows];
    load(op.residual.data, added);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = AddRounded(rows[r], added[r]);
      if (inside(r) && active) jaxnorm::Store(op.sum + at(r), rows[r]);
    }
  }

  op.WithVariant([&](auto center) {
    Acc values[kRows][kVec];
#pragma unroll
    for (int r = 0; r < kRows; ++r) ToAccAll(rows[r], values[r]);
    // Sums over each row of f(value).
    const auto sum_rows = [&](Acc(&sums)[kRows], auto f) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r] = 0;
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[r] += f(values[r][j]);
      }
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] += __shfl_xor_sync(kAllLanes, sums[r], distance);
      }
    };
    const auto subtract = [&](const Acc(&amounts)[kRows]) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const Acc amount = active ? amounts[r] : Acc(0);
#pragma unroll
        for (int j = 0; j < kVec; ++j) values[r][j] -= amount;
      }
    };

    const Acc count = static_cast<Acc>(op.cols), inverse = 1 / count;
    Acc mean[kRows] = {}, squares[kRows];
    if (center) {
      sum_rows(mean, [](Acc s) { return s; });
#pragma unroll
      for (int r = 0; r < kRows; ++r) mean[r] = MeanOf(mean[r], count, inverse);
      subtract(mean);
      if constexpr (kCorrectsMean<T>) {
        Acc rest[kRows];
        sum_rows(rest, [](Acc d) { return d; });
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          rest[r] *= inverse;
          mean[r] += rest[r];
        }
        subtract(rest);
      }
    }
    sum_rows(squares, [](Acc d) { return d * d; });
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!inside(r)) continue;
      const typename Op::Final final = {mean[r], InverseSqrt(fma(squares[r], inverse, op.epsilon))};
      if (lane == 0) op.StoreStatistics(center, first_row + r * kGroups, final);
      if (!active) continue;
      Acc out[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) out[j] = fma(values[r][j] * final.rstd, factor[j], shift[j]);
      jaxnorm::Store(op.y + at(r), RoundVec<T>(out));
    }
  });
}

template <int kLanes, typename Op>
ffi::Error LaunchShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name) {
  const Grid grid = {.blocks = CeilDiv(op.rows, kShortThreads / kLanes * ShortRows(kLanes)), .threads = kShortThreads};
  return Launch<NormFwdShortKernel<Op, kLanes>>(device, stream, grid, name, op);
}

}  // namespace

template <typename Op>
ffi::Error LaunchNormFwdShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots,
                              const char* name) {
  switch (NextPowerOfTwo(slots)) {
    case 1:
      return LaunchShort<1>(device, stream, op, name);
    case 2:
      return LaunchShort<2>(device, stream, op, name);
    case 4:
      return LaunchShort<4>(device, stream, op, name);
    case 8:
      return LaunchShort<8>(device, stream, op, name);
    case 16:
      return LaunchShort<16>(device, stream, op, name);
    default:
      return LaunchShort<32>(device, stream, op, name);
  }
}

#define JAXNORM_INSTANTIATE(T)                                                                                        \
  template ffi::Error LaunchNormFwdShort(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, int slots, \
                                         const char*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
