// layer_norm and rms_norm, forward: the operation, for which norm_fwd_*.cu have kernels, each for some lengths of rows, and
// rows.cuh those for all others. The formulas are in norm_args.h.
#ifndef JAXNORM_CUDA_NORM_FWD_CUH_
#define JAXNORM_CUDA_NORM_FWD_CUH_

#include <cmath>

#include "norm.cuh"
#include "norm_args.h"
#include "norm_rows.cuh"
#include "operand.cuh"
#include "rows.cuh"

namespace jaxnorm {

// 1 / x; for float32 one instruction, off by less than 2^-23.
__device__ __forceinline__ float Reciprocal(float x) { return ApproximateReciprocal(x); }
__device__ __forceinline__ double Reciprocal(double x) { return 1 / x; }

// x^-1/2. For float32 the instruction's result and one step of Newton's method, which knows no infinities.
__device__ __forceinline__ float InverseSqrt(float x) {
  const float y = rsqrtf(x), residual = fma(-x * y, y, 1.0f);
  return isnan(residual) ? y : fma(0.5f * y, residual, y);
}
__device__ __forceinline__ double InverseSqrt(double x) { return 1 / sqrt(x); }

// sum / count, given 1 / count. Divided with a step of Newton's method: the mean of equal numbers is that number, and
// their variance 0.
template <typename Acc>
__device__ __forceinline__ Acc MeanOf(Acc sum, Acc count, Acc inverse) {
  const Acc quotient = sum * inverse;
  return isfinite(quotient) ? fma(fma(-quotient, count, sum), inverse, quotient) : quotient;
}

// Whether that, being rounded, is corrected by the mean of the deviations from it. The mean of 16-bit numbers is exact
// enough.
template <typename T>
inline constexpr bool kCorrectsMean = sizeof(T) == sizeof(AccT<T>);

// a + b, rounded to T.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> AddRounded(const Vec<T, N>& a, const Vec<T, N>& b) {
  Vec<T, N> out;
  if constexpr (sizeof(T) == 2) {
    // Not by way of float32: this is one instruction for two elements.
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      reinterpret_cast<Pair<T>&>(out.v[i]) =
          __hadd2(reinterpret_cast<const Pair<T>&>(a.v[i]), reinterpret_cast<const Pair<T>&>(b.v[i]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.v[i] = a.v[i] + b.v[i];
  }
  return out;
}

// Of the elements that count: their number, mean (0 if not centred) and sum of squared deviations from it. Merging as
// Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance"; an empty side changes nothing.
template <typename Acc>
struct Moments {
  Acc count, mean, squares;

  static __device__ __forceinline__ Moments Identity() { return {0, 0, 0}; }

  // 1 / count, or any finite number if it is 0, so that 0 times it is 0.
  static __device__ __forceinline__ Acc Inverse(Acc count) { return Reciprocal(fmax(count, Acc(1))); }

  static __device__ __forceinline__ Moments Merge(Moments a, Moments b) {
    const Acc count = a.count + b.count, delta = b.mean - a.mean;
    const Acc weight = a.count == 0 ? Acc(1) : b.count * Inverse(count);
    return {count, fma(delta, weight, a.mean), fma(delta, delta * (a.count * weight), a.squares + b.squares)};
  }

  // Of `count` elements, from the sums of their distances from a pivot and of the squares of these, and 1 / count.
  static __device__ __forceinline__ Moments FromPivot(Acc count, Acc inverse, Acc pivot, Acc sum, Acc squares) {
    const Acc shift = sum * inverse, rest = fma(-sum, shift, squares);
    return {count, pivot + shift, rest < 0 ? Acc(0) : rest};  // not fmax, which would drop NaN
  }

  // Whether a pivot was so far away that more than three bits of `rest`, what is left of the squares of distances from it,
  // are lost. Not if they are no numbers.
  static __device__ __forceinline__ bool Lost(Acc squares, Acc rest) { return 8 * rest < squares; }

  // All lanes at once: sums, unlike Merge, give all of them the same bits. Means are summed as distances from that of
  // the first lane which has any, so that equal ones stay as they are.
  static __device__ __forceinline__ Moments MergeLanes(Moments p, int width) {
    const unsigned counting = __ballot_sync(kAllLanes, p.count != 0) >> (threadIdx.x % kWarp & -width);
    const Acc count = LaneSum(p.count, width);
    return MergeLanes({p}, width, __ffs(counting) - 1, count, Inverse(count));
  }

  // Several of each lane, given the first lane that has any, the count of all, and 1 / count. Both sums at once, as squares
  // about the mean of all would have to wait for that; once more about the mean if the pivot turns out to be far from it.
  template <int kN>
  static __device__ __forceinline__ Moments MergeLanes(const Moments (&p)[kN], int width, int first, Acc count,
                                                       Acc inverse) {
    Acc pivot = __shfl_sync(kAllLanes, p[0].mean, first, width);
#pragma unroll 1
    for (bool again = true;; again = false) {
      Acc sum = 0, squares = 0;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const Acc distance = p[i].mean - pivot, part = p[i].count * distance;
        sum += part;
        squares += fma(part, distance, p[i].squares);
      }
      squares = LaneSum(squares, width);
      const Moments all = FromPivot(count, inverse, pivot, LaneSum(sum, width), squares);
      if (!again || !__any_sync(kAllLanes, Lost(squares, all.squares))) return all;
      pivot = all.mean;
    }
  }
};

// s = x, or x + residual rounded to T; y = (s - mean) * rstd * (scale + scale_offset) + bias. kShifted: parameters are
// ShiftedCopies, for bundles of rows of odd length.
template <typename T_, Mode kMode_, bool kShifted = false>
struct NormFwd {
  using T = T_;
  using Acc = AccT<T>;
  using Partial = Moments<Acc>;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kGeneral = kMode == Mode::kGeneral;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kInputs = 2;        // x, residual
  static constexpr int kColumnInputs = 1;  // x
  static constexpr int kSlotsPerThread = 8;
  static constexpr int kUnroll = kGeneral || sizeof(T) == 2 ? 1 : 2;  // more blocks at once are worth more
  static constexpr bool kRare = kMode == Mode::kPlain;
  static constexpr unsigned kAllElements = (1u << kVec) - 1;

  // What every call reads comes first, in few lines of the constant cache.
  int64_t rows;
  int cols;
  bool grouped, center, narrow;
  OperandOf<T, kMode> x, residual;
  Acc epsilon, scale_offset, inverse_cols;  // 1 / cols: few instructions are as slow as a division
  T *y, *sum;
  Acc *mean, *rstd;
  DeviceParameter<T> scale, bias;
  int64_t rows_per_group;
  OperandOf<bool, kMode> where;

  NormFwd(const NormFwdArgs& args)
      : rows(args.shape.rows()),
        cols(static_cast<int>(args.shape.cols)),
        grouped(args.shape.groups > 1),
        center(args.center),
        narrow(NarrowParameters(args)),
        x(args.x, rows),
        residual(args.residual, rows),
        epsilon(static_cast<Acc>(args.epsilon)),
        scale_offset(static_cast<Acc>(args.scale_offset)),
        inverse_cols(Acc(1) / static_cast<Acc>(cols)),
        y(static_cast<T*>(args.y)),
        sum(static_cast<T*>(args.sum)),
        mean(static_cast<Acc*>(args.mean)),
        rstd(static_cast<Acc*>(args.rstd)),
        scale(args.scale, narrow),
        bias(args.bias, narrow),
        rows_per_group(args.shape.rows_per_group),
        where(args.mask, rows) {}

  // Copies the parameters to `scratch`; false if it has no room for them.
  bool ShiftParameters(const DeviceInfo& device, cudaStream_t stream, Scratch scratch, const char* name,
                       Error* status) {
    static_assert(kShifted);
    if (scale.data == nullptr && bias.data == nullptr) return true;
    const auto shift = [&]<typename U>(std::type_identity<U>) {
      const int64_t pitch = ShiftedCopies::Pitch(cols, kVecSize<U>);
      if (static_cast<int64_t>(scratch.bytes) < 2 * kVecBytes * pitch) return false;
      const auto from = [](const DeviceParameter<T>& parameter) { return static_cast<const U*>(parameter.data); };
      U* const copies = static_cast<U*>(scratch.data);
      const Grid grid = {.blocks = CeilDiv(pitch, kShiftThreads), .threads = kShiftThreads};
      *status = Launch<ShiftParametersKernel<U>>(device, stream, grid, name, from(scale), from(bias), copies, cols);
      if (scale.data != nullptr) scale.data = copies;
      if (bias.data != nullptr) bias.data = copies + kVecSize<U> * pitch;
      return true;
    };
    return narrow ? shift(std::type_identity<T>()) : shift(std::type_identity<Acc>());
  }

  // Whether scale and bias are T, and that is not the arithmetic's dtype.
  static bool NarrowParameters(const NormFwdArgs& args) {
    return !std::is_same_v<T, Acc> && args.parameter_dtype == args.dtype;
  }

  struct Row {
    T* y;
    SlotGrid<T, kMode> grid;
    OperandRow<T> x, residual;
    OperandRow<bool> where;
    T* sum;
    const void *scale, *bias;
  };
  struct Slot {
    Vec<T, kVec> s;
    unsigned skipped;  // bit i: the statistics do not count element i
  };
  struct Loaded {
    Acc factor[kVec], shift[kVec];
  };
  struct Final {
    Acc mean, rstd;
  };

  __device__ __forceinline__ Row Begin(int64_t index) const {
    T* row = y + index * cols;
    asm("" : "+l"(row));  // as in DeviceParameter
    const int64_t group = grouped ? index / rows_per_group : 0;
    Row r = {row, {row, cols}, {}, {}, {}, sum + index * cols, scale.Row(group), bias.Row(group)};
    if constexpr (kGeneral) {
      r.x = OperandRow<T>(x, index);
      r.residual = OperandRow<T>(residual, index);
      r.where = OperandRow<bool>(where, index);
    } else {
      r.x = OperandRow<T>::Full(x, index * cols);
      r.residual = OperandRow<T>::Full(residual, index * cols);
    }
    return r;
  }

  // What rows that begin `skew` elements after a slot have of a parameter that is not grouped.
  __device__ __forceinline__ const void* Shifted(const DeviceParameter<T>& parameter, int skew) const {
    if (!kShifted || parameter.data == nullptr) return parameter.data;
    const int count = narrow ? kVecSize<T> : kVecSize<Acc>;
    const int64_t bytes = ShiftedCopies::Column0(skew, cols, count) * (kVecBytes / count);
    return static_cast<const char*>(parameter.data) + bytes;
  }

  __device__ __forceinline__ const OperandRow<T>& Input(const Row& row, int k) const {
    return k == 0 ? row.x : row.residual;
  }
  __host__ __device__ __forceinline__ bool Has(int k) const { return k == 0 || sum != nullptr; }
  __host__ __device__ __forceinline__ bool HasWhere() const { return kGeneral && where.data != nullptr; }
  __host__ __device__ __forceinline__ int Place(int k) const { return k; }
  __host__ __device__ __forceinline__ int Inputs() const { return Has(1) ? 2 : 1; }

  static __device__ __forceinline__ T NeutralInput() { return FromAcc<T>(Acc(0)); }

  template <bool kEdges>
  __device__ __forceinline__ void Decode(const Row& row, int slot, const RawSlot<NormFwd>& raw, Slot& out) const {
    // As words: a condition on a vector of 16-bit elements is compiled to one selection for each of them.
    auto words = std::bit_cast<uint4>(raw.in[0]);
    if (Has(1)) words = std::bit_cast<uint4>(AddRounded(raw.in[0], raw.in[1]));
    out.s = std::bit_cast<Vec<T, kVec>>(words);
    Skip<kEdges>(row, slot, out);
    if constexpr (kGeneral) {
      if (HasWhere()) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) out.skipped |= raw.where.v[i] ? 0u : 1u << i;
      }
    }
  }

  template <bool kEdges>
  __device__ __forceinline__ void Skip(const Row& row, int slot, Slot& out) const {
    out.skipped = 0;
    if constexpr (kMode == Mode::kPlain) {
      if (kEdges && slot >= row.grid.Slots()) out.skipped = kAllElements;
    } else {
      const int before = max(-row.grid.First(slot), 0), after = max(row.grid.First(slot) + kVec - cols, 0);
      out.skipped = ~(kAllElements << before & kAllElements >> after) & kAllElements;
    }
  }

  // Whether the operation centres; kGeneral leaves it to run time, for the sake of the code's size.
  template <typename F>
  __device__ __forceinline__ void WithVariant(F f) const {
    if constexpr (kGeneral) {
      f(center);
    } else if (center) {
      f(std::true_type());
    } else {
      f(std::false_type());
    }
  }
  template <typename F>
  __device__ __forceinline__ void WithoutVariant(F f) const {
    f(center);
  }

  template <typename Center, int kN>
  __device__ __forceinline__ Partial Reduce(Center center, Slot (&slots)[kN], int width) const {
    if constexpr (kMode == Mode::kPlain) {
      // One lane alone has nothing but elements of the row.
      if (width > 1) return ReduceSlots<false>(center, slots, width, static_cast<Acc>(cols));
      return ReduceSlots<false>(center, slots, 1, Acc(kN * kVec));
    } else {
      unsigned any = 0;
#pragma unroll
      for (int j = 0; j < kN; ++j) any |= slots[j].skipped;
      if (any == 0) return ReduceSlots<false>(center, slots, 1, Acc(kN * kVec));
      int count = kN * kVec;
#pragma unroll
      for (int j = 0; j < kN; ++j) count -= __popc(slots[j].skipped);
      if (count == 0) return Partial::Identity();
      return ReduceSlots<true>(center, slots, 1, static_cast<Acc>(count));
    }
  }

  // In two passes over registers. kSome: some elements of slots do not count; otherwise either all of a slot do, or
  // none, and then they are 0.
  template <bool kSome, typename Center, int kN>
  __device__ __forceinline__ Partial ReduceSlots(Center center, const Slot (&slots)[kN], int width, Acc count) const {
    Acc values[kN][kVec];
#pragma unroll
    for (int j = 0; j < kN; ++j) ToAccAll(slots[j].s, values[j]);
    // The sum of f(element, slot), one chain of additions per slot.
    const auto sum_of = [&](auto f) {
      Acc sums[kN];
#pragma unroll
      for (int j = 0; j < kN; ++j) sums[j] = 0;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          const Acc term = f(values[j][i], slots[j]);
          sums[j] += kSome && (slots[j].skipped >> i & 1) ? Acc(0) : term;
        }
      }
#pragma unroll
      for (int j = 1; j < kN; ++j) sums[0] += sums[j];
      return LaneSum(sums[0], width);
    };
    if (!center) return {count, 0, sum_of([](Acc s, const Slot&) { return s * s; })};
    // Divided (by a power of two mostly), not multiplied by an inverse: the mean of equal numbers is that number, and
    // their variance 0.
    const Acc mean = sum_of([](Acc s, const Slot&) { return s; }) / count;
    const auto deviation = [&](Acc s, const Slot& slot) { return s - (!kSome && slot.skipped ? Acc(0) : mean); };
    const Acc squares = sum_of([&](Acc s, const Slot& slot) {
      const Acc d = deviation(s, slot);
      return d * d;
    });
    if constexpr (sizeof(T) == 2) return {count, mean, squares};  // the mean of few 16-bit numbers is exact enough
    // The mean was rounded; that of the deviations corrects it, and the sum of squares.
    const Acc rest = sum_of(deviation), shift = rest / count, corrected = fma(-rest, shift, squares);
    return {count, mean + shift, corrected < 0 ? Acc(0) : corrected};  // not fmax, which would drop NaN
  }

  // ---- Running sums, for rows that a thread has many slots of ----

  // Sums of the distances from a pivot, which all threads of a warp have in common, and of their squares: three operations for
  // each element and nothing to merge.
  template <int kN>
  struct Running {
    Acc pivot[kN];
    Acc sum[kN] = {}, squares[kN] = {};
  };

  // An element of row r.
  template <typename Center, int kN>
  __device__ __forceinline__ void Accumulate(Center center, Acc value, int r, Running<kN>& running) const {
    const Acc d = center ? value - running.pivot[r] : value;
    if (center) running.sum[r] += d;
    running.squares[r] = fma(d, d, running.squares[r]);
  }
  // A slot of each of kN rows.
  template <typename Center, int kN>
  __device__ __forceinline__ void Accumulate(Center center, const Vec<T, kVec> (&slots)[kN],
                                             Running<kN>& running) const {
    Acc values[kN][kVec];
#pragma unroll
    for (int r = 0; r < kN; ++r) ToAccAll(slots[r], values[r]);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
#pragma unroll
      for (int r = 0; r < kN; ++r) Accumulate(center, values[r][i], r, running);
    }
  }

  // A pivot: exact if all elements are equal, whose variance is then 0.
  static __device__ __forceinline__ Acc MeanOfSlot(const Vec<T, kVec>& slot) {
    Acc values[kVec];
    ToAccAll(slot, values);
    return TreeSum(values) * (Acc(1) / kVec);
  }

  // Given the count of all, and 1 / count.
  template <typename Center, int kN>
  __device__ __forceinline__ Partial MergeLanes(Center center, const Partial (&p)[kN], int width, Acc count,
                                                Acc inverse) const {
    if (center) return Partial::MergeLanes(p, width, 0, count, inverse);
    Acc squares = 0;
#pragma unroll
    for (int i = 0; i < kN; ++i) squares += p[i].squares;
    return {count, 0, LaneSum(squares, width)};
  }

  template <typename Center>
  __device__ __forceinline__ void Prepare(Center, Slot&, const Partial&) const {}

  // Without an element that counts, 0 / 0.
  template <typename Center>
  __device__ __forceinline__ Final Finish(Center, const Partial& total) const {
    return {total.count == 0 ? Acc(NAN) : total.mean,
            InverseSqrt(fma(total.squares, Reciprocal(total.count), epsilon))};
  }

  // scale + scale_offset and bias of columns [first, first + kVec).
  __device__ __forceinline__ void Parameters(const void* scale_row, const void* bias_row, int first,
                                             Acc (&factor)[kVec], Acc (&shift)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      factor[i] = 1;
      shift[i] = 0;
    }
    constexpr bool kAligned = kMode == Mode::kPlain || kShifted;
    if (scale_row != nullptr) DeviceParameter<T>::template Load<kAligned>(narrow, scale_row, first, cols, factor);
    if (bias_row != nullptr) DeviceParameter<T>::template Load<kAligned>(narrow, bias_row, first, cols, shift);
    if (scale_row != nullptr && scale_offset != 0) {  // last, so that no load waits for another
#pragma unroll
      for (int i = 0; i < kVec; ++i) factor[i] += scale_offset;
    }
  }
  __device__ __forceinline__ void Parameters(int first, Acc (&factor)[kVec], Acc (&shift)[kVec]) const {
    Parameters(scale.data, bias.data, first, factor, shift);
  }

  template <typename Center>
  __device__ __forceinline__ Loaded LoadForStore(Center, const Row& row, int slot) const {
    Loaded loaded;
    Parameters(row.scale, row.bias, row.grid.First(slot), loaded.factor, loaded.shift);
    return loaded;
  }

  template <typename Center>
  __device__ __forceinline__ void Store(Center center, const Row& row, int slot, const Slot& kept, const Loaded& loaded,
                                        const Final& final) const {
    Vec<T, kVec> sum = kept.s;
    if constexpr (sizeof(T) < sizeof(Acc)) {
      // Else the elements may be kept as Acc from the reduction on, in twice the registers.
      auto words = std::bit_cast<uint4>(sum);
      asm("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
      sum = std::bit_cast<Vec<T, kVec>>(words);
    }
    Acc s[kVec], out[kVec];
    ToAccAll(sum, s);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      out[i] = fma((center ? s[i] - final.mean : s[i]) * final.rstd, loaded.factor[i], loaded.shift[i]);
    }
    StoreSlot(row.y, row.grid, row.grid.First(slot), out);
    if (Has(1)) StoreSum(row, row.grid.First(slot), kept.s);
  }

  __device__ __forceinline__ void StoreSum(const Row& row, int first, const Vec<T, kVec>& s) const {
    if (kGeneral && !IsVecAligned(row.sum + first)) {
      // Its own grid is not that of y.
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (first + i >= 0 && first + i < cols) row.sum[first + i] = s.v[i];
      }
    } else {
      StoreSlot(row.sum, row.grid, first, s);
    }
  }

  struct Ahead {};
  __device__ __forceinline__ Ahead LoadAhead(int64_t) const { return {}; }
  template <typename Center>
  __device__ __forceinline__ void StoreRow(Center center, int64_t index, const Partial& total, const Ahead&) const {
    StoreStatistics(center, index, Finish(center, total));
  }
  template <typename Center>
  __device__ __forceinline__ void StoreStatistics(Center center, int64_t index, const Final& final) const {
    if (center) mean[index] = final.mean;
    rstd[index] = final.rstd;
  }
};

// How many elements of a row a warp has, and 1 / that.
template <typename Acc>
struct WarpCount {
  Acc count, inverse;

  // By all lanes, each with its own.
  static __device__ __forceinline__ WarpCount Of(Acc own) {
    const Acc count = LaneSum(own, kWarp);
    return {count, Moments<Acc>::Inverse(count)};
  }
};

// What a warp has of each of kRows rows: lane i gets that of row i / (kWarp / kRows). accumulate(running) adds up the thread's
// elements, about `pivots`, and once more about their means if a pivot turns out to be far from these.
template <typename Op, bool kCenter, int kRows, typename F>
__device__ __forceinline__ typename Op::Partial SumWarp(const typename Op::Acc (&pivots)[kRows],
                                                        const WarpCount<typename Op::Acc>& all, int lane,
                                                        F accumulate) {
  using Acc = typename Op::Acc;
  using Partial = typename Op::Partial;
  using Running = typename Op::template Running<kRows>;
  if constexpr (!kCenter) {
    Running running;
    accumulate(running);
    return {all.count, 0, SumOverLanes<kWarp>(running.squares, lane)};
  } else {
    constexpr int kLanes = kWarp / kRows;  // of a row: the first half of them gets its sum, the others that of squares
    bool lost = false;
    const auto sum_about = [&](const Acc(&pivots)[kRows]) {
      Running running;
#pragma unroll
      for (int r = 0; r < kRows; ++r) running.pivot[r] = pivots[r];
      accumulate(running);
      Acc numbers[2 * kRows], pivot = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        numbers[2 * r] = running.sum[r];
        numbers[2 * r + 1] = running.squares[r];
        const Acc of_row = Kept(pivots[r]);  // else the choice is made in memory
        pivot = lane / kLanes == r ? of_row : pivot;
      }
      const Acc own = SumOverLanes<kWarp>(numbers, lane), other = __shfl_xor_sync(kAllLanes, own, kLanes / 2);
      const bool has_squares = lane & kLanes / 2;
      const Acc sum = has_squares ? other : own, squares = has_squares ? own : other;
      const auto part = Partial::FromPivot(all.count, all.inverse, pivot, sum, squares);
      lost = Partial::Lost(squares, part.squares);
      return part;
    };
    auto part = sum_about(pivots);
    if (__any_sync(kAllLanes, lost)) {
      Acc means[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) means[r] = __shfl_sync(kAllLanes, part.mean, r * kLanes);
      part = sum_about(means);
    }
    return part;
  }
}

// Of a row in norm_fwd_short.cu.
inline constexpr int kMaxShortSlots = kWarp;
// Of a block there, and rows of a thread where a row has `lanes` lanes: measured to be the fastest of 64 to 256, and 1 to 8.
inline constexpr int kShortThreads = 64;
constexpr int ShortRows(int lanes) { return lanes < 4 ? lanes : 4; }

// Defined there for the kPlain operations; rows have their parameters in common.
template <typename Op>
Error LaunchNormFwdShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, const char* name);

// Defined in norm_fwd_at_once.cu for the kPlain operations of 16-bit elements; rows have their parameters in common. False if
// it does not suit.
template <typename Op>
bool LaunchNormFwdAtOnce(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status);

// Defined in norm_fwd_chunk.cu for the kPlain operations, in norm_fwd_ragged.cu for kRagged; rows have their parameters in
// common. False if it does not suit.
template <typename Op>
bool LaunchNormFwdChunks(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status);
template <typename Op>
bool LaunchNormFwdRagged(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status);

// Defined in norm_fwd_bundle.cu for the kPlain operations, and for kRagged with kShifted, whose parameters are copied to
// `scratch`; rows have their parameters in common. False if it does not suit.
template <typename Op>
bool LaunchNormFwdBundles(const DeviceInfo& device, cudaStream_t stream, Op op, Scratch scratch, const char* name,
                          Error* status);

// Defined in norm_fwd_long_ragged.cu for the kRagged operations; rows have their parameters in common. False if it does not
// suit.
template <typename Op>
bool LaunchNormFwdLongRagged(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name,
                             Error* status);

// Few rows, of at least that many slots, take norm_fwd_few.cu if all of their elements fit the multiprocessors' shared memory.
inline constexpr int kMinSplitSlots = 8192;

// Defined there for the kPlain operations; rows have their parameters in common. False if it does not suit.
template <typename Op>
bool LaunchNormFwdFew(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, Scratch scratch,
                      const char* name, Error* status);

// Rows of more slots take norm_fwd_long.cu, where that suits: bundles of them have few rows, or many blocks to wait for.
// Layer_norm has twice the parameters.
inline int MaxBundleSlots(bool center) { return center ? 2048 : 4096; }

// Defined there for the kPlain operations; rows have their parameters in common. False if it does not suit.
template <typename Op>
bool LaunchNormFwdLong(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, const char* name,
                       Error* status);

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_NORM_FWD_CUH_
