// Handlers of the ReLU calls.
#include "calls.h"
#include "registry.h"
#include "relu_parse.h"

namespace jaxnorm {
namespace {

Error ReluFwd(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
              ffi::Result<ffi::AnyBuffer> mask) {
  ReluArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseReluFwd(x, rest, *y, *mask, &args));
  return RunReluFwd(stream, args);
}

Error ReluBwd(cudaStream_t stream, ffi::AnyBuffer mask, ffi::AnyBuffer t, ffi::Result<ffi::AnyBuffer> out) {
  ReluArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseRelu(t, *out, mask, &args));
  return RunReluBwd(stream, args);
}

JAXNORM_REGISTER(relu_fwd, ReluFwd,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()   // x
                     .RemainingArgs()         // z, or nothing
                     .Ret<ffi::AnyBuffer>()   // y
                     .Ret<ffi::AnyBuffer>(),  // mask
                 {ffi::Traits::kCmdBufferCompatible});

JAXNORM_REGISTER(relu_bwd, ReluBwd,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()   // mask
                     .Arg<ffi::AnyBuffer>()   // t
                     .Ret<ffi::AnyBuffer>(),  // out
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
