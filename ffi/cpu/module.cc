// The Python side of the handlers for the CPU.
#include <nanobind/nanobind.h>

#include "registry.h"

namespace nb = nanobind;

NB_MODULE(_cpu, m) {
  // Compared with the installed jaxlib before anything is registered: see jaxnorm/_lib.py.
  m.attr("XLA_FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("targets", [] {
    nb::dict targets;
    for (const jaxnorm::Target& target : jaxnorm::Targets()) {
      targets[target.name] = nb::capsule(reinterpret_cast<void*>(target.handler));
    }
    return targets;
  });
}
