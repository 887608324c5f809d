// Handlers of the cross-entropy calls.
#include "calls.h"
#include "cross_entropy_parse.h"
#include "registry.h"

namespace jaxnorm {
namespace {

Error CrossEntropyFwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer labels, ffi::RemainingArgs rest,
                             ffi::Result<ffi::AnyBuffer> nll, ffi::Result<ffi::AnyBuffer> lse,
                             ffi::Result<ffi::AnyBuffer> scratch, int64_t axis, double smoothing) {
  CrossEntropyArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseCrossEntropyFwd(x, labels, rest, *nll, *lse, axis, smoothing, &args));
  if (args.shape.rows() == 0) return Error::Success();
  return RunCrossEntropyFwd(stream, args, ScratchOf(*scratch));
}

JAXNORM_REGISTER(cross_entropy_fwd, CrossEntropyFwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int64_t>("axis")
                     .Attr<double>("smoothing"),
                 {ffi::Traits::kCmdBufferCompatible});

Error CrossEntropyBwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer labels, ffi::AnyBuffer a,
                             ffi::AnyBuffer b, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                             ffi::Result<ffi::AnyBuffer> scratch, int64_t axis, double smoothing) {
  CrossEntropyArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseCrossEntropyBwd(x, labels, a, b, rest, *out, axis, smoothing, &args));
  if (args.shape.size() == 0) return Error::Success();
  return RunCrossEntropyBwd(stream, args, ScratchOf(*scratch));
}

JAXNORM_REGISTER(cross_entropy_bwd, CrossEntropyBwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int64_t>("axis")
                     .Attr<double>("smoothing"),
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
