// What the kernels of layer_norm and rms_norm that stay for many rows share, forward (norm_fwd_long.cu) and backward
// (norm_bwd.cu).
//
// A thread owns the same columns of each of its rows, so what belongs to columns (parameters and their gradients) is in
// registers all the time. Rows are on their way to shared memory several turns before they are needed. Each thread
// copies and reads its own slots only, which takes no barrier. Warps, and the blocks of a cluster, exchange the sums of
// a row once in a turn, and while they travel work is done on the rows before and after it.
#ifndef JAXNORM_CUDA_NORM_ROWS_CUH_
#define JAXNORM_CUDA_NORM_ROWS_CUH_

#include <algorithm>
#include <bit>

#include "launch.cuh"
#include "norm.cuh"
#include "operand.cuh"
#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

namespace jaxnorm {

// kN sums over a row.
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

// ---- Columns and slots ----
//
// Slots are those of the dense arrays, which are aligned (kRagged), or of the columns (others). A row that begins within
// a slot may touch one slot more than it fills: its columns there belong to the first slot, whose elements before the
// row's begin are free.
template <typename T, Mode kMode>
struct RowColumns {
  static constexpr int kVec = kVecSize<T>;

  int cols;

  __host__ __device__ __forceinline__ int Slots() const { return (cols + kVec - 1) / kVec; }
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

  // `to` is where element 0 of the slot belongs.
  __device__ __forceinline__ void Store(T* to, int slot, int skew, const Vec<T, kVec>& values) const {
    if (kMode == Mode::kPlain || (Whole(slot * kVec - skew) && IsVecAligned(to))) {
      jaxnorm::Store(to, values);
    } else {
      const auto [here, beside] = Parts(slot, skew);
      T* const after = to + Slots() * kVec;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (here >> i & 1) to[i] = values.v[i];
        if (beside >> i & 1) after[i] = values.v[i];
      }
    }
  }

  // Scale or bias of a slot, whose elements are left as they are where it has no column.
  __device__ __forceinline__ void Parameter(bool narrow, const void* row, int slot, int skew,
                                            AccT<T> (&out)[kVec]) const {
    const int first = slot * kVec - skew;
    if (kMode == Mode::kPlain && IsVecAligned(row)) {
      DeviceParameter<T>::template Load</*kAligned=*/true>(narrow, row, first, cols, out);
    } else if (Whole(first)) {
      DeviceParameter<T>::template Load</*kAligned=*/false>(narrow, row, first, cols, out);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int column = Column(slot, skew, i);
        if (column >= cols) continue;
        out[i] = narrow ? ToAcc(static_cast<const T*>(row)[column]) : static_cast<const AccT<T>*>(row)[column];
      }
    }
  }
};

// ---- Which rows a thread works on ----

inline constexpr int kBlockThreads = 256;  // or twice as many for one long row

struct RowsPlan {
  int blocks = 1;            // or clusters, for each group of rows
  int turns = 1, rest = 0;   // of a block, and one more if its first row is before `rest`
  int threads_per_row = 32;  // a power of two up to 32, or whole warps
  int rows_per_block = 1;
  int cluster = 1;
  int part_slots = 0;  // of a row per block
};

// Where a thread is in the launch.
struct RowsPlace {
  unsigned block, param_group = 0;
  int rank = 0;  // in the cluster
  int threads, thread, row_group = 0;
  int step;  // rows from turn to turn
  int turns, own_turns;
  int64_t base;  // the first row

  __device__ __forceinline__ RowsPlace(const RowsPlan& plan, int64_t rows_per_group)
      : block(blockIdx.x), threads(plan.threads_per_row), step(plan.blocks * plan.rows_per_block) {
    if (plan.cluster > 1) {
      rank = static_cast<int>(block % plan.cluster);
      block /= plan.cluster;
    }
    if (block >= plan.blocks) {
      param_group = block / plan.blocks;
      block %= plan.blocks;
    }
    if (plan.rows_per_block > 1) row_group = threadIdx.x / threads;
    thread = threadIdx.x - row_group * threads;
    const int block_row = block * plan.rows_per_block;
    turns = plan.turns + (block_row < plan.rest ? 1 : 0);
    own_turns = plan.turns + (block_row + row_group < plan.rest ? 1 : 0);
    base = param_group * rows_per_group + block_row + row_group;
  }

  __device__ __forceinline__ bool Inside(int turn) const { return turn < own_turns; }
  __device__ __forceinline__ int64_t Index(int turn) const { return base + int64_t{turn} * step; }
};

// ---- Rows in shared memory ----

// Copies the slot at element `offset` of a dense array of `size` elements, where the array may end.
template <typename T>
__device__ __forceinline__ void CopyLast(uint32_t shared, const T* array, int64_t size, int64_t offset) {
  constexpr int kVec = kVecSize<T>;
  Vec<T, kVec> values;
#pragma unroll
  for (int i = 0; i < kVec; ++i) values.v[i] = offset + i < size ? array[offset + i] : T();
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

// kStages rows of up to kArrays arrays, of which this thread owns kSlots slots each: the same columns in all of its
// rows, as the step is a multiple of kVec rows (kRagged).
template <typename T, Mode kMode, int kArrays, int kSlots, int kStages>
struct RowStages {
  using Columns = RowColumns<T, kMode>;
  using V = Vec<T, kVecSize<T>>;
  using Bits = WordsOf<V>;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kWords = sizeof(Bits) / sizeof(uint32_t);
  static constexpr bool kPlain = kMode == Mode::kPlain, kRagged = kMode == Mode::kRagged;
  // Slot j of array k of a stage, at constant distances so that addresses take few registers.
  static constexpr uint32_t kSlotBytes = kBlockThreads * kVecBytes;
  static constexpr unsigned kHead = 1u << 2 * kSlots, kWraps = kHead << 1;

  Columns columns;
  int arrays, skew, first_slot, slot_step;
  // Bit j: slot j is in the row; bit kSlots + j: it is an edge, which not all columns fill; and then whether slot 0 is the
  // row's first, and what continues there. One register, where comparisons would take several.
  unsigned flags = 0;
  uint32_t stage_bytes, own;
  uint32_t wrapped, wrapped_step;  // after all stages, what continues in a row's first slot
  uint32_t edges;                  // and masks of the first and of the last slot

  __host__ __device__ static int Bytes(int arrays, int threads, int rows_per_block) {
    const int halves = (threads + kBlockThreads - 1) / kBlockThreads;
    return kStages * kSlots * arrays * halves * static_cast<int>(kSlotBytes) +
           (kPlain ? 0 : (kStages * arrays + 4) * kVecBytes * rows_per_block);
  }

  __device__ __forceinline__ RowStages(const void* shared, Columns columns, int arrays, const RowsPlan& plan,
                                       const RowsPlace& place)
      : columns(columns), arrays(arrays), skew(columns.Skew(place.base)) {
    first_slot = place.rank * plan.part_slots + place.thread;
    const int end = min((place.rank + 1) * plan.part_slots, columns.Slots());
    slot_step = place.threads;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (Slot(j) >= end) continue;
      flags |= 1u << j;
      if (!columns.Whole(First(j))) flags |= 1u << (kSlots + j);
    }
    if (first_slot == 0) flags |= kHead;
    if (kRagged && first_slot == 0 && columns.Wraps(skew)) flags |= kWraps;
    asm volatile("" : "+r"(flags));
    stage_bytes = kSlots * arrays * kSlotBytes;
    const uint32_t base = SharedAddress(shared), halves = (blockDim.x + kBlockThreads - 1) / kBlockThreads;
    own = base + threadIdx.x % kBlockThreads * kVecBytes + threadIdx.x / kBlockThreads * (kStages * stage_bytes);
    wrapped_step = plan.rows_per_block * kVecBytes;
    wrapped = base + kStages * stage_bytes * halves + place.row_group * kVecBytes;
    edges = wrapped + kStages * arrays * wrapped_step + 3 * place.row_group * kVecBytes;
    for (int j = 0; j < kSlots; ++j) {  // slots that do not exist can be read: they are 0
      if (IsActive(j)) continue;
      for (int k = 0; k < kStages * arrays; ++k) StoreShared(At(0, j, 0) + k * kSlots * kSlotBytes, Bits());
    }
    if constexpr (!kPlain) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (!IsEdge(j)) continue;
        const auto [here, beside] = columns.Parts(Slot(j), skew);
        Bits bits[2];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          bits[0].w[w] = ElementMask<T>(here, w);
          bits[1].w[w] = ElementMask<T>(beside, w);
        }
        StoreShared(EdgeMasks(j), bits[0]);
        StoreShared(EdgeMasks(j) + kVecBytes, bits[1]);
      }
    }
  }

  __device__ __forceinline__ int Slot(int j) const { return first_slot + j * slot_step; }
  __device__ __forceinline__ int First(int j) const { return Slot(j) * kVec - skew; }
  __device__ __forceinline__ bool IsActive(int j) const { return flags >> j & 1; }
  __device__ __forceinline__ bool IsEdge(int j) const { return !kPlain && (flags >> (kSlots + j) & 1); }
  __device__ __forceinline__ bool Wraps() const { return kRagged && (flags & kWraps) != 0; }
  __device__ __forceinline__ uint32_t At(int place, int j, int k) const {
    return own + place * stage_bytes + (k * kSlots + j) * kSlotBytes;
  }
  __device__ __forceinline__ uint32_t Wrapped(int place, int k) const {
    return wrapped + (place * arrays + k) * wrapped_step;
  }
  // Which bits of an edge are columns that lie there, and after that, which are of those that continue there.
  __device__ __forceinline__ uint32_t EdgeMasks(int j) const {
    return edges + (j == 0 && (flags & kHead) != 0 ? 0 : 2) * kVecBytes;
  }
  static __device__ __forceinline__ int Next(int place, int by = 1) {
    return place + by >= kStages ? place + by - kStages : place + by;
  }

  // Starts copying a row to `place`; `offset` is where this thread's first slot is in the arrays. `last`: of all `size`
  // elements this row has the last ones, so its last slot may not be all in the array. data(k) is array k.
  template <typename Data>
  __device__ __forceinline__ void Copy(int64_t offset, int place, bool last, int64_t size, Data data) const {
    if (!kRagged || !last) {
#pragma unroll
      for (int k = 0; k < kArrays; ++k) {
        if (k == arrays) break;
        const T* const from = data(k) + offset;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          if (IsActive(j)) CopyAsync(At(place, j, k), from + j * slot_step * kVec);
        }
        if (Wraps()) CopyAsync(Wrapped(place, k), from + columns.Slots() * kVec);
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < arrays; ++k) {
#pragma unroll 1
        for (int j = 0; j < kSlots; ++j) {
          if (IsActive(j)) CopyLast(At(place, j, k), data(k), size, offset + j * slot_step * kVec);
        }
        if (Wraps()) CopyLast(Wrapped(place, k), data(k), size, offset + columns.Slots() * kVec);
      }
    }
  }

  // A slot of a row that is read for the first time. Columns that an edge has beside those in memory are put at their
  // place, here and in shared memory, and 0 where there is no column.
  __device__ __forceinline__ V LoadFirst(int place, int j, int k) const {
    auto words = LoadShared<Bits>(At(place, j, k));
    if (IsEdge(j)) {
      const auto here = LoadShared<Bits>(EdgeMasks(j)), beside = LoadShared<Bits>(EdgeMasks(j) + kVecBytes);
      const Bits more = j == 0 && Wraps() ? LoadShared<Bits>(Wrapped(place, k)) : Bits();
#pragma unroll
      for (int w = 0; w < kWords; ++w) words.w[w] = (words.w[w] & here.w[w]) | (more.w[w] & beside.w[w]);
      StoreShared(At(place, j, k), words);
    }
    return std::bit_cast<V>(words);
  }
  __device__ __forceinline__ void Complete(int place, int k) const {
    if constexpr (!kPlain) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (IsEdge(j)) LoadFirst(place, j, k);
      }
    }
  }
  __device__ __forceinline__ V Load(int place, int j, int k) const { return LoadShared<V>(At(place, j, k)); }

  // `to` is where element 0 of slot j belongs in a dense array.
  __device__ __forceinline__ void Store(T* to, int j, const V& values) const {
    if constexpr (kMode == Mode::kGeneral) {
      columns.Store(to, Slot(j), skew, values);
    } else if (!IsEdge(j)) {
      jaxnorm::Store(to, values);
    } else {
      const auto here = LoadShared<Bits>(EdgeMasks(j)), beside = LoadShared<Bits>(EdgeMasks(j) + kVecBytes);
      T* const after = to + columns.Slots() * kVec;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (HasElement(here, i)) to[i] = values.v[i];
        if (HasElement(beside, i)) after[i] = values.v[i];
      }
    }
  }
  static __device__ __forceinline__ bool HasElement(const Bits& mask, int i) {
    return mask.w[i * kWords / kVec] >> (i * 32 * kWords / kVec % 32) & 1;
  }
};

// ---- Sums over a row ----

// What warps of a block, or blocks of a cluster, tell each other of even and of odd turns: one may be ahead by a turn. In
// small clusters the warps of all blocks tell each other directly, and none waits before it needs the sums. Then one may
// be ahead of the slowest by two turns when it sends the next ones, so there are four places for them.
inline constexpr int kExchangePlaces = 4;
inline constexpr int kMaxDirectCluster = 4;  // in larger ones, so many messages were measured to take longer
template <typename Sums>
struct RowExchangeShared {
  Sums warps[2][kMaxThreads / kWarp];
  uint64_t barriers[kExchangePlaces];
};

// For each turn: Put what lanes have of a row, then Begin, then End, which has the sums of all. The next turn's Put may
// come before End.
template <typename Sums>
struct RowExchange {
  static constexpr int kBytes = sizeof(Sums);
  static constexpr int kTurnBytes = sizeof(RowExchangeShared<Sums>::warps) / 2;  // from even to odd turns

  int threads, row_group, cluster, warps, lane;
  int sent;                      // by each block
  uint32_t own_warp, row_warps;  // of the block
  uint32_t own_place, places;    // of the cluster
  uint32_t barriers;

  static __host__ __device__ __forceinline__ bool IsDirect(int cluster) {
    return cluster > 1 && cluster <= kMaxDirectCluster;
  }
  static __host__ __device__ __forceinline__ int Sent(const RowsPlan& plan) {
    return IsDirect(plan.cluster) ? plan.threads_per_row / kWarp : 1;
  }
  // Of dynamic shared memory, for what a cluster's blocks send.
  static int Bytes(const RowsPlan& plan) {
    return plan.cluster > 1 ? kExchangePlaces * plan.cluster * Sent(plan) * kBytes : 0;
  }
  static __device__ __forceinline__ void ClusterStart(RowExchangeShared<Sums>& shared) {
    static_assert(kExchangePlaces == 4);
    uint64_t* const b = shared.barriers;
    jaxnorm::ClusterStart(&b[0], &b[1], &b[2], &b[3]);
  }

  // For a cluster, between ClusterStart and ClusterWait. `memory` has Bytes(plan).
  __device__ __forceinline__ RowExchange(RowExchangeShared<Sums>& shared, const void* memory, const RowsPlan& plan,
                                         const RowsPlace& place)
      : threads(place.threads),
        row_group(place.row_group),
        cluster(plan.cluster),
        warps(place.threads / kWarp),
        lane(threadIdx.x % kWarp),
        sent(Sent(plan)),
        own_warp(SharedAddress(&shared.warps[0][threadIdx.x / kWarp])),
        row_warps(SharedAddress(&shared.warps[0][row_group * warps + Warp()])),
        places(SharedAddress(memory)),
        barriers(SharedAddress(&shared.barriers[0])) {
    own_place = places + (place.rank * sent + (IsDirect(cluster) ? threadIdx.x / kWarp : 0)) * kBytes;
  }

  __device__ __forceinline__ Sums Put(Sums sums, int turn) const {
    if (threads < kWarp) return Sums::MergeLanes(sums, threads);
    sums = Sums::MergeLanes(sums, kWarp);
    if (IsDirect(cluster)) {
      if (lane < cluster) SendToPeer(own_place + PlaceOffset(turn), Barrier(turn), lane, sums);
    } else if (threads > kWarp && lane == 0) {
      StoreShared(own_warp + (turn & 1) * kTurnBytes, sums);
    }
    return sums;
  }

  __device__ __forceinline__ Sums Begin(Sums sums, int turn) const {
    if (threads <= kWarp || IsDirect(cluster)) return sums;
    // A barrier of the threads of one row, of which a block has at most 15 that are wider than a warp.
    asm volatile("bar.sync %0, %1;" ::"r"(row_group + 1), "r"(threads) : "memory");
    sums = Warp() < warps ? LoadShared<Sums>(row_warps + (turn & 1) * kTurnBytes) : Sums::Identity();
    if (warps > 8) sums = Sums::Merge(sums, ShuffleXor(sums, 8));
    sums = Sums::MergeLanes(sums, 8);
    if (cluster > 1 && threadIdx.x < cluster) {
      SendToPeer(own_place + PlaceOffset(turn), Barrier(turn), threadIdx.x, sums);
    }
    return sums;
  }

  __device__ __forceinline__ Sums End(Sums sums, int turn) const {
    if (cluster == 1) return sums;
    const int received = cluster * sent;
    ReceiveFromPeers(Barrier(turn), received * kBytes, turn / kExchangePlaces & 1);
    sums = Sums::Identity();
    for (int i = lane; i < received; i += kWarp) {
      sums = Sums::Merge(sums, LoadShared<Sums>(places + PlaceOffset(turn) + i * kBytes));
    }
    return Sums::MergeLanes(sums, kWarp);
  }

 private:
  __device__ __forceinline__ int Warp() const { return lane & (warps > 8 ? 15 : 7); }
  __device__ __forceinline__ int PlaceOffset(int turn) const {
    return turn % kExchangePlaces * (cluster * sent * kBytes);
  }
  __device__ __forceinline__ uint32_t Barrier(int turn) const {
    return barriers + turn % kExchangePlaces * static_cast<int>(sizeof(uint64_t));
  }
};

// ---- Planning ----

// Rows of a thread lie alike if the step from one to the next is a multiple of kVec rows (kRagged): then the number of
// blocks is one of this.
template <typename Op>
int BlockUnit(int rows_per_block) {
  if (Op::kMode != Mode::kRagged) return 1;
  return Op::kVec / std::min(Op::kVec, rows_per_block & -rows_per_block);
}

// How many blocks, of the most that there can be: a multiple of `unit`, and as many as run at once, or a multiple of
// `unit` that takes few rounds. Rounds are weighed by the bytes of each column: of a row, and `fixed` ones.
inline int RowBlocks(int64_t rows, int rows_per_block, int64_t unit, int64_t most, int64_t at_once, int64_t row_bytes,
                     int64_t fixed) {
  const int64_t blocks = std::min(most / unit * unit, at_once);
  if (blocks % unit == 0) return static_cast<int>(blocks);
  int64_t least = INT64_MAX, best = unit;
  for (int64_t n = unit; n <= std::min(most, 8 * at_once); n += unit) {
    const int64_t turns = (rows + n * rows_per_block - 1) / (n * rows_per_block);
    const int64_t bytes = (n + at_once - 1) / at_once * (row_bytes * turns * rows_per_block + fixed);
    if (bytes >= least) continue;
    least = bytes;
    best = n;
  }
  return static_cast<int>(best);
}

// Gives plan.blocks blocks their shares; false if there are too many rows.
inline bool PlanTurns(int64_t rows, RowsPlan& plan) {
  const int64_t step = int64_t{plan.blocks} * plan.rows_per_block;
  if (rows / step >= INT32_MAX / 2) return false;
  plan.turns = static_cast<int>(rows / step);
  plan.rest = static_cast<int>(rows % step);
  return true;
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_NORM_ROWS_CUH_
