// Combining what threads hold: within a group of lanes, across the warps of a row, across the blocks of a cluster.
//
// A partial P is a small trivially copyable struct of floating-point members with
//   static P Identity();  static P Merge(P, P);   // commutative and associative up to rounding
//   static P MergeLanes(P, int width);            // over groups of `width` lanes: every lane gets the result
// The order of merging depends on the launch shape only, so results are the same bits in every run.
#ifndef JAXNORM_CUDA_REDUCE_CUH_
#define JAXNORM_CUDA_REDUCE_CUH_

#include <cstdint>

#include "vec.cuh"

namespace jaxnorm {

inline constexpr int kWarp = 32;
inline constexpr int kMaxWarps = 32;    // of one block
inline constexpr int kMaxCluster = 16;  // blocks
inline constexpr unsigned kAllLanes = 0xffffffffu;

// XORs the lane index with 1, 2, ... < width (a power of two <= 32): every lane of a group gets the group's result.
template <typename Acc, typename F>
__device__ __forceinline__ Acc LaneReduce(Acc value, int width, F merge) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    if (offset < width) value = merge(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

template <typename P>
__device__ __forceinline__ P ShuffleXor(P value, int offset) {
  static_assert(sizeof(P) % sizeof(float) == 0);
  constexpr int kWords = sizeof(P) / sizeof(float);
  struct Words {
    float w[kWords];
  };
  Words words = std::bit_cast<Words>(value);
#pragma unroll
  for (int i = 0; i < kWords; ++i) words.w[i] = __shfl_xor_sync(kAllLanes, words.w[i], offset);
  return std::bit_cast<P>(words);
}

// ---- Thread-block clusters (no-ops that are never called before sm_90) ----

__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes `value` to the variable at `local` in the shared memory of block `rank` of this cluster.
template <typename P>
__device__ __forceinline__ void StoreToPeer(P* local, int rank, P value) {
#if __CUDA_ARCH__ >= 900
  constexpr int kWords = sizeof(P) / sizeof(uint32_t);
  struct Words {
    uint32_t w[kWords];
  };
  const Words words = std::bit_cast<Words>(value);
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address + 4 * i), "r"(words.w[i]) : "memory");
  }
#endif
}

// ---- A row shared by threads, warps and blocks ----

template <typename P>
struct RowShared {
  P warps[kMaxWarps];
  P blocks[kMaxCluster];
};

// Merges partials that are equal in all lanes of a warp over the `warps_per_row` warps (a power of two, or all of the
// block) and `cluster` blocks that share a row. One barrier per level. Peers push their partial instead of being read,
// so no block has to wait for readers to leave.
template <typename P>
__device__ __forceinline__ P MergeRow(P value, int warps_per_row, int cluster, int rank, RowShared<P>& shared) {
  if (warps_per_row <= 1) return value;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (lane == 0) shared.warps[warp] = value;
  __syncthreads();
  const int first = warp / warps_per_row * warps_per_row;
  value = P::MergeLanes(lane < warps_per_row ? shared.warps[first + lane] : P::Identity(), kWarp);
  if (cluster > 1) {
    if (threadIdx.x < cluster) StoreToPeer(&shared.blocks[rank], threadIdx.x, value);
    ClusterArrive();
    ClusterWait();
    value = P::MergeLanes(lane < cluster ? shared.blocks[lane] : P::Identity(), kWarp);
  }
  return value;
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_REDUCE_CUH_
