// Combining what threads hold: within a group of lanes, across the warps of a row, across the blocks of a cluster.
//
// A partial P is a small trivially copyable struct of floating-point members with
//   static P Identity();  static P Merge(P, P);   // commutative and associative up to rounding
//   static P MergeLanes(P, int width);            // over groups of `width` lanes: every lane gets the result
// The order of merging depends on the launch shape only, so results are the same bits in every run.
#ifndef JAXNORM_CUDA_REDUCE_CUH_
#define JAXNORM_CUDA_REDUCE_CUH_

#include <cstdint>

#include "launch.cuh"
#include "vec.cuh"

namespace jaxnorm {

inline constexpr int kWarp = 32;
inline constexpr int kMaxWarps = 32;  // of one block
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

// The same with their sum.
template <typename Acc>
__device__ __forceinline__ Acc LaneSum(Acc value, int width) {
  return LaneReduce(value, width, [](Acc a, Acc b) { return a + b; });
}

// Adds neighbours, then their sums, and so on: additions that do not wait for each other. N is a power of two.
template <typename Acc, int N>
__device__ __forceinline__ Acc TreeSum(const Acc (&numbers)[N]) {
  if constexpr (N == 1) {
    return numbers[0];
  } else {
    Acc pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = numbers[2 * i] + numbers[2 * i + 1];
    return TreeSum(pairs);
  }
}

// f of each word of `value`.
template <typename P, typename F>
__device__ __forceinline__ P MapWords(P value, F f) {
  auto words = std::bit_cast<WordsOf<P>>(value);
#pragma unroll
  for (uint32_t& word : words.w) word = f(word);
  return std::bit_cast<P>(words);
}

template <typename P>
__device__ __forceinline__ P ShuffleXor(P value, int offset) {
  return MapWords(value, [=](uint32_t word) { return __shfl_xor_sync(kAllLanes, word, offset); });
}

template <typename P>
__device__ __forceinline__ P ShuffleFrom(P value, int lane) {
  return MapWords(value, [=](uint32_t word) { return __shfl_sync(kAllLanes, word, lane); });
}

// Which warp of the block this is, in a form that tells the compiler that all lanes have the same.
__device__ __forceinline__ int WarpIndex() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0); }

// By all lanes of a warp: true in one of them, which the compiler then knows to be alone. Else it makes loops over lanes of what
// takes operands for the whole warp, such as preparing a barrier or asking for a bulk copy.
__device__ __forceinline__ bool ElectLane() {
#if __CUDA_ARCH__ >= 900
  uint32_t elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
#else
  return threadIdx.x % kWarp == 0;
#endif
}

// ---- Barriers in shared memory: who arrives need not wait, and may wait later ----

__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int arrivals) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}

// Lets peers and bulk copies use the barriers that this thread has prepared.
__device__ __forceinline__ void PublishBarriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// What this thread has written to shared memory before, others see after they have waited.
__device__ __forceinline__ void ArriveAtBarrier(uint32_t address) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(address) : "memory");
}

// By all lanes of a warp. `parity` is that of how often the barrier has been waited for before.
__device__ __forceinline__ void WaitForBarrier(uint32_t address, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n .reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
#else
        " mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
  __syncwarp();
}

// ---- Thread-block clusters (no-ops that are never called before sm_90) ----
//
// Blocks send values to each other's shared memory and count the bytes that arrive with an mbarrier. A cluster barrier
// instead would have to make the values visible, and waits for all stores to global memory in the process: the results
// of the row before.

// Prepares barriers in shared memory, and tells the peers so. To be paired with ClusterWait, after which every peer is
// running and can be sent to.
template <typename... Barrier>
__device__ __forceinline__ void ClusterStart(Barrier*... barriers) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    (InitBarrier(barriers, 1), ...);
    PublishBarriers();
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Which cluster this is of the launch, and which block of the cluster.
__device__ __forceinline__ int ClusterIndex() {
  int index = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return index;
}
__device__ __forceinline__ int ClusterRank() {
  int rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes `value` to shared memory at `address`, and counts it at the barrier at `counter`, both in block `rank` of this
// cluster. kWide words are written at once, to a multiple of their size: each store is counted by itself, which takes
// time.
template <int kWide = 1, typename P>
__device__ __forceinline__ void SendToPeer(uint32_t address, uint32_t counter, int rank, P value) {
#if __CUDA_ARCH__ >= 900
  const auto words = std::bit_cast<WordsOf<P>>(value);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(counter), "r"(rank));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(P) / sizeof(uint32_t)); i += kWide) {
    if constexpr (kWide == 4) {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
              address + 4 * i),
          "r"(words.w[i]), "r"(words.w[i + 1]), "r"(words.w[i + 2]), "r"(words.w[i + 3]), "r"(counter)
          : "memory");
    } else if constexpr (kWide == 2) {
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                       address + 4 * i),
                   "r"(words.w[i]), "r"(words.w[i + 1]), "r"(counter)
                   : "memory");
    } else {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address + 4 * i),
          "r"(words.w[i]), "r"(counter)
          : "memory");
    }
  }
#endif
}
template <typename P>
__device__ __forceinline__ void SendToPeer(P* local, uint64_t* barrier, int rank, P value) {
  SendToPeer(static_cast<uint32_t>(__cvta_generic_to_shared(local)),
             static_cast<uint32_t>(__cvta_generic_to_shared(barrier)), rank, value);
}

// Announces `bytes` from all peers together, this block among them; by one thread, each time that the barrier is used.
__device__ __forceinline__ void ExpectFromPeers(uint32_t address, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
#endif
}

// Copies from global to shared memory, both aligned to 16 bytes, a multiple of as many, and counts them at the barrier at
// `counter`, which has been told to expect them.
__device__ __forceinline__ void CopyBulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t counter,
                                         L2Policy policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(counter), "l"(static_cast<uint64_t>(policy))
      : "memory");
#endif
}
__device__ __forceinline__ void CopyBulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t counter) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(counter)
               : "memory");
#endif
}

// Waits for `bytes` from all peers together, this block among them. `parity` as above.
__device__ __forceinline__ void ReceiveFromPeers(uint32_t address, int bytes, int parity) {
  if (threadIdx.x == 0) ExpectFromPeers(address, bytes);
  WaitForBarrier(address, parity);
}
__device__ __forceinline__ void ReceiveFromPeers(uint64_t* barrier, int bytes, int parity) {
  ReceiveFromPeers(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)), bytes, parity);
}

// ---- A row shared by threads, warps and blocks ----

template <typename P>
struct RowShared {
  P warps[kMaxWarps];
  P blocks[kMaxCluster];
  uint64_t barrier;
};

// Merges partials that are equal in all lanes of a warp over the `warps_per_row` warps (a power of two, or all of the
// block) that share a row.
template <typename P>
__device__ __forceinline__ P MergeWarps(P value, int warps_per_row, RowShared<P>& shared) {
  if (warps_per_row <= 1) return value;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (lane == 0) shared.warps[warp] = value;
  __syncthreads();
  const int first = warps_per_row * kWarp == blockDim.x ? 0 : warp & -warps_per_row;
  return P::MergeLanes(lane < warps_per_row ? shared.warps[first + lane] : P::Identity(), kWarp);
}

// A row that a cluster has for itself.
template <typename P, int kWarps>
struct ClusterShared {
  P warps[kWarps];  // of all blocks
  uint64_t barrier;
};

// Merges what the warps of the blocks of a cluster have, without merging those of a block first,
// after ClusterStart and ClusterWait; once in a kernel.
template <typename P, int kWarps>
__device__ __forceinline__ P MergeCluster(P value, int cluster, int rank, ClusterShared<P, kWarps>& shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (lane < cluster) SendToPeer(&shared.warps[rank * warps + warp], &shared.barrier, lane, value);
  ReceiveFromPeers(&shared.barrier, cluster * warps * static_cast<int>(sizeof(P)), 0);
  P own = P::Identity();
  for (int i = lane; i < cluster * warps; i += kWarp) own = P::Merge(own, shared.warps[i]);
  return P::MergeLanes(own, kWarp);
}

// ---- A row shared by blocks that are all running (cooperative launches) ----

// Whether no lane of a warp misses a post. All wait until all are there: where lanes wait by themselves, a warp that has found
// its posts at different times goes on as several, and the exchange takes 0.3 us more of about 2.
__device__ __forceinline__ bool AllThere(bool there) { return __all_sync(kAllLanes, there); }

// A value in global memory, for other blocks. 16 bytes are written and read at once; 8 of them are the launch's tag, so
// what is read is the value of this launch or not there yet, whatever else the memory held. No order of stores matters.
// The lowest kTagStep of a tag's values are for counting.
template <typename P>
struct Post {
  static constexpr int kParts = (sizeof(P) + 7) / 8;
  struct alignas(16) Part {
    unsigned long long x, y;
  } parts[kParts];

  __device__ __forceinline__ void Write(P value, uint64_t tag) {
    const auto words = std::bit_cast<WordsOf<P>>(value);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      constexpr int kWords = sizeof(P) / sizeof(uint32_t);
      const uint64_t low = words.w[2 * i], high = 2 * i + 1 < kWords ? words.w[(2 * i + 1) % kWords] : 0;
      asm volatile("{\n .reg .b128 v;\n mov.b128 v, {%1, %2};\n st.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(
                       __cvta_generic_to_global(&parts[i])),
                   "l"(tag), "l"(low | high << 32)
                   : "memory");
    }
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (Part& part : parts) part.x = 0;
  }

  // Adds one to a post that this thread has read, and returns how many did before.
  __device__ __forceinline__ int Count() { return static_cast<int>(atomicAdd(&parts[0].x, 1ull) % kTagStep); }

  // By all lanes of a warp, of which those get a value that want one.
  __device__ __forceinline__ P Read(uint64_t tag, bool wanted) const {
    P value;
    while (!AllThere(!wanted || TryRead(tag, value))) continue;
    return value;
  }

  // Whether it is there yet. All parts are read at once.
  __device__ __forceinline__ bool TryRead(uint64_t tag, P& value) const {
    return Take(tag, WordsOf<P>{}, value, [](const Part& from, uint64_t& found, uint64_t& part) {
      asm volatile("{\n .reg .b128 v;\n ld.relaxed.gpu.global.b128 v, [%2];\n mov.b128 {%0, %1}, v;\n}"
                   : "=l"(found), "=l"(part)
                   : "l"(__cvta_generic_to_global(&from))
                   : "memory");
    });
  }
  // Without a branch: if it is not `wanted`, nothing is read, `value` stays what it is, and is there.
  __device__ __forceinline__ bool TryRead(uint64_t tag, P& value, bool wanted) const {
    return Take(tag, std::bit_cast<WordsOf<P>>(value), value,
                [wanted](const Part& from, uint64_t& found, uint64_t& part) {
                  asm volatile(
                      "{\n .reg .b128 v;\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n mov.b128 v, {%0, %1};\n"
                      " @p ld.relaxed.gpu.global.b128 v, [%2];\n mov.b128 {%0, %1}, v;\n}"
                      : "+l"(found), "+l"(part)
                      : "l"(__cvta_generic_to_global(&from)), "r"(static_cast<uint32_t>(wanted))
                      : "memory");
                });
  }

 private:
  // load(part, found, value): what a part has, or leaves what is there already, of `words`.
  template <typename Load>
  __device__ __forceinline__ bool Take(uint64_t tag, WordsOf<P> words, P& value, Load load) const {
    constexpr int kWords = sizeof(P) / sizeof(uint32_t);
    bool there = true;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const uint64_t low = words.w[2 * i], high = 2 * i + 1 < kWords ? words.w[(2 * i + 1) % kWords] : 0;
      uint64_t found = tag, part = low | high << 32;
      load(parts[i], found, part);
      there = there && found / kTagStep == tag / kTagStep;
      words.w[2 * i] = static_cast<uint32_t>(part);
      if (2 * i + 1 < kWords) words.w[(2 * i + 1) % kWords] = static_cast<uint32_t>(part >> 32);
    }
    value = std::bit_cast<P>(words);
    return there;
  }
};

// Posts of a lane that are read at once (waiting for one after the other takes longer), and so of all that share a row.
inline constexpr int kLanePosts = 6, kMaxPosts = kLanePosts * kWarp;

// By whole warps: reads `count` posts, `step` apart, each until it is there. Thread i of `threads` has posts i, i + threads, ..., no
// more than kLanePosts, and 0 beside them.
template <typename P>
__device__ __forceinline__ void ReadPosts(const Post<P>* posts, int count, uint64_t tag, P (&values)[kLanePosts],
                                          int thread, int threads, int step) {
  bool missing[kLanePosts], any;
#pragma unroll
  for (int i = 0; i < kLanePosts; ++i) {
    values[i] = {};
    missing[i] = thread + i * threads < count;
  }
  do {
    any = false;
#pragma unroll
    for (int i = 0; i < kLanePosts; ++i) {
      missing[i] = !posts[(thread + i * threads) * step].TryRead(tag, values[i], missing[i]);
      any |= missing[i];
    }
  } while (!AllThere(!any));
}

// By a warp.
template <typename P>
__device__ __forceinline__ void ReadPosts(const Post<P>* posts, int count, uint64_t tag, P (&values)[kLanePosts]) {
  ReadPosts(posts, count, tag, values, threadIdx.x % kWarp, kWarp, 1);
}

// By a warp, after ReadPosts, with what lane 0 has had from posts[0].Count(). A graph is launched again with the same tag, so
// the last warp that has read the posts removes them.
template <typename P>
__device__ __forceinline__ void ClearAfterLast(Post<P>* posts, int count, int left_before) {
  if (__shfl_sync(kAllLanes, left_before, 0) != count - 1) return;
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) posts[i].Clear();
}

// Where the `blocks` blocks of a row exchange their partials. All blocks of the launch must be running.
template <typename P>
struct Meeting {
  Post<P>* posts;  // one per block
  uint64_t tag;
  int blocks, rank;

  __device__ __forceinline__ P Merge(P value, RowShared<P>& shared) const {
    if (threadIdx.x == 0) posts[rank].Write(value, tag);
    P own = P::Identity();
    for (int first = 0; first < blocks; first += blockDim.x) {
      const int i = first + threadIdx.x;
      const P value = posts[i].Read(tag, i < blocks);
      if (i < blocks) own = P::Merge(own, value);
    }
    return MergeWarps(P::MergeLanes(own, kWarp), blockDim.x / kWarp, shared);
  }

  // To be called by thread 0 after Merge, and its result given to Clear when there is time. A graph is launched again
  // with the same tag, so the last block to leave removes it.
  __device__ __forceinline__ int Leave() const { return posts[0].Count(); }
  __device__ __forceinline__ void Clear(int left_before) const {
    if (left_before != blocks - 1) return;
    for (int i = 0; i < blocks; ++i) posts[i].Clear();
  }
};

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_REDUCE_CUH_
