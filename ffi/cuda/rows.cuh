// Row-wise kernels: reduce each row to a few numbers, then write each element from them. One set of kernels serves
// every such operation; the operation is a functor (softmax_fwd.cu and softmax_bwd.cu show two).
//
// Rows are cut into slots of 16 bytes on the address grid of the row that is written, so a row whose start or length is
// odd only has two slots that it does not fill: they are loaded whole (neighbours' elements are ignored) and stored by
// element. An input with another alignment is loaded by element.
//
// Three modes, by what a call needs, because instructions that check for the rare cost bandwidth:
//   kPlain    rows fill their slots, arrays are full and aligned, no optional operand
//   kRagged   rows do not fill their slots
//   kGeneral  anything
//
// Tiers, by row length:
//   Warp   up to 128 slots, kPlain: in the registers of 1..32 lanes, several rows per warp.
//   Block  every thread copies its slots to shared memory asynchronously and reads them from there once per pass.
//          What is in flight is then bounded by shared memory, not by registers: 32 KiB per block and seven blocks per
//          multiprocessor, of which some load while others store. Rows of more than 32 KiB go over a cluster of blocks that
//          exchange partials through distributed shared memory (sm_90 and later).
//   Split  too long for that: one launch reduces chunks of rows, the next one stores; batch by batch, so that the second
//          launch finds its inputs in L2.
//
// Op concept (T storage type, Acc arithmetic type):
//   struct Partial                          see reduce.cuh
//   struct Row                              pointers into one row; Row Begin(int64_t row) const
//   static constexpr Mode kMode
//   struct Slot                             what is kept of one slot between reduction and store
//   const OperandRow<T>& Input(row, k)      the kInputs arrays that are as long as a row
//   void Decode(row, slot, Vec (&raw)[kInputs], Slot&)   to arithmetic, elements outside the row neutral
//   template <int kN> Partial Reduce(Slot(&)[kN], int width)   of the slots and of `width` lanes
//   void Prepare(Slot&, Partial total)      bring a freshly decoded slot to the state that Reduce leaves
//   Final Finish(Partial total)
//   void Store(row, slot, Slot, Final)
//   int64_t rows;  static constexpr int kInputs      arrays as long as a row that are read
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

enum class Mode { kPlain, kRagged, kGeneral };

// ---- Slots ----

// Where a row of `cols` elements of T lies on the grid of 16-byte slots; element c is in slot (c + skew) / kVec.
template <typename T, Mode kMode>
struct SlotGrid {
  int skew = 0;  // elements between the first slot's start and the row's
  int cols = 0;

  __device__ __forceinline__ SlotGrid(const T* row, int cols) : cols(cols) {
    if (kMode != Mode::kPlain) skew = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kVecSize<T>);
  }
  __device__ __forceinline__ int First(int slot) const { return slot * kVecSize<T> - skew; }
  __device__ __forceinline__ int Slots() const {
    return kMode == Mode::kPlain ? cols / kVecSize<T> : (skew + cols + kVecSize<T> - 1) / kVecSize<T>;
  }
  __device__ __forceinline__ bool Whole(int first) const {
    return kMode == Mode::kPlain || (first >= 0 && first + kVecSize<T> <= cols);
  }
};

// Reads elements [first, first + kVec) around a row of an input.
template <Mode kMode, typename T>
__device__ __forceinline__ Vec<T, kVecSize<T>> LoadSlot(const OperandRow<T>& input, int first) {
  if constexpr (kMode == Mode::kPlain) return Load<Cache::kStreaming>(input.row + first);
  return input.template Load<kVecSize<T>>(first);
}

// The same into shared memory; complete after CopyWait.
template <Mode kMode, typename T>
__device__ __forceinline__ void CopySlotAsync(Vec<T, kVecSize<T>>* shared, const OperandRow<T>& input, int first) {
  const auto* p = reinterpret_cast<const Vec<T, kVecSize<T>>*>(input.row + first);
  if constexpr (kMode == Mode::kPlain) {
    CopyAsync(shared, p);
  } else if constexpr (kMode == Mode::kRagged) {  // aligned; only the array's last slot is not whole
    CopyAsync(shared, p, min(input.end - first, kVecSize<T>) * static_cast<int>(sizeof(T)));
  } else {
    *shared = input.template Load<kVecSize<T>>(first);
  }
}

template <typename T, Mode kMode>
__device__ __forceinline__ void StoreSlot(T* row, const SlotGrid<T, kMode>& grid, int first,
                                          const AccT<T> (&values)[kVecSize<T>]) {
  const Vec<T, kVecSize<T>> rounded = RoundVec<T>(values);
  if (grid.Whole(first)) {  // the grid is that of the row that is written, so this is aligned
    Store<Cache::kStreaming>(row + first, rounded);
  } else {
#pragma unroll
    for (int i = 0; i < kVecSize<T>; ++i) {
      if (first + i >= 0 && first + i < grid.cols) row[first + i] = rounded.v[i];
    }
  }
}

// ---- Warp tier ----

// Slot j of lane t of a group of `lanes` (a power of two) is j * lanes + t.
template <typename Op, int kItems>
__global__ void __launch_bounds__(128) WarpRowKernel(const __grid_constant__ Op op, const int lanes) {
  using T = typename Op::T;
  const int lane = threadIdx.x & (lanes - 1);
  const int64_t index = int64_t{blockIdx.x} * (blockDim.x / lanes) + threadIdx.x / lanes;
  const bool inside = index < op.rows;  // lanes without a row still take part in shuffles
  const typename Op::Row row = op.Begin(inside ? index : op.rows - 1);
  const int slots = inside ? row.grid.Slots() : 0;
  Vec<T, kVecSize<T>> raw[kItems][Op::kInputs];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) {
      if (const int slot = lane + j * lanes; slot < slots) {
        raw[j][k] = LoadSlot<Op::kMode>(op.Input(row, k), row.grid.First(slot));
      }
    }
  }
  typename Op::Slot kept[kItems];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    kept[j] = Op::Slot::Neutral();
    if (const int slot = lane + j * lanes; slot < slots) op.Decode(row, slot, raw[j], kept[j]);
  }
  const typename Op::Partial total = op.Reduce(kept, lanes);
  const auto final = op.Finish(total);
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if (const int slot = lane + j * lanes; slot < slots) op.Store(row, slot, kept[j], final);
  }
}

// ---- Passes over many slots, from shared or from global memory ----

template <typename Op>
inline constexpr int kPassUnroll = 4 / Op::kInputs;  // slots of each input that a thread works on at once

// Calls body.operator()<n>(base, kept) for groups of n slots base, base + step, ... below `end`: kPassUnroll of them
// while there are as many, then one by one. fetch(slot, raw) reads one.
template <typename Op, typename Fetch, typename Body>
__device__ __forceinline__ void ForEachSlotGroup(const Op& op, const typename Op::Row& row, int first, int end, int step,
                                                 Fetch fetch, Body body) {
  const auto group = [&]<int kN>(int base, std::integral_constant<int, kN>) {
    Vec<typename Op::T, kVecSize<typename Op::T>> raw[kN][Op::kInputs];
#pragma unroll
    for (int j = 0; j < kN; ++j) fetch(base + j * step, raw[j]);
    typename Op::Slot kept[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) op.Decode(row, base + j * step, raw[j], kept[j]);
    body(base, kept);
  };
  constexpr int kUnroll = kPassUnroll<Op>;
  int base = first;
  for (; base + (kUnroll - 1) * step < end; base += kUnroll * step) group(base, std::integral_constant<int, kUnroll>());
  for (; base < end; base += step) group(base, std::integral_constant<int, 1>());
}

template <typename Op, typename Fetch>
__device__ __forceinline__ void ReduceSlots(const Op& op, const typename Op::Row& row, int first, int end, int step,
                                            Fetch fetch, typename Op::Partial& own) {
  ForEachSlotGroup(op, row, first, end, step, fetch, [&]<int kN>(int, typename Op::Slot(&kept)[kN]) {
    own = Op::Partial::Merge(own, op.Reduce(kept, 1));
  });
}

template <typename Op, typename Fetch>
__device__ __forceinline__ void StoreSlots(const Op& op, const typename Op::Row& row, int first, int end, int step,
                                           Fetch fetch, const typename Op::Partial& total) {
  const auto final = op.Finish(total);
  ForEachSlotGroup(op, row, first, end, step, fetch, [&]<int kN>(int base, typename Op::Slot(&kept)[kN]) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      op.Prepare(kept[j], total);
      op.Store(row, base + j * step, kept[j], final);
    }
  });
}

// ---- Block tier ----

inline constexpr int kMaxThreads = 512;

struct BlockPlan {
  int threads_per_row = 32;  // a power of two where a block has several rows
  int rows_per_block = 1;
  int cluster = 1;           // blocks that share a row
  int part_slots = 0;        // of a row per block
};

template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1) BlockRowKernel(const __grid_constant__ Op op, const BlockPlan plan) {
  using V = Vec<typename Op::T, kVecSize<typename Op::T>>;
  using Partial = typename Op::Partial;
  extern __shared__ uint4 shared_bytes[];
  __shared__ RowShared<Partial> shared;
  const int threads = plan.threads_per_row;
  int thread = threadIdx.x, group = 0, rank = 0;
  int64_t index = blockIdx.x;
  if (plan.rows_per_block > 1) {
    thread &= threads - 1;
    group = threadIdx.x / threads;
    index = index * plan.rows_per_block + group;
  } else if (plan.cluster > 1) {
    ClusterArrive();
    index = blockIdx.x / plan.cluster;
    rank = blockIdx.x % plan.cluster;
  }
  const bool inside = index < op.rows;  // threads without a row still take part in shuffles and barriers
  const typename Op::Row row = op.Begin(inside ? index : op.rows - 1);
  const int begin = rank * plan.part_slots;
  const int end = inside ? min(begin + plan.part_slots, row.grid.Slots()) : 0;

  // In two halves, so that the first is reduced while the second is still on its way. A thread reads only what it
  // copied itself: no barrier.
  V* const stage = reinterpret_cast<V*>(shared_bytes) + group * plan.part_slots * Op::kInputs - begin;
  const int middle = begin + (end - begin) / (2 * threads) * threads;
  for (int half = 0; half < 2; ++half) {
    const int stop = half == 0 ? middle : end;
    for (int slot = (half == 0 ? begin : middle) + thread; slot < stop; slot += threads) {
#pragma unroll
      for (int k = 0; k < Op::kInputs; ++k) {
        CopySlotAsync<Op::kMode>(stage + k * plan.part_slots + slot, op.Input(row, k), row.grid.First(slot));
      }
    }
    CopyCommit();
  }
  const auto fetch = [&](int slot, V(&raw)[Op::kInputs]) {
#pragma unroll
    for (int k = 0; k < Op::kInputs; ++k) raw[k] = stage[k * plan.part_slots + slot];
  };
  Partial total = Partial::Identity();
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    if (half == 0) {
      CopyWait<1>();
    } else {
      CopyWait<0>();
    }
    ReduceSlots(op, row, (half == 0 ? begin : middle) + thread, half == 0 ? middle : end, threads, fetch, total);
  }
  total = Partial::MergeLanes(total, min(threads, kWarp));
  total = MergeRow(total, threads / kWarp, plan.cluster, rank, shared);
  StoreSlots(op, row, begin + thread, end, threads, fetch, total);
}

// ---- Split tier ----

inline constexpr int kMaxSplitPartials = 4096;  // rows of a batch * chunks; Python reserves scratch for this many

// Chunk c of a row is slots [c * chunk_slots, (c + 1) * chunk_slots). Block b works on chunk b % chunks of row
// first_row + b / chunks.
struct SplitPlan {
  int64_t first_row = 0;
  int chunks = 1;
  int chunk_slots = 0;
};

// Calls body(row, first slot of this thread, end, fetch) for the block's chunk.
template <typename Op, typename Body>
__device__ __forceinline__ void WithChunk(const Op& op, const SplitPlan& plan, Body body) {
  const typename Op::Row row = op.Begin(plan.first_row + blockIdx.x / plan.chunks);
  const int begin = static_cast<int>(blockIdx.x % plan.chunks) * plan.chunk_slots;
  const int end = min(begin + plan.chunk_slots, row.grid.Slots());
  body(row, begin + static_cast<int>(threadIdx.x), end,
       [&](int slot, Vec<typename Op::T, kVecSize<typename Op::T>>(&raw)[Op::kInputs]) {
#pragma unroll
         for (int k = 0; k < Op::kInputs; ++k) raw[k] = LoadSlot<Op::kMode>(op.Input(row, k), row.grid.First(slot));
       });
}

template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1)
    SplitReduceKernel(const __grid_constant__ Op op, const SplitPlan plan, typename Op::Partial* partials) {
  using Partial = typename Op::Partial;
  __shared__ RowShared<Partial> shared;
  WithChunk(op, plan, [&](const typename Op::Row& row, int first, int end, auto fetch) {
    Partial own = Partial::Identity();
    ReduceSlots(op, row, first, end, blockDim.x, fetch, own);
    const Partial total = MergeRow(Partial::MergeLanes(own, kWarp), blockDim.x / kWarp, 1, 0, shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
  });
}

template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1)
    SplitStoreKernel(const __grid_constant__ Op op, const SplitPlan plan, const typename Op::Partial* partials) {
  using Partial = typename Op::Partial;
  __shared__ RowShared<Partial> shared;
  Partial own = Partial::Identity();
  for (int c = threadIdx.x; c < plan.chunks; c += blockDim.x) {
    own = Partial::Merge(own, partials[blockIdx.x / plan.chunks * plan.chunks + c]);
  }
  const Partial total = MergeRow(Partial::MergeLanes(own, kWarp), blockDim.x / kWarp, 1, 0, shared);
  WithChunk(op, plan, [&](const typename Op::Row& row, int first, int end, auto fetch) {
    StoreSlots(op, row, first, end, blockDim.x, fetch, total);
  });
}

// ---- Choosing ----

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int NextPowerOfTwo(int64_t n) { return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(n))); }

inline constexpr int kWarpItems = 4;  // slots per lane of the Warp tier: 64 bytes per input in flight
// Slots per thread of the Block tier: with fewer, the fixed cost of a thread shows; with more, the passes take long.
template <typename Op>
inline constexpr int kSlotsPerThread = 8 / Op::kInputs;

// A block's part of a row, staged, is at most this large where clusters can share the row.
template <typename Op>
inline constexpr int kPartBytes = (Op::kInputs == 1 ? 100 : 130) << 10;

// Slots of a row that stay on chip.
template <typename Op>
int64_t MaxRowSlots(const DeviceInfo& device) {
  constexpr int kPortableCluster = 8;
  const int64_t block_bytes = device.max_shared_bytes / 2 - kStaticSharedBytes;  // two blocks per multiprocessor at least
  return block_bytes / (kVecBytes * Op::kInputs) * (device.clusters ? kPortableCluster : 1);
}

template <typename Op>
ffi::Error LaunchRow(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, const char* name) {
  constexpr int kBlockThreads = 128;
  if constexpr (Op::kMode == Mode::kPlain) {
    if (slots <= kWarp * kWarpItems) {
      const int lanes = NextPowerOfTwo(CeilDiv(slots, kWarpItems));
      const Grid grid = {.blocks = CeilDiv(op.rows, kBlockThreads / lanes), .threads = kBlockThreads};
      const int64_t items = CeilDiv(slots, lanes);
      if (items == 1) return Launch<WarpRowKernel<Op, 1>>(device, stream, grid, name, op, lanes);
      if (items == 2) return Launch<WarpRowKernel<Op, 2>>(device, stream, grid, name, op, lanes);
      return Launch<WarpRowKernel<Op, kWarpItems>>(device, stream, grid, name, op, lanes);
    }
  }
  constexpr int kSlotBytes = kVecBytes * Op::kInputs;
  // The smallest cluster that keeps a block's part comfortable, up to the portable size of 8.
  const int64_t parts = CeilDiv(int64_t{slots} * kSlotBytes, kPartBytes<Op>);
  const int cluster = device.clusters ? std::min(NextPowerOfTwo(parts), 8) : 1;
  BlockPlan plan = {.cluster = cluster, .part_slots = static_cast<int>(CeilDiv(slots, cluster))};
  plan.threads_per_row = std::min(NextPowerOfTwo(CeilDiv(plan.part_slots, kSlotsPerThread<Op>)), kMaxThreads);
  plan.rows_per_block = std::max(1, kBlockThreads / plan.threads_per_row);
  const Grid grid = {.blocks = CeilDiv(op.rows, plan.rows_per_block) * cluster,
                     .threads = plan.threads_per_row * plan.rows_per_block,
                     .shared_bytes = plan.part_slots * kSlotBytes * plan.rows_per_block,
                     .cluster = cluster};
  return Launch<BlockRowKernel<Op>>(device, stream, grid, name, op, plan);
}

// `scratch` holds kMaxSplitPartials partials.
template <typename Op>
ffi::Error LaunchSplit(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, void* scratch,
                       const char* name) {
  using Partial = typename Op::Partial;
  auto* partials = static_cast<Partial*>(scratch);
  // Half of L2 for the inputs of a batch: the other half sees what the store launch writes.
  const int64_t row_bytes = int64_t{slots} * kVecBytes * Op::kInputs;
  const int64_t batch = std::clamp<int64_t>(device.l2_bytes / 2 / row_bytes, 1, std::min<int64_t>(op.rows, kMaxSplitPartials));
  SplitPlan plan;
  constexpr int kThreads = 256;
  const int64_t wanted = CeilDiv(slots, kThreads * 8);
  plan.chunks = static_cast<int>(std::clamp<int64_t>(wanted, 1, kMaxSplitPartials / batch));
  plan.chunk_slots = static_cast<int>(CeilDiv(slots, plan.chunks));
  for (; plan.first_row < op.rows; plan.first_row += batch) {
    const Grid grid = {.blocks = std::min(batch, op.rows - plan.first_row) * plan.chunks, .threads = kThreads};
    JAXNORM_RETURN_IF_ERROR(Launch<SplitReduceKernel<Op>>(device, stream, grid, name, op, plan, partials));
    JAXNORM_RETURN_IF_ERROR(
        Launch<SplitStoreKernel<Op>>(device, stream, grid, name, op, plan, const_cast<const Partial*>(partials)));
  }
  return ffi::Error::Success();
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_ROWS_CUH_
