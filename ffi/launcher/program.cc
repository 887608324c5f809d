#include "launcher/program.h"

#include <unordered_map>

#include "launcher/compile.h"
#include "launcher/driver.h"

namespace jaxnorm {
namespace {

constexpr int kSharedBytesWithoutAsking = 48 * 1024;
constexpr int kPortableCluster = 8;
constexpr int kClusterArchitecture = 90;

std::string TooLarge(const Gpu& gpu, const std::string& what) {
  return "a block of this program does not fit " + gpu.name + ": " + what;
}

}  // namespace

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

std::string Program::Load(const Plan& plan, int ordinal, Kernels* kernels) {
  const Driver& driver = StartedDriver();
  const Gpus& gpus = AllGpus();
  if (!gpus.reason.empty()) return gpus.reason;
  if (ordinal < 0 || ordinal >= static_cast<int>(gpus.list.size())) {
    return "there is no GPU number " + std::to_string(ordinal);
  }
  const Gpu& gpu = gpus.list[ordinal];
  const bool clusters = plan.cluster > 1 && !plan.together;
  if (clusters && gpu.architecture < kClusterArchitecture) {
    return "clusters of blocks are for sm_90 and later, " + gpu.name + " is sm_" + std::to_string(gpu.architecture);
  }
  if (plan.shared_bytes > gpu.shared_bytes) {
    return TooLarge(gpu, std::to_string(plan.shared_bytes) + " bytes of shared memory, there are " +
                             std::to_string(gpu.shared_bytes));
  }

  std::lock_guard<std::mutex> lock(mutex_);
  void *library = nullptr, *function = nullptr;
  if (std::string error = LoadLibrary(gpu.architecture, &library); !error.empty()) return error;
  int device = 0;
  if (int result = driver.DeviceGet(&device, ordinal); result != 0) return driver.Describe("cuDeviceGet", result);
  // KernelGetFunction loads into the current context, which otherwise the first launch would do.
  auto find = [&](const char* name, void** kernel) -> std::string {
    if (int result = driver.LibraryGetKernel(kernel, library, name); result != 0) {
      return driver.Describe(std::string("the kernel ") + name, result);
    }
    if (int result = driver.KernelGetFunction(&function, *kernel); result != 0) {
      return driver.Describe(std::string("loading ") + name, result);
    }
    return "";
  };
  if (plan.has_finish) {
    if (std::string error = find("row_program_finish", &kernels->finish); !error.empty()) return error;
  }
  if (std::string error = find("row_program", &kernels->row_program); !error.empty()) return error;

  int& allowed = shared_allowed_[{kernels->row_program, device}];  // calls that share a kernel may differ
  if (plan.shared_bytes > kSharedBytesWithoutAsking && plan.shared_bytes > allowed) {
    if (int result = driver.KernelSetAttribute(kMaxDynamicSharedBytes, plan.shared_bytes, kernels->row_program, device);
        result != 0) {
      return driver.Describe(std::to_string(plan.shared_bytes) + " bytes of shared memory", result);
    }
    allowed = plan.shared_bytes;
  }
  if (clusters && plan.cluster > kPortableCluster) {
    if (int result = driver.KernelSetAttribute(kNonPortableClusterAllowed, 1, kernels->row_program, device);
        result != 0) {
      return driver.Describe("clusters of " + std::to_string(plan.cluster) + " blocks", result);
    }
  }

  int resident = 0;
  if (clusters) {
    CudaLaunchAttribute cluster{};
    cluster.id = kLaunchAttributeCluster;
    cluster.value.cluster = {static_cast<unsigned>(plan.cluster), 1, 1};
    const CudaLaunchConfig config{static_cast<unsigned>(plan.cluster),
                                  1,
                                  1,
                                  static_cast<unsigned>(plan.threads),
                                  1,
                                  1,
                                  static_cast<unsigned>(plan.shared_bytes),
                                  nullptr,
                                  &cluster,
                                  1};
    if (int result = driver.MaxActiveClusters(&resident, function, &config); result != 0) {
      return driver.Describe("cuOccupancyMaxActiveClusters", result);
    }
  } else {
    if (int result = driver.MaxActiveBlocks(&resident, function, plan.threads, plan.shared_bytes); result != 0) {
      return driver.Describe("cuOccupancyMaxActiveBlocksPerMultiprocessor", result);
    }
    resident = resident * gpu.multiprocessors / plan.cluster;
  }
  if (resident == 0) {
    return TooLarge(gpu, std::to_string(plan.threads) + " threads with their registers, " +
                             std::to_string(plan.shared_bytes) + " bytes of shared memory, clusters of " +
                             std::to_string(plan.cluster));
  }
  kernels->resident = resident;
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
