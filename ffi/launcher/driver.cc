#include "launcher/driver.h"

#include <dlfcn.h>

namespace jaxnorm {
namespace {

// CUdevice_attribute
constexpr int kMultiprocessors = 16;
constexpr int kL2Bytes = 38;
constexpr int kMajor = 75;
constexpr int kMinor = 76;
constexpr int kSharedBytesOptIn = 97;

Driver Open() {
  Driver driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    driver.missing = dlerror();
    return driver;
  }
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && driver.missing.empty()) {
      driver.missing = std::string("the NVIDIA driver is older than CUDA 12, it has no ") + name;
    }
  };
  find(driver.GetErrorString, "cuGetErrorString");
  find(driver.DriverGetVersion, "cuDriverGetVersion");
  find(driver.Init, "cuInit");
  find(driver.DeviceGetCount, "cuDeviceGetCount");
  find(driver.DeviceGet, "cuDeviceGet");
  find(driver.DeviceGetName, "cuDeviceGetName");
  find(driver.DeviceGetAttribute, "cuDeviceGetAttribute");
  find(driver.PrimaryContextGetState, "cuDevicePrimaryCtxGetState");
  find(driver.PrimaryContextRetain, "cuDevicePrimaryCtxRetain");
  find(driver.PrimaryContextRelease, "cuDevicePrimaryCtxRelease_v2");
  find(driver.ContextPush, "cuCtxPushCurrent_v2");
  find(driver.ContextPop, "cuCtxPopCurrent_v2");
  find(driver.LibraryLoadData, "cuLibraryLoadData");
  find(driver.LibraryUnload, "cuLibraryUnload");
  find(driver.LibraryGetKernel, "cuLibraryGetKernel");
  find(driver.KernelGetFunction, "cuKernelGetFunction");
  find(driver.KernelSetAttribute, "cuKernelSetAttribute");
  find(driver.MaxActiveBlocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  find(driver.MaxActiveClusters, "cuOccupancyMaxActiveClusters");
  find(driver.LaunchKernel, "cuLaunchKernelEx");
  if (driver.missing.empty()) driver.DriverGetVersion(&driver.cuda);
  return driver;
}

Driver Start() {
  Driver driver = OpenedDriver();
  if (!driver.missing.empty()) return driver;
  if (int result = driver.Init(0); result != 0) driver.missing = driver.Describe("cuInit", result);
  return driver;
}

Gpus Find() {
  const Driver& driver = StartedDriver();
  Gpus gpus;
  gpus.reason = driver.missing;
  if (!gpus.reason.empty()) return gpus;
  int count = 0;
  if (int result = driver.DeviceGetCount(&count); result != 0) {
    gpus.reason = driver.Describe("cuDeviceGetCount", result);
  } else if (count == 0) {
    gpus.reason = "the NVIDIA driver finds no GPU";
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Gpu gpu;
    int device = 0, major = 0, minor = 0;
    char name[256] = "";
    driver.DeviceGet(&device, ordinal);
    driver.DeviceGetName(name, sizeof name - 1, device);
    driver.DeviceGetAttribute(&major, kMajor, device);
    driver.DeviceGetAttribute(&minor, kMinor, device);
    driver.DeviceGetAttribute(&gpu.multiprocessors, kMultiprocessors, device);
    driver.DeviceGetAttribute(&gpu.shared_bytes, kSharedBytesOptIn, device);
    driver.DeviceGetAttribute(&gpu.l2_bytes, kL2Bytes, device);
    gpu.name = name;
    gpu.architecture = major * 10 + minor;
    gpus.list.push_back(gpu);
  }
  return gpus;
}

}  // namespace

std::string Driver::Describe(const std::string& what, int result) const {
  const char* words = nullptr;
  GetErrorString(result, &words);
  return what + ": " + (words != nullptr ? words : "unknown error") + " (" + std::to_string(result) + ")";
}

const Driver& OpenedDriver() {
  static const Driver driver = Open();
  return driver;
}

const Driver& StartedDriver() {
  static const Driver driver = Start();
  return driver;
}

const Gpus& AllGpus() {
  static const Gpus gpus = Find();
  return gpus;
}

}  // namespace jaxnorm
