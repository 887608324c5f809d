// What the kernels of layer_norm and rms_norm that stay for many rows share, forward (norm_fwd_long.cu) and backward
// (norm_bwd.cu, which has an exchange of its own: with this one, rows of odd length and clusters of 8 and 16 were measured
// to be 5 to 8% slower, and only clusters of 2 and 4 faster).
//
// A thread owns the same columns of each of its rows, so what belongs to columns (parameters and their gradients) is in
// registers all the time. Rows are on their way to shared memory several turns before they are needed. Each thread
// copies and reads its own slots only, which takes no barrier. Warps, and the blocks of a cluster, exchange the sums of
// a row once in a turn, and while they travel work is done on the rows before and after it.
#ifndef JAXNORM_CUDA_NORM_ROWS_CUH_
#define JAXNORM_CUDA_NORM_ROWS_CUH_

#include "reduce.cuh"
#include "rows.cuh"
#include "vec.cuh"

namespace jaxnorm {

inline constexpr int kBlockThreads = 256;  // or twice as many for one long row

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
