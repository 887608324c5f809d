// Every source file that defines an XLA FFI handler announces it here; module.cc hands the list to Python.
// A new operation therefore touches no table.
#ifndef JAXNORM_REGISTRY_H_
#define JAXNORM_REGISTRY_H_

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxnorm {

namespace ffi = xla::ffi;

struct Target {
  const char* name;  // without the "jaxnorm_" prefix, which Python adds
  XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*);
};

inline std::vector<Target>& Targets() {
  static std::vector<Target> targets;
  return targets;
}

inline bool Register(const char* name, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  Targets().push_back({name, handler});
  return true;
}

}  // namespace jaxnorm

// JAXNORM_REGISTER(softmax_fwd, SoftmaxFwd, binding...) defines the handler and registers it as "softmax_fwd".
#define JAXNORM_REGISTER(name, function, ...)                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxnorm_##name, function, __VA_ARGS__); \
  static const bool registered_##name = ::jaxnorm::Register(#name, jaxnorm_##name)

#endif  // JAXNORM_REGISTRY_H_
