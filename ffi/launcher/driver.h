// The CUDA driver, opened at run time: the module then builds without a CUDA header and imports without a driver.
#ifndef JAXNORM_LAUNCHER_DRIVER_H_
#define JAXNORM_LAUNCHER_DRIVER_H_

#include <cstdint>
#include <string>
#include <vector>

namespace jaxnorm {

// cuda.h's types, as far as they are used; a CUlibrary, CUkernel, CUfunction, CUcontext or CUstream is a void*.
struct CudaLaunchAttribute {
  unsigned id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int on;
  } value;
};
struct CudaLaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  CudaLaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(CudaLaunchAttribute) == 72 && sizeof(CudaLaunchConfig) == 56);

// CUlaunchAttributeID
inline constexpr unsigned kLaunchAttributeCooperative = 2;
inline constexpr unsigned kLaunchAttributeCluster = 4;
inline constexpr unsigned kLaunchAttributeEarly = 6;  // "programmatic stream serialization"
// CUfunction_attribute
inline constexpr int kMaxDynamicSharedBytes = 8;
inline constexpr int kNonPortableClusterAllowed = 14;

// Each function returns a CUresult, 0 for success.
struct Driver {
  int (*GetErrorString)(int, const char**);
  int (*DriverGetVersion)(int*);
  int (*Init)(unsigned);
  int (*DeviceGetCount)(int*);
  int (*DeviceGet)(int*, int);
  int (*DeviceGetName)(char*, int, int);
  int (*DeviceGetAttribute)(int*, int, int);
  int (*PrimaryContextGetState)(int, unsigned*, int*);
  int (*PrimaryContextRetain)(void**, int);
  int (*PrimaryContextRelease)(int);
  int (*ContextPush)(void*);
  int (*ContextPop)(void**);
  int (*LibraryLoadData)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  int (*LibraryUnload)(void*);
  int (*LibraryGetKernel)(void**, void*, const char*);
  int (*KernelGetFunction)(void**, void*);
  int (*KernelSetAttribute)(int, int, void*, int);
  int (*MaxActiveBlocks)(int*, void*, int, size_t);
  int (*MaxActiveClusters)(int*, void*, const CudaLaunchConfig*);
  int (*LaunchKernel)(const CudaLaunchConfig*, void*, void**, void**);

  std::string missing;  // why the functions cannot be called, or ""
  int cuda = 0;         // the newest CUDA version that the driver supports: 13000 for 13.0

  // "what: the driver's words (number)".
  std::string Describe(const std::string& what, int result) const;
};

// Opens the driver without starting it: no device is touched.
const Driver& OpenedDriver();

// The driver, started; `missing` says why it is not.
const Driver& StartedDriver();

struct Gpu {
  std::string name;
  int architecture = 0;  // XY of sm_XY
  int multiprocessors = 0;
  int shared_bytes = 0;  // the most shared memory that a block can ask for
  int l2_bytes = 0;
};

// The GPUs that this process sees, by ordinal; none, with a reason, where there is no driver. Asked once.
struct Gpus {
  std::vector<Gpu> list;
  std::string reason;
};
const Gpus& AllGpus();

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_DRIVER_H_
