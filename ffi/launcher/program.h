// A program: CUDA text, compiled and loaded on this machine's GPUs.
#ifndef JAXNORM_LAUNCHER_PROGRAM_H_
#define JAXNORM_LAUNCHER_PROGRAM_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "launcher/driver.h"
#include "launcher/plan.h"

namespace jaxnorm {

// The attributes of a launch on a GPU.
struct LaunchAttributes {
  LaunchAttributes(const Launch& launch, const Gpu& gpu);
  CudaLaunchAttribute list[3] = {};
  unsigned count = 0;
};
CudaLaunchConfig LaunchConfig(const Launch& launch, const Size& size, LaunchAttributes* attributes, void* stream);

// The kernels of a call's launches on one device. Kernels stay loaded while the process lives.
struct Kernels {
  const Gpu* gpu = nullptr;
  std::vector<void*> of_launch;
  int64_t resident = 0;  // blocks, or clusters, of the kernel with the rule kTiles that the device holds at once
};

// A process has one Program for each source, which all calls share.
class Program {
 public:
  static std::shared_ptr<Program> ForSource(std::string_view source);

  explicit Program(std::string source) : source_(std::move(source)) {}

  // Compiles the source and loads the plan's kernels for device `ordinal`, whose context is current, so that a launch
  // has nothing left to do. Returns "" or an error.
  std::string Load(const Plan& plan, int ordinal, Kernels* kernels);

 private:
  // A loaded library serves all devices of its architecture.
  std::string LoadLibrary(int architecture, void** library);
  // Finds a launch's kernel, and lets it have the shared memory and the cluster that the launch asks for.
  std::string LoadKernel(const Launch& launch, const std::string& name, void* library, int device, void** kernel,
                         void** function);

  const std::string source_;
  std::mutex mutex_;
  std::map<int, void*> libraries_;                       // by architecture
  std::map<std::pair<void*, int>, int> shared_allowed_;  // bytes that a kernel may ask for on a device
};

// Runs `task(ordinal)` for each device whose primary context is active in this process, with that context current.
// Returns "" if any task returns "", else the first error.
std::string OnEachDevice(const std::function<std::string(int)>& task);

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_PROGRAM_H_
