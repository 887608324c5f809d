// Row-wise kernels: reduce each row to a few numbers, then write each element from them. One set of kernels serves
// every such operation; the operation is a functor (softmax_fwd.cu and softmax_bwd.cu show two).
//
// Rows are cut into slots of 16 bytes on the address grid of the row that is written, so a row whose start or length is
// odd only has two slots that it does not fill: they are loaded whole (neighbours' elements are ignored) and stored by
// element. An input with another alignment is loaded by element.
//
// Four modes, by what a call needs, because instructions that check for the rare cost bandwidth:
//   kPlain     rows fill their slots, arrays are full and aligned, no optional operand
//   kRagged    rows do not fill their slots
//   kOperands  as kPlain, and optional operands have a vector for each slot, aligned too: attention's mask and bias
//   kGeneral   anything
//
// Tiers, by row length:
//   Warp   up to 64 slots (1 KiB), kPlain: in the registers of 1..32 lanes, several rows per warp.
//   Full   as Warp, with a kernel for each of the most frequent numbers of slots.
//   Block  every thread copies its slots to shared memory asynchronously and reads them from there once per pass.
//          What is in flight is then bounded by shared memory, not by registers, and while some blocks load, others
//          store. Rows of more than 100 KiB per input go over a cluster of up to 8 blocks, which exchange partials
//          through distributed shared memory (sm_90 and later). Blocks that stay for several rows were measured 10%
//          slower: multiprocessors are not equally fast, and then wait for the slowest.
//   Split  too long for that: all multiprocessors share a few rows, and exchange partials through global memory. What
//          of their inputs does not fit in shared memory they read again, from L2 as far as it goes.
//
// Op concept (T storage type, Acc arithmetic type):
//   static constexpr Mode kMode
//   static constexpr int kInputs            arrays that a slot is read from, at most
//   static constexpr int kSlotsPerThread    of the Block tier: with fewer, the fixed cost of a thread shows
//   static constexpr int kUnroll            slots that a thread works on at once in a pass
//   static constexpr bool kRare             whether the operation has other kernels for most calls of the mode: those of
//                                           short rows are left out, and variants left to run time, for the code's size
//   struct Partial                          see reduce.cuh
//   struct Row                              pointers into one row; Row Begin(int64_t row) const
//   const OperandRow<T>& Input(row, k); bool Has(k); int Place(k), Inputs(); bool HasWhere()   input k < kInputs, if it is there, which of
//                                           the Inputs() present ones it is, and `where` of a row (kOperands, kGeneral)
//   WithVariant(f)                          calls f(v) once with what kernels should be compiled for separately, as a
//                                           constant; the same v is handed to the functions below
//   struct Slot                             what is kept of one slot between reduction and store
//   void Decode<kEdges>(row, slot, RawSlot, Slot&)   to arithmetic; kEdges: elements outside the row may be anything
//                                           and become neutral; in kPlain: the slot may lie outside, and is neutral
//   static T NeutralInput()                 what a row is padded with instead (kPlain, kRagged)
//   template <int kN> Partial Reduce(v, Slot(&)[kN], int width)   of the slots and of `width` lanes, which hold the
//                                           whole row if there are several
//   void Prepare(v, Slot&, Partial total)   bring a freshly decoded slot to the state that Reduce leaves
//   Final Finish(v, Partial total)
//   Loaded LoadForStore(v, row, slot)       what only Store needs; called for several slots, then Store
//   void Store(v, row, slot, Slot, Loaded, Final)
//   void StoreRow(v, int64_t row, Partial total, Ahead)   called by one thread for each row
//   struct Ahead; Ahead LoadAhead(int64_t row)   what StoreRow reads besides; where a block has one row, loaded by
//                                           its thread while the row is on its way
//   int64_t rows
// and for the Full tier, which is for kPlain operations that have it:
//   Row RowAfter(row, int64_t elements)     the row that far behind
// and with kRare:
//   WithoutVariant(f)
#ifndef JAXNORM_CUDA_ROWS_CUH_
#define JAXNORM_CUDA_ROWS_CUH_

#include <algorithm>
#include <bit>
#include <type_traits>

#include "launch.cuh"
#include "operand.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace jaxnorm {

enum class Mode { kPlain, kRagged, kOperands, kGeneral };
// Whether rows are whole slots and arrays aligned.
constexpr bool FillsSlots(Mode mode) { return mode == Mode::kPlain || mode == Mode::kOperands; }
// An array that is dense in all modes but kGeneral.
template <typename T, Mode kMode>
using OperandOf = std::conditional_t<kMode == Mode::kGeneral, DeviceOperand<T>, DenseOperand<T>>;

// ---- Slots ----

// Where a row of `cols` elements of T lies on the grid of 16-byte slots; element c is in slot (c + skew) / kVec.
template <typename T, Mode kMode>
struct SlotGrid {
  int skew = 0;  // elements between the first slot's start and the row's
  int cols = 0;

  SlotGrid() = default;
  __device__ __forceinline__ SlotGrid(const T* row, int cols) : cols(cols) {
    if (!FillsSlots(kMode)) skew = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kVecSize<T>);
  }
  __device__ __forceinline__ int First(int slot) const { return slot * kVecSize<T> - skew; }
  __device__ __forceinline__ int Slots() const {
    return FillsSlots(kMode) ? cols / kVecSize<T> : (skew + cols + kVecSize<T> - 1) / kVecSize<T>;
  }
  __device__ __forceinline__ bool Whole(int first) const {
    return FillsSlots(kMode) || (first >= 0 && first + kVecSize<T> <= cols);
  }
};

// The bytes of `where` for one slot.
template <typename T>
using WhereBytes = std::conditional_t<kVecSize<T> == 8, uint2, uint32_t>;

// One slot of all inputs, as they were loaded. In kOperands as words, since they meet masks of words: what was loaded as
// elements would be packed again, one by one.
template <typename Op>
struct RawSlot {
  using T = typename Op::T;
  static constexpr bool kWords = Op::kMode == Mode::kOperands;
  using In = std::conditional_t<kWords, uint4, Vec<T, kVecSize<T>>>;
  using Where = std::conditional_t<kWords, WhereBytes<T>, Vec<bool, kVecSize<T>>>;
  In in[Op::kInputs];
  Where where;  // kOperands and kGeneral, where there is one
};

// Copies elements [first, first + kVec) around a row of an input to shared memory; complete after CopyWait. kCached: see
// CopyAsync.
template <Mode kMode, bool kCached, typename T>
__device__ __forceinline__ void CopySlotAsync(Vec<T, kVecSize<T>>* shared, const OperandRow<T>& input, int first) {
  const auto* p = reinterpret_cast<const Vec<T, kVecSize<T>>*>(input.row + first);
  // kRagged is aligned, and only the array's last slot may not be whole.
  if (FillsSlots(kMode) || (kMode == Mode::kRagged ? first + kVecSize<T> <= input.end : input.Vectorizable(first))) {
    CopyAsync<kCached>(shared, p);
  } else {
    *shared = input.template Load<kVecSize<T>>(first);
  }
}

template <typename T, Mode kMode>
__device__ __forceinline__ void StoreSlot(T* row, const SlotGrid<T, kMode>& grid, int first,
                                          const Vec<T, kVecSize<T>>& rounded) {
  if (grid.Whole(first)) {  // the grid is that of the row that is written, so this is aligned
    jaxnorm::Store(row + first, rounded);
  } else {
#pragma unroll
    for (int i = 0; i < kVecSize<T>; ++i) {
      if (first + i >= 0 && first + i < grid.cols) row[first + i] = rounded.v[i];
    }
  }
}

template <typename T, Mode kMode>
__device__ __forceinline__ void StoreSlot(T* row, const SlotGrid<T, kMode>& grid, int first,
                                          const AccT<T> (&values)[kVecSize<T>]) {
  StoreSlot(row, grid, first, RoundVec<T>(values));
}

// ---- Warp tier ----

inline constexpr int kMaxWarpSlots = 64;
inline constexpr int kWarpThreads = 64;  // per block of the Warp tier

// Slots per lane of the Warp tier. Short rows are better off with more lanes, and long ones, by 1%, too.
template <typename Op>
inline constexpr int kWarpItems = Op::kMode == Mode::kOperands ? 2 : 4 / Op::kColumnInputs;  // registers are scarce
inline constexpr int kFewWarpItems = 2, kShortWarpSlots = 8, kLongWarpSlots = 16;

// Slot j of lane t of a group of 2^log2_lanes is j * lanes + t.
template <typename Op, int kItems>
__global__ void __launch_bounds__(kWarpThreads) WarpRowKernel(const int log2_lanes, const __grid_constant__ Op op) {
  using T = typename Op::T;
  const int lanes = 1 << log2_lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const int64_t index = int64_t{blockIdx.x} * (blockDim.x >> log2_lanes) + (threadIdx.x >> log2_lanes);
  const bool inside = index < op.rows;  // lanes without a row still take part in shuffles
  const typename Op::Row row = op.Begin(inside ? index : op.rows - 1);
  const int slots = inside ? row.grid.Slots() : 0;
  RawSlot<Op> raw[kItems];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      // As words: a condition on a vector of 16-bit elements is compiled to one selection for each of them.
      uint4 words = SplatWords(Op::NeutralInput());
      if (const int slot = lane + j * lanes; slot < slots && op.Has(k)) {
        words = std::bit_cast<uint4>(jaxnorm::Load(op.Input(row, k).row + row.grid.First(slot)));
      }
      raw[j].in[k] = std::bit_cast<typename RawSlot<Op>::In>(words);
    }
    if constexpr (Op::kMode == Mode::kOperands) {
      raw[j].where = {};
      if (const int slot = lane + j * lanes; slot < slots && op.HasWhere()) {
        raw[j].where = __ldg(reinterpret_cast<const WhereBytes<T>*>(row.where.row + row.grid.First(slot)));
      }
    }
  }
  op.WithVariant([&](auto variant) {
    typename Op::Slot kept[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) op.template Decode<true>(row, lane + j * lanes, raw[j], kept[j]);
    const typename Op::Partial total = op.Reduce(variant, kept, lanes);
    if (inside && lane == 0) op.StoreRow(variant, index, total, op.LoadAhead(index));
    const auto final = op.Finish(variant, total);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      if (const int slot = lane + j * lanes; slot < slots) {
        op.Store(variant, row, slot, kept[j], op.LoadForStore(variant, row, slot), final);
      }
    }
  });
}

// ---- Full tier ----

// Rows that fill the lanes of the Warp tier with kFullItems slots each. How many lanes that takes is known when this is
// compiled, and a thread works on kFullRows rows at constant distances: with so little to do for a slot, instructions take
// as long as memory. With fewer blocks on a multiprocessor than kFullBlocks, 49152 rows of 256 bytes would be more than
// are there at once, which takes 5% longer.
inline constexpr int kFullItems = 2, kFullRows = 2, kFullBlocks = 24;
inline constexpr int kMinFullLanes = 8;  // shorter rows are better off with more slots per lane
template <int kLanes>
inline constexpr int kFullBlockRows = kWarpThreads / kLanes * kFullRows;

// There are at least kFullBlockRows rows.
template <typename Op, int kLanes>
__global__ void __launch_bounds__(kWarpThreads, kFullBlocks) FullRowKernel(const __grid_constant__ Op op) {
  static_assert(Op::kMode == Mode::kPlain);
  constexpr int kGroups = kWarpThreads / kLanes;  // row r of a thread is r * kGroups after its first
  constexpr int kCols = kLanes * kFullItems * Op::kVec, kStep = kGroups * kCols;
  const int lane = threadIdx.x % kLanes;
  const auto slot = [&](int j) { return lane + j * kLanes; };
  // The last block may have rows that the one before has too; both write the same values.
  const int64_t block_row = min(int64_t{blockIdx.x} * kFullBlockRows<kLanes>, op.rows - kFullBlockRows<kLanes>);
  int64_t index = block_row + threadIdx.x / kLanes;
  typename Op::Row row = op.RowAfter(op.Begin(0), index * kCols);
  uint4 words[kFullRows][kFullItems][Op::kInputs];
#pragma unroll
  for (int r = 0; r < kFullRows; ++r) {
    const typename Op::Row from = op.RowAfter(row, r * kStep);
#pragma unroll
    for (int j = 0; j < kFullItems; ++j) {
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) {
        words[r][j][k] = std::bit_cast<uint4>(jaxnorm::Load(op.Input(from, k).row + from.grid.First(slot(j))));
      }
    }
  }
  op.WithVariant([&](auto variant) {
  // One by one: side by side, rows take registers that are not there.
#pragma unroll 1
    for (int r = 0; r < kFullRows; ++r, index += kGroups, row = op.RowAfter(row, kStep)) {
      typename Op::Slot kept[kFullItems];
#pragma unroll
      for (int j = 0; j < kFullItems; ++j) {
        RawSlot<Op> raw;
#pragma unroll
        for (int k = 0; k < Op::kInputs; ++k) {
          raw.in[k] = std::bit_cast<typename RawSlot<Op>::In>(words[0][j][k]);
#pragma unroll
          for (int next = 1; next < kFullRows; ++next) words[next - 1][j][k] = words[next][j][k];
        }
        op.template Decode<false>(row, slot(j), raw, kept[j]);
      }
      const typename Op::Partial total = op.Reduce(variant, kept, kLanes);
      if (lane == 0) op.StoreRow(variant, index, total, op.LoadAhead(index));
      const auto final = op.Finish(variant, total);
#pragma unroll
      for (int j = 0; j < kFullItems; ++j) {
        op.Store(variant, row, slot(j), kept[j], op.LoadForStore(variant, row, slot(j)), final);
      }
    }
  });
}

// ---- Passes over many slots, from shared or from global memory ----

// Calls body.operator()<n>(base, kept) for groups of n slots base, base + step, ... below `end`: Op::kUnroll of them
// while there are as many, then one by one. fetch(slot, raw) reads one.
template <bool kEdges, typename Op, typename Fetch, typename Body>
__device__ __forceinline__ void ForEachSlotGroup(const Op& op, const typename Op::Row& row, int first, int end,
                                                 int step, Fetch fetch, Body body) {
  const auto group = [&]<int kN>(int base, std::integral_constant<int, kN>) {
    RawSlot<Op> raw[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) fetch(base + j * step, raw[j]);
    typename Op::Slot kept[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) op.template Decode<kEdges>(row, base + j * step, raw[j], kept[j]);
    body(base, kept);
  };
  constexpr int kUnroll = Op::kUnroll;
  int base = first;
  if constexpr (kUnroll > 1) {
    for (; base + (kUnroll - 1) * step < end; base += kUnroll * step) {
      group(base, std::integral_constant<int, kUnroll>());
    }
  }
#pragma unroll 1  // there are few
  for (; base < end; base += step) group(base, std::integral_constant<int, 1>());
}

template <bool kEdges, typename Op, typename Variant, typename Fetch>
__device__ __forceinline__ void ReduceSlots(const Op& op, Variant variant, const typename Op::Row& row, int first,
                                            int end, int step, Fetch fetch, typename Op::Partial& own) {
  ForEachSlotGroup<kEdges>(op, row, first, end, step, fetch, [&]<int kN>(int, typename Op::Slot(&kept)[kN]) {
    own = Op::Partial::Merge(own, op.Reduce(variant, kept, 1));
  });
}

template <bool kEdges, typename Op, typename Variant, typename Fetch>
__device__ __forceinline__ void StoreSlots(const Op& op, Variant variant, const typename Op::Row& row, int first,
                                           int end, int step, Fetch fetch, const typename Op::Partial& total) {
  const auto final = op.Finish(variant, total);
  ForEachSlotGroup<kEdges>(op, row, first, end, step, fetch, [&]<int kN>(int base, typename Op::Slot(&kept)[kN]) {
    typename Op::Loaded loaded[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) loaded[j] = op.LoadForStore(variant, row, base + j * step);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      op.Prepare(variant, kept[j], total);
      op.Store(variant, row, base + j * step, kept[j], loaded[j], final);
    }
  });
}

template <typename Op, typename F>
__device__ __forceinline__ void WithRowVariant(const Op& op, F f) {
  if constexpr (Op::kRare) {
    op.WithoutVariant(f);
  } else {
    op.WithVariant(f);
  }
}

// ---- Staging: slots [begin, end) of a row in shared memory ----

inline constexpr int kMaxThreads = 512;

// Of a block that copies rows of odd length by way of L1: those of 1023 and 4095 16-bit columns (513 slots) take 0.95 to 0.98
// times as long. Shared memory that holds much more leaves L1 too little of what both share: 50257 columns took 1.2 times as
// long. What lies between was not compared.
inline constexpr int kMaxCachedSlots = 576;

// Of `slots` that are staged, those copied first: whole turns of all threads. Divisions are left to the host, since few
// instructions of a kernel are as slow, and nothing else has begun when these would be needed.
inline int HalfSlots(int slots, int threads) { return slots / (2 * threads) * threads; }

// One thread's view: it owns slots begin + thread, begin + thread + threads, ... and reads nothing else, so no barrier
// is needed between copying and reading.
template <typename Op>
struct Stage {
  using T = typename Op::T;
  using V = Vec<T, kVecSize<T>>;
  using W = WhereBytes<T>;
  // In kGeneral, operands other than the inputs matter at the edges, so they are looked at in each pass.
  static constexpr bool kEdges = Op::kMode == Mode::kGeneral;

  const Op& op;
  const typename Op::Row& row;
  V* base;   // of slot `begin` of the first input; the next ones follow after part_slots each
  W* where;  // of slot `begin` (kOperands)
  int part_slots;
  int half_slots;  // see HalfSlots
  int begin, end;
  int thread, threads;

  __device__ __forceinline__ V& At(int slot, int k) const { return base[k * part_slots + slot - begin]; }

  // Starts copying the slots of [from, to); `from` is begin plus a multiple of `threads`.
  __device__ __forceinline__ void Copy(int from, int to) const {
    const auto copy = [&](auto cached) {
      for (int slot = from + thread; slot < to; slot += threads) {
#pragma unroll
        for (int k = 0; k < Op::kInputs; ++k) {
          if (!op.Has(k)) continue;
          CopySlotAsync<Op::kMode, cached>(&At(slot, op.Place(k)), op.Input(row, k), row.grid.First(slot));
        }
        if constexpr (Op::kMode == Mode::kOperands) {
          if (op.HasWhere()) {
            CopyAsync(where + (slot - begin), reinterpret_cast<const W*>(row.where.row + row.grid.First(slot)));
          }
        }
      }
    };
    if (Op::kMode == Mode::kRagged && part_slots <= kMaxCachedSlots) {
      copy(std::true_type());
    } else {
      copy(std::false_type());
    }
    CopyCommit();
  }

  // Makes what a slot holds outside the row neutral, if it is staged, in [from, to) and this thread's.
  __device__ __forceinline__ void Pad(int slot, int from, int to) const {
    if (slot < from || slot >= to || (slot - begin) % threads != thread) return;
    const int first = row.grid.First(slot);
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      if (!op.Has(k)) continue;
      T* const element = At(slot, op.Place(k)).v;
      for (int i = 0; i < -first; ++i) element[i] = Op::NeutralInput();
      for (int i = row.grid.cols - first; i < kVecSize<T>; ++i) element[i] = Op::NeutralInput();
    }
  }

  // After the copies of [from, to) are complete.
  __device__ __forceinline__ void PadEdges(int from, int to) const {
    if constexpr (Op::kMode == Mode::kRagged) {
      Pad(0, from, to);
      Pad(row.grid.Slots() - 1, from, to);
    }
  }

  __device__ __forceinline__ auto Fetch() const {
    return [this](int slot, RawSlot<Op>& raw) {
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) {
        if (op.Has(k)) raw.in[k] = reinterpret_cast<const typename RawSlot<Op>::In&>(At(slot, op.Place(k)));
      }
      if constexpr (Op::kMode == Mode::kGeneral) {
        // Not staged: it is small and mostly shared by rows, so it comes from L1; room for it would cost more.
        if (op.HasWhere()) raw.where = row.where.template Load<kVecSize<T>>(row.grid.First(slot));
      }
      if constexpr (Op::kMode == Mode::kOperands) {
        if (op.HasWhere()) raw.where = where[slot - begin];
      }
    };
  }

  // Where the second half begins. Halves are copied as separate groups, so that the first is reduced while the second
  // is on its way; more groups cost more than they hide.
  __device__ __forceinline__ int Middle() const { return min(begin + half_slots, end); }

  __device__ __forceinline__ void CopyHalves() const {
    const int middle = Middle();
    Copy(begin, middle);
    Copy(middle, end);
  }

  // Of what these threads have of a row: `own`, and the slots staged.
  template <typename Variant>
  __device__ __forceinline__ typename Op::Partial ReduceHalves(
      Variant variant, typename Op::Partial own = Op::Partial::Identity()) const {
    const int middle = Middle();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (half == 0) {
        CopyWait<1>();
      } else {
        CopyWait<0>();
      }
      const int from = half == 0 ? begin : middle, to = half == 0 ? middle : end;
      PadEdges(from, to);
      ReduceSlots<kEdges>(op, variant, row, from + thread, to, threads, Fetch(), own);
    }
    // Most often all lanes; a width that is known spares a branch for each step.
    return threads >= kWarp ? Op::Partial::MergeLanes(own, kWarp) : Op::Partial::MergeLanes(own, threads);
  }

  template <typename Variant>
  __device__ __forceinline__ void Store(Variant variant, const typename Op::Partial& total) const {
    StoreSlots<kEdges>(op, variant, row, begin + thread, end, threads, Fetch(), total);
  }
};

// ---- Block tier ----

struct BlockPlan {
  int threads_per_row = 32;  // a power of two where a block has several rows
  int rows_per_block = 1;
  int cluster = 1;     // blocks that share a row
  int part_slots = 0;  // of a row per block
  int half_slots = 0;  // see HalfSlots
};

// Of a block of a cluster, whose partials of each warp have to fit in the static shared memory.
template <typename Op>
inline constexpr int kMaxClusterThreads = sizeof(typename Op::Partial) <= 24 ? kMaxThreads : kMaxThreads / 2;

template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1) BlockRowKernel(const __grid_constant__ Op op, const BlockPlan plan) {
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ union {
    RowShared<typename Op::Partial> of_block;
    ClusterShared<typename Op::Partial, kMaxPortableCluster * kMaxClusterThreads<Op> / kWarp> of_cluster;
  } shared;
  const int threads = plan.threads_per_row;
  int thread = threadIdx.x, group = 0, rank = 0;
  int64_t index = blockIdx.x;
  if (plan.rows_per_block > 1) {
    thread &= threads - 1;
    group = threadIdx.x >> (31 - __clz(threads));
    index = index * plan.rows_per_block + group;
  } else if (plan.cluster > 1) {
    index = ClusterIndex();
    rank = ClusterRank();
  }
  const bool inside = index < op.rows;  // threads without a row still take part in shuffles and barriers
  const typename Op::Row row = op.Begin(inside ? index : op.rows - 1);
  const int begin = rank * plan.part_slots;
  const int end = inside ? max(begin, min(begin + plan.part_slots, row.grid.Slots())) : begin;
  auto* const base = reinterpret_cast<typename Stage<Op>::V*>(shared_bytes) + group * plan.part_slots * op.Inputs();
  // That of all rows of a block lies behind their inputs, which are aligned to more bytes.
  auto* const where =
      reinterpret_cast<typename Stage<Op>::W*>(shared_bytes + plan.rows_per_block * plan.part_slots * op.Inputs()) +
      group * plan.part_slots;
  const Stage<Op> stage = {op, row, base, where, plan.part_slots, plan.half_slots, begin, end, thread, threads};
  stage.CopyHalves();
  if (plan.cluster > 1) {
    ClusterStart(&shared.of_cluster.barrier);
    ClusterWait();
  }
  const bool first_of_row = inside && rank == 0 && thread == 0;
  // Only where one warp waits for it: where every warp has the first thread of a row, all of them would.
  const bool early = plan.rows_per_block == 1;
  typename Op::Ahead ahead = {};
  if (first_of_row && early) ahead = op.LoadAhead(index);
  WithRowVariant(op, [&](auto variant) {
    const auto own = stage.ReduceHalves(variant);
    const auto total = plan.cluster > 1 ? MergeCluster(own, plan.cluster, rank, shared.of_cluster)
                                        : MergeWarps(own, threads / kWarp, shared.of_block);
    if (first_of_row) op.StoreRow(variant, index, total, early ? ahead : op.LoadAhead(index));
    stage.Store(variant, total);
  });
}

// ---- Split tier ----

// One block per multiprocessor. More threads gain 3 to 5% where two inputs are read, and nothing with one.
template <typename Op>
inline constexpr int kSplitThreads = Op::kMode == Mode::kGeneral || Op::kColumnInputs == 1 ? 512 : 1024;

// Chunk c of a row is slots [c * chunk_slots, (c + 1) * chunk_slots), of which the last staged_slots are staged. Block i
// has chunk i % chunks of row first_row + i / chunks.
template <typename Partial>
struct SplitPlan {
  int64_t first_row = 0;
  FastDiv chunks;
  int chunk_slots = 0;
  int staged_slots = 0;
  int half_slots = 0;              // see HalfSlots
  Post<Partial>* posts = nullptr;  // one per block
  uint64_t tag = 0;
};

template <typename Op>
__global__ void __launch_bounds__(kSplitThreads<Op>, 1)
    SplitKernel(const __grid_constant__ Op op, const SplitPlan<typename Op::Partial> plan) {
  using Partial = typename Op::Partial;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ RowShared<Partial> shared, merged;
  uint32_t place;
  const int nth = plan.chunks.DivMod(blockIdx.x, &place), chunk = place, chunks = plan.chunks.divisor();
  const Meeting<Partial> meeting = {plan.posts + nth * chunks, plan.tag, chunks, chunk};
  const int64_t index = plan.first_row + nth;
  const typename Op::Row row = op.Begin(index);
  const int begin = chunk * plan.chunk_slots;
  const int end = max(begin, min(begin + plan.chunk_slots, row.grid.Slots()));
  const int middle = max(begin, end - plan.staged_slots);
  const int thread = threadIdx.x, threads = blockDim.x;
  auto* const base = reinterpret_cast<typename Stage<Op>::V*>(shared_bytes);
  const Stage<Op> stage = {op, row, base, nullptr, plan.staged_slots, plan.half_slots, middle, end, thread, threads};
  stage.CopyHalves();
  typename Op::Ahead ahead = {};
  if (chunk == 0 && thread == 0) ahead = op.LoadAhead(index);
  // What is not staged is read twice, the second time from L2. It is never the row's last slot, so all of it exists.
  const auto fetch = [&](int slot, RawSlot<Op>& raw) {
    const int first = row.grid.First(slot);
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      if (!op.Has(k)) continue;
      if constexpr (Op::kMode == Mode::kGeneral) {
        raw.in[k] = op.Input(row, k).template Load<kVecSize<typename Op::T>>(first);
      } else {
        raw.in[k] = jaxnorm::Load(op.Input(row, k).row + first);
      }
    }
    if constexpr (Op::kMode == Mode::kGeneral) {
      if (op.HasWhere()) raw.where = row.where.template Load<kVecSize<typename Op::T>>(first);
    }
  };
  WithRowVariant(op, [&](auto variant) {
    Partial own = Partial::Identity();
    ReduceSlots<true>(op, variant, row, begin + thread, middle, threads, fetch, own);
    const Partial of_block = MergeWarps(stage.ReduceHalves(variant, own), threads / kWarp, shared);
    const Partial total = meeting.Merge(of_block, merged);
    const int left_before = thread == 0 ? meeting.Leave() : 0;
    if (chunk == 0 && thread == 0) op.StoreRow(variant, index, total, ahead);
    StoreSlots<true>(op, variant, row, begin + thread, middle, threads, fetch, total);
    stage.Store(variant, total);
    if (thread == 0) meeting.Clear(left_before);
  });
}

// ---- Choosing ----

// How many a part has if n are cut into at most `parts`, each of which begins at a multiple of `step`.
inline int64_t AlignedPart(int64_t n, int64_t parts, int64_t step) { return CeilDiv(CeilDiv(n, step), parts) * step; }

// Slots of a part that begins with a cache line, if the first one does: otherwise all that a warp copies has a part of one
// line more (8 x 1048576 cut into 132, a tenth of a copy's time).
inline int64_t PartSlots(int64_t slots, int64_t parts) { return AlignedPart(slots, parts, kLineBytes / kVecBytes); }

inline int NextPowerOfTwo(int64_t n) { return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(n))); }

// What one block stages of a row: up to the first figure it has the row for itself. A longer row is cut into parts of
// at most the second, which lets several blocks of different clusters share a multiprocessor.
inline constexpr int kMaxPartBytes = 100 << 10;  // per input that every call has
template <typename Op>
inline constexpr int kClusterPartBytes = (Op::kColumnInputs == 1 ? 43 : 64) << 10;  // of all inputs
inline constexpr int kMinFewSlots = 2048;  // of a row: shorter ones are not worth a cluster

// In shared memory.
template <typename Op>
int SlotBytes(const Op& op) {
  return kVecBytes * op.Inputs() + (Op::kMode == Mode::kOperands && op.HasWhere() ? kVecSize<typename Op::T> : 0);
}

template <typename Op>
int MaxPartSlots(const Op& op, const DeviceInfo& device) {
  return std::min(device.max_shared_bytes - kStaticSharedBytes, kMaxPartBytes * Op::kColumnInputs) / SlotBytes(op);
}

// Slots of a row that stay on chip.
template <typename Op>
int MaxRowSlots(const Op& op, const DeviceInfo& device) {
  return MaxPartSlots(op, device) * (device.clusters ? kMaxPortableCluster : 1);
}

// Rows of `slots` slots by the Full tier; false if it does not suit.
template <typename Op>
bool LaunchFullRow(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, const char* name,
                   Error* status) {
  const auto launch = [&]<int kLanes>() {
    if (slots != kLanes * kFullItems || op.rows < kFullBlockRows<kLanes>) return false;
    const Grid grid = {.blocks = CeilDiv(op.rows, kFullBlockRows<kLanes>), .threads = kWarpThreads};
    *status = Launch<FullRowKernel<Op, kLanes>>(device, stream, grid, name, op);
    return true;
  };
  return [&]<int... kPower>(std::integer_sequence<int, kPower...>) {
    return (launch.template operator()<(kMinFullLanes << kPower)>() || ...);
  }(std::make_integer_sequence<int, std::countr_zero(static_cast<unsigned>(kWarp / kMinFullLanes)) + 1>());
}

template <typename Op>
Error LaunchRow(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, const char* name) {
  constexpr int kBlockThreads = 128;
  if constexpr (Op::kMode == Mode::kPlain && !Op::kRare && requires(typename Op::Row row) { op.RowAfter(row, 0); }) {
    auto status = Error::Success();
    if (LaunchFullRow(device, stream, op, slots, name, &status)) return status;
  }
  if constexpr (FillsSlots(Op::kMode) && !Op::kRare) {
    if (slots <= kMaxWarpSlots) {
      const bool few = slots <= kShortWarpSlots || slots > kLongWarpSlots;
      const int items = slots == 1 ? 1 : few ? kFewWarpItems : kWarpItems<Op>;
      const int lanes = NextPowerOfTwo(CeilDiv(slots, items));
      const int log2_lanes = std::countr_zero(static_cast<unsigned>(lanes));
      const Grid grid = {.blocks = CeilDiv(op.rows, kWarpThreads / lanes), .threads = kWarpThreads};
      if (items == 1) return Launch<WarpRowKernel<Op, 1>>(device, stream, grid, name, log2_lanes, op);
      if (items == 2) return Launch<WarpRowKernel<Op, 2>>(device, stream, grid, name, log2_lanes, op);
      return Launch<WarpRowKernel<Op, kWarpItems<Op>>>(device, stream, grid, name, log2_lanes, op);
    }
  }
  const int slot_bytes = SlotBytes(op);
  const int64_t row_bytes = int64_t{slots} * slot_bytes;
  BlockPlan plan = {.part_slots = slots};
  // Few rows leave multiprocessors idle: then as many blocks per row as there can be.
  const bool few = device.clusters && op.rows * kMaxPortableCluster <= 4 * device.sms && slots >= kMinFewSlots;
  if (slots <= MaxPartSlots(op, device) && !few) {
    // The row may touch one slot more than it has whole ones; that one is not worth twice the threads.
    const int64_t whole = std::max(1, slots - (FillsSlots(Op::kMode) ? 0 : 1));
    plan.threads_per_row = std::min(NextPowerOfTwo(CeilDiv(whole, Op::kSlotsPerThread)), kMaxThreads);
    plan.rows_per_block = std::max(1, kBlockThreads / plan.threads_per_row);
  } else {
    const int64_t parts = CeilDiv(row_bytes, kClusterPartBytes<Op>);
    plan.cluster = few ? kMaxPortableCluster : static_cast<int>(std::min<int64_t>(parts, kMaxPortableCluster));
    plan.part_slots = static_cast<int>(CeilDiv(slots, plan.cluster));
    const int per_thread = few || Op::kColumnInputs > 1 ? 8 : 14;
    const int64_t warps = CeilDiv(plan.part_slots, per_thread * kWarp);
    plan.threads_per_row = static_cast<int>(std::clamp<int64_t>(warps * kWarp, kBlockThreads, kMaxClusterThreads<Op>));
  }
  plan.half_slots = HalfSlots(plan.part_slots, plan.threads_per_row);
  const Grid grid = {.blocks = CeilDiv(op.rows, plan.rows_per_block) * plan.cluster,
                     .threads = plan.threads_per_row * plan.rows_per_block,
                     .shared_bytes = plan.part_slots * slot_bytes * plan.rows_per_block,
                     .cluster = plan.cluster};
  return Launch<BlockRowKernel<Op>>(device, stream, grid, name, op, plan);
}

// `scratch` is where the blocks of a launch exchange partials; Python reserves room for 1000 of them at least.
template <typename Op>
Error LaunchSplit(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, Scratch scratch,
                  const char* name) {
  using Partial = typename Op::Partial;
  const int shared_bytes = device.max_shared_bytes - kStaticSharedBytes;
  const int64_t blocks = device.sms;
  JAXNORM_CHECK(blocks * sizeof(Post<Partial>) <= scratch.bytes && blocks < int64_t{kTagStep});
  // All rows at once if L2 can hold their inputs; otherwise as many as shared memory can hold.
  const int64_t row_bytes = int64_t{slots} * kVecBytes * op.Inputs();
  const int64_t held = op.rows <= device.l2_bytes / row_bytes ? op.rows : blocks * shared_bytes / row_bytes;
  const int64_t batch = std::clamp<int64_t>(held, 1, std::min(op.rows, blocks));
  const int chunks = static_cast<int>(std::min<int64_t>(blocks / batch, slots));
  SplitPlan<Partial> plan = {.chunks = FastDiv(chunks), .posts = static_cast<Post<Partial>*>(scratch.data)};
  plan.chunk_slots = static_cast<int>(PartSlots(slots, chunks));
  plan.staged_slots = std::min(plan.chunk_slots, shared_bytes / (kVecBytes * op.Inputs()));
  plan.half_slots = HalfSlots(plan.staged_slots, kSplitThreads<Op>);
  for (; plan.first_row < op.rows; plan.first_row += batch) {
    plan.tag = LaunchTag();
    const Grid grid = {.blocks = std::min(batch, op.rows - plan.first_row) * chunks,
                       .threads = kSplitThreads<Op>,
                       .shared_bytes = plan.staged_slots * kVecBytes * op.Inputs(),
                       .cooperative = true};
    JAXNORM_RETURN_IF_ERROR(Launch<SplitKernel<Op>>(device, stream, grid, name, op, plan));
  }
  return Error::Success();
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_ROWS_CUH_
