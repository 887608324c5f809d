#include <array>
#include <atomic>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "launch.cuh"

namespace jaxnorm {
namespace {

// Whether the code that a device of this compute capability gets has Hopper's instructions: code compiled for an older
// architecture alone runs on Hopper too.
bool HasHopperCode(int major, int minor) {
  int best = 0;  // that the device can run, in the form of __CUDA_ARCH__
  for (int arch : {__CUDA_ARCH_LIST__}) {
    if (arch <= 100 * major + 10 * minor) best = std::max(best, arch);
  }
  return best >= 900;
}

// How much shared memory a block may ask for.
int DynamicSharedBytes(const DeviceInfo& device) { return device.max_shared_bytes - kStaticSharedBytes; }

cudaError_t OptIn(const void* kernel, const DeviceInfo& device) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, DynamicSharedBytes(device));
}

}  // namespace

Error LaunchStatus(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return Error::Success();
  return Error::Internal(std::string("jaxnorm: ") + what + ": " + cudaGetErrorString(status));
}

Error CurrentDevice(const DeviceInfo** info) {
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

uint64_t LaunchTag() {
  static std::atomic<uint64_t> next = [] {
    std::random_device random;
    return (uint64_t{random()} << 32 | random()) / kTagStep * kTagStep;
  }();
  return next.fetch_add(kTagStep, std::memory_order_relaxed);
}

int ActiveClusters(const void* kernel, const DeviceInfo& device, int threads, int cluster, KnownClusters& known) {
  if (!device.clusters) return 0;
  const std::atomic_ref<int> cached(known[device.ordinal][cluster]);
  if (const int value = cached.load(std::memory_order_relaxed); value > 0) return value - 1;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = DynamicSharedBytes(device);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  const bool allowed =
      OptIn(kernel, device) == cudaSuccess &&
      (cluster <= kMaxPortableCluster ||
       cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess) &&
      cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess;
  if (!allowed) {
    cudaGetLastError();  // a device that refuses is no error of the next call
    count = 0;
  }
  cached.store(count + 1, std::memory_order_relaxed);
  return count;
}

Error Launch(const void* kernel, const DeviceInfo& device, cudaStream_t stream, const Grid& grid, const char* name,
             const void** args, uint64_t* opted_in) {
  const std::atomic_ref<uint64_t> opted(*opted_in);
  const uint64_t bit = uint64_t{1} << device.ordinal;
  if (grid.shared_bytes > 48 * 1024 - kStaticSharedBytes && !(opted.load(std::memory_order_relaxed) & bit)) {
    if (cudaError_t status = OptIn(kernel, device); status != cudaSuccess) return LaunchStatus(status, name);
    opted.fetch_or(bit, std::memory_order_relaxed);
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
  // The runtime reads the parameters; the type of its argument says otherwise.
  return LaunchStatus(cudaLaunchKernelExC(&config, kernel, const_cast<void**>(args)), name);
}

}  // namespace jaxnorm
