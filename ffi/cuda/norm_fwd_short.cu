// layer_norm and rms_norm, forward, of short rows.
//
// A row is in the registers of 1..32 lanes, a slot in each. Each thread works on several rows with the same columns, whose
// scale and bias it loads once: they may be larger than the rows' slots, and loading them for each row would take longer
// than all else.
//
// With so little to do for each slot, instructions take as long as memory. So how many lanes a row has, and whether it
// fills them, is known when this is compiled: then all rows of a thread are at constant distances. And one lane works out
// the statistics of one row, not every lane those of all.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

// kFull: rows have as many slots as lanes. Row r of a thread is r * kGroups after its first.
template <typename Op, bool kCenter, int kLanes, bool kFull>
__global__ void __launch_bounds__(kShortThreads) NormFwdShortKernel(const __grid_constant__ Op op) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  constexpr int kVec = Op::kVec, kRows = ShortRows(kLanes), kGroups = kShortThreads / kLanes;
  constexpr int kSumLanes = kLanes / kRows;  // that end up with the sum of a row
  constexpr bool kCorrect = kCenter && kCorrectsMean<T>;
  using V = Vec<T, kVec>;
  static_assert(Op::kMode == Mode::kPlain);
  const int cols = kFull ? kLanes * kVec : op.cols;
  const int lane = threadIdx.x % kLanes;
  const bool active = kFull || lane * kVec < cols;
  const int64_t block_row = int64_t{blockIdx.x} * (kGroups * kRows), first_row = block_row + threadIdx.x / kLanes;
  const int64_t offset = first_row * cols + lane * kVec;
  const auto at = [&](auto* array, int r) { return array + offset + r * (kGroups * cols); };

  // `whole`: the block has all its rows.
  const auto run = [&](auto whole) {
    const auto left = static_cast<int>(min(op.rows - first_row, int64_t{kGroups * kRows}));
    const auto inside = [&](int r) { return whole || r * kGroups < left; };
    // As words: a condition on a vector of 16-bit elements is compiled to one selection for each of them.
    WordsOf<V> rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = {};
      if (inside(r) && active) rows[r] = std::bit_cast<WordsOf<V>>(jaxnorm::Load(at(op.x.data, r)));
    }
    Acc factor[kVec], shift[kVec];
    op.Parameters(active ? lane * kVec : 0, factor, shift);
    if (op.Has(1)) {
      V added[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (inside(r) && active) added[r] = jaxnorm::Load(at(op.residual.data, r));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!inside(r) || !active) continue;
        rows[r] = std::bit_cast<WordsOf<V>>(AddRounded(std::bit_cast<V>(rows[r]), added[r]));
        jaxnorm::Store(at(op.sum, r), std::bit_cast<V>(rows[r]));
      }
    }

    const Acc inverse = kFull ? Acc(1) / (kLanes * kVec) : op.inverse_cols;
    const auto of_row = [&](Acc value, int r) { return __shfl_sync(kAllLanes, value, r * kSumLanes, kLanes); };
    Acc means[kRows] = {}, rests[kRows] = {};  // their sums are subtracted
    const auto deviations = [&](int r, Acc(&out)[kVec]) {
      ToAccAll(std::bit_cast<V>(rows[r]), out);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (kCenter) out[j] -= means[r];
        if (kCorrect) out[j] -= rests[r];
        if (kCenter && !active) out[j] = 0;
      }
    };
    // For each row the sum of f(deviation).
    const auto sum_rows = [&](auto f) {
      Acc sums[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Acc values[kVec];
        deviations(r, values);
        sums[r] = 0;
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[r] = f(sums[r], values[j]);
      }
      return SumOverLanes<kLanes>(sums, lane);
    };
    const auto add = [](Acc sum, Acc value) { return sum + value; };
    Acc mean = 0;  // of row lane / kSumLanes
    if constexpr (kCenter) {
      const Acc sum = sum_rows(add);
      mean = kFull ? sum * inverse : MeanOf(sum, static_cast<Acc>(cols), inverse);  // by a power of two
#pragma unroll
      for (int r = 0; r < kRows; ++r) means[r] = of_row(mean, r);
    }
    if constexpr (kCorrect) {
      const Acc rest = sum_rows(add) * inverse;
      mean += rest;
#pragma unroll
      for (int r = 0; r < kRows; ++r) rests[r] = of_row(rest, r);
    }
    const Acc squares = sum_rows([](Acc sum, Acc value) { return fma(value, value, sum); });
    const typename Op::Final final = {mean, InverseSqrt(fma(squares, inverse, op.epsilon))};
    if (lane % kSumLanes == 0 && inside(lane / kSumLanes)) {
      op.StoreStatistics(std::bool_constant<kCenter>(), first_row + lane / kSumLanes * kGroups, final);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Acc rstd = of_row(final.rstd, r);
      if (!inside(r) || !active) continue;
      Acc values[kVec];
      deviations(r, values);
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[j] = fma(values[j] * rstd, factor[j], shift[j]);
      jaxnorm::Store(at(op.y, r), RoundVec<T>(values));
    }
  };
  if (kFull && block_row + kGroups * kRows <= op.rows) {
    run(std::true_type());
  } else {
    run(std::false_type());
  }
}

template <int kLanes, bool kFull, typename Op>
Error LaunchShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name) {
  const Grid grid = {.blocks = CeilDiv(op.rows, kShortThreads / kLanes * ShortRows(kLanes)), .threads = kShortThreads};
  return op.center ? Launch<NormFwdShortKernel<Op, true, kLanes, kFull>>(device, stream, grid, name, op)
                   : Launch<NormFwdShortKernel<Op, false, kLanes, kFull>>(device, stream, grid, name, op);
}

}  // namespace

template <typename Op>
Error LaunchNormFwdShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, const char* name) {
  switch (slots) {
    case 1:
      return LaunchShort<1, true>(device, stream, op, name);
    case 2:
      return LaunchShort<2, true>(device, stream, op, name);
    case 4:
      return LaunchShort<4, true>(device, stream, op, name);
    case 8:
      return LaunchShort<8, true>(device, stream, op, name);
    case 16:
      return LaunchShort<16, true>(device, stream, op, name);
    case 32:
      return LaunchShort<32, true>(device, stream, op, name);
  }
  switch (NextPowerOfTwo(slots)) {
    case 4:
      return LaunchShort<4, false>(device, stream, op, name);
    case 8:
      return LaunchShort<8, false>(device, stream, op, name);
    case 16:
      return LaunchShort<16, false>(device, stream, op, name);
    default:
      return LaunchShort<32, false>(device, stream, op, name);
  }
}

#define JAXNORM_INSTANTIATE(T)                                                                                   \
  template Error LaunchNormFwdShort(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, int slots, \
                                    const char*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
