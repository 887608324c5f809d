// NVRTC, NVIDIA's compiler as a library, opened at run time.
#ifndef JAXNORM_LAUNCHER_NVRTC_H_
#define JAXNORM_LAUNCHER_NVRTC_H_

#include <string>
#include <vector>

namespace jaxnorm {

class Nvrtc {
 public:
  // Opens the first of `candidates` (paths, or names for the loader) that is not too new for the driver. Without such a
  // library `missing()` says why, and what to install.
  explicit Nvrtc(const std::vector<std::string>& candidates);

  const std::string& missing() const { return missing_; }
  int major() const { return major_; }
  int minor() const { return minor_; }
  const std::string& path() const { return path_; }

  // Tells builds of the compiler apart: version and size of the library.
  const std::string& identity() const { return identity_; }

  // The newest architecture of its family whose code sm_<architecture> runs, or 0.
  int TargetFor(int architecture) const;

  std::vector<std::string> Options(int target) const;

  // "", or the error with the whole log. `log` has ptxas's report.
  std::string Compile(const std::string& source, const std::vector<std::string>& options, std::string* cubin,
                      std::string* log) const;

 private:
  // Opens one library: "", or why it cannot be used.
  std::string Open(const std::string& path);

  int (*Version)(int*, int*);
  int (*GetNumSupportedArchs)(int*);
  int (*GetSupportedArchs)(int*);
  int (*CreateProgram)(void**, const char*, const char*, int, const char* const*, const char* const*);
  int (*DestroyProgram)(void**);
  int (*CompileProgram)(void*, int, const char* const*);
  int (*GetCubinSize)(void*, size_t*);
  int (*GetCubin)(void*, char*);
  int (*GetProgramLogSize)(void*, size_t*);
  int (*GetProgramLog)(void*, char*);
  const char* (*GetErrorString)(int);

  std::string missing_, path_, identity_;
  int major_ = 0, minor_ = 0;
  std::vector<int> architectures_;
};

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_NVRTC_H_
