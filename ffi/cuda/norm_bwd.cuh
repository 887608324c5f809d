// layer_norm and rms_norm, backward: what the kernels share, which are those of rows that blocks or clusters hold
// (norm_bwd.cu), of short ones (norm_bwd_short.cu), and of longer or few long ones (norm_bwd_few.cu, norm_bwd_long.cu). The formulas are in norm_args.h.
#ifndef JAXNORM_CUDA_NORM_BWD_CUH_
#define JAXNORM_CUDA_NORM_BWD_CUH_

#include <algorithm>
#include <bit>

#include "launch.cuh"
#include "norm.cuh"
#include "norm_args.h"
#include "norm_rows.cuh"
#include "operand.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

namespace jaxnorm {

inline constexpr int kMaxArrays = 3;

// Over a row: w = dy * scale, w * xhat and, with a mask, how many elements count.
enum { kW, kProduct, kCount };
template <typename T_, Mode kMode_>
struct NormBwd {
  using T = T_;
  using Acc = AccT<T>;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kGeneral = kMode == Mode::kGeneral;
  static constexpr int kVec = kVecSize<T>;
  // Of a row per thread: more do not fit the registers.
  static constexpr int kSlots = kGeneral ? (sizeof(T) == 2 ? 1 : 2) : (sizeof(T) == 2 ? 2 : 4);
  using V = Vec<T, kVec>;
  using Sums = RowSums<Acc, kGeneral ? 3 : 2>;

  // What every call reads comes first, in few lines of the constant cache.
  int64_t rows;
  int cols;
  int arrays;  // x, dy and, with need_x, dsum
  OperandOf<T, kMode> x;
  T* dx;
  int64_t to_dy, to_dsum;  // bytes from x
  OperandOf<Acc, kMode> mean, rstd;
  int64_t rows_per_group;
  bool center, need_x, need_scale, need_bias, narrow;
  Acc scale_offset, inverse_cols;
  DeviceParameter<T> scale;
  OperandOf<T, kMode> dy, dsum;
  OperandOf<bool, kMode> mask;

  explicit NormBwd(const NormBwdArgs& args)
      : rows(args.shape.rows()),
        cols(static_cast<int>(args.shape.cols)),
        arrays(args.dsum && args.dx ? 3 : 2),
        x(args.x, args.shape.rows()),
        dx(static_cast<T*>(args.dx)),
        to_dy(reinterpret_cast<intptr_t>(args.dy.data) - reinterpret_cast<intptr_t>(args.x.data)),
        to_dsum(reinterpret_cast<intptr_t>(args.dsum.data) - reinterpret_cast<intptr_t>(args.x.data)),
        mean(args.mean, args.shape.rows()),
        rstd(args.rstd, args.shape.rows()),
        rows_per_group(args.shape.rows_per_group),
        center(args.center),
        need_x(args.dx != nullptr),
        need_scale(args.dscale != nullptr),
        need_bias(args.dbias != nullptr),
        narrow(!std::is_same_v<T, Acc> && args.parameter_dtype == args.dtype),
        scale_offset(args.scale ? static_cast<Acc>(args.scale_offset) : Acc(0)),
        inverse_cols(Acc(1) / static_cast<Acc>(cols)),
        scale(args.scale, narrow),
        dy(args.dy, args.shape.rows()),
        dsum(args.dsum, args.shape.rows()),
        mask(args.mask, args.shape.rows()) {}

  __host__ __device__ __forceinline__ int Outputs() const { return (need_scale ? 1 : 0) + (need_bias ? 1 : 0); }
  __host__ __device__ __forceinline__ int Slots() const { return (cols + kVec - 1) / kVec; }

  // ---- Columns and slots ----

  // How many columns a row has before its first whole slot of the dense arrays, which are aligned (kRagged).
  __device__ __forceinline__ int Head(int64_t index) const {
    return kMode == Mode::kRagged ? (kVec - static_cast<int>(index * cols % kVec)) % kVec : 0;
  }
  // Whether a slot's elements are as many columns in a row; `first` is that of element 0.
  __device__ __forceinline__ bool Whole(int first) const { return kMode == Mode::kPlain || first + kVec <= cols; }

  // ---- Rows ----

  __device__ __forceinline__ bool Has(int k) const { return k < 2 || arrays == kMaxArrays; }
  // Where array k has what x has at `p`, if both are dense.
  __device__ __forceinline__ const T* Beside(const T* p, int k) const {
    return k == 0 ? p : reinterpret_cast<const T*>(reinterpret_cast<const char*>(p) + (k == 1 ? to_dy : to_dsum));
  }

  struct Row {
    OperandRow<T> in[kMaxArrays];
    OperandRow<bool> mask;
  };

  __device__ __forceinline__ Row Begin(int64_t index) const {
    Row r;
    if constexpr (kGeneral) {
      r.in[0] = OperandRow<T>(x, index);
      r.in[1] = OperandRow<T>(dy, index);
      r.in[2] = OperandRow<T>(dsum, index);
      r.mask = OperandRow<bool>(mask, index);
    } else {
      r.in[0] = OperandRow<T>::Full(x, index * cols);
      r.in[1] = OperandRow<T>::Full(dy, index * cols);
      r.in[2] = OperandRow<T>::Full(dsum, index * cols);
    }
    return r;
  }

  // Columns [first, first + kVec) of an array's row, wherever it begins; 0 beside the row.
  __device__ __forceinline__ V Columns(const OperandRow<T>& row, int first) const {
    if constexpr (kMode == Mode::kPlain) {
      return jaxnorm::Load(row.row + first);
    } else if constexpr (kMode == Mode::kRagged) {
      return LoadColumns<T, kVec, /*kAligned=*/false>(row.row, first, cols);
    } else {
      auto values = row.template Load<kVec>(first);
      if (!Whole(first)) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (first + i >= cols) values.v[i] = FromAcc<T>(Acc(0));
        }
      }
      return values;
    }
  }

  struct Statistics {
    Acc mean, rstd;

    // For the 16-bit types one instruction, whose error at large means is below what they resolve.
    __device__ __forceinline__ Acc Xhat(Acc x) const {
      if constexpr (sizeof(T) == 2) return fma(x, rstd, -mean * rstd);
      return (x - mean) * rstd;
    }
    __device__ __forceinline__ Statistics FromLane(int lane) const {
      return {__shfl_sync(kAllLanes, mean, lane), __shfl_sync(kAllLanes, rstd, lane)};
    }
  };

  // Their loads take long, so callers issue them early. 0 beside the rows.
  __device__ __forceinline__ Statistics StatisticsOf(int64_t index, bool inside) const {
    Statistics s = {0, 0};
    if (!inside) return s;
    const auto of_row = [&](const auto& numbers) {
      if constexpr (kGeneral) {
        return numbers.data[numbers.RowOffset(index)];
      } else {
        return numbers.data[index];
      }
    };
    if (center) s.mean = of_row(mean);
    s.rstd = of_row(rstd);
    return s;
  }

  // The scale of a slot or of one column, 1 where there is none. Its offset is added after that, so that nothing has to
  // wait for loads yet.
  __device__ __forceinline__ void Scale(int64_t group, int first, Acc (&out)[kVec]) const {
    if (const void* row = scale.data == nullptr ? nullptr : scale.Row(group);
        kMode == Mode::kPlain && row != nullptr && IsVecAligned(row)) {
      DeviceParameter<T>::template Load</*kAligned=*/true>(narrow, row, first, cols, out);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) out[i] = first + i < cols ? Scale(group, first + i) : Acc(1);
    }
  }
  __device__ __forceinline__ Acc Scale(int64_t group, int column) const {
    if (scale.data == nullptr) return 1;
    const void* row = scale.Row(group);
    return narrow ? ToAcc(static_cast<const T*>(row)[column]) : static_cast<const Acc*>(row)[column];
  }
  __device__ __forceinline__ void Offset(Acc& factor) const { factor += scale_offset; }
  __device__ __forceinline__ void Offset(Acc (&factors)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) factors[i] += scale_offset;
  }

  // Bit i: the mask keeps element i of a slot.
  __device__ __forceinline__ unsigned Keep(const Row& row, int first) const {
    if (!kGeneral || mask.data == nullptr) return ~0u;
    unsigned keep = 0;
    const auto bits = row.mask.template Load<kVec>(first);
#pragma unroll
    for (int i = 0; i < kVec; ++i) keep |= (bits.v[i] && first + i < cols ? 1u : 0u) << i;
    return keep;
  }

  // Adds what one column contributes.
  __device__ __forceinline__ void Reduce(const Statistics& statistics, Acc x, Acc dy, Acc sc, Sums& sums, Acc& dscale,
                                         Acc& dbias) const {
    const Acc xhat = statistics.Xhat(x), w = dy * sc;
    dbias += dy;
    dscale = fma(dy, xhat, dscale);
    sums.v[kW] += w;
    sums.v[kProduct] = fma(w, xhat, sums.v[kProduct]);
  }
  // Or a slot, in which x and dy are 0 where it has no column.
  __device__ __forceinline__ void Reduce(const Row& row, const Statistics& statistics, int first, const V& x,
                                         const V& dy, const Acc (&sc)[kVec], Sums& sums) const {
    Acc ignored[2][kVec] = {};
    Reduce(row, statistics, first, x, dy, sc, sums, ignored[0], ignored[1]);
  }
  __device__ __forceinline__ void Reduce(const Row& row, const Statistics& statistics, int first, const V& x,
                                         const V& dy, const Acc (&sc)[kVec], Sums& sums, Acc (&dscale)[kVec],
                                         Acc (&dbias)[kVec]) const {
    Acc xs[kVec], g[kVec];
    ToAccAll(x, xs);
    ToAccAll(dy, g);
#pragma unroll
    for (int i = 0; i < kVec; ++i) Reduce(statistics, xs[i], g[i], sc[i], sums, dscale[i], dbias[i]);
    if constexpr (kGeneral) {
      if (mask.data != nullptr) sums.v[kCount] += __popc(Keep(row, first));
    }
  }

  // What the results of a row need of its sums: dx = rstd * (w - (c1 + xhat * c2)).
  struct Final {
    Acc c1, c2;
  };
  __device__ __forceinline__ Final Finish(const Sums& sums) const {
    Acc inverse = inverse_cols;
    if constexpr (kGeneral) {
      if (mask.data != nullptr) inverse = 1 / sums.v[kCount];
    }
    return {center ? sums.v[kW] * inverse : Acc(0), sums.v[kProduct] * inverse};
  }

  // Of one column. For the 16-bit types, (c1 + xhat * c2) is one instruction.
  __device__ __forceinline__ Acc Dx(const Statistics& statistics, Acc x, Acc dy, Acc sc, const Final& final,
                                    bool keep) const {
    const Acc slope = -statistics.rstd * final.c2;
    Acc drift;
    if constexpr (sizeof(T) == 2) {
      drift = fma(x, slope, fma(-statistics.mean, slope, -final.c1));
    } else {
      drift = fma(x - statistics.mean, slope, -final.c1);
    }
    return fma(dy, sc, keep ? drift : Acc(0)) * statistics.rstd;
  }
  __device__ __forceinline__ void Dx(const Row& row, const Statistics& statistics, int first, const V& x, const V& dy,
                                     const Acc (&sc)[kVec], const Final& final, Acc (&out)[kVec]) const {
    const unsigned keep = Keep(row, first);
    Acc xs[kVec], g[kVec];
    ToAccAll(x, xs);
    ToAccAll(dy, g);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      out[i] = Dx(statistics, xs[i], g[i], sc[i], final, !kGeneral || (keep >> i & 1) != 0);
    }
  }

  static __device__ __forceinline__ void Add(const V& values, Acc (&out)[kVec]) {
    Acc added[kVec];
    ToAccAll(values, added);
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[i] += added[i];
  }

  // `to` is where column `first` belongs.
  __device__ __forceinline__ void Store(T* to, int first, const Acc (&values)[kVec]) const {
    const V rounded = RoundVec<T>(values);
    if (kMode == Mode::kPlain || (Whole(first) && IsVecAligned(to))) {
      jaxnorm::Store(to, rounded);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (first + i < cols) to[i] = rounded.v[i];
      }
    }
  }
};

// ---- Gradients of parameters ----

// [groups][cols] each; of A (exact) or T.
struct NormBwdGradients {
  void *dscale, *dbias;
  int cols;
  bool exact;

  // Element c of what a group's partial sums have: dscale, if it is needed, and then dbias.
  template <typename T>
  __device__ __forceinline__ void Store(int64_t group, int64_t c, AccT<T> value) const {
    void* const out = c < cols && dscale != nullptr ? dscale : dbias;
    const int64_t at = group * cols + (c < cols ? c : c - cols);
    if (exact) {
      static_cast<AccT<T>*>(out)[at] = value;
    } else {
      static_cast<T*>(out)[at] = FromAcc<T>(value);
    }
  }
};

// Writes columns [first, first + kVec) of a row of parameters' gradients.
template <typename Op, typename U>
__device__ __forceinline__ void StoreColumns(U* row, int first, int cols, const typename Op::Acc (&values)[Op::kVec]) {
  constexpr int kWide = kVecSize<U> < Op::kVec ? kVecSize<U> : Op::kVec;
  if (first + Op::kVec <= cols && IsVecAligned(row + first)) {
#pragma unroll
    for (int i = 0; i < Op::kVec; i += kWide) {
      Vec<U, kWide> vector;
#pragma unroll
      for (int k = 0; k < kWide; ++k) vector.v[k] = FromAcc<U>(values[i + k]);
      *reinterpret_cast<Vec<U, kWide>*>(row + first + i) = vector;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Op::kVec; ++i) {
      if (first + i < cols) row[first + i] = FromAcc<U>(values[i]);
    }
  }
}

// Writes one thread's slot of a gradient: dbias or dscale, of a group.
template <typename Op>
__device__ __forceinline__ void StoreGradient(const Op& op, const NormBwdGradients& gradients, bool is_bias, int first,
                                              const typename Op::Acc (&values)[Op::kVec], int64_t group = 0) {
  void* const row = is_bias ? gradients.dbias : gradients.dscale;
  if (gradients.exact) {
    StoreColumns<Op>(static_cast<typename Op::Acc*>(row) + group * op.cols, first, op.cols, values);
  } else {
    StoreColumns<Op>(static_cast<typename Op::T*>(row) + group * op.cols, first, op.cols, values);
  }
}

// Writes one thread's slot of a group's gradients of parameters, of which there are `parts` partial sums: to `partials`, in
// which this is part `part` of all groups', or as results if there are no others.
template <typename Op>
__device__ __forceinline__ void StoreGradients(const Op& op, const NormBwdGradients& gradients,
                                               typename Op::Acc* partials, int parts, int part, int first,
                                               const typename Op::Acc (&dscale)[Op::kVec],
                                               const typename Op::Acc (&dbias)[Op::kVec], int64_t group = 0) {
  using Acc = typename Op::Acc;
  Acc* const sums = partials + int64_t{part} * op.Outputs() * op.cols;
  const auto write = [&](bool is_bias, const Acc(&values)[Op::kVec]) {
    if (parts > 1) {
      StoreColumns<Op>(sums + (is_bias && op.need_scale ? op.cols : 0), first, op.cols, values);
    } else {
      StoreGradient(op, gradients, is_bias, first, values, group);
    }
  };
  if (op.need_scale) write(false, dscale);
  if (op.need_bias) write(true, dbias);
}

template <typename Acc, int kN>
__device__ __forceinline__ void AddTo(Vec<Acc, kN>& sum, const Vec<Acc, kN>& more) {
#pragma unroll
  for (int i = 0; i < kN; ++i) sum.v[i] += more.v[i];
}

// Of a block's first `columns` threads, a power of two, each gets the sum over the threads that are multiples of so many
// behind it. `of_threads` is shared memory for one of each thread; all may write there again after the next barrier.
template <typename Sum>
__device__ __forceinline__ Sum SumOverWays(Sum sum, int columns, int threads, Sum* of_threads) {
  for (int offset = columns; offset < kWarp; offset *= 2) AddTo(sum, ShuffleXor(sum, offset));
  of_threads[threadIdx.x] = sum;
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= columns) return sum;
  const int step = max(columns, kWarp);  // those of a warp have been added up
#pragma unroll 8
  for (int i = threadIdx.x + step; i < threads; i += step) AddTo(sum, of_threads[i]);
  return sum;
}

// Adds up the rows of partial sums, [groups][parts][width]: 2^log2_columns times kWide columns for each block.
inline constexpr int kSumThreads = 256;
inline constexpr int kSumAhead =
    10;  // parts that a thread loads at once: all, if there are two for each multiprocessor
template <typename T, int kWide>
__global__ void __launch_bounds__(kSumThreads)
    NormBwdSumKernel(const AccT<T>* partials, int parts, int64_t width, int64_t total, int log2_columns,
                     const NormBwdGradients gradients) {
  using Acc = AccT<T>;
  using Columns = Vec<Acc, kWide>;
  __shared__ Columns of_threads[kSumThreads];
  const int columns = 1 << log2_columns, x = threadIdx.x & (columns - 1), y = threadIdx.x >> log2_columns;
  const int ways = kSumThreads >> log2_columns;
  const int64_t column = (int64_t{blockIdx.x} * columns + x) * kWide;  // of all groups
  const int64_t group = column < width ? 0 : column / width, c = column - group * width;
  Columns sum = {};
  if (column < total) {
    const Acc* p = partials + WaitForLaunchBefore(group * parts * width + c);
    for (int b = y; b < parts; b += kSumAhead * ways) {
      Columns loaded[kSumAhead] = {};
#pragma unroll
      for (int i = 0; i < kSumAhead; ++i) {
        if (const int part = b + i * ways; part < parts)
          loaded[i] = *reinterpret_cast<const Columns*>(p + part * width);
      }
#pragma unroll
      for (int i = 0; i < kSumAhead; ++i) AddTo(sum, loaded[i]);
    }
  }
  sum = SumOverWays(sum, columns, kSumThreads, of_threads);
  if (y != 0 || column >= total) return;
#pragma unroll
  for (int i = 0; i < kWide; ++i) gradients.Store<T>(group, c + i, sum.v[i]);
}

// ---- Partial sums of gradients that blocks leave: for that launch, or for each other ----

// Partial sums of two columns, which fit a post's part.
template <typename Acc>
using ColumnPair = Vec<Acc, 2>;

// Where blocks leave them, of `width` columns, an even number, each: for a second launch; or as posts, if all blocks are
// running, each of which adds up those of 2^log2_own pairs of columns at a time.
template <typename Acc>
struct NormBwdParts {
  Acc* partials = nullptr;                 // [blocks][width]
  Post<ColumnPair<Acc>>* posts = nullptr;  // [blocks][width / 2], in the same place
  int log2_own = 0;
  uint64_t tag = 0;

  NormBwdParts(void* scratch, int width, int64_t blocks, bool meet) : partials(static_cast<Acc*>(scratch)) {
    if (!meet) return;
    posts = static_cast<Post<ColumnPair<Acc>>*>(scratch);
    log2_own = std::countr_zero(static_cast<unsigned>(std::min(NextPowerOfTwo(CeilDiv(width / 2, blocks)), kWarp)));
    tag = LaunchTag();
  }
};

// Bytes of what a block leaves.
template <typename Acc>
int64_t PartBytes(int width, bool meet) {
  return width * static_cast<int64_t>(meet ? sizeof(Post<ColumnPair<Acc>>) / 2 : sizeof(Acc));
}

// Whether `blocks` blocks do well to leave posts. Larger arrays displace these, which then come from memory when they are asked
// for: 256 columns took 6 % more, 512 with a residual's cotangent, a fourth array, 11 %. And more posts, which are twice as large as
// partial sums, take longer than a second launch.
inline constexpr int64_t kMaxPostBytes = 5 << 19;
template <typename Op>
bool MayMeet(const DeviceInfo& device, const Op& op, int64_t blocks, Scratch scratch) {
  const int64_t array_bytes = op.rows * op.cols * static_cast<int64_t>(sizeof(typename Op::T));
  const int64_t post_bytes = blocks * PartBytes<typename Op::Acc>(op.Outputs() * op.cols, true);
  return op.Outputs() > 0 && op.arrays == 2 && 3 * array_bytes <= device.l2_bytes &&
         post_bytes <= std::min(kMaxPostBytes, static_cast<int64_t>(scratch.bytes));
}

// Leaves the sums of the `sets` rows of `total`, which is in shared memory, as part `part`; by all threads of a block.
template <typename Acc>
__device__ __forceinline__ void LeaveSums(const NormBwdParts<Acc>& parts, int64_t part, const Acc* total, int sets,
                                          int width) {
  using Pair = ColumnPair<Acc>;
  const int pairs = width / 2;
  for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
    Pair sum = {};
#pragma unroll 4
    for (int s = 0; s < sets; ++s) AddTo(sum, *reinterpret_cast<const Pair*>(total + s * width + 2 * p));
    if (const int64_t at = part * pairs + p; parts.posts == nullptr) {
      reinterpret_cast<Pair*>(parts.partials)[at] = sum;
    } else {
      parts.posts[at].Write(sum, parts.tag);
    }
  }
}

// Adds up some columns of what all blocks leave as posts. `of_threads` is shared memory for one pair of each thread.
template <typename T>
__device__ __forceinline__ void AddUpPosts(const NormBwdParts<AccT<T>>& parts, int blocks, int width,
                                           ColumnPair<AccT<T>>* of_threads, const NormBwdGradients& gradients) {
  using Pair = ColumnPair<AccT<T>>;
  // Threads that have the same pair read posts of different blocks.
  const int pairs = width / 2, own_pairs = 1 << parts.log2_own, ways = static_cast<int>(blockDim.x) >> parts.log2_own;
  const int x = threadIdx.x & (own_pairs - 1), y = threadIdx.x >> parts.log2_own;
  for (int p = blockIdx.x * own_pairs + x; p - x < pairs; p += blocks * own_pairs) {
    Post<Pair>* const of_pair = parts.posts + p;
    Pair sum = {};
    for (int b = 0; b < blocks; b += kLanePosts * ways) {
      Pair values[kLanePosts];
      ReadPosts(of_pair + b * pairs, p < pairs ? blocks - b : 0, parts.tag, values, y, ways, pairs);
#pragma unroll
      for (const Pair& value : values) AddTo(sum, value);
    }
    sum = SumOverWays(sum, own_pairs, blockDim.x, of_threads);
    if (p < pairs) {
      if (y == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) gradients.Store<T>(0, 2 * p + i, sum.v[i]);
      }
      // A graph is launched again with the same tag.
      for (int b = y; b < blocks; b += ways) of_pair[b * pairs].Clear();
    }
    __syncthreads();
  }
}

template <typename Op>
NormBwdGradients Gradients(const NormBwdArgs& args) {
  const bool exact = args.gradient_dtype == AccDtype(args.dtype);
  return {args.dscale, args.dbias, static_cast<int>(args.shape.cols), exact};
}

// Adds up `parts` rows of partial sums for each group.
template <typename Op>
Error LaunchSum(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                const typename Op::Acc* partials, int64_t parts) {
  using T = typename Op::T;
  const int64_t width = int64_t{op.Outputs()} * op.cols, total = args.shape.groups * width;
  const auto launch = [&]<int kWide>(std::integral_constant<int, kWide>) {
    // Each thread adds up 8 or more, and neighbours read 32 bytes or more; half of that if blocks are few.
    const bool few = total <= 2 * device.sms;
    const int ways = std::clamp(NextPowerOfTwo(parts / (few ? 4 : 8)), 1, few ? 64 : 32);
    const int log2_columns = std::countr_zero(static_cast<unsigned>(kSumThreads / ways));
    const int64_t blocks = CeilDiv(total, int64_t{kWide} << log2_columns);
    const Grid grid = {
        .blocks = blocks, .threads = kSumThreads, .shared_bytes = SpreadBytes(device, blocks), .early = true};
    return Launch<NormBwdSumKernel<T, kWide>>(device, stream, grid, "norm_bwd", partials, static_cast<int>(parts),
                                              width, total, log2_columns, Gradients<Op>(args));
  };
  // Whole vectors where they leave each multiprocessor a line of partial sums: less is asked for, and by fewer threads.
  constexpr int kWide = kVecSize<typename Op::Acc>;
  const bool wide = op.cols % kWide == 0 && IsVecAligned(partials) && total >= int64_t{device.sms} * kWarp;
  return wide ? launch(std::integral_constant<int, kWide>()) : launch(std::integral_constant<int, 1>());
}

// Short rows: defined in norm_bwd_short.cu for the kPlain operations. False if it does not suit.
template <typename Op>
bool LaunchNormBwdShort(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                        Scratch scratch, Error* status);

// Few and long rows: defined in norm_bwd_few.cu for the kPlain operations. False if it does not suit.
template <typename Op>
bool LaunchNormBwdFew(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                      Scratch scratch, Error* status);

// Rows that no cluster can hold, or few long ones: defined in norm_bwd_long.cu.
template <typename Op>
Error LaunchNormBwdLong(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                        Scratch scratch);

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_NORM_BWD_CUH_
