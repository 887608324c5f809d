// Handlers of the softmax calls.
#include "calls.h"
#include "registry.h"
#include "softmax_parse.h"

namespace jaxnorm {
namespace {

Error SoftmaxFwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                        ffi::Result<ffi::AnyBuffer> scratch, int64_t axis, double factor, bool log, int64_t operands) {
  SoftmaxFwdArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseSoftmaxFwd(x, rest, *y, axis, factor, log, operands, &args));
  if (args.shape.size() == 0) return Error::Success();
  return RunSoftmaxFwd(stream, args, operands == 0, ScratchOf(*scratch));
}

JAXNORM_REGISTER(softmax_fwd, SoftmaxFwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int64_t>("axis")
                     .Attr<double>("factor")
                     .Attr<bool>("log")
                     .Attr<int64_t>("operands"),
                 {ffi::Traits::kCmdBufferCompatible});

Error SoftmaxBwdHandler(cudaStream_t stream, ffi::AnyBuffer y, ffi::AnyBuffer t, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> scratch, int64_t axis,
                        double factor, int64_t form) {
  SoftmaxBwdArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseSoftmaxBwd(y, t, rest, *out, axis, factor, form, &args));
  if (args.shape.size() == 0) return Error::Success();
  return RunSoftmaxBwd(stream, args, rest.size() == 0, ScratchOf(*scratch));
}

JAXNORM_REGISTER(softmax_bwd, SoftmaxBwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int64_t>("axis")
                     .Attr<double>("factor")
                     .Attr<int64_t>("form"),
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
