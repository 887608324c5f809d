// The FFI target launch: CUDA kernels whose source travels with the call.
#ifndef JAXNORM_LAUNCHER_HANDLER_H_
#define JAXNORM_LAUNCHER_HANDLER_H_

#include "xla/ffi/api/ffi.h"

namespace jaxnorm {

// Stages of the target. XLA calls Instantiate when it compiles or loads an executable: Instantiate decodes and checks
// the attributes, and compiles and loads the program. Execute launches the kernels. A third stage, `initialize`, would
// cost 1 us in each execution, also in replays of CUDA graphs.
XLA_FFI_Error* LaunchInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* LaunchExecute(XLA_FFI_CallFrame* frame);

// The type of the state that Instantiate makes. XLA must know it before the stages are registered.
XLA_FFI_TypeId* LaunchStateId();
const XLA_FFI_TypeInfo* LaunchStateInfo();

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_HANDLER_H_
