// Launching: what a device offers, asked once, and kernel attributes, set once per device. What needs no kernel's type is in
// launch.cu, so that it is compiled once.
#ifndef JAXNORM_CUDA_LAUNCH_CUH_
#define JAXNORM_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "call.h"
#include "vec.cuh"

namespace jaxnorm {

inline constexpr int kMaxDevices = 64;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct DeviceInfo {
  int ordinal = 0;
  int sms = 0;
  int max_shared_bytes = 0;  // per block, after opting in
  int l2_bytes = 0;
  double cycle_bytes = 0;  // that memory moves for each multiprocessor in a cycle, at its peak; 0 if it is not known
  bool clusters = false;   // thread-block clusters, distributed shared memory, bulk copies (Hopper and later)
};

// `what` names the call that returned `status`.
Error LaunchStatus(cudaError_t status, const char* what);

// Of the current device, which XLA makes that of the call's stream. Cached: handlers run on every execution.
Error CurrentDevice(const DeviceInfo** info);

// A tag that no other launch has, of this process or another: a multiple of kTagStep. (See Post in reduce.cuh.)
inline constexpr uint64_t kTagStep = 1 << 16;
uint64_t LaunchTag();

// Of shared memory, kept for a kernel's own variables; the dynamic part can have the rest.
inline constexpr int kStaticSharedBytes = 4096;

struct Grid {
  int64_t blocks = 0;
  int threads = 0;
  int shared_bytes = 0;
  int cluster = 1;           // consecutive blocks that share a row
  bool cooperative = false;  // all blocks run at once, or the launch fails
  bool early = false;        // blocks may begin while the launch before still runs, for which they wait themselves
};

// Programmatic dependent launch (Hopper and later). Blocks of an early launch have begun, have loaded their first
// instructions and have asked L2 for what they will read when the last of the launch before have ended. Without it, that
// is two to three microseconds of each launch.

// Lets the next launch begin, if it is an early one, as soon as all blocks have come here or ended. Where there is much
// left to do, the next blocks would wait in places that working ones need: 1% slower for large arrays.
__device__ __forceinline__ void LetNextBegin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Blocks of an early launch find room where blocks of the one before have ended, and all would go to the multiprocessors that
// are done before others, where their loads wait for each other. Shared memory that nobody uses, of so many bytes, spreads
// them over all. They have no more than kStaticSharedBytes of their own.
inline int SpreadBytes(const DeviceInfo& device, int64_t blocks) {
  constexpr int kLeast = 2, kMost = 6;        // blocks of a multiprocessor: with more there is little to spread
  constexpr int kReservedSharedBytes = 1024;  // of each block, by the system
  const int64_t at_once = std::max<int64_t>(CeilDiv(blocks, int64_t{device.sms}), kLeast);
  if (!device.clusters || at_once > kMost) return 0;
  const int64_t all = device.max_shared_bytes + kReservedSharedBytes;
  return static_cast<int>(all / at_once) - kReservedSharedBytes - kStaticSharedBytes;
}

// Until all that launches before have written is there. Addresses are computed from the result, which is `index`: the
// compiler might else load what it takes for constant before. Until then, lines may be prefetched to L2, and operands of the
// call be loaded if its first launch, not an early one, is the one before.
template <typename Index>
__device__ __forceinline__ Index WaitForLaunchBefore(Index index) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  return Kept(index);
}

inline constexpr int kMaxCluster = 16;         // blocks
inline constexpr int kMaxPortableCluster = 8;  // on every device that has clusters

// How many clusters of `cluster` blocks, of `threads` threads and all of a multiprocessor's shared memory each, run at the
// same time: the multiprocessors that share a cluster's hardware need not be a multiple of it. 0 where the device has no
// such clusters. Asked once for a kernel, a device and a size.
using KnownClusters = int[kMaxDevices][kMaxCluster + 1];  // one more than the answer, or 0; atomically
int ActiveClusters(const void* kernel, const DeviceInfo& device, int threads, int cluster, KnownClusters& known);

template <auto kKernel>
int ActiveClusters(const DeviceInfo& device, int threads, int cluster) {
  static KnownClusters known = {};
  return ActiveClusters(reinterpret_cast<const void*>(kKernel), device, threads, cluster, known);
}

// Launches a kernel; `args` point to its parameters. `opted_in` has a bit for each device, used atomically: the opt-in to
// large shared memory belongs to a kernel and a device, and a process may use several devices.
Error Launch(const void* kernel, const DeviceInfo& device, cudaStream_t stream, const Grid& grid, const char* name,
             const void** args, uint64_t* opted_in);

// Launches kKernel(args...).
template <auto kKernel, typename... Args>
Error Launch(const DeviceInfo& device, cudaStream_t stream, const Grid& grid, const char* name, const Args&... args) {
  static_assert(std::is_same_v<decltype(kKernel), void (*)(Args...)>, "a kernel gets its parameters' types");
  static uint64_t opted_in = 0;
  const void* pointers[] = {&args...};
  return Launch(reinterpret_cast<const void*>(kKernel), device, stream, grid, name, pointers, &opted_in);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_LAUNCH_CUH_
