// Cross-entropy forward: the call, and its kernels without smoothing.
#include "cross_entropy_fwd.cuh"

namespace jaxnorm {
namespace {

template <typename T, Mode kMode>
using Sharp = CrossEntropyFwd<T, kMode, false>;

ffi::Error CrossEntropyFwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer labels, ffi::RemainingArgs rest,
                                  ffi::Result<ffi::AnyBuffer> nll, ffi::Result<ffi::AnyBuffer> lse,
                                  ffi::Result<ffi::AnyBuffer> scratch, int64_t axis, double smoothing) {
  CrossEntropyArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseCrossEntropyFwd(x, labels, rest, *nll, *lse, axis, smoothing, &args));
  if (args.shape.rows() == 0) return ffi::Error::Success();
  if (smoothing != 0) return LaunchSmoothCrossEntropyFwd(stream, args, *scratch);
  return LaunchCrossEntropy<Sharp>(stream, args, *scratch, "cross_entropy_fwd");
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

}  // namespace
}  // namespace jaxnorm
