// layer_norm and rms_norm, forward, of short rows.
//
// A row is in the registers of 1..32 lanes, a slot in each. Each thread works on several rows with the same columns, whose
// scale and bias it loads once: they may be larger than the rows' slots, and loading them for each row would take longer
// than all else.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kShortThreads = 128;
inline constexpr int kShortRows = 4;  // of a thread

// Row r of a thread is r * (groups of lanes in the block) after its first.
template <typename Op>
__global__ void __launch_bounds__(kShortThreads, 5)
    NormFwdShortKernel(const __grid_constant__ Op op, const int log2_lanes) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  using V = Vec<T, Op::kVec>;
  constexpr int kVec = Op::kVec, kRows = kShortRows;
  static_assert(Op::kMode == Mode::kPlain);
  const int lanes = 1 << log2_lanes, lane = threadIdx.x & (lanes - 1);
  const int groups = kShortThreads >> log2_lanes;
  const int64_t first_row = int64_t{blockIdx.x} * (groups * kRows) + (threadIdx.x >> log2_lanes);
  const int left = static_cast<int>(min(op.rows - first_row, static_cast<int64_t>(kShortThreads * kRows)));
  const int64_t offset = first_row * op.cols + lane * kVec;
  const int row_step = groups * op.cols;
  const bool active = lane * kVec < op.cols;
  const auto inside = [&](int r) { return r * groups < left; };
  const auto at = [&](int r) { return offset + r * row_step; };

  const auto load = [&](const T* from, V(&to)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      uint4 words = {};
      if (inside(r) && active) words = std::bit_cast<uint4>(jaxnorm::Load(from + at(r)));
      to[r] = std::bit_cast<V>(words);
    }
  };
  V raw[kRows];
  load(op.x.data, raw);
  Acc factor[kVec], shift[kVec];
  op.Parameters(active ? lane * kVec : 0, factor, shift);
  if (op.Has(1)) {
    V added[kRows];
    load(op.residual.data, added);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      raw[r] = AddRounded(raw[r], added[r]);
      if (inside(r) && active) jaxnorm::Store(op.sum + at(r), raw[r]);
    }
  }
  Acc values[kRows][kVec];  // 0 where there is no slot
#pragma unroll
  for (int r = 0; r < kRows; ++r) ToAccAll(raw[r], values[r]);
  // Sums over each row of f(value).
  const auto sum_rows = [&](Acc(&sums)[kRows], auto f) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = 0;
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[r] += f(values[r][i]);
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] += __shfl_xor_sync(kAllLanes, sums[r], distance);
    }
  };
  const auto subtract = [&](const Acc(&amounts)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Acc amount = active ? amounts[r] : Acc(0);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[r][i] -= amount;
    }
  };
  const Acc count = static_cast<Acc>(op.cols), inverse = 1 / count;
  op.WithVariant([&](auto center) {
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
      if (lane == 0) op.StoreStatistics(center, first_row + r * groups, final);
      if (!active) continue;
      Acc out[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) out[i] = fma(values[r][i] * final.rstd, factor[i], shift[i]);
      jaxnorm::Store(op.y + at(r), RoundVec<T>(out));
    }
  });
}

}  // namespace

template <typename Op>
ffi::Error LaunchNormFwdShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots,
                              const char* name) {
  const int lanes = NextPowerOfTwo(slots), log2_lanes = std::countr_zero(static_cast<unsigned>(lanes));
  const Grid grid = {.blocks = CeilDiv(op.rows, kShortThreads / lanes * kShortRows), .threads = kShortThreads};
  return Launch<NormFwdShortKernel<Op>>(device, stream, grid, name, op, log2_lanes);
}

#define JAXNORM_INSTANTIATE(T)                                                                                        \
  template ffi::Error LaunchNormFwdShort(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, int slots, \
                                         const char*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
