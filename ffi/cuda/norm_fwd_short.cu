// layer_norm and rms_norm, forward, of short rows.
//
// A row is in the registers of 1..32 lanes, a slot in each. Each thread works on several rows with the same columns, whose
// scale and bias it loads once: they may be larger than the rows' slots, and loading them for each row would take longer
// than all else. Rows are loaded at once; but longer ones of layer_norm, which has two passes of statistics, are on their
// way to shared memory before the first of them is looked at. That takes fewer registers and so has more of them under
// way: 32 slots were measured 2% faster than with loads at once, where rms_norm was 3% slower, and 8 slots 4%.
#include <utility>

#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kShortThreads = 128;
inline constexpr int kDirectRows = 3, kStagedRows = 4;  // of a thread
inline constexpr int kMaxDirectSlots = 16;              // of a row of layer_norm that is loaded at once
inline constexpr int kStagedAtOnce = 2;                 // rows that a thread works on at once when they have come

// What one thread has: a slot of each of its rows, of which row r is r * groups after the first.
template <typename Op, int kRows>
class ShortRows {
 public:
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  static constexpr int kVec = Op::kVec;
  using V = Vec<T, kVec>;
  static_assert(Op::kMode == Mode::kPlain);

  __device__ __forceinline__ ShortRows(const Op& op, int log2_lanes)
      : op_(op),
        lanes_(1 << log2_lanes),
        lane_(threadIdx.x & (lanes_ - 1)),
        groups_(kShortThreads >> log2_lanes),
        first_row_(int64_t{blockIdx.x} * (groups_ * kRows) + (threadIdx.x >> log2_lanes)),
        left_(static_cast<int>(min(op.rows - first_row_, static_cast<int64_t>(kShortThreads * kRows)))),
        offset_(first_row_ * op.cols + lane_ * kVec) {}

  // Whether there is a slot for this thread in a row, and whether there is one of row r.
  __device__ __forceinline__ bool Active() const { return lane_ * kVec < op_.cols; }
  __device__ __forceinline__ bool There(int r) const { return Inside(r) && Active(); }
  __device__ __forceinline__ int64_t At(int r) const { return offset_ + r * (groups_ * op_.cols); }

  __device__ __forceinline__ void LoadParameters() { op_.Parameters(Active() ? lane_ * kVec : 0, factor_, shift_); }

  // Rows [first, first + kN), 0 where a row has no slot for this thread.
  template <typename Center, int kN>
  __device__ __forceinline__ void Normalise(Center center, int first, const V (&rows)[kN]) const {
    Acc values[kN][kVec];
#pragma unroll
    for (int r = 0; r < kN; ++r) ToAccAll(rows[r], values[r]);
    const Acc count = static_cast<Acc>(op_.cols), inverse = 1 / count;
    Acc mean[kN] = {}, squares[kN];
    if (center) {
      SumRows(values, mean, [](Acc s) { return s; });
#pragma unroll
      for (int r = 0; r < kN; ++r) mean[r] = MeanOf(mean[r], count, inverse);
      Subtract(values, mean);
      if constexpr (kCorrectsMean<T>) {
        Acc rest[kN];
        SumRows(values, rest, [](Acc d) { return d; });
#pragma unroll
        for (int r = 0; r < kN; ++r) {
          rest[r] *= inverse;
          mean[r] += rest[r];
        }
        Subtract(values, rest);
      }
    }
    SumRows(values, squares, [](Acc d) { return d * d; });
#pragma unroll
    for (int r = 0; r < kN; ++r) {
      if (!Inside(first + r)) continue;
      const typename Op::Final final = {mean[r], InverseSqrt(fma(squares[r], inverse, op_.epsilon))};
      if (lane_ == 0) op_.StoreStatistics(center, first_row_ + (first + r) * groups_, final);
      if (!Active()) continue;
      Acc out[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) out[i] = fma(values[r][i] * final.rstd, factor_[i], shift_[i]);
      jaxnorm::Store(op_.y + At(first + r), RoundVec<T>(out));
    }
  }

 private:
  __device__ __forceinline__ bool Inside(int r) const { return r * groups_ < left_; }

  // Sums over each row of f(value).
  template <int kN, typename F>
  __device__ __forceinline__ void SumRows(const Acc (&values)[kN][kVec], Acc (&sums)[kN], F f) const {
#pragma unroll
    for (int r = 0; r < kN; ++r) {
      sums[r] = 0;
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[r] += f(values[r][i]);
    }
    for (int distance = lanes_ / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int r = 0; r < kN; ++r) sums[r] += __shfl_xor_sync(kAllLanes, sums[r], distance);
    }
  }

  template <int kN>
  __device__ __forceinline__ void Subtract(Acc (&values)[kN][kVec], const Acc (&amounts)[kN]) const {
#pragma unroll
    for (int r = 0; r < kN; ++r) {
      const Acc amount = Active() ? amounts[r] : Acc(0);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[r][i] -= amount;
    }
  }

  const Op& op_;
  const int lanes_, lane_, groups_;
  const int64_t first_row_;
  const int left_;  // rows from the first one on
  const int64_t offset_;
  Acc factor_[kVec], shift_[kVec];
};

template <typename Op>
__global__ void __launch_bounds__(kShortThreads, 6)
    NormFwdShortKernel(const __grid_constant__ Op op, const int log2_lanes) {
  using T = typename Op::T;
  using V = Vec<T, Op::kVec>;
  ShortRows<Op, kDirectRows> own(op, log2_lanes);
  const auto load = [&](const T* from, V(&to)[kDirectRows]) {
#pragma unroll
    for (int r = 0; r < kDirectRows; ++r) {
      // As words: a condition on a vector of 16-bit elements is compiled to one selection for each of them.
      uint4 words = {};
      if (own.There(r)) words = std::bit_cast<uint4>(jaxnorm::Load(from + own.At(r)));
      to[r] = std::bit_cast<V>(words);
    }
  };
  V rows[kDirectRows];
  load(op.x.data, rows);
  own.LoadParameters();
  if (op.Has(1)) {
    V added[kDirectRows];
    load(op.residual.data, added);
#pragma unroll
    for (int r = 0; r < kDirectRows; ++r) {
      rows[r] = AddRounded(rows[r], added[r]);
      if (own.There(r)) jaxnorm::Store(op.sum + own.At(r), rows[r]);
    }
  }
  op.WithVariant([&](auto center) { own.Normalise(center, 0, rows); });
}

template <typename Op>
__global__ void __launch_bounds__(kShortThreads, 8)
    NormFwdStagedKernel(const __grid_constant__ Op op, const int log2_lanes) {
  using V = Vec<typename Op::T, Op::kVec>;
  constexpr int kTurns = kStagedRows / kStagedAtOnce;
  extern __shared__ __align__(kVecBytes) uint4 shared_bytes[];
  ShortRows<Op, kStagedRows> own(op, log2_lanes);
  // Each thread reads what it has copied itself, which takes no barrier.
  const uint32_t shared = SharedAddress(shared_bytes) + threadIdx.x * kVecBytes;
  const auto place = [&](int k, int r) { return shared + (k * kStagedRows + r) * (kShortThreads * kVecBytes); };
#pragma unroll
  for (int r = 0; r < kStagedRows; ++r) {
    if (own.There(r)) {
      CopyAsync(place(0, r), op.x.data + own.At(r));
      if (op.Has(1)) CopyAsync(place(1, r), op.residual.data + own.At(r));
    }
    if (r % kStagedAtOnce == kStagedAtOnce - 1) CopyCommit();
  }
  own.LoadParameters();
  op.WithVariant([&](auto center) {
    const auto turn = [&](auto t) {
      CopyWait<kTurns - 1 - t>();
      V rows[kStagedAtOnce];
#pragma unroll
      for (int i = 0; i < kStagedAtOnce; ++i) {
        // What is in the place of a row that is not there reaches no result.
        const int r = t * kStagedAtOnce + i;
        auto words = LoadShared<uint4>(place(0, r));
        if (!own.Active()) words = {};
        rows[i] = std::bit_cast<V>(words);
        if (!op.Has(1) || !own.There(r)) continue;
        rows[i] = AddRounded(rows[i], LoadShared<V>(place(1, r)));
        jaxnorm::Store(op.sum + own.At(r), rows[i]);
      }
      own.Normalise(center, t * kStagedAtOnce, rows);
    };
    [&]<int... kTurn>(std::integer_sequence<int, kTurn...>) {
      (turn(std::integral_constant<int, kTurn>()), ...);
    }(std::make_integer_sequence<int, kTurns>());
  });
}

}  // namespace

template <typename Op>
ffi::Error LaunchNormFwdShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots,
                              const char* name) {
  const int lanes = NextPowerOfTwo(slots), log2_lanes = std::countr_zero(static_cast<unsigned>(lanes));
  const bool direct = slots <= kMaxDirectSlots || !op.center;
  const int rows = direct ? kDirectRows : kStagedRows;
  Grid grid = {.blocks = CeilDiv(op.rows, kShortThreads / lanes * rows), .threads = kShortThreads};
  if (direct) return Launch<NormFwdShortKernel<Op>>(device, stream, grid, name, op, log2_lanes);
  grid.shared_bytes = op.Inputs() * rows * kShortThreads * kVecBytes;
  return Launch<NormFwdStagedKernel<Op>>(device, stream, grid, name, op, log2_lanes);
}

#define JAXNORM_INSTANTIATE(T)                                                                                        \
  template ffi::Error LaunchNormFwdShort(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, int slots, \
                                         const char*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
