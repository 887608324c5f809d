// From CUDA text to code: this process's memory, then the folder on disk, then NVRTC.
#ifndef JAXNORM_LAUNCHER_COMPILE_H_
#define JAXNORM_LAUNCHER_COMPILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace jaxnorm {

// Sets where to look for NVRTC, and the cache. The settings are used from the first compilation after this call until
// the next call. Forgets the code that this process has compiled.
void Configure(std::vector<std::string> nvrtc, std::string cache_folder, int64_t cache_limit);

struct CompilerState {
  int major = 0, minor = 0;  // of NVRTC
  std::string path;
  std::string missing;    // why there is no NVRTC, or ""
  std::string cache_off;  // why nothing is kept on disk, or ""
};
CompilerState GetCompilerState();

// Whether NVRTC has code for sm_<architecture>.
bool CanCompileFor(int architecture);

struct Code {
  std::string cubin, log;
  double seconds = 0;   // that compiling, or reading from disk, took
  bool cached = false;  // read from disk
};

// Compiles `source` for sm_<architecture> once in a process, whichever threads ask. Returns "" or an error.
// `in_memory`: an earlier call compiled it.
std::string Compile(const std::string& source, int architecture, std::shared_ptr<const Code>* code,
                    bool* in_memory = nullptr);

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_COMPILE_H_
