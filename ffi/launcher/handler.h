// The FFI target launch: CUDA kernels whose source travels with the call.
#ifndef JAXNORM_LAUNCHER_HANDLER_H_
#define JAXNORM_LAUNCHER_HANDLER_H_

#include "xla/ffi/api/ffi.h"

namespace jaxnorm {

// Stages of the target. XLA calls Instantiate when it compiles or loads an executable: attributes are decoded and
// checked, the program is compiled and loaded. Execute launches. A third stage, `initialize`, would cost 1 us in each
// execution, also in replays of CUDA graphs.
XLA_FFI_Error* LaunchInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* LaunchExecute(XLA_FFI_CallFrame* frame);

// What XLA must be told of the state that Instantiate makes, before it meets the stages.
XLA_FFI_TypeId* LaunchStateId();
const XLA_FFI_TypeInfo* LaunchStateInfo();

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_HANDLER_H_
