// Errors of handlers, and checks that make them.
#ifndef JAXNORM_ERRORS_H_
#define JAXNORM_ERRORS_H_

#include <string>
#include <utility>

#include "xla/ffi/api/c_api.h"

// Returns an Error naming the expression that failed. Python checks the same things first, with friendlier words;
// this guards deserialised programs and direct ffi_call users.
#define JAXNORM_CHECK(condition)                                                                                     \
  do {                                                                                                               \
    if (!(condition)) {                                                                                              \
      return ::jaxnorm::Error::InvalidArgument(std::string("jaxnorm: ") + __func__ + ": check failed: " #condition); \
    }                                                                                                                \
  } while (false)

#define JAXNORM_RETURN_IF_ERROR(expression)                                      \
  do {                                                                           \
    if (::jaxnorm::Error error_ = (expression); error_.failure()) return error_; \
  } while (false)

namespace jaxnorm {

// The error type inside of handlers. XLA gets an error of its own type.
class Error {
 public:
  Error(XLA_FFI_Error_Code code, std::string message) : code_(code), message_(std::move(message)) {}
  static Error Success() { return Error(XLA_FFI_Error_Code_OK, std::string()); }
  static Error InvalidArgument(std::string message) {
    return Error(XLA_FFI_Error_Code_INVALID_ARGUMENT, std::move(message));
  }
  static Error Internal(std::string message) { return Error(XLA_FFI_Error_Code_INTERNAL, std::move(message)); }

  bool failure() const { return code_ != XLA_FFI_Error_Code_OK; }
  XLA_FFI_Error_Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  XLA_FFI_Error_Code code_;
  std::string message_;
};

}  // namespace jaxnorm

#endif  // JAXNORM_ERRORS_H_
