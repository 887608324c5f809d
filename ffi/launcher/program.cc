#include "launcher/program.h"

#include <unordered_map>

#include "launcher/compile.h"
#include "launcher/driver.h"

namespace jaxnorm {
namespace {

// The most dynamic shared memory of a launch that does not set the kernel's limit. A kernel may also have static
// arrays.
constexpr int kSharedBytesWithoutAsking = 16 * 1024;
constexpr int kPortableCluster = 8;
constexpr int kClusterArchitecture = 90;

std::string TooLarge(const Gpu& gpu, const std::string& what) {
  return "a block of this program does not fit " + gpu.name + ": " + what;
}

std::string CheckFits(const Launch& launch, const Gpu& gpu) {
  if (launch.clustered() && gpu.architecture < kClusterArchitecture) {
    return "clusters of blocks are for sm_90 and later, " + gpu.name + " is sm_" + std::to_string(gpu.architecture);
  }
  if (launch.shared_bytes > gpu.shared_bytes) {
    return TooLarge(gpu, std::to_string(launch.shared_bytes) + " bytes of shared memory, there are " +
                             std::to_string(gpu.shared_bytes));
  }
  return "";
}

// How many blocks, or clusters, of a kernel the device holds at once.
std::string CountResident(const Launch& launch, const Gpu& gpu, void* function, int64_t* resident) {
  const Driver& driver = StartedDriver();
  const int threads = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  int count = 0;
  if (launch.clustered()) {
    LaunchAttributes attributes(launch, gpu);
    const Extent cluster{static_cast<unsigned>(launch.cluster), 1, 1};
    const CudaLaunchConfig config = LaunchConfig(launch, {cluster, launch.block}, &attributes, nullptr);
    if (int result = driver.MaxActiveClusters(&count, function, &config); result != 0) {
      return driver.Describe("cuOccupancyMaxActiveClusters", result);
    }
  } else {
    if (int result = driver.MaxActiveBlocks(&count, function, threads, launch.shared_bytes); result != 0) {
      return driver.Describe("cuOccupancyMaxActiveBlocksPerMultiprocessor", result);
    }
    count = count * gpu.multiprocessors / launch.cluster;
  }
  if (count == 0) {
    return TooLarge(gpu, std::to_string(threads) + " threads with their registers, " +
                             std::to_string(launch.shared_bytes) + " bytes of shared memory, clusters of " +
                             std::to_string(launch.cluster));
  }
  *resident = count;
  return "";
}

}  // namespace

LaunchAttributes::LaunchAttributes(const Launch& launch, const Gpu& gpu) {
  if (launch.clustered()) {
    CudaLaunchAttribute& attribute = list[count++];
    attribute.id = kLaunchAttributeCluster;
    attribute.value.cluster = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  if (launch.cooperative) {
    CudaLaunchAttribute& attribute = list[count++];
    attribute.id = kLaunchAttributeCooperative;
    attribute.value.on = 1;
  }
  if (launch.early && gpu.architecture >= kClusterArchitecture) {
    CudaLaunchAttribute& attribute = list[count++];
    attribute.id = kLaunchAttributeEarly;
    attribute.value.on = 1;
  }
}

CudaLaunchConfig LaunchConfig(const Launch& launch, const Size& size, LaunchAttributes* attributes, void* stream) {
  return {size.grid.x,
          size.grid.y,
          size.grid.z,
          size.block.x,
          size.block.y,
          size.block.z,
          static_cast<unsigned>(launch.shared_bytes),
          stream,
          attributes->list,
          attributes->count};
}

std::shared_ptr<Program> Program::ForSource(std::string_view source) {
  static auto* mutex = new std::mutex;
  static auto* programs = new std::unordered_map<std::string, std::shared_ptr<Program>>;
  std::string key(source);
  std::lock_guard<std::mutex> lock(*mutex);
  std::shared_ptr<Program>& program = (*programs)[key];
  if (program == nullptr) program = std::make_shared<Program>(std::move(key));
  return program;
}

std::string Program::LoadLibrary(int architecture, void** library) {
  void*& loaded = libraries_[architecture];
  if (loaded == nullptr) {
    std::shared_ptr<const Code> code;
    if (std::string error = Compile(source_, architecture, &code); !error.empty()) return error;
    const Driver& driver = StartedDriver();
    if (int result = driver.LibraryLoadData(&loaded, code->cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
        result != 0) {
      loaded = nullptr;
      return driver.Describe("cuLibraryLoadData", result);
    }
  }
  *library = loaded;
  return "";
}

std::string Program::LoadKernel(const Launch& launch, const std::string& name, void* library, int device, void** kernel,
                                void** function) {
  const Driver& driver = StartedDriver();
  if (int result = driver.LibraryGetKernel(kernel, library, name.c_str()); result != 0) {
    return driver.Describe("the kernel " + name, result);
  }
  // KernelGetFunction loads into the current context, which otherwise the first launch would do.
  if (int result = driver.KernelGetFunction(function, *kernel); result != 0) {
    return driver.Describe("loading " + name, result);
  }
  int& allowed = shared_allowed_[{*kernel, device}];  // calls that share a kernel may differ
  if (launch.shared_bytes > kSharedBytesWithoutAsking && launch.shared_bytes > allowed) {
    if (int result = driver.KernelSetAttribute(kMaxDynamicSharedBytes, launch.shared_bytes, *kernel, device);
        result != 0) {
      return driver.Describe(std::to_string(launch.shared_bytes) + " bytes of shared memory", result);
    }
    allowed = launch.shared_bytes;
  }
  if (launch.clustered() && launch.cluster > kPortableCluster) {
    if (int result = driver.KernelSetAttribute(kNonPortableClusterAllowed, 1, *kernel, device); result != 0) {
      return driver.Describe("clusters of " + std::to_string(launch.cluster) + " blocks", result);
    }
  }
  return "";
}

std::string Program::Load(const Plan& plan, int ordinal, Kernels* kernels) {
  const Driver& driver = StartedDriver();
  const Gpus& gpus = AllGpus();
  if (!gpus.reason.empty()) return gpus.reason;
  if (ordinal < 0 || ordinal >= static_cast<int>(gpus.list.size())) {
    return "there is no GPU number " + std::to_string(ordinal);
  }
  const Gpu& gpu = gpus.list[ordinal];
  kernels->gpu = &gpu;
  for (const Launch& launch : plan.launches) {
    if (std::string error = CheckFits(launch, gpu); !error.empty()) return error;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  void *library = nullptr, *kernel = nullptr, *function = nullptr;
  if (std::string error = LoadLibrary(gpu.architecture, &library); !error.empty()) return error;
  int device = 0;
  if (int result = driver.DeviceGet(&device, ordinal); result != 0) return driver.Describe("cuDeviceGet", result);
  for (const Launch& launch : plan.launches) {
    std::string error = LoadKernel(launch, plan.kernels[launch.kernel], library, device, &kernel, &function);
    if (!error.empty()) return error;
    kernels->of_launch.push_back(kernel);
    int64_t resident = 0;
    if (launch.rule != Rule::kTiles && !launch.cooperative) continue;
    if (error = CountResident(launch, gpu, function, &resident); !error.empty()) return error;
    if (launch.rule == Rule::kTiles) kernels->resident = resident;
    if (launch.cooperative && launch.rule == Rule::kFixed && launch.grid.x > resident * launch.cluster) {
      return "this program is for a larger GPU than " + gpu.name + ": " + std::to_string(launch.grid.x) +
             " blocks must run at once, it holds " + std::to_string(resident * launch.cluster);
    }
  }
  return "";
}

std::string OnEachDevice(const std::function<std::string(int)>& task) {
  const Driver& driver = StartedDriver();
  std::string first;
  bool done = false;
  for (int ordinal = 0; ordinal < static_cast<int>(AllGpus().list.size()); ++ordinal) {
    int device = 0, active = 0;
    unsigned flags = 0;
    void* context = nullptr;
    if (driver.DeviceGet(&device, ordinal) != 0) continue;
    if (driver.PrimaryContextGetState(device, &flags, &active) != 0 || active == 0) continue;
    std::string error;
    if (int result = driver.PrimaryContextRetain(&context, device); result != 0) {
      error = driver.Describe("cuDevicePrimaryCtxRetain", result);
    } else {
      if (int pushed = driver.ContextPush(context); pushed != 0) {
        error = driver.Describe("cuCtxPushCurrent", pushed);
      } else {
        error = task(ordinal);
        driver.ContextPop(&context);
      }
      driver.PrimaryContextRelease(device);
    }
    done = done || error.empty();
    if (first.empty()) first = error;
  }
  return done ? "" : first;
}

}  // namespace jaxnorm
