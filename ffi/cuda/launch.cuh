// Launching: what a device offers, asked once, and kernel attributes, set once per device.
#ifndef JAXNORM_CUDA_LAUNCH_CUH_
#define JAXNORM_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

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

// Whether the code that a device of this compute capability gets has Hopper's instructions: code compiled for an older
// architecture alone runs on Hopper too.
inline bool HasHopperCode(int major, int minor) {
  int best = 0;  // that the device can run, in the form of __CUDA_ARCH__
  for (int arch : {__CUDA_ARCH_LIST__}) {
    if (arch <= 100 * major + 10 * minor) best = std::max(best, arch);
  }
  return best >= 900;
}

// Of the current device, which XLA makes that of the call's stream. Cached: handlers run on every execution.
inline Error CurrentDevice(const DeviceInfo** info) {
  static std::array<DeviceInfo, kMaxDevices> devices;
  static std::array<std::atomic<bool>, kMaxDevices> known;
  static std::mutex mutex;
  int ordinal = 0;
  if (cudaError_t status = cudaGetDevice(&ordinal); status != cudaSuccess) {
    return LaunchStatus(status, "cudaGetDevice");
  }
  if (ordinal >= kMaxDevices) return Error::Internal("jaxnorm: more than 64 devices in one process");
  if (!known[ordinal].load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex);
    DeviceInfo d;
    d.ordinal = ordinal;
    int major = 0, minor = 0, clock_khz = 0, memory_khz = 0, bus_bits = 0;
    for (auto [attribute, value] :
         {std::pair{cudaDevAttrMultiProcessorCount, &d.sms},
          std::pair{cudaDevAttrMaxSharedMemoryPerBlockOptin, &d.max_shared_bytes},
          std::pair{cudaDevAttrL2CacheSize, &d.l2_bytes}, std::pair{cudaDevAttrClockRate, &clock_khz},
          std::pair{cudaDevAttrMemoryClockRate, &memory_khz}, std::pair{cudaDevAttrGlobalMemoryBusWidth, &bus_bits},
          std::pair{cudaDevAttrComputeCapabilityMajor, &major}, std::pair{cudaDevAttrComputeCapabilityMinor, &minor}}) {
      if (cudaError_t status = cudaDeviceGetAttribute(value, attribute, ordinal); status != cudaSuccess) {
        return LaunchStatus(status, "cudaDeviceGetAttribute");
      }
    }
    d.clusters = HasHopperCode(major, minor);
    if (clock_khz > 0) d.cycle_bytes = 2.0 * memory_khz * bus_bits / 8 / clock_khz / d.sms;  // two transfers a clock
    devices[ordinal] = d;
    known[ordinal].store(true, std::memory_order_release);
  }
  *info = &devices[ordinal];
  return Error::Success();
}

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
template <auto kKernel>
int ActiveClusters(const DeviceInfo& device, int threads, int cluster) {
  if (!device.clusters) return 0;
  static std::array<std::array<std::atomic<int>, kMaxCluster + 1>, kMaxDevices> known;  // one more than that, or 0
  std::atomic<int>& cached = known[device.ordinal][cluster];
  if (const int value = cached.load(std::memory_order_relaxed); value > 0) return value - 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = device.max_shared_bytes - kStaticSharedBytes;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  const bool allowed =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(config.dynamicSmemBytes)) == cudaSuccess &&
      (cluster <= kMaxPortableCluster ||
       cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess) &&
      cudaOccupancyMaxActiveClusters(&count, kKernel, &config) == cudaSuccess;
  if (!allowed) {
    cudaGetLastError();  // a device that refuses is no error of the next call
    count = 0;
  }
  cached.store(count + 1, std::memory_order_relaxed);
  return count;
}

// Launches kKernel(args...). The opt-in to large shared memory belongs to a kernel and a device, so it is remembered
// for both; a process may use several devices.
template <auto kKernel, typename... Args>
Error Launch(const DeviceInfo& device, cudaStream_t stream, const Grid& grid, const char* name, const Args&... args) {
  static std::atomic<uint64_t> opted_in{0};
  const uint64_t bit = uint64_t{1} << device.ordinal;
  if (grid.shared_bytes > 48 * 1024 - kStaticSharedBytes && !(opted_in.load(std::memory_order_relaxed) & bit)) {
    if (cudaError_t status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  device.max_shared_bytes - kStaticSharedBytes);
        status != cudaSuccess) {
      return LaunchStatus(status, name);
    }
    opted_in.fetch_or(bit, std::memory_order_relaxed);
  }
  if (grid.blocks > INT32_MAX) {
    return Error::InvalidArgument(std::string("jaxnorm: ") + name + ": more than 2^31 - 1 thread blocks");
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[3] = {};
  config.attrs = attributes;
  if (grid.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  if (grid.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  if (grid.early && device.clusters) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return LaunchStatus(cudaLaunchKernelEx(&config, kKernel, args...), name);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_LAUNCH_CUH_
