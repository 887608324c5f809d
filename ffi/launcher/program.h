// A row program on this machine's GPUs: its kernels, loaded.
#ifndef JAXNORM_LAUNCHER_PROGRAM_H_
#define JAXNORM_LAUNCHER_PROGRAM_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "launcher/plan.h"

namespace jaxnorm {

// What a launch on one device needs. Kernels stay loaded while the process lives.
struct Kernels {
  void* row_program = nullptr;
  void* finish = nullptr;  // nullptr: there is none
  int64_t resident = 0;    // blocks, or clusters, of row_program that the device holds at once
};

// One for each source in a process, whoever calls it.
class Program {
 public:
  static std::shared_ptr<Program> ForSource(std::string_view source);

  explicit Program(std::string source) : source_(std::move(source)) {}

  // Compiles and loads for device `ordinal`, whose context is current, so that a launch has nothing left to do.
  // Returns "" or an error.
  std::string Load(const Plan& plan, int ordinal, Kernels* kernels);

 private:
  // Code that is loaded serves all devices of its architecture.
  std::string LoadLibrary(int architecture, void** library);

  const std::string source_;
  std::mutex mutex_;
  std::map<int, void*> libraries_;                       // by architecture
  std::map<std::pair<void*, int>, int> shared_allowed_;  // bytes that a kernel may ask for on a device
};

// Runs `task(ordinal)` for each device on which this process works, with its context current. Returns "" if one of the
// tasks does, or the first error.
std::string OnEachDevice(const std::function<std::string(int)>& task);

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_PROGRAM_H_
