// layer_norm and rms_norm, backward: the formulas are in norm_args.h.
//
// x and dy are read once, dx is written once. Gradients of the parameters are sums over rows, so blocks stay for many
// rows: a thread owns the same columns of each of its rows and keeps their scale and their sums in registers. A block
// then leaves one row of partial sums in float32, and a second, small launch adds those up. Nothing depends on the order
// in which blocks run, so results are the same bits every time.
//
// Rows are on their way to shared memory several turns before they are needed. Each thread copies and reads its own
// slots only, which takes no barrier. What a turn does is shifted by one row between the two passes: the first one sums
// row t + 1 while the sums of row t travel between warps and between the blocks of a cluster, then the second one writes
// row t.
//
// Rows that no cluster can hold are read twice, through L2: one launch reduces them, and a second one writes dx.
#include <algorithm>

#include "launch.cuh"
#include "norm.cuh"
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
  static constexpr int kSlots = kGeneral || sizeof(T) == 2 ? 2 : 4;  // of a row per thread: more do not fit the registers
  using V = Vec<T, kVec>;
  using Sums = RowSums<Acc, kGeneral ? 3 : 2>;

  int64_t rows, rows_per_group;
  int cols;
  int arrays;  // x, dy and, with need_x, dsum
  bool center, need_x, need_scale, need_bias, narrow;
  DeviceOperand<T> x, dy, dsum;
  DeviceOperand<bool> mask;
  DeviceOperand<Acc> mean, rstd;
  DeviceParameter<T> scale;
  Acc scale_offset, inverse_cols;
  T* dx;

  explicit NormBwd(const NormBwdArgs& args)
      : rows(args.shape.rows()),
        rows_per_group(args.shape.rows_per_group),
        cols(static_cast<int>(args.shape.cols)),
        arrays(args.dsum && args.dx ? 3 : 2),
        center(args.center),
        need_x(args.dx != nullptr),
        need_scale(args.dscale != nullptr),
        need_bias(args.dbias != nullptr),
        narrow(!std::is_same_v<T, Acc> && args.parameter_dtype == args.dtype),
        x(args.x, args.shape.rows()),
        dy(args.dy, args.shape.rows()),
        dsum(args.dsum, args.shape.rows()),
        mask(args.mask, args.shape.rows()),
        mean(args.mean, args.shape.rows()),
        rstd(args.rstd, args.shape.rows()),
        scale(args.scale, narrow),
        scale_offset(static_cast<Acc>(args.scale_offset)),
        inverse_cols(Acc(1) / static_cast<Acc>(cols)),
        dx(static_cast<T*>(args.dx)) {}

  __host__ __device__ __forceinline__ int Outputs() const { return (need_scale ? 1 : 0) + (need_bias ? 1 : 0); }
  __host__ __device__ __forceinline__ int Slots() const { return (cols + kVec - 1) / kVec; }

  // ---- Columns and slots ----
  //
  // Slots are those of the dense arrays, which are aligned (kRagged), or of the columns (others). A row that begins
  // within a slot may touch one slot more than it fills: its columns there belong to the first slot, whose elements
  // before the row's begin are free.

  __device__ __forceinline__ int Skew(int64_t index) const {
    return kMode == Mode::kRagged ? static_cast<int>(index * cols % kVec) : 0;
  }
  // Of element i of a slot; cols or more if it has none.
  __device__ __forceinline__ int Column(int slot, int skew, int i) const {
    const int column = slot * kVec - skew + i;
    return column < 0 ? column + Slots() * kVec : column;
  }
  __device__ __forceinline__ bool Wraps(int skew) const { return skew + cols > Slots() * kVec; }
  // Bit i: element i of a slot is a column that lies there in memory; and, one that lies in the slot after the last one.
  struct SlotParts {
    unsigned here, beside;
  };
  __device__ __forceinline__ SlotParts Parts(int slot, int skew) const {
    constexpr unsigned kAll = (1u << kVec) - 1;
    const int first = slot * kVec - skew;
    const unsigned here = kAll << max(-first, 0) & kAll >> max(first + kVec - cols, 0) & kAll;
    if (first >= 0) return {here, 0};
    const int left = cols + skew - Slots() * kVec;
    return {here, left > 0 ? (1u << left) - 1 : 0};
  }
  // Whether a slot's elements are as many columns in a row; `first` is that of element 0.
  __device__ __forceinline__ bool Whole(int first) const {
    return kMode == Mode::kPlain || (first >= 0 && first + kVec <= cols);
  }

  // ---- Rows ----

  __device__ __forceinline__ const DeviceOperand<T>& Array(int k) const { return k == 0 ? x : k == 1 ? dy : dsum; }

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

  struct Statistics {
    Acc mean, rstd;

    // For the 16-bit types one instruction, whose error at large means is below what they resolve.
    __device__ __forceinline__ Acc Xhat(Acc x) const {
      if constexpr (sizeof(T) == 2) return fma(x, rstd, -mean * rstd);
      return (x - mean) * rstd;
    }
  };

  // Their loads take long, so callers issue them early. 0 beside the rows.
  __device__ __forceinline__ Statistics StatisticsOf(int64_t index, bool inside) const {
    Statistics s = {0, 0};
    if (!inside) return s;
    if (center) s.mean = mean.data[kGeneral ? mean.RowOffset(index) : index];
    s.rstd = rstd.data[kGeneral ? rstd.RowOffset(index) : index];
    return s;
  }

  // scale + scale_offset of a slot.
  __device__ __forceinline__ void Scale(int64_t group, int slot, int skew, Acc (&out)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[i] = 1;
    if (scale.data == nullptr) return;
    const void* row = scale.Row(group);
    const int first = slot * kVec - skew;
    if (kMode == Mode::kPlain && IsVecAligned(row)) {
      DeviceParameter<T>::template Load<true>(narrow, row, first, cols, out);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int column = Column(slot, skew, i);
        if (column >= cols) continue;
        out[i] = narrow ? ToAcc(static_cast<const T*>(row)[column]) : static_cast<const Acc*>(row)[column];
      }
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[i] += scale_offset;
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

  // Adds what one slot contributes, in which x and dy are 0 where it has no column.
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
    for (int i = 0; i < kVec; ++i) {
      const Acc xhat = statistics.Xhat(xs[i]), w = g[i] * sc[i];
      dbias[i] += g[i];
      dscale[i] = fma(g[i], xhat, dscale[i]);
      sums.v[kW] += w;
      sums.v[kProduct] = fma(w, xhat, sums.v[kProduct]);
    }
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

  __device__ __forceinline__ void Dx(const Row& row, const Statistics& statistics, int first, const V& x, const V& dy,
                                     const Acc (&sc)[kVec], const Final& final, Acc (&out)[kVec]) const {
    const unsigned keep = Keep(row, first);
    Acc xs[kVec], g[kVec];
    ToAccAll(x, xs);
    ToAccAll(dy, g);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      Acc inner = fma(statistics.Xhat(xs[i]), final.c2, final.c1);
      if (kGeneral && !(keep >> i & 1)) inner = 0;
      out[i] = fma(g[i], sc[i], -inner) * statistics.rstd;
    }
  }

  static __device__ __forceinline__ void Add(const V& values, Acc (&out)[kVec]) {
    Acc added[kVec];
    ToAccAll(values, added);
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[i] += added[i];
  }

  // `to` is where element 0 of the slot belongs.
  __device__ __forceinline__ void Store(T* to, int slot, int skew, const Acc (&values)[kVec]) const {
    const V rounded = RoundVec<T>(values);
    const int first = slot * kVec - skew;
    if (kMode == Mode::kPlain || (Whole(first) && IsVecAligned(to))) {
      jaxnorm::Store(to, rounded);
    } else {
      const auto [here, beside] = Parts(slot, skew);
      T* const after = to + Slots() * kVec;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (here >> i & 1) to[i] = rounded.v[i];
        if (beside >> i & 1) after[i] = rounded.v[i];
      }
    }
  }
};

// ---- Rows that blocks or clusters hold ----

inline constexpr int kBlockThreads = 256;  // or twice as many for one long row
inline constexpr int kStages = 3;  // more were measured to be slower: the first ones are then read before any is written

struct NormBwdPlan {
  int blocks = 1;            // or clusters, for each group
  int turns = 1, rest = 0;   // of a block, and one more if its first row is before `rest`
  int threads_per_row = 32;  // a power of two up to 32, or whole warps
  int rows_per_block = 1;
  int cluster = 1;
  int part_slots = 0;  // of a row per block
};

// What warps, and the blocks of a cluster, tell each other of even and of odd turns: one may be ahead by a turn.
template <typename Sums>
struct NormBwdShared {
  Sums warps[2][kMaxThreads / kWarp];
  Sums blocks[2][kMaxCluster];
  uint64_t barriers[2];
};

// A barrier of the threads of one row, of which a block has at most 15 that are wider than a warp.
__device__ __forceinline__ void RowBarrier(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

// Copies the slot at element `offset` of a dense array to shared memory; complete after CopyWait. Only the array's last
// slot may not be `whole`.
template <typename T>
__device__ __forceinline__ void CopySlot(uint32_t shared, const DeviceOperand<T>& array, int64_t offset, bool whole) {
  constexpr int kVec = kVecSize<T>;
  if (whole || offset + kVec <= array.elements) return CopyAsync(shared, array.data + offset);
  Vec<T, kVec> values;
#pragma unroll
  for (int i = 0; i < kVec; ++i) values.v[i] = offset + i < array.elements ? array.data[offset + i] : T();
  StoreShared(shared, values);
}

// Of word w of a vector, those bits that belong to elements whose bit in `elements` is set.
template <typename T>
__device__ __forceinline__ uint32_t ElementMask(unsigned elements, int w) {
  if constexpr (sizeof(T) == 2) {
    return (elements >> 2 * w & 1 ? 0xffffu : 0u) | (elements >> 2 * w & 2 ? 0xffff0000u : 0u);
  } else {
    return elements >> w * sizeof(uint32_t) / sizeof(T) & 1 ? ~0u : 0u;
  }
}

template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1)
    NormBwdKernel(const __grid_constant__ Op op, const NormBwdPlan plan, typename Op::Acc* partials) {
  using Acc = typename Op::Acc;
  using V = typename Op::V;
  using Sums = typename Op::Sums;
  using T = typename Op::T;
  constexpr int kVec = Op::kVec, kSlots = Op::kSlots;
  constexpr bool kRagged = Op::kMode == Mode::kRagged, kPlain = Op::kMode == Mode::kPlain;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ NormBwdShared<Sums> shared;
  static_assert(sizeof(shared) <= kStaticSharedBytes);
  int rank = 0;
  unsigned block = blockIdx.x, param_group = 0;
  if (plan.cluster > 1) {
    ClusterStart(&shared.barriers[0], &shared.barriers[1]);
    rank = static_cast<int>(block % plan.cluster);
    block /= plan.cluster;
  }
  if (block >= plan.blocks) {
    param_group = block / plan.blocks;
    block %= plan.blocks;
  }
  const int threads = plan.threads_per_row;
  const int row_group = plan.rows_per_block > 1 ? threadIdx.x / threads : 0;
  const int thread = threadIdx.x - row_group * threads;
  const int step = plan.blocks * plan.rows_per_block;  // rows from turn to turn
  const int block_row = block * plan.rows_per_block;
  const int turns = plan.turns + (block_row < plan.rest ? 1 : 0);
  const int own_turns = plan.turns + (block_row + row_group < plan.rest ? 1 : 0);
  const auto inside = [&](int turn) { return turn < own_turns; };
  const int64_t base = param_group * op.rows_per_group + block_row + row_group;
  const auto index = [&](int turn) { return base + int64_t{turn} * step; };

  // This thread's slots, which are the same columns in all of its rows: the step is a multiple of kVec rows (kRagged).
  const int skew = op.Skew(base);
  const int first_slot = rank * plan.part_slots + thread;
  const int end = min((rank + 1) * plan.part_slots, op.Slots());
  const auto slot_of = [&](int j) { return first_slot + j * threads; };
  const auto first_of = [&](int j) { return slot_of(j) * kVec - skew; };
  const auto active = [&](int j) { return slot_of(j) < end; };
  const bool wraps = kRagged && first_slot == 0 && op.Wraps(skew);

  // In shared memory: slot j of array k of a stage, at constant distances so that addresses take few registers, and
  // after all stages what continues in a row's first slot.
  constexpr uint32_t kSlotBytes = kBlockThreads * kVecBytes;
  const uint32_t stage_bytes = kSlots * op.arrays * kSlotBytes;
  const uint32_t shared_base = SharedAddress(shared_bytes);
  const uint32_t own = shared_base + threadIdx.x % kBlockThreads * kVecBytes +
                       threadIdx.x / kBlockThreads * (kStages * stage_bytes);
  const auto at = [&](int place, int j, int k) { return own + place * stage_bytes + (k * kSlots + j) * kSlotBytes; };
  const auto wrapped = [&](int place, int k) {
    const uint32_t halves = (blockDim.x + kBlockThreads - 1) / kBlockThreads;
    return shared_base + kStages * stage_bytes * halves +
           ((place * op.arrays + k) * plan.rows_per_block + row_group) * kVecBytes;
  };
  // Elements from the first one of the arrays to that of this thread's first slot: of the row to be copied next, and of
  // the one to be stored next.
  const int64_t step_elements = int64_t{step} * op.cols;
  const int slot_step = threads * kVec;
  int64_t copy_offset = base * op.cols + first_of(0), store_offset = copy_offset;
  const auto copy = [&](int turn, int place) {
    if (inside(turn)) {
      const typename Op::Row row = op.Begin(index(turn));
      const bool whole = kPlain || index(turn) + 1 < op.rows;
#pragma unroll
      for (int k = 0; k < kMaxArrays; ++k) {
        if (k == op.arrays) break;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          if (!active(j)) continue;
          if constexpr (Op::kGeneral) {
            StoreShared(at(place, j, k), row.in[k].template Load<kVec>(first_of(j)));
          } else {
            CopySlot(at(place, j, k), op.Array(k), copy_offset + j * slot_step, whole);
          }
        }
        if (wraps) CopySlot(wrapped(place, k), op.Array(k), copy_offset + op.Slots() * kVec, whole);
      }
    }
    copy_offset += step_elements;
    CopyCommit();
  };
  // Puts the columns that a slot has beside those in memory at its place, or 0.
  const auto complete = [&](int place) {
    if constexpr (!kPlain) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (!active(j) || op.Whole(first_of(j))) continue;
        const auto [here, beside] = op.Parts(slot_of(j), skew);
#pragma unroll 1
        for (int k = 0; k < op.arrays; ++k) {
          auto words = LoadShared<WordsOf<V>>(at(place, j, k));
          const bool more = kRagged && j == 0 && wraps;
          const auto more_words = more ? LoadShared<WordsOf<V>>(wrapped(place, k)) : WordsOf<V>();
#pragma unroll
          for (int w = 0; w < kVecBytes / 4; ++w) {
            words.w[w] = (words.w[w] & ElementMask<T>(here, w)) | (more_words.w[w] & ElementMask<T>(beside, w));
          }
          StoreShared(at(place, j, k), words);
        }
      }
    }
  };

  for (int place = 0; place < kStages; ++place) copy(place, place);
  auto now = op.StatisticsOf(index(0), inside(0)), next = op.StatisticsOf(index(1), inside(1));
  Acc scale[kSlots][kVec], dscale[kSlots][kVec], dbias[kSlots][kVec];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) scale[j][i] = dscale[j][i] = dbias[j][i] = 0;
    if (active(j)) op.Scale(param_group, slot_of(j), skew, scale[j]);
  }
  if (plan.cluster > 1) ClusterWait();

  const int warps = threads / kWarp, lane = threadIdx.x % kWarp, warp_of_row = lane & (warps > 8 ? 15 : 7);
  constexpr uint32_t kTurnBytes = sizeof(shared.warps[0]);  // from even to odd turns
  const uint32_t own_sums = SharedAddress(&shared.warps[0][threadIdx.x / kWarp]);
  const uint32_t row_sums = SharedAddress(&shared.warps[0][row_group * warps + warp_of_row]);
  // The sums of a row over the lanes that share it; other warps find them in shared memory after the next barrier.
  const auto reduce = [&](int turn, int place, const typename Op::Statistics& statistics) {
    auto sums = Sums::Identity();
    complete(place);
    if (inside(turn)) {
      const typename Op::Row row = op.Begin(index(turn));
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (!active(j)) continue;
        op.Reduce(row, statistics, first_of(j), LoadShared<V>(at(place, j, 0)), LoadShared<V>(at(place, j, 1)),
                  scale[j], sums, dscale[j], dbias[j]);
      }
    }
    if (!op.need_x) return sums;
    if (threads < kWarp) return Sums::MergeLanes(sums, threads);
    sums = Sums::MergeLanes(sums, kWarp);
    if (threads > kWarp && lane == 0) StoreShared(own_sums + (turn & 1) * kTurnBytes, sums);
    return sums;
  };

  int place = 0;
  CopyWait<kStages - 2>();
  Sums sums = reduce(0, 0, now);
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const int parity = turn & 1;
    if (op.need_x && threads > kWarp) {
      RowBarrier(row_group, threads);
      sums = warp_of_row < warps ? LoadShared<Sums>(row_sums + parity * kTurnBytes) : Sums::Identity();
      if (warps > 8) sums = Sums::Merge(sums, ShuffleXor(sums, 8));
      sums = Sums::MergeLanes(sums, 8);
      if (plan.cluster > 1 && threadIdx.x < plan.cluster) {
        SendToPeer(&shared.blocks[parity][rank], &shared.barriers[parity], threadIdx.x, sums);
      }
    }
    const auto upcoming = op.StatisticsOf(index(turn + 2), inside(turn + 2));
    CopyWait<kStages - 2>();
    const int next_place = place + 1 == kStages ? 0 : place + 1;
    Sums next_sums;
    if (turn + 1 < turns) next_sums = reduce(turn + 1, next_place, next);
    if (op.need_x) {
      if (plan.cluster > 1) {
        ReceiveFromPeers(&shared.barriers[parity], plan.cluster * static_cast<int>(sizeof(Sums)), turn >> 1 & 1);
        sums = Sums::MergeLanes(lane < plan.cluster ? shared.blocks[parity][lane] : Sums::Identity(), kWarp);
      }
      if (inside(turn)) {
        const typename Op::Row row = op.Begin(index(turn));
        const auto final = op.Finish(sums);
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          if (!active(j)) continue;
          Acc out[kVec];
          op.Dx(row, now, first_of(j), LoadShared<V>(at(place, j, 0)), LoadShared<V>(at(place, j, 1)), scale[j], final,
                out);
          if (op.arrays == kMaxArrays) op.Add(LoadShared<V>(at(place, j, 2)), out);
          op.Store(op.dx + (store_offset + j * slot_step), slot_of(j), skew, out);
        }
      }
    }
    store_offset += step_elements;
    copy(turn + kStages, place);
    place = next_place;
    sums = next_sums;
    now = next;
    next = upcoming;
  }
  const int outputs = op.Outputs();
  if (outputs == 0) return;

  // One row of sums for each block: [outputs][cols].
  const auto put = [&](Acc* to, int j, const Acc(&values)[kVec]) {
    if (kPlain) {
#pragma unroll
      for (int i = 0; i < kVec; i += kVecSize<Acc>) {
        Vec<Acc, kVecSize<Acc>> vector;
#pragma unroll
        for (int k = 0; k < kVecSize<Acc>; ++k) vector.v[k] = values[i + k];
        *reinterpret_cast<Vec<Acc, kVecSize<Acc>>*>(to + first_of(j) + i) = vector;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (const int column = op.Column(slot_of(j), skew, i); column < op.cols) to[column] = values[i];
      }
    }
  };
  const auto put_all = [&](Acc* to) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (!active(j)) continue;
      if (op.need_scale) put(to, j, dscale[j]);
      if (op.need_bias) put(to + (op.need_scale ? op.cols : 0), j, dbias[j]);
    }
  };
  Acc* const out = partials + (param_group * plan.blocks + block) * outputs * op.cols;
  if (plan.rows_per_block == 1) return put_all(out);
  // The rows of a block leave their sums in the memory that the stages had. Those of a warp are summed first, if their
  // slots have the same columns.
  int sets = plan.rows_per_block, set = row_group;
  bool writes = true;
  if (kPlain && threads < kWarp) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        for (int offset = threads; offset < kWarp; offset *= 2) {
          dscale[j][i] += __shfl_xor_sync(kAllLanes, dscale[j][i], offset);
          dbias[j][i] += __shfl_xor_sync(kAllLanes, dbias[j][i], offset);
        }
      }
    }
    sets = blockDim.x / kWarp;
    set = threadIdx.x / kWarp;
    writes = threadIdx.x % kWarp < threads;
  }
  CopyWait<0>();
  __syncthreads();
  auto* const total = reinterpret_cast<Acc*>(shared_bytes);
  const int width = outputs * op.cols;
  if (writes) put_all(total + set * width);
  __syncthreads();
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    Acc sum = total[c];
    for (int s = 1; s < sets; ++s) sum += total[s * width + c];
    out[c] = sum;
  }
}

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

// Adds up the rows of partial sums, [groups][parts][width]: 2^log2_columns columns for each block.
inline constexpr int kSumThreads = 256;
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    NormBwdSumKernel(const AccT<T>* partials, int parts, int64_t width, int64_t total, int log2_columns,
                     const NormBwdGradients gradients) {
  using Acc = AccT<T>;
  __shared__ Acc sums[kSumThreads];
  const int columns = 1 << log2_columns, x = threadIdx.x & (columns - 1), y = threadIdx.x >> log2_columns;
  const int ways = kSumThreads >> log2_columns;
  const int64_t column = int64_t{blockIdx.x} * columns + x;  // of all groups
  const int64_t group = column < width ? 0 : column / width, c = column - group * width;
  Acc sum = 0;
  if (column < total) {
    const Acc* p = partials + group * parts * width + c;
#pragma unroll 8
    for (int b = y; b < parts; b += ways) sum += p[b * width];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (y != 0 || column >= total) return;
#pragma unroll 8
  for (int i = 1; i < ways; ++i) sum += sums[i * columns + x];
  gradients.Store<T>(group, c, sum);
}

// ---- Longer rows ----

inline constexpr int kLongThreads = 128;
inline constexpr int kLongRows = kLongThreads / kWarp;  // that a block works on at once
inline constexpr int kLongSlots = 4;                    // of a row per thread, to be reduced

// Rows [first_row, first_row + rows) of one group.
struct NormBwdLongPlan {
  int64_t group = 0, first_row = 0, rows = 1;
  int chunks = 1;               // of a row, for its sums
  int tiles = 1, slices = 1;    // of columns and rows, for the rest
};

// Columns [first, first + kVec) of an array's row, wherever it begins; 0 beside the row.
template <typename Op>
__device__ __forceinline__ typename Op::V LoadColumns(const Op& op, const OperandRow<typename Op::T>& row, int first) {
  using T = typename Op::T;
  if constexpr (Op::kMode == Mode::kPlain) {
    return jaxnorm::Load(row.row + first);
  } else if constexpr (Op::kMode == Mode::kRagged) {
    return LoadWords<T, Op::kVec, /*kAligned=*/false>(row.row, first, op.cols);
  } else {
    auto values = row.template Load<Op::kVec>(first);
    if (!op.Whole(first)) {
#pragma unroll
      for (int i = 0; i < Op::kVec; ++i) {
        if (first + i >= op.cols) values.v[i] = FromAcc<T>(typename Op::Acc(0));
      }
    }
    return values;
  }
}

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

// Chunk blockIdx.x % chunks of kLongRows rows: sums[row][chunk].
template <typename Op>
__global__ void __launch_bounds__(kLongThreads)
    NormBwdLongReduceKernel(const __grid_constant__ Op op, const NormBwdLongPlan plan, typename Op::Sums* sums) {
  using Sums = typename Op::Sums;
  constexpr int kVec = Op::kVec;
  __shared__ Sums shared[kLongRows][kLongThreads / kWarp];
  const int chunk = static_cast<int>(blockIdx.x % plan.chunks);
  const int64_t first_row = int64_t{blockIdx.x / plan.chunks} * kLongRows;
  const auto inside = [&](int r) { return first_row + r < plan.rows; };
  Sums own[kLongRows];
  typename Op::Row rows[kLongRows];
  typename Op::Statistics statistics[kLongRows];
#pragma unroll
  for (int r = 0; r < kLongRows; ++r) {
    const int64_t index = plan.first_row + (inside(r) ? first_row + r : 0);
    own[r] = Sums::Identity();
    rows[r] = op.Begin(index);
    statistics[r] = op.StatisticsOf(index, true);
  }
#pragma unroll 1
  for (int j = 0; j < kLongSlots; ++j) {
    const int slot = (chunk * kLongSlots + j) * kLongThreads + threadIdx.x;
    if (slot >= op.Slots()) break;
    typename Op::V xs[kLongRows], gs[kLongRows];
#pragma unroll
    for (int r = 0; r < kLongRows; ++r) {
      xs[r] = LoadColumns(op, rows[r].in[0], slot * kVec);
      gs[r] = LoadColumns(op, rows[r].in[1], slot * kVec);
    }
    typename Op::Acc sc[kVec];
    op.Scale(plan.group, slot, 0, sc);
#pragma unroll
    for (int r = 0; r < kLongRows; ++r) op.Reduce(rows[r], statistics[r], slot * kVec, xs[r], gs[r], sc, own[r]);
  }
#pragma unroll
  for (int r = 0; r < kLongRows; ++r) {
    own[r] = Sums::MergeLanes(own[r], kWarp);
    if (threadIdx.x % kWarp == 0) shared[r][threadIdx.x / kWarp] = own[r];
  }
  __syncthreads();
  if (const int r = threadIdx.x; r < kLongRows && inside(r)) {
    Sums total = shared[r][0];
    for (int w = 1; w < kLongThreads / kWarp; ++w) total = Sums::Merge(total, shared[r][w]);
    sums[(first_row + r) * plan.chunks + chunk] = total;
  }
}

// One slot of columns for each thread, in every `slices`-th set of kLongRows rows.
template <typename Op>
__global__ void __launch_bounds__(kLongThreads, Op::kMode == Mode::kPlain ? 4 : 2)
    NormBwdLongKernel(const __grid_constant__ Op op, const NormBwdLongPlan plan, const typename Op::Sums* sums,
                      typename Op::Acc* partials, const NormBwdGradients gradients) {
  using Acc = typename Op::Acc;
  using Sums = typename Op::Sums;
  constexpr int kVec = Op::kVec;
  __shared__ typename Op::Final shared[2][kLongRows];
  const int slice = static_cast<int>(blockIdx.x / plan.tiles);
  const int slot = static_cast<int>(blockIdx.x % plan.tiles * kLongThreads + threadIdx.x), first = slot * kVec;
  const bool active = slot < op.Slots();
  Acc dscale[kVec], dbias[kVec], sc[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) dscale[i] = dbias[i] = 0;
  if (active) op.Scale(plan.group, slot, 0, sc);
  int turn = 0;
#pragma unroll 1
  for (int64_t base = int64_t{slice} * kLongRows; base < plan.rows; base += int64_t{plan.slices} * kLongRows, ++turn) {
    const auto index = [&](int r) { return plan.first_row + min(base + r, plan.rows - 1); };
    typename Op::V xs[kLongRows], gs[kLongRows], added[kLongRows];
#pragma unroll
    for (int r = 0; r < kLongRows; ++r) {
      if (!active) continue;
      const typename Op::Row row = op.Begin(index(r));
      xs[r] = LoadColumns(op, row.in[0], first);
      gs[r] = LoadColumns(op, row.in[1], first);
      if (op.arrays == kMaxArrays) added[r] = LoadColumns(op, row.in[2], first);
    }
    if (op.need_x) {  // warp r finishes the sums of row r
      const int64_t row = min(base + threadIdx.x / kWarp, plan.rows - 1);
      auto total = Sums::Identity();
      for (int c = threadIdx.x % kWarp; c < plan.chunks; c += kWarp) {
        total = Sums::Merge(total, sums[row * plan.chunks + c]);
      }
      total = Sums::MergeLanes(total, kWarp);
      if (threadIdx.x % kWarp == 0) shared[turn & 1][threadIdx.x / kWarp] = op.Finish(total);
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < kLongRows; ++r) {
      if (!active || base + r >= plan.rows) continue;
      const auto statistics = op.StatisticsOf(index(r), true);
      Acc x[kVec], g[kVec];
      ToAccAll(xs[r], x);
      ToAccAll(gs[r], g);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        dbias[i] += g[i];
        dscale[i] = fma(g[i], statistics.Xhat(x[i]), dscale[i]);
      }
      if (op.need_x) {
        Acc out[kVec];
        op.Dx(op.Begin(index(r)), statistics, first, xs[r], gs[r], sc, shared[turn & 1][r], out);
        if (op.arrays == kMaxArrays) op.Add(added[r], out);
        op.Store(op.dx + (index(r) * op.cols + first), slot, 0, out);
      }
    }
  }
  if (!active) return;
  // Final results, or partial sums of this slice: dscale, if it is needed, and then dbias.
  Acc* const sums_out = partials + (plan.group * plan.slices + slice) * op.Outputs() * op.cols;
  const auto write = [&](bool is_bias, const Acc(&values)[kVec]) {
    void* const final = is_bias ? gradients.dbias : gradients.dscale;
    Acc* const partial = sums_out + (is_bias && op.need_scale ? op.cols : 0);
    if (plan.slices > 1) {
      StoreColumns<Op>(partial, first, op.cols, values);
    } else if (gradients.exact) {
      StoreColumns<Op>(static_cast<Acc*>(final) + plan.group * op.cols, first, op.cols, values);
    } else {
      StoreColumns<Op>(static_cast<typename Op::T*>(final) + plan.group * op.cols, first, op.cols, values);
    }
  };
  if (op.need_scale) write(false, dscale);
  if (op.need_bias) write(true, dbias);
}

// ---- Launching ----

template <typename Op>
NormBwdGradients Gradients(const NormBwdArgs& args) {
  const bool exact = args.gradient_dtype == norm_internal::AccType(args.dtype);
  return {args.dscale, args.dbias, static_cast<int>(args.shape.cols), exact};
}

// Adds up `parts` rows of partial sums for each group.
template <typename Op>
ffi::Error LaunchSum(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                     const typename Op::Acc* partials, int64_t parts) {
  const int64_t width = int64_t{op.Outputs()} * op.cols, total = args.shape.groups * width;
  // Each thread adds up 8 or more, and neighbours read 32 bytes or more.
  const int log2_columns = std::countr_zero(static_cast<unsigned>(kSumThreads / std::clamp(NextPowerOfTwo(parts / 8), 1, 32)));
  const Grid grid = {.blocks = CeilDiv(total, int64_t{1} << log2_columns), .threads = kSumThreads};
  return Launch<NormBwdSumKernel<typename Op::T>>(device, stream, grid, "norm_bwd", partials, static_cast<int>(parts),
                                                  width, total, log2_columns, Gradients<Op>(args));
}

template <typename Op>
ffi::Error LaunchLong(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                      ffi::AnyBuffer scratch) {
  using Acc = typename Op::Acc;
  using Sums = typename Op::Sums;
  const NormShape& shape = args.shape;
  const bool parameters = op.Outputs() > 0;
  const int64_t capacity = static_cast<int64_t>(scratch.size_bytes() / sizeof(Acc));
  const int64_t part_size = shape.groups * op.Outputs() * shape.cols;  // partial sums of a slice
  NormBwdLongPlan plan;
  plan.chunks = static_cast<int>(CeilDiv(op.Slots(), kLongThreads * kLongSlots));
  plan.tiles = static_cast<int>(CeilDiv(op.Slots(), kLongThreads));
  // All rows of a group in one launch if their gradients are summed; otherwise as many as there is memory for their sums.
  const int64_t sums_per_row = op.need_x ? plan.chunks * static_cast<int64_t>(sizeof(Sums) / sizeof(Acc)) : 0;
  plan.rows = shape.rows_per_group;
  if (!parameters) plan.rows = std::min(plan.rows, capacity / sums_per_row);
  const int64_t left = capacity - plan.rows * sums_per_row;
  JAXNORM_CHECK(plan.rows > 0 && left >= 0);
  auto* const sums = static_cast<Sums*>(scratch.untyped_data());
  auto* const partials = static_cast<Acc*>(scratch.untyped_data()) + plan.rows * sums_per_row;
  // Enough slices to fill the device, if each has rows enough for what its partial sums cost.
  int64_t slices = CeilDiv(8 * device.sms, plan.tiles);
  if (parameters) slices = std::min({slices, plan.rows / 16, left / part_size});
  plan.slices = static_cast<int>(std::clamp<int64_t>(slices, 1, CeilDiv(plan.rows, kLongRows)));
  const int64_t batch = plan.rows;
  for (plan.group = 0; plan.group < shape.groups; ++plan.group) {
    for (int64_t row = 0; row < shape.rows_per_group; row += batch) {
      plan.first_row = plan.group * shape.rows_per_group + row;
      plan.rows = std::min(batch, shape.rows_per_group - row);
      if (op.need_x) {
        const Grid grid = {.blocks = CeilDiv(plan.rows, kLongRows) * plan.chunks, .threads = kLongThreads};
        JAXNORM_RETURN_IF_ERROR(Launch<NormBwdLongReduceKernel<Op>>(device, stream, grid, "norm_bwd", op, plan, sums));
      }
      const Grid grid = {.blocks = int64_t{plan.slices} * plan.tiles, .threads = kLongThreads};
      JAXNORM_RETURN_IF_ERROR(Launch<NormBwdLongKernel<Op>>(device, stream, grid, "norm_bwd", op, plan,
                                                            static_cast<const Sums*>(sums), partials,
                                                            Gradients<Op>(args)));
    }
  }
  if (!parameters || plan.slices == 1) return ffi::Error::Success();
  return LaunchSum(device, stream, op, args, partials, plan.slices);
}

template <typename Op>
ffi::Error LaunchNormBwd(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                         ffi::AnyBuffer scratch) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  constexpr int kMaxPart = kMaxThreads * Op::kSlots;
  const int slots = op.Slots(), outputs = op.Outputs();
  // Rows that fit no cluster; and those of which L2 can hold all, unless one block has a row for itself.
  const int64_t input_bytes = args.shape.size() * 2 * static_cast<int64_t>(sizeof(T));
  NormBwdPlan plan;
  int at_once = 0;
  while (plan.cluster < kMaxCluster && CeilDiv(slots, plan.cluster) > kMaxPart) plan.cluster *= 2;
  if (plan.cluster > 1) at_once = ActiveClusters<NormBwdKernel<Op>>(device, kMaxThreads, plan.cluster);
  if (plan.cluster > 1 && (CeilDiv(slots, plan.cluster) > kMaxPart || at_once == 0 || input_bytes <= device.l2_bytes / 4 * 3)) {
    return LaunchLong(device, stream, op, args, scratch);
  }
  plan.part_slots = static_cast<int>(CeilDiv(slots, plan.cluster));
  const int64_t wanted = CeilDiv(plan.part_slots, Op::kSlots);
  plan.threads_per_row = static_cast<int>(wanted > kWarp ? CeilDiv(wanted, kWarp) * kWarp : NextPowerOfTwo(wanted));
  plan.rows_per_block = std::max(1, kBlockThreads / plan.threads_per_row);
  const int threads = plan.threads_per_row * plan.rows_per_block;
  const int padded = static_cast<int>(CeilDiv(threads, kBlockThreads) * kBlockThreads);
  int stage_bytes = Op::kSlots * op.arrays * kVecBytes * padded;
  if (Op::kMode == Mode::kRagged) stage_bytes += op.arrays * kVecBytes * plan.rows_per_block;
  if (plan.cluster == 1) at_once = device.sms * (threads <= kBlockThreads ? 2 : 1);
  // Rows of a thread lie alike if the step from one to the next is a multiple of kVec (kRagged).
  const int64_t unit = Op::kMode == Mode::kRagged ? Op::kVec / std::min(Op::kVec, plan.rows_per_block & -plan.rows_per_block) : 1;
  int64_t most = CeilDiv(op.rows_per_group, plan.rows_per_block);
  if (outputs > 0) {
    const int64_t row_bytes = args.shape.groups * outputs * args.shape.cols * int64_t{sizeof(Acc)};
    const int64_t room = static_cast<int64_t>(scratch.size_bytes()) / row_bytes;
    JAXNORM_CHECK(room > 0);
    most = std::min(most, room);
  }
  if (most < unit) return LaunchNormBwd(device, stream, NormBwd<T, Mode::kGeneral>(args), args, scratch);
  // Each block leaves a row of partial sums, so as few as run at once: or, if those are no multiple of `unit`, as many
  // as take few rounds. Weighed by the bytes of each column: of rows, and of partial sums written and read.
  int64_t blocks = std::min<int64_t>(most / unit * unit, at_once);
  int64_t least = INT64_MAX;
  for (int64_t n = unit; blocks % unit != 0 && n <= std::min<int64_t>(most, 8 * at_once); n += unit) {
    const int64_t rows = CeilDiv(op.rows_per_group, n * plan.rows_per_block) * plan.rows_per_block;
    const int64_t bytes = CeilDiv(n, at_once) * int64_t{3 * sizeof(T) * rows + 4 * sizeof(Acc)};
    if (bytes >= least) continue;
    least = bytes;
    plan.blocks = static_cast<int>(n);
  }
  if (blocks % unit == 0) plan.blocks = static_cast<int>(blocks);
  JAXNORM_CHECK(op.rows_per_group < INT32_MAX);
  plan.turns = static_cast<int>(op.rows_per_group / (int64_t{plan.blocks} * plan.rows_per_block));
  plan.rest = static_cast<int>(op.rows_per_group % (int64_t{plan.blocks} * plan.rows_per_block));
  Grid grid = {.blocks = args.shape.groups * plan.blocks * plan.cluster,
               .threads = threads,
               .shared_bytes = kStages * stage_bytes,
               .cluster = plan.cluster};
  auto* const partials = static_cast<Acc*>(scratch.untyped_data());
  JAXNORM_RETURN_IF_ERROR(Launch<NormBwdKernel<Op>>(device, stream, grid, "norm_bwd", op, plan, partials));
  if (outputs == 0) return ffi::Error::Success();
  return LaunchSum(device, stream, op, args, partials, plan.blocks);
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
