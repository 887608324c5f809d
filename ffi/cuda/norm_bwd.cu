// layer_norm and rms_norm, backward: the formulas are in norm_args.h.
//
// x and dy are read once, dx is written once. Gradients of the parameters are sums over rows, so blocks stay for many
// rows: a thread owns the same columns of each of its rows and keeps their sums in registers. A block then leaves one
// row of partial sums in float32, and a second, small launch adds those up. Nothing depends on the order in which blocks
// run, so results are the same bits every time.
//
// While one row is reduced, the next ones are on their way to shared memory. Each thread copies and reads its own slots
// only, which takes no barrier.
//
// Rows too long for the blocks of a cluster are read twice, through L2: one launch reduces them, and a second one, whose
// threads own columns, takes all rows in turn.
#include <algorithm>

#include "launch.cuh"
#include "norm_args.h"
#include "operand.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kMaxArrays = 3;

// Over a row: w = dy * scale, w * xhat and, with a mask, how many elements count.
enum { kW, kProduct, kCount };
template <typename Acc, int kN>
struct RowSums {
  Acc v[kN];
  static __device__ __forceinline__ RowSums Identity() { return {}; }
  static __device__ __forceinline__ RowSums Merge(RowSums a, RowSums b) {
#pragma unroll
    for (int i = 0; i < kN; ++i) a.v[i] += b.v[i];
    return a;
  }
  static __device__ __forceinline__ RowSums MergeLanes(RowSums p, int width) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      if (offset < width) p = Merge(p, ShuffleXor(p, offset));
    }
    return p;
  }
};

template <typename T_, Mode kMode_>
struct NormBwd {
  using T = T_;
  using Acc = AccT<T>;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kGeneral = kMode == Mode::kGeneral;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kSlots = kGeneral ? 2 : 4;  // of a row per thread: more do not fit the registers
  using V = Vec<T, kVec>;
  using Sums = RowSums<Acc, kGeneral ? 3 : 2>;

  int64_t rows_per_group;
  int cols;
  int arrays;  // x, dy and, with need_x, dsum
  bool center, need_x, need_scale, need_bias, scale_is_acc;
  DeviceOperand<T> x, dy, dsum;
  DeviceOperand<bool> mask;
  DeviceOperand<Acc> mean, rstd;
  const void* scale;
  int64_t scale_stride;  // from one group's to the next's
  Acc scale_offset;
  T* dx;

  explicit NormBwd(const NormBwdArgs& args)
      : rows_per_group(args.shape.rows_per_group),
        cols(static_cast<int>(args.shape.cols)),
        arrays(args.dsum && args.dx ? 3 : 2),
        center(args.center),
        need_x(args.dx != nullptr),
        need_scale(args.dscale != nullptr),
        need_bias(args.dbias != nullptr),
        scale_is_acc(args.parameter_dtype == norm_internal::AccType(args.dtype)),
        x(args.x, args.shape.rows()),
        dy(args.dy, args.shape.rows()),
        dsum(args.dsum, args.shape.rows()),
        mask(args.mask, args.shape.rows()),
        mean(args.mean, args.shape.rows()),
        rstd(args.rstd, args.shape.rows()),
        scale(args.scale.data),
        scale_stride(args.scale.group_stride),
        scale_offset(static_cast<Acc>(args.scale_offset)),
        dx(static_cast<T*>(args.dx)) {}

  __host__ __device__ __forceinline__ int Outputs() const { return (need_scale ? 1 : 0) + (need_bias ? 1 : 0); }

  // Row `index` of all; threads without a row get one of no slots.
  struct Row {
    int slots;
    OperandRow<T> in[kMaxArrays];
    OperandRow<bool> mask;
    T* dx;
    Acc mean, rstd;

    // For the 16-bit types one instruction, whose error at large means is below what they resolve.
    __device__ __forceinline__ Acc Xhat(T x) const {
      if constexpr (sizeof(T) == 2) return fma(ToAcc(x), rstd, -mean * rstd);
      return (ToAcc(x) - mean) * rstd;
    }
  };

  // On the grid of 16-byte slots of the dense arrays, which are aligned (kRagged), or of the columns (kGeneral).
  __device__ __forceinline__ int Skew(int64_t index) const {
    return kMode == Mode::kRagged ? static_cast<int>(index * cols % kVec) : 0;
  }

  __device__ __forceinline__ Row Begin(int64_t index, bool inside, int skew) const {
    Row r;
    r.slots = inside ? (skew + cols + kVec - 1) / kVec : 0;
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
    r.dx = dx + index * cols;
    return r;
  }

  // Their loads take long, so they are issued early: see the callers.
  __device__ __forceinline__ void Statistics(int64_t index, bool inside, Acc* row_mean, Acc* row_rstd) const {
    *row_mean = *row_rstd = 0;
    if (!inside) return;
    if (center) *row_mean = mean.data[kGeneral ? mean.RowOffset(index) : index];
    *row_rstd = rstd.data[kGeneral ? rstd.RowOffset(index) : index];
  }

  // scale + scale_offset of columns [first, first + kVec); what lies outside the row is 0.
  __device__ __forceinline__ void Scale(int64_t group, int first, Acc (&out)[kVec]) const {
    if (scale == nullptr) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) out[i] = 1;
    } else if (scale_is_acc) {
      ScaleOf(static_cast<const Acc*>(scale) + group * scale_stride, first, out);
    } else {
      ScaleOf(static_cast<const T*>(scale) + group * scale_stride, first, out);
    }
  }

  template <typename P>
  __device__ __forceinline__ void ScaleOf(const P* row, int first, Acc (&out)[kVec]) const {
    constexpr int kLoad = kVecSize<P> < kVec ? kVecSize<P> : kVec;
    if (kMode == Mode::kPlain && reinterpret_cast<uintptr_t>(row) % kVecBytes == 0) {
#pragma unroll
      for (int i = 0; i < kVec; i += kLoad) {
        const auto part = *reinterpret_cast<const Vec<P, kLoad>*>(row + first + i);
#pragma unroll
        for (int k = 0; k < kLoad; ++k) out[i + k] = ToAcc(part.v[k]) + scale_offset;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        out[i] = first + i >= 0 && first + i < cols ? ToAcc(row[first + i]) + scale_offset : Acc(0);
      }
    }
  }

  __device__ __forceinline__ bool Whole(int first) const {
    return kMode == Mode::kPlain || (first >= 0 && first + kVec <= cols);
  }

  // What is loaded beside the row becomes 0.
  __device__ __forceinline__ V Inside(V values, int first) const {
    if (!Whole(first)) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (first + i < 0 || first + i >= cols) values.v[i] = FromAcc<T>(Acc(0));
      }
    }
    return values;
  }

  __device__ __forceinline__ unsigned Keep(const Row& row, int first) const {
    unsigned keep = 0;
    if (kGeneral && mask.data != nullptr) {
      const auto bits = row.mask.template Load<kVec>(first);
#pragma unroll
      for (int i = 0; i < kVec; ++i) keep |= (bits.v[i] && first + i < cols ? 1u : 0u) << i;
    } else {
      keep = ~0u;
    }
    return keep;
  }

  __device__ __forceinline__ void Store(T* row, int first, const Acc (&values)[kVec]) const {
    const V rounded = RoundVec<T>(values);
    if (kMode == Mode::kPlain || (Whole(first) && IsVecAligned(row + first))) {
      jaxnorm::Store(row + first, rounded);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (first + i >= 0 && first + i < cols) row[first + i] = rounded.v[i];
      }
    }
  }

  // What the results of a row need of its sums: dx = rstd * (w - (c1 + xhat * c2)).
  struct Final {
    Acc c1, c2;
  };
  __device__ __forceinline__ Final Finish(const Sums& sums) const {
    Acc n = static_cast<Acc>(cols);
    if constexpr (kGeneral) {
      if (mask.data != nullptr) n = sums.v[kCount];
    }
    return {center ? sums.v[kW] / n : Acc(0), sums.v[kProduct] / n};
  }

  // Adds what a slot contributes.
  __device__ __forceinline__ void Count(const Row& row, int first, Sums& sums) const {
    if constexpr (kGeneral) {
      if (mask.data != nullptr) sums.v[kCount] += __popc(Keep(row, first));
    }
  }

  __device__ __forceinline__ void Dx(const Row& row, int first, const V& xs, const V& gs, const Acc (&sc)[kVec],
                                     const Final& final, Acc (&out)[kVec]) const {
    const unsigned keep = Keep(row, first);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      Acc inner = fma(row.Xhat(xs.v[i]), final.c2, final.c1);
      if (kGeneral && !(keep >> i & 1)) inner = 0;
      out[i] = fma(ToAcc(gs.v[i]), sc[i], -inner) * row.rstd;
    }
  }

  __device__ __forceinline__ static void Add(const V& values, Acc (&out)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[i] += ToAcc(values.v[i]);
  }
};

// ---- Rows that blocks or clusters hold ----

inline constexpr int kBlockThreads = 256;  // or twice as many for one long row

struct NormBwdPlan {
  int blocks = 1;            // or clusters, for each group
  int threads_per_row = 32;  // a power of two up to 32, or whole warps
  int merge_width = 1;       // warps of a row, up to a power of two
  int rows_per_block = 1;
  int cluster = 1;
  int part_slots = 0;  // of a row per block
  int stages = 2;
};

// A barrier of the threads of one row, of which a block has at most 15 that are wider than a warp.
__device__ __forceinline__ void RowBarrier(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

// Each call's `shared` is the one before the last call's: a warp, or a block of the cluster, may be ahead by one row.
template <typename Sums>
__device__ __forceinline__ Sums MergeNormRow(Sums value, const NormBwdPlan& plan, int group, int rank, int turn,
                                             RowShared<Sums> (&shared)[2]) {
  value = Sums::MergeLanes(value, min(plan.threads_per_row, kWarp));
  if (plan.threads_per_row > kWarp) {
    RowShared<Sums>& own = shared[turn & 1];
    const int warps = plan.threads_per_row / kWarp, lane = threadIdx.x % kWarp % plan.merge_width;
    if (threadIdx.x % kWarp == 0) own.warps[threadIdx.x / kWarp] = value;
    RowBarrier(group, plan.threads_per_row);
    value = Sums::MergeLanes(lane < warps ? own.warps[group * warps + lane] : Sums::Identity(), plan.merge_width);
    if (plan.cluster > 1) value = MergeBlocks(value, plan.cluster, rank, own, turn >> 1 & 1);
  }
  return value;
}

// Keeps the compiler from loading the next slot early, for which there are no registers.
__device__ __forceinline__ void OneSlotAtATime() { asm volatile("" ::: "memory"); }

// Vectors that the scale of one slot takes.
template <typename Acc, int kVec>
inline constexpr int kScaleVectors = kVec / kVecSize<Acc>;

template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1)
    NormBwdKernel(const __grid_constant__ Op op, const NormBwdPlan plan, typename Op::Acc* partials) {
  using Acc = typename Op::Acc;
  using V = typename Op::V;
  using ScaleVector = Vec<Acc, kVecSize<Acc>>;
  constexpr int kVec = Op::kVec, kSlots = Op::kSlots;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ RowShared<typename Op::Sums> shared[2];  // in turn, so that one barrier for each row is enough
  int rank = 0;
  int64_t block = blockIdx.x;
  if (plan.cluster > 1) {
    ClusterStart(&shared[0].barrier, &shared[1].barrier);
    rank = static_cast<int>(block % plan.cluster);
    block /= plan.cluster;
  }
  const int64_t param_group = block / plan.blocks;
  block %= plan.blocks;
  const int row_group = threadIdx.x / plan.threads_per_row, thread = threadIdx.x % plan.threads_per_row;
  const int step = plan.blocks * plan.rows_per_block;
  const int64_t base = param_group * op.rows_per_group + row_group;
  int64_t block_row = block * plan.rows_per_block;  // the first of this turn
  // The step is a multiple of kVec rows (kRagged), so that all rows of a thread lie alike.
  const int skew = op.Skew(base + block_row);
  // This thread's slots: `count` of them, plan.threads_per_row apart.
  const int begin = rank * plan.part_slots + thread;
  const int end = min((rank + 1) * plan.part_slots, (skew + op.cols + kVec - 1) / kVec);
  const int count = end > begin ? (end - begin + plan.threads_per_row - 1) / plan.threads_per_row : 0;
  const int first_column = begin * kVec - skew;
  const auto first_of = [&](int j) { return first_column + j * kVec * plan.threads_per_row; };
  const auto inside = [&](int64_t block_row) { return block_row + row_group < op.rows_per_group; };

  // This thread's slots in shared memory: of the scale, then of the rows that are staged. Their distance is a constant,
  // so that most addresses need no register.
  constexpr int kScaleSlots = kSlots * kScaleVectors<Acc, kVec>;
  const int stage_slots = kSlots * op.arrays;
  V* const own = reinterpret_cast<V*>(shared_bytes) + threadIdx.x % kBlockThreads +
                 threadIdx.x / kBlockThreads * (kScaleSlots + plan.stages * stage_slots) * kBlockThreads;
  const auto at = [&](int place, int j, int k) -> V& {
    return (own + place * stage_slots * kBlockThreads)[(kScaleSlots + k * kSlots + j) * kBlockThreads];
  };
  const auto copy = [&](int64_t block_row, int place) {
    if (inside(block_row)) {
      const typename Op::Row row = op.Begin(base + block_row, true, skew);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (j >= count) continue;
        CopySlotAsync<Op::kMode>(&at(place, j, 0), row.in[0], first_of(j));
        CopySlotAsync<Op::kMode>(&at(place, j, 1), row.in[1], first_of(j));
        if (op.arrays == kMaxArrays) CopySlotAsync<Op::kMode>(&at(place, j, 2), row.in[2], first_of(j));
      }
    }
    CopyCommit();
  };
  const auto scale_at = [&](int j, int part) -> ScaleVector& {
    return reinterpret_cast<ScaleVector&>(own[(j * kScaleVectors<Acc, kVec> + part) * kBlockThreads]);
  };
  const auto scale_of = [&](int j, Acc(&sc)[kVec]) {
#pragma unroll
    for (int part = 0; part < kScaleVectors<Acc, kVec>; ++part) {
      const ScaleVector vector = scale_at(j, part);
#pragma unroll
      for (int i = 0; i < kVecSize<Acc>; ++i) sc[part * kVecSize<Acc> + i] = vector.v[i];
    }
  };

  for (int place = 0; place < plan.stages; ++place) copy(block_row + place * step, place);
  Acc dscale[kSlots][kVec], dbias[kSlots][kVec];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) dscale[j][i] = dbias[j][i] = 0;
    if (j < count) {
      Acc sc[kVec];
      op.Scale(param_group, first_of(j), sc);
#pragma unroll
      for (int i = 0; i < kVec; ++i) scale_at(j, i / kVecSize<Acc>).v[i % kVecSize<Acc>] = sc[i];
    }
  }
  Acc mean, rstd;
  op.Statistics(base + block_row, inside(block_row), &mean, &rstd);
  if (plan.cluster > 1) ClusterWait();
  int place = 0, turn = 0;
  for (; block_row < op.rows_per_group; block_row += step) {
    typename Op::Row row = op.Begin(base + block_row, true, skew);
    row.mean = mean;
    row.rstd = rstd;
    op.Statistics(base + block_row + step, inside(block_row + step), &mean, &rstd);
    if (plan.stages == 3) {
      CopyWait<2>();
    } else {
      CopyWait<1>();
    }
    const int active = inside(block_row) ? count : 0;  // without a row, still part of shuffles and barriers
    auto sums = Op::Sums::Identity();
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (j >= active) continue;
      const int first = first_of(j);
      const V xs = op.Inside(at(place, j, 0), first), gs = op.Inside(at(place, j, 1), first);
      Acc sc[kVec];
      scale_of(j, sc);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc xhat = row.Xhat(xs.v[i]), g = ToAcc(gs.v[i]), w = g * sc[i];
        dbias[j][i] += g;
        dscale[j][i] = fma(g, xhat, dscale[j][i]);
        sums.v[kW] += w;
        sums.v[kProduct] = fma(w, xhat, sums.v[kProduct]);
      }
      op.Count(row, first, sums);
      OneSlotAtATime();
    }
    if (op.need_x) {
      sums = MergeNormRow(sums, plan, row_group, rank, turn++, shared);
      const auto final = op.Finish(sums);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (j >= active) continue;
        Acc sc[kVec], out[kVec];
        scale_of(j, sc);
        op.Dx(row, first_of(j), at(place, j, 0), at(place, j, 1), sc, final, out);
        if (op.arrays == kMaxArrays) op.Add(at(place, j, 2), out);
        op.Store(row.dx, first_of(j), out);
        OneSlotAtATime();
      }
    }
    copy(block_row + plan.stages * step, place);
    if (++place == plan.stages) place = 0;
  }
  if (!op.need_scale && !op.need_bias) return;

  // One row of sums for each block: [outputs][cols].
  Acc* const out = partials + (param_group * plan.blocks + block) * op.Outputs() * op.cols;
  const auto add_slot = [&](Acc* to, int first, const Acc(&values)[kVec], bool accumulate) {
    if (Op::kMode == Mode::kPlain) {
#pragma unroll
      for (int i = 0; i < kVec; i += kVecSize<Acc>) {
        auto* const p = reinterpret_cast<ScaleVector*>(to + first + i);
        ScaleVector sum = accumulate ? *p : ScaleVector();
#pragma unroll
        for (int k = 0; k < kVecSize<Acc>; ++k) sum.v[k] += values[i + k];
        *p = sum;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int c = first + i;
        if (c >= 0 && c < op.cols) to[c] = accumulate ? to[c] + values[i] : values[i];
        OneSlotAtATime();
      }
    }
  };
  const auto add = [&](Acc* to, bool accumulate) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (j >= count) continue;
      if (op.need_scale) add_slot(to, first_of(j), dscale[j], accumulate);
      if (op.need_bias) add_slot(to + (op.need_scale ? op.cols : 0), first_of(j), dbias[j], accumulate);
    }
  };
  if (plan.rows_per_block == 1) return add(out, false);
  // The rows of a block one after the other, in the memory that the stages had.
  CopyWait<0>();
  Acc* const total = reinterpret_cast<Acc*>(shared_bytes);
  for (int g = 0; g < plan.rows_per_block; ++g) {
    __syncthreads();
    if (row_group == g) add(total, g > 0);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < op.Outputs() * op.cols; c += blockDim.x) out[c] = total[c];
}

// Adds up the rows of partial sums: [groups][blocks][width] to dscale (the first `cols` of a group's width) and dbias.
template <typename T>
__global__ void __launch_bounds__(1024) NormBwdSumKernel(const AccT<T>* partials, int blocks, int64_t width, int cols,
                                                         int64_t total, bool exact, void* dscale, void* dbias) {
  using Acc = AccT<T>;
  __shared__ Acc sums[kWarp][kWarp + 1];
  const int x = threadIdx.x % kWarp, y = threadIdx.x / kWarp;
  const int64_t column = int64_t{blockIdx.x} * kWarp + x;  // of all groups
  const int64_t group = column / width, c = column % width;
  Acc sum = 0;
  if (column < total) {
    const Acc* p = partials + group * blocks * width + c;
#pragma unroll 4
    for (int b = y; b < blocks; b += kWarp) sum += p[b * width];
  }
  sums[y][x] = sum;
  __syncthreads();
  if (y != 0 || column >= total) return;
  for (int i = 1; i < kWarp; ++i) sum += sums[i][x];
  const bool first = c < cols && dscale != nullptr;
  void* const out = first ? dscale : dbias;
  const int64_t at = group * cols + (c < cols ? c : c - cols);
  if (exact) {
    static_cast<Acc*>(out)[at] = sum;
  } else {
    static_cast<T*>(out)[at] = FromAcc<T>(sum);
  }
}

// ---- Longer rows ----

// Where a launch finds its rows. With gradients of parameters, `rows` is what each group has; without, all rows count as
// one group, or as several where there is not enough scratch memory for all sums at once.
struct NormBwdLongPlan {
  int64_t first_row = 0, rows = 1;
  int chunks = 1, chunk_slots = 1;  // of a row, for its sums
  int tiles = 1, slices = 1;        // of a group's columns and rows
};

// Chunk i % chunks of row i / chunks.
template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1)
    NormBwdLongReduceKernel(const __grid_constant__ Op op, const NormBwdLongPlan plan, typename Op::Sums* sums) {
  using Acc = typename Op::Acc;
  using V = typename Op::V;
  constexpr int kVec = Op::kVec;
  __shared__ RowShared<typename Op::Sums> shared;
  const int64_t index = plan.first_row + blockIdx.x / plan.chunks;
  const int skew = op.Skew(index);
  typename Op::Row row = op.Begin(index, true, skew);
  op.Statistics(index, true, &row.mean, &row.rstd);
  const int begin = static_cast<int>(blockIdx.x % plan.chunks) * plan.chunk_slots;
  const int end = min(begin + plan.chunk_slots, row.slots);
  auto own = Op::Sums::Identity();
#pragma unroll 2
  for (int slot = begin + threadIdx.x; slot < end; slot += blockDim.x) {
    const int first = slot * kVec - skew;
    const V xs = op.Inside(row.in[0].template Load<kVec>(first), first);
    const V gs = op.Inside(row.in[1].template Load<kVec>(first), first);
    Acc sc[kVec];
    op.Scale(index / op.rows_per_group, first, sc);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Acc xhat = row.Xhat(xs.v[i]), w = ToAcc(gs.v[i]) * sc[i];
      own.v[kW] += w;
      own.v[kProduct] = fma(w, xhat, own.v[kProduct]);
    }
    op.Count(row, first, own);
  }
  own = MergeWarps(Op::Sums::MergeLanes(own, kWarp), blockDim.x / kWarp, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = own;
}

// One slot of columns for each thread, in every `slices`-th row of a group. Columns are cut without regard to how rows
// lie in memory: loads and stores of odd rows are by element.
template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1)
    NormBwdLongKernel(const __grid_constant__ Op op, const NormBwdLongPlan plan, const typename Op::Sums* sums,
                      typename Op::Acc* partials) {
  using Acc = typename Op::Acc;
  using V = typename Op::V;
  constexpr int kVec = Op::kVec;
  const int64_t part = blockIdx.x / plan.tiles;  // of all groups' slices
  const int64_t group = part / plan.slices;
  const int first = static_cast<int>((blockIdx.x % plan.tiles * blockDim.x + threadIdx.x) * kVec);
  const bool active = first < op.cols;
  Acc dscale[kVec], dbias[kVec], sc[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) dscale[i] = dbias[i] = 0;
  int64_t scale_group = -1;
#pragma unroll 1
  for (int64_t r = part % plan.slices; r < plan.rows; r += plan.slices) {
    const int64_t in_launch = group * plan.rows + r, index = plan.first_row + in_launch;
    typename Op::Row row = op.Begin(index, true, 0);
    V xs, gs, added;
    if (active) {
      xs = op.Inside(row.in[0].template Load<kVec>(first), first);
      gs = op.Inside(row.in[1].template Load<kVec>(first), first);
      if (op.arrays == kMaxArrays) added = row.in[2].template Load<kVec>(first);
    }
    op.Statistics(index, true, &row.mean, &row.rstd);
    auto total = Op::Sums::Identity();
    if (op.need_x) {  // each warp by itself
      for (int c = threadIdx.x % kWarp; c < plan.chunks; c += kWarp) {
        total = Op::Sums::Merge(total, sums[in_launch * plan.chunks + c]);
      }
      total = Op::Sums::MergeLanes(total, kWarp);
    }
    if (!active) continue;
    if (const int64_t g = index / op.rows_per_group; g != scale_group) {
      op.Scale(g, first, sc);
      scale_group = g;
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Acc g = ToAcc(gs.v[i]);
      dbias[i] += g;
      dscale[i] = fma(g, row.Xhat(xs.v[i]), dscale[i]);
    }
    if (op.need_x) {
      Acc out[kVec];
      op.Dx(row, first, xs, gs, sc, op.Finish(total), out);
      if (op.arrays == kMaxArrays) op.Add(added, out);
      op.Store(row.dx, first, out);
    }
  }
  Acc* out = partials + part * op.Outputs() * op.cols;
  const auto write = [&](const Acc(&values)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (first + i < op.cols) out[first + i] = values[i];
    }
    out += op.cols;
  };
  if (op.need_scale) write(dscale);
  if (op.need_bias) write(dbias);
}

// ---- Launching ----

// Adds up `parts` rows of partial sums for each group.
template <typename Op>
ffi::Error LaunchSum(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                     const typename Op::Acc* partials, int64_t parts) {
  const int64_t width = int64_t{op.Outputs()} * op.cols, total = args.shape.groups * width;
  const bool exact = args.gradient_dtype == norm_internal::AccType(args.dtype);
  const Grid grid = {.blocks = CeilDiv(total, kWarp), .threads = 1024};
  return Launch<NormBwdSumKernel<typename Op::T>>(device, stream, grid, "norm_bwd", partials, static_cast<int>(parts),
                                                  width, op.cols, total, exact, args.dscale, args.dbias);
}

template <typename Op>
ffi::Error LaunchLong(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                      ffi::AnyBuffer scratch) {
  using Acc = typename Op::Acc;
  using Sums = typename Op::Sums;
  constexpr int kThreads = 256;
  const bool parameters = op.Outputs() > 0;
  const int64_t slots = CeilDiv(args.shape.cols, Op::kVec) + (Op::kMode == Mode::kPlain ? 0 : 1);
  const int64_t capacity = static_cast<int64_t>(scratch.size_bytes() / sizeof(Acc));
  const int64_t part_size = op.Outputs() * args.shape.cols;  // partial sums of a slice
  const int64_t room = (capacity - args.shape.groups * part_size) / static_cast<int64_t>(sizeof(Sums) / sizeof(Acc));
  JAXNORM_CHECK(room > 0 && (!parameters || room >= args.shape.rows()));
  NormBwdLongPlan plan;
  plan.rows = parameters ? args.shape.rows_per_group : std::min(args.shape.rows(), room);
  const int64_t launched = parameters ? args.shape.rows() : plan.rows;
  // Chunks of 16 slots for each thread, or longer ones if there is no room.
  const int64_t chunks = std::min(CeilDiv(slots, 16 * kThreads), room / launched);
  plan.chunks = static_cast<int>(chunks);
  plan.chunk_slots = static_cast<int>(CeilDiv(slots, chunks));
  plan.tiles = static_cast<int>(CeilDiv(args.shape.cols, Op::kVec * kThreads));
  auto* const sums = static_cast<Sums*>(scratch.untyped_data());
  auto* const partials = reinterpret_cast<Acc*>(sums + launched * chunks);
  // Enough slices to fill the device; each leaves partial sums, so few where those would weigh.
  int64_t slices = CeilDiv(8 * device.sms, plan.tiles);
  if (parameters) {
    const int64_t left = capacity - launched * chunks * static_cast<int64_t>(sizeof(Sums) / sizeof(Acc));
    slices = std::min({slices, CeilDiv(plan.rows, 16), left / (args.shape.groups * part_size)});
  }
  plan.slices = static_cast<int>(std::clamp<int64_t>(slices, 1, plan.rows));
  const int64_t groups = parameters ? args.shape.groups : 1;
  for (; plan.first_row < args.shape.rows(); plan.first_row += launched) {
    if (!parameters) plan.rows = std::min(plan.rows, args.shape.rows() - plan.first_row);
    if (op.need_x) {
      const Grid grid = {.blocks = groups * plan.rows * plan.chunks, .threads = kThreads};
      JAXNORM_RETURN_IF_ERROR(Launch<NormBwdLongReduceKernel<Op>>(device, stream, grid, "norm_bwd", op, plan, sums));
    }
    const Grid grid = {.blocks = groups * plan.slices * plan.tiles, .threads = kThreads};
    JAXNORM_RETURN_IF_ERROR(Launch<NormBwdLongKernel<Op>>(device, stream, grid, "norm_bwd", op, plan,
                                                          static_cast<const Sums*>(sums), partials));
  }
  if (!parameters) return ffi::Error::Success();
  return LaunchSum(device, stream, op, args, partials, plan.slices);
}

template <typename Op>
ffi::Error LaunchNormBwd(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                         ffi::AnyBuffer scratch) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  const int slots = static_cast<int>(CeilDiv(args.shape.cols, Op::kVec)) + (Op::kMode == Mode::kRagged ? 1 : 0);
  // Shared memory holds two stages of two arrays for a block of the largest size; with a third one parts are shorter.
  const int max_part = kMaxThreads * Op::kSlots / (op.arrays == kMaxArrays ? 2 : 1);
  if (slots > max_part * (device.clusters ? kMaxPortableCluster : 1)) {
    return LaunchLong(device, stream, op, args, scratch);
  }
  NormBwdPlan plan;
  while (CeilDiv(slots, plan.cluster) > max_part) plan.cluster *= 2;
  plan.part_slots = static_cast<int>(CeilDiv(slots, plan.cluster));
  const int64_t wanted = CeilDiv(plan.part_slots, Op::kSlots);
  plan.threads_per_row = static_cast<int>(wanted > kWarp ? CeilDiv(wanted, kWarp) * kWarp : NextPowerOfTwo(wanted));
  plan.merge_width = NextPowerOfTwo(CeilDiv(plan.threads_per_row, kWarp));
  plan.rows_per_block = std::max(1, kBlockThreads / plan.threads_per_row);
  const int threads = plan.threads_per_row * plan.rows_per_block;
  const int padded = static_cast<int>(CeilDiv(threads, kBlockThreads) * kBlockThreads);
  const int stage_bytes = Op::kSlots * op.arrays * kVecBytes * padded;
  const int scale_bytes = Op::kSlots * Op::kVec * static_cast<int>(sizeof(Acc)) * padded;
  const int blocks_per_sm = threads <= kBlockThreads ? 2 : 1;
  const int room = (device.max_shared_bytes + 1024) / blocks_per_sm - 1024 - kStaticSharedBytes;
  plan.stages = scale_bytes + 3 * stage_bytes <= room ? 3 : 2;
  // One row of partial sums for each block; more blocks than run at once would only write more of them.
  const int outputs = op.Outputs();
  int64_t blocks = std::min<int64_t>(CeilDiv(op.rows_per_group, plan.rows_per_block),
                                     std::max(1, device.sms * blocks_per_sm / plan.cluster));
  if (outputs > 0) {
    const int64_t row_bytes = args.shape.groups * outputs * args.shape.cols * int64_t{sizeof(Acc)};
    const int64_t room_for = static_cast<int64_t>(scratch.size_bytes()) / row_bytes;
    JAXNORM_CHECK(room_for > 0);
    blocks = std::min(blocks, room_for);
  }
  if (Op::kMode == Mode::kRagged) {
    // Rows of a thread lie alike if the step from one to the next is a multiple of kVec.
    const int64_t unit = Op::kVec / std::min(Op::kVec, plan.rows_per_block & -plan.rows_per_block);
    if (blocks < unit) return LaunchNormBwd(device, stream, NormBwd<T, Mode::kGeneral>(args), args, scratch);
    blocks = blocks / unit * unit;
  }
  plan.blocks = static_cast<int>(blocks);
  Grid grid = {.blocks = args.shape.groups * blocks * plan.cluster,
               .threads = threads,
               .shared_bytes = scale_bytes + plan.stages * stage_bytes,
               .cluster = plan.cluster};
  if (plan.rows_per_block > 1 && outputs > 0) {
    grid.shared_bytes = std::max<int>(grid.shared_bytes, outputs * op.cols * sizeof(Acc));
  }
  auto* const partials = static_cast<Acc*>(scratch.untyped_data());
  JAXNORM_RETURN_IF_ERROR(Launch<NormBwdKernel<Op>>(device, stream, grid, "norm_bwd", op, plan, partials));
  if (outputs == 0) return ffi::Error::Success();
  return LaunchSum(device, stream, op, args, partials, blocks);
}

ffi::Error NormBwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::RemainingArgs rest,
                          ffi::RemainingRets results, int64_t axis, int64_t groups, bool center, double scale_offset,
                          int64_t operands, int64_t need) {
  NormBwdArgs args;
  JAXNORM_RETURN_IF_ERROR(
      ParseNormBwd(x, dy, rest, results, axis, groups, center, scale_offset, operands, need, &args));
  const NormShape& shape = args.shape;
  JAXNORM_CHECK(shape.cols < INT32_MAX / 2);  // positions within a row are 32-bit; Python lowers the formula instead
  if (shape.size() == 0) {
    const size_t bytes = shape.groups * shape.cols * ffi::ByteWidth(args.gradient_dtype);
    for (void* out : {args.dscale, args.dbias}) {
      if (out == nullptr || bytes == 0) continue;
      JAXNORM_RETURN_IF_ERROR(LaunchStatus(cudaMemsetAsync(out, 0, bytes, stream), "norm_bwd"));
    }
    return ffi::Error::Success();
  }
  auto scratch = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (scratch.has_error()) return scratch.error();
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) -> ffi::Error {
    bool full = !args.mask && args.mean.elements == (args.center ? shape.rows() : 0) &&
                args.rstd.elements == shape.rows() && (args.dx == nullptr || IsVecAligned(args.dx));
    for (const Operand* a : {&args.x, &args.dy, &args.dsum}) {
      full = full && (!*a || (IsVecAligned(a->data) && a->elements == shape.size()));
    }
    if constexpr (!std::is_same_v<T, double>) {
      using Plain = NormBwd<T, Mode::kPlain>;
      using Ragged = NormBwd<T, Mode::kRagged>;
      if (full && shape.cols % kVecSize<T> == 0) return LaunchNormBwd(*device, stream, Plain(args), args, **scratch);
      if (full) return LaunchNormBwd(*device, stream, Ragged(args), args, **scratch);
    }
    return LaunchNormBwd(*device, stream, NormBwd<T, Mode::kGeneral>(args), args, **scratch);
  });
}

JAXNORM_REGISTER(norm_bwd, NormBwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .RemainingRets()
                     .Attr<int64_t>("axis")
                     .Attr<int64_t>("groups")
                     .Attr<bool>("center")
                     .Attr<double>("scale_offset")
                     .Attr<int64_t>("operands")
                     .Attr<int64_t>("need"),
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
