// What the kernels of layer_norm and rms_norm that stay for many rows share: backward (norm_bwd.cu), with BlockExchange and
// ClusterExchange, and forward (norm_fwd_long.cu), with RowExchange.
//
// A thread owns the same columns of each of its rows, so what belongs to columns (parameters and their gradients) is in
// registers all the time. Rows are on their way to shared memory several turns before they are needed. Each thread
// copies and reads its own slots only, which takes no barrier. Warps, and the blocks of a cluster, exchange the sums of
// a row once in a turn, and while they travel work is done on the rows before and after it.
#ifndef JAXNORM_CUDA_NORM_ROWS_CUH_
#define JAXNORM_CUDA_NORM_ROWS_CUH_

#include <utility>

#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

namespace jaxnorm {

struct RowsPlan {
  int blocks = 1;            // or clusters, for each group of rows
  int turns = 1, rest = 0;   // of a block, and one more if its first row is before `rest`
  int threads_per_row = 32;  // a power of two up to 32, or whole warps
  int rows_per_block = 1;
  int cluster = 1;
  int part_slots = 0;       // of a row per block
  int exchange_offset = 0;  // of a cluster's exchange in shared memory
};

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
  // Of all lanes of a warp: writes what they have together to shared memory, with half the shuffles if there are two. By
  // lanes 0 and 16, so a barrier is for after __syncwarp.
  static __device__ __forceinline__ void StoreMerged(uint32_t address, RowSums p, int lane) {
    if constexpr (kN == 2) {
      const bool upper = lane >= kWarp / 2;
      Acc sum = upper ? p.v[1] : p.v[0];
      sum += __shfl_xor_sync(kAllLanes, upper ? p.v[0] : p.v[1], kWarp / 2);
#pragma unroll
      for (int offset = kWarp / 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      struct Half {
        Acc sum;
      };
      if (lane % (kWarp / 2) == 0) StoreShared(address + (upper ? static_cast<int>(sizeof(Acc)) : 0), Half{sum});
    } else {
      p = MergeLanes(p, kWarp);
      if (lane == 0) StoreShared(address, p);
    }
  }
};

// What warps, and the blocks of a cluster, tell each other of their share of a row. For each turn: Put what lanes have,
// then Begin; kLag turns later End, which has the sums of all.

// One lane arrives at a barrier for its warp, after __syncwarp, which orders what the others have read before. To
// compute-sanitizer's racecheck an arrival stands for its own lane alone: it reports that other lanes' reads of a place and
// the next write to it, several turns later, are unordered.

// Rows that a block has for itself. A warp puts row s after it has had the sums of row s - kLag - 1, so all warps have put
// that one, so they have had the sums of row s - 2 * kLag - 2: between them are kPlaces - 1 rows.
template <typename Sums, int kLag>
struct BlockExchange {
  static constexpr unsigned kPlaces = 2 * kLag + 2;
  static constexpr int kMaxRows = kMaxThreads / (2 * kWarp);  // that are wider than a warp
  struct alignas(kVecBytes) Shared {
    Sums warps[kPlaces][kMaxThreads / kWarp];
    uint64_t barriers[kPlaces][kMaxRows];
  };

  int threads, lane, warps, width;
  uint32_t own_warp, row_warps, barriers;

  static __device__ __forceinline__ void Start(Shared& shared, const RowsPlan& plan) {
    if (plan.threads_per_row <= kWarp) return;
    if (threadIdx.x < kPlaces * kMaxRows) InitBarrier(&shared.barriers[0][threadIdx.x], plan.threads_per_row / kWarp);
    __syncthreads();
  }
  __device__ __forceinline__ void Meet() const {}

  __device__ __forceinline__ BlockExchange(Shared& shared, const RowsPlan& plan, int rank, int row_group, int thread)
      : threads(plan.threads_per_row),
        lane(thread % kWarp),
        warps(plan.threads_per_row / kWarp),
        width(warps <= 2   ? 2
              : warps <= 8 ? 8
                           : 16),
        own_warp(SharedAddress(&shared.warps[0][thread / kWarp])),
        row_warps(SharedAddress(&shared.warps[0][row_group * warps + lane % width])),
        barriers(SharedAddress(&shared.barriers[0][row_group % kMaxRows])) {}

  __device__ __forceinline__ Sums Put(Sums sums, unsigned turn) const {
    if (threads <= kWarp) return Sums::MergeLanes(sums, threads);
    Sums::StoreMerged(own_warp + WarpPlace(turn), sums, lane);
    __syncwarp();
    if (lane == 0) ArriveAtBarrier(Barrier(turn));
    return sums;
  }
  __device__ __forceinline__ void Begin(unsigned turn) {}
  __device__ __forceinline__ Sums End(Sums sums, unsigned turn) const {
    if (threads <= kWarp) return sums;
    WaitForBarrier(Barrier(turn), turn / kPlaces & 1);
    return Sums::MergeLanes(lane % width < warps ? LoadShared<Sums>(row_warps + WarpPlace(turn)) : Sums::Identity(),
                            width);
  }

 private:
  static __device__ __forceinline__ uint32_t WarpPlace(unsigned turn) {
    return turn % kPlaces * static_cast<uint32_t>(sizeof(Shared::warps) / kPlaces);
  }
  __device__ __forceinline__ uint32_t Barrier(unsigned turn) const {
    return barriers + turn % kPlaces * static_cast<uint32_t>(sizeof(Shared::barriers) / kPlaces);
  }
};

// A row that a cluster has, of at least two warps in each block. One warp, another one in each turn, adds up what those
// of its block have and sends it to all blocks; no other waits before it needs the sums.
//
// When row s is sent, that warp has had the sums of row s - kLag, so all warps have put that row, so they have had the
// sums of row s - 2 * kLag - 1. That many places are free for it. In a block, where a row is put after the sums of
// row s - kLag - 1 were had, which its warps have put by then, four places are enough.
template <typename Sums, int kLag>
struct ClusterExchange {
  // Powers of two, for cheap remainders, if there is room.
  static constexpr unsigned kPlaces = sizeof(Sums) <= 16 ? 8 : 2 * kLag + 1, kWarpPlaces = 4;
  // A place and its barrier are at a constant distance: one address for both, with a cheap remainder.
  template <int kN>
  struct alignas(sizeof(Sums) <= 8 ? 2 * kN * sizeof(Sums) : kVecBytes) Place {
    Sums of[kN];
    uint64_t barrier;
  };
  using BlocksPlace = Place<kMaxCluster>;
  using WarpsPlace = Place<kMaxThreads / kWarp>;
  struct Shared {
    BlocksPlace blocks[kPlaces];
    WarpsPlace warps[kWarpPlaces];
  };
  static constexpr int kBytes = sizeof(Sums);
  static constexpr int kWide = kBytes % 8 == 0 ? 2 : 1;

  int cluster, warps, lane, warp, rank;
  int sender = 0;                      // of the turn
  uint32_t block_places, warp_places;  // addresses of the first of them
  uint32_t own_warp, row_warps;        // what this warp puts, and what this lane of the sender reads, in a place

  static __device__ __forceinline__ void Start(Shared& shared, const RowsPlan& plan) {
    if (threadIdx.x < kWarpPlaces) InitBarrier(&shared.warps[threadIdx.x].barrier, plan.threads_per_row / kWarp);
    for (int i = threadIdx.x; i < static_cast<int>(kPlaces) * kMaxCluster; i += blockDim.x) {
      shared.blocks[i / kMaxCluster].of[i % kMaxCluster] = Sums::Identity();
    }
    __syncthreads();
    [&]<size_t... kPlace>(std::index_sequence<kPlace...>) {
      ClusterStart(&shared.blocks[kPlace].barrier...);
    }(std::make_index_sequence<kPlaces>());
  }
  __device__ __forceinline__ ClusterExchange(Shared& shared, const RowsPlan& plan, int rank, int row_group, int thread)
      : cluster(Kept(plan.cluster)),
        warps(plan.threads_per_row / kWarp),
        lane(thread % kWarp),
        warp(thread / kWarp),
        rank(rank),
        block_places(SharedAddress(&shared.blocks[0])),
        warp_places(SharedAddress(&shared.warps[0])),
        own_warp(warp * kBytes),
        row_warps(lane % (kWarp / 2) * kBytes) {}

  // To be called once, after Start and before the first Put.
  __device__ __forceinline__ void Meet() const { ClusterWait(); }

  __device__ __forceinline__ Sums Put(Sums sums, unsigned turn) {
    const uint32_t place = WarpPlace(turn);
    Sums::StoreMerged(place + own_warp, sums, lane);
    __syncwarp();
    if (lane == 0) ArriveAtBarrier(place + offsetof(WarpsPlace, barrier));
    return sums;
  }
  __device__ __forceinline__ void Begin(unsigned turn) {
    if (warp == sender) {
      const uint32_t from = WarpPlace(turn), to = BlockPlace(turn), barrier = to + offsetof(BlocksPlace, barrier);
      WaitForBarrier(from + offsetof(WarpsPlace, barrier), turn / kWarpPlaces & 1);
      const bool exists = lane % (kWarp / 2) < warps;
      Sums sums = exists ? LoadShared<Sums>(from + row_warps) : Sums::Identity();
      sums = Sums::MergeLanes(sums, kWarp / 2);
      if (lane == 0) ExpectFromPeers(barrier, cluster * kBytes);
      if (lane < cluster) SendToPeer<kWide>(to + rank * kBytes, barrier, lane, sums);
    }
    sender = sender + 1 == warps ? 0 : sender + 1;
  }
  __device__ __forceinline__ Sums End(Sums, unsigned turn) const {
    const uint32_t from = BlockPlace(turn);
    WaitForBarrier(from + offsetof(BlocksPlace, barrier), turn / kPlaces & 1);
    const Sums sums = OfBlocks(from);
    return cluster > 8 ? Sums::Merge(sums, OfBlocks(from + 8 * kBytes)) : sums;
  }

 private:
  // Of 8 blocks together, of which some may not be there and have 0. That takes less time than shuffles.
  static __device__ __forceinline__ Sums OfBlocks(uint32_t from) {
    struct Pair {
      Sums of[2];
    };
    Sums sums;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const auto pair = LoadShared<Pair>(from + i * kBytes);
      const Sums two = Sums::Merge(pair.of[0], pair.of[1]);
      sums = i == 0 ? two : Sums::Merge(sums, two);
    }
    return sums;
  }
  __device__ __forceinline__ uint32_t WarpPlace(unsigned turn) const {
    return warp_places + turn % kWarpPlaces * static_cast<uint32_t>(sizeof(WarpsPlace));
  }
  __device__ __forceinline__ uint32_t BlockPlace(unsigned turn) const {
    return block_places + turn % kPlaces * static_cast<uint32_t>(sizeof(BlocksPlace));
  }
};

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
  static constexpr int kWide = kBytes % 8 == 0 ? 2 : 1;
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

  // `memory` has Bytes(plan). In a cluster, Put is for after ClusterWait.
  __device__ __forceinline__ RowExchange(RowExchangeShared<Sums>& shared, const void* memory, const RowsPlan& plan,
                                         int rank, int row_group)
      : threads(plan.threads_per_row),
        row_group(row_group),
        cluster(plan.cluster),
        warps(plan.threads_per_row / kWarp),
        lane(threadIdx.x % kWarp),
        sent(Sent(plan)),
        own_warp(SharedAddress(&shared.warps[0][threadIdx.x / kWarp])),
        row_warps(SharedAddress(&shared.warps[0][row_group * warps + Warp()])),
        places(SharedAddress(memory)),
        barriers(SharedAddress(&shared.barriers[0])) {
    own_place = places + (rank * sent + (IsDirect(cluster) ? threadIdx.x / kWarp : 0)) * kBytes;
  }

  __device__ __forceinline__ Sums Put(Sums sums, int turn) const {
    if (threads < kWarp) return Sums::MergeLanes(sums, threads);
    sums = Sums::MergeLanes(sums, kWarp);
    if (IsDirect(cluster)) {
      if (lane < cluster) SendToPeer<kWide>(own_place + PlaceOffset(turn), Barrier(turn), lane, sums);
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
      SendToPeer<kWide>(own_place + PlaceOffset(turn), Barrier(turn), threadIdx.x, sums);
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

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_NORM_ROWS_CUH_
