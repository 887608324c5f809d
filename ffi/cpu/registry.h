// Every source file that defines an XLA FFI handler announces it here; module.cc hands the list to Python.
// A new operation therefore touches no table.
#ifndef JAXNORM_CPU_REGISTRY_H_
#define JAXNORM_CPU_REGISTRY_H_

#include <vector>

#include "errors.h"
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

inline Error FromFfi(const ffi::Error& error) {
  return Error(static_cast<XLA_FFI_Error_Code>(*error.errc()), error.message());
}

// Run calls the handler, and returns its Error as XLA's error type.
template <auto kHandler>
struct Adapter;
template <typename... Args, Error (*kHandler)(Args...)>
struct Adapter<kHandler> {
  static ffi::Error Run(Args... args) {
    const Error error = kHandler(args...);
    return ffi::Error(error.code(), error.message());
  }
};

}  // namespace jaxnorm

// JAXNORM_REGISTER(softmax_fwd, SoftmaxFwd, binding...) registers the handler SoftmaxFwd, which returns an Error, as
// "softmax_fwd".
#define JAXNORM_REGISTER(name, function, ...)                                                    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxnorm_##name, ::jaxnorm::Adapter<function>::Run, __VA_ARGS__); \
  static const bool registered_##name = ::jaxnorm::Register(#name, jaxnorm_##name)

#endif  // JAXNORM_CPU_REGISTRY_H_
