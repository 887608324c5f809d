#include "launcher/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <system_error>

#include "launcher/driver.h"

namespace jaxnorm {
namespace {

namespace fs = std::filesystem;

// NVRTC 13.0 looks for its builtins on the loader's path only, but uses builtins that are already loaded.
void OpenBuiltinsBeside(const fs::path& library) {
  std::error_code error;
  for (const fs::directory_entry& file : fs::directory_iterator(library.parent_path(), error)) {
    if (file.path().filename().string().rfind("libnvrtc-builtins.so", 0) == 0) {
      dlopen(file.path().c_str(), RTLD_LAZY | RTLD_LOCAL);
    }
  }
}

}  // namespace

Nvrtc::Nvrtc(const std::vector<std::string>& candidates) {
  const int driver = OpenedDriver().cuda / 1000;  // 0 without a driver: nothing can run, all can compile
  std::string reasons = "NVRTC, which compiles kernels, was not found (";
  for (const std::string& candidate : candidates) {
    std::string reason = Open(candidate);
    if (reason.empty() && driver != 0 && major_ > driver) {
      reason = path_ + " is newer than the NVIDIA driver, which is for CUDA " + std::to_string(driver);
    }
    if (reason.empty()) return;
    reasons += reason + "; ";
  }
  missing_ = reasons + "install it with pip install nvidia-cuda-nvrtc" + (driver == 12 ? "-cu12" : "") + ")";
}

std::string Nvrtc::Open(const std::string& path) {
  if (path.find('/') != std::string::npos) OpenBuiltinsBeside(path);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::string reason = dlerror();
    return reason.find("No such file") != std::string::npos ? "no " + path : reason;
  }
  std::string missing;
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = path + " has no " + name;
  };
  find(Version, "nvrtcVersion");
  find(GetNumSupportedArchs, "nvrtcGetNumSupportedArchs");
  find(GetSupportedArchs, "nvrtcGetSupportedArchs");
  find(CreateProgram, "nvrtcCreateProgram");
  find(DestroyProgram, "nvrtcDestroyProgram");
  find(CompileProgram, "nvrtcCompileProgram");
  find(GetCubinSize, "nvrtcGetCUBINSize");
  find(GetCubin, "nvrtcGetCUBIN");
  find(GetProgramLogSize, "nvrtcGetProgramLogSize");
  find(GetProgramLog, "nvrtcGetProgramLog");
  find(GetErrorString, "nvrtcGetErrorString");
  if (!missing.empty()) return missing;
  Version(&major_, &minor_);
  int count = 0;
  GetNumSupportedArchs(&count);
  architectures_.assign(count, 0);
  GetSupportedArchs(architectures_.data());

  Dl_info where;
  path_ = dladdr(reinterpret_cast<void*>(Version), &where) != 0 ? where.dli_fname : path;
  if (path_ != path) OpenBuiltinsBeside(path_);
  std::error_code error;
  const uintmax_t size = fs::file_size(path_, error);
  identity_ = "nvrtc " + std::to_string(major_) + "." + std::to_string(minor_) + ", " +
              std::to_string(error ? 0 : size) + " bytes";
  return "";
}

int Nvrtc::TargetFor(int architecture) const {
  int target = 0;
  for (int known : architectures_) {
    if (known / 10 == architecture / 10 && known <= architecture) target = std::max(target, known);
  }
  return target;
}

std::vector<std::string> Nvrtc::Options(int target) const {
  // The output is a cubin, because a driver refuses PTX of a newer NVRTC. Warning 177 is about functions that a kernel
  // does not use. Generic lambdas have no annotation of where they run, hence the default execution space.
  std::vector<std::string> options = {"--gpu-architecture=sm_" + std::to_string(target), "--std=c++17",
                                      "--ptxas-options=-v", "--diag-suppress=177",
                                      "--device-as-default-execution-space"};
  // NVRTC's own cache would leave out the report of registers and spills.
  if (major_ >= 13) options.push_back("--no-cache");
  return options;
}

std::string Nvrtc::Compile(const std::string& source, const std::vector<std::string>& options, std::string* cubin,
                           std::string* log) const {
  std::vector<const char*> pointers;
  for (const std::string& option : options) pointers.push_back(option.c_str());
  void* program = nullptr;
  int result = CreateProgram(&program, source.c_str(), "jaxnorm.cu", 0, nullptr, nullptr);
  if (result != 0) return std::string("nvrtcCreateProgram: ") + GetErrorString(result);
  result = CompileProgram(program, static_cast<int>(pointers.size()), pointers.data());
  size_t size = 0;
  GetProgramLogSize(program, &size);
  log->assign(size, '\0');
  if (size > 0) GetProgramLog(program, log->data());
  log->resize(log->find_last_not_of(std::string("\0\n", 2)) + 1);  // the log ends with a zero
  std::string error;
  if (result != 0) {
    error = std::string("NVRTC could not compile (") + GetErrorString(result) + "):\n" + *log;
  } else if (size = 0, result = GetCubinSize(program, &size); result != 0 || size == 0) {
    error = "NVRTC made no code for " + options[0];
  } else {
    cubin->assign(size, '\0');
    GetCubin(program, cubin->data());
  }
  DestroyProgram(&program);
  return error;
}

}  // namespace jaxnorm
