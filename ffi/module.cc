// The Python side of both extension modules: _cpu and _cuda are this file plus their operations.
#include <nanobind/nanobind.h>

#include "registry.h"

#ifdef JAXNORM_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace nb = nanobind;

NB_MODULE(JAXNORM_MODULE, m) {
  // Compared with the installed jaxlib before anything is registered: see jaxnorm/_lib.py.
  m.attr("XLA_FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("targets", [] {
    nb::dict targets;
    for (const jaxnorm::Target& target : jaxnorm::Targets()) {
      targets[target.name] = nb::capsule(reinterpret_cast<void*>(target.handler));
    }
    return targets;
  });
#ifdef JAXNORM_WITH_CUDA
  m.attr("CUDART_VERSION") = CUDART_VERSION;
  m.attr("ARCHITECTURES") = JAXNORM_CUDA_ARCHITECTURES;
  m.def("devices", [] {
    // One (name, major, minor) per device; the message says why there is none. Never raises: a machine without a
    // driver is a normal place to import this module.
    nb::list devices;
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    for (int i = 0; error == cudaSuccess && i < count; ++i) {
      cudaDeviceProp properties;
      error = cudaGetDeviceProperties(&properties, i);
      if (error == cudaSuccess) {
        devices.append(nb::make_tuple(properties.name, properties.major, properties.minor));
      }
    }
    return nb::make_tuple(devices, error == cudaSuccess ? "" : cudaGetErrorString(error));
  });
#endif
}
