#include "launcher/compile.h"

#include <chrono>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "launcher/cache.h"
#include "launcher/nvrtc.h"

namespace jaxnorm {
namespace {

// The code of one source for one target.
struct Slot {
  std::mutex mutex;  // held while the code is compiled
  std::shared_ptr<const Code> code;
};

// The settings of one call of Configure, with the code compiled under them. Threads that still compile with older
// settings keep their Compiler alive.
class Compiler {
 public:
  Compiler(std::vector<std::string> nvrtc, std::string folder, int64_t limit)
      : candidates_(std::move(nvrtc)), folder_(std::move(folder)), limit_(limit) {}

  // Opening NVRTC takes some milliseconds, so it waits for the first use.
  const Nvrtc& nvrtc() {
    std::call_once(nvrtc_once_, [this] { nvrtc_ = std::make_unique<Nvrtc>(candidates_); });
    return *nvrtc_;
  }
  const Cache& cache() {
    std::call_once(cache_once_, [this] { cache_ = std::make_unique<Cache>(folder_, limit_); });
    return *cache_;
  }
  std::shared_ptr<Slot> SlotFor(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Slot>& slot = slots_[key];
    if (slot == nullptr) slot = std::make_shared<Slot>();
    return slot;
  }

 private:
  const std::vector<std::string> candidates_;
  const std::string folder_;
  const int64_t limit_;
  std::once_flag nvrtc_once_, cache_once_;
  std::unique_ptr<Nvrtc> nvrtc_;
  std::unique_ptr<Cache> cache_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Slot>> slots_;
};

std::mutex current_mutex;
std::shared_ptr<Compiler>& Current() {
  static auto* current = new std::shared_ptr<Compiler>(
      std::make_shared<Compiler>(std::vector<std::string>{"libnvrtc.so.13", "libnvrtc.so.12"}, "", 0));
  return *current;  // never deleted: other threads may compile while the process ends
}
std::shared_ptr<Compiler> CurrentCompiler() {
  std::lock_guard<std::mutex> lock(current_mutex);
  return Current();
}

}  // namespace

void Configure(std::vector<std::string> nvrtc, std::string cache_folder, int64_t cache_limit) {
  auto compiler = std::make_shared<Compiler>(std::move(nvrtc), std::move(cache_folder), cache_limit);
  std::lock_guard<std::mutex> lock(current_mutex);
  Current() = std::move(compiler);
}

CompilerState GetCompilerState() {
  const std::shared_ptr<Compiler> compiler = CurrentCompiler();
  const Nvrtc& nvrtc = compiler->nvrtc();
  CompilerState state;
  state.major = nvrtc.major();
  state.minor = nvrtc.minor();
  state.path = nvrtc.path();
  state.missing = nvrtc.missing();
  state.cache_off = compiler->cache().off();
  return state;
}

bool CanCompileFor(int architecture) {
  const std::shared_ptr<Compiler> compiler = CurrentCompiler();
  return compiler->nvrtc().missing().empty() && compiler->nvrtc().TargetFor(architecture) != 0;
}

std::string Compile(const std::string& source, int architecture, std::shared_ptr<const Code>* code, bool* in_memory) {
  const std::shared_ptr<Compiler> compiler = CurrentCompiler();
  const Nvrtc& nvrtc = compiler->nvrtc();
  if (!nvrtc.missing().empty()) return nvrtc.missing();
  const int target = nvrtc.TargetFor(architecture);
  if (target == 0) {
    return "NVRTC " + std::to_string(nvrtc.major()) + "." + std::to_string(nvrtc.minor()) + " has no code for sm_" +
           std::to_string(architecture) + "; install one that has (pip install --upgrade nvidia-cuda-nvrtc)";
  }
  const std::vector<std::string> options = nvrtc.Options(target);
  std::string key = nvrtc.identity();
  for (const std::string& option : options) key += "\n" + option;
  key += "\n\n" + source;

  const std::shared_ptr<Slot> slot = compiler->SlotFor(key);
  std::lock_guard<std::mutex> lock(slot->mutex);
  if (in_memory != nullptr) *in_memory = slot->code != nullptr;
  if (slot->code == nullptr) {
    const auto start = std::chrono::steady_clock::now();
    auto made = std::make_shared<Code>();
    made->cached = compiler->cache().Read(key, &made->cubin, &made->log);
    if (!made->cached) {
      const std::string error = nvrtc.Compile(source, options, &made->cubin, &made->log);
      if (!error.empty()) return error;
      compiler->cache().Write(key, made->cubin, made->log);
    }
    made->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    slot->code = std::move(made);
  }
  *code = slot->code;
  return "";
}

}  // namespace jaxnorm
