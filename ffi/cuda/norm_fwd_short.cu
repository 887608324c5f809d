// layer_norm and rms_norm, forward, of short rows.
//
// A row is in the registers of 1..32 lanes. Each thread works on several rows with the same columns, whose scale and
// bias it loads once: they may be larger than the rows' slots, and loading them for each row would take longer than all
// else.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kShortThreads = 128;
inline constexpr int kShortPerThread = 4;  // slots, of all rows

// Slot j of lane t of a row's 2^log2_lanes is j * lanes + t; row r of a thread is r * (groups of lanes in the block)
// after its first.
template <typename Op, int kItems, int kRows>
__global__ void __launch_bounds__(kShortThreads, 5)
    NormFwdShortKernel(const __grid_constant__ Op op, const int log2_lanes) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  using V = Vec<T, Op::kVec>;
  constexpr int kVec = Op::kVec;
  static_assert(Op::kMode == Mode::kPlain);
  const int lanes = 1 << log2_lanes, lane = threadIdx.x & (lanes - 1);
  const int groups = kShortThreads >> log2_lanes;
  const int64_t first_row = int64_t{blockIdx.x} * (groups * kRows) + (threadIdx.x >> log2_lanes);
  const int left = static_cast<int>(min(op.rows - first_row, static_cast<int64_t>(kShortThreads * kRows)));
  const int64_t offset = first_row * op.cols + lane * kVec;
  const int row_step = groups * op.cols, slot_step = lanes * kVec;
  const auto inside = [&](int r) { return r * groups < left; };
  const auto active = [&](int j) { return (lane + j * lanes) * kVec < op.cols; };
  const auto at = [&](int r, int j) { return offset + (r * row_step + j * slot_step); };

  const auto load = [&](const T* from, V(&to)[kRows][kItems]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        uint4 words = {};
        if (inside(r) && active(j)) words = std::bit_cast<uint4>(jaxnorm::Load(from + at(r, j)));
        to[r][j] = std::bit_cast<V>(words);
      }
    }
  };
  V raw[kRows][kItems];
  load(op.x.data, raw);
  Acc factor[kItems][kVec], shift[kItems][kVec];
#pragma unroll
  for (int j = 0; j < kItems; ++j) op.Parameters(active(j) ? (lane + j * lanes) * kVec : 0, factor[j], shift[j]);
  if (op.Has(1)) {
    V added[kRows][kItems];
    load(op.residual.data, added);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        raw[r][j] = AddRounded(raw[r][j], added[r][j]);
        if (inside(r) && active(j)) jaxnorm::Store(op.sum + at(r, j), raw[r][j]);
      }
    }
  }
  Acc values[kRows][kItems][kVec];  // 0 where there is no slot
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kItems; ++j) ToAccAll(raw[r][j], values[r][j]);
  }
  // Sums over each row of f(value).
  const auto sum_rows = [&](Acc(&sums)[kRows], auto f) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = 0;
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) sums[r] += f(values[r][j][i]);
      }
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] += __shfl_xor_sync(kAllLanes, sums[r], distance);
    }
  };
  const auto subtract = [&](const Acc(&amounts)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const Acc amount = active(j) ? amounts[r] : Acc(0);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[r][j][i] -= amount;
      }
    }
  };
  const Acc count = static_cast<Acc>(op.cols), inverse = 1 / count;
  op.WithVariant([&](auto center) {
    Acc mean[kRows] = {}, squares[kRows];
    if (center) {
      sum_rows(mean, [](Acc s) { return s; });
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        // Divided with a step of Newton's method: the mean of equal numbers is that number, and their variance 0.
        const Acc quotient = mean[r] * inverse;
        mean[r] = isfinite(quotient) ? fma(fma(-quotient, count, mean[r]), inverse, quotient) : quotient;
      }
      subtract(mean);
      if constexpr (sizeof(T) == sizeof(Acc)) {  // the mean was rounded; that of the deviations corrects it
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
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (!active(j)) continue;
        Acc out[kVec];
#pragma unroll
        for (int i = 0; i < kVec; ++i) out[i] = fma(values[r][j][i] * final.rstd, factor[j][i], shift[j][i]);
        jaxnorm::Store(op.y + at(r, j), RoundVec<T>(out));
      }
    }
  });
}

}  // namespace

template <typename Op>
ffi::Error LaunchNormFwdShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots,
                              const char* name) {
  const auto launch = [&]<int kItems>(std::integral_constant<int, kItems>) {
    const int lanes = NextPowerOfTwo(CeilDiv(slots, kItems));
    const int log2_lanes = std::countr_zero(static_cast<unsigned>(lanes));
    constexpr int kRows = kShortPerThread / kItems;
    const Grid grid = {.blocks = CeilDiv(op.rows, kShortThreads / lanes * kRows), .threads = kShortThreads};
    return Launch<NormFwdShortKernel<Op, kItems, kRows>>(device, stream, grid, name, op, log2_lanes);
  };
  if (slots <= kWarp) return launch(std::integral_constant<int, 1>());
  return launch(std::integral_constant<int, 2>());
}

#define JAXNORM_INSTANTIATE(T)                                                                                        \
  template ffi::Error LaunchNormFwdShort(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, int slots, \
                                         const char*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
