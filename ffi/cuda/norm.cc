// Handlers of the layer_norm and rms_norm calls.
#include <bit>

#include "calls.h"
#include "norm_parse.h"
#include "registry.h"

namespace jaxnorm {
namespace {

Error NormFwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                     ffi::RemainingRets results, int64_t axis, int64_t groups, bool center, double epsilon,
                     double scale_offset, int64_t operands) {
  NormFwdArgs args;
  JAXNORM_RETURN_IF_ERROR(
      ParseNormFwd(x, rest, *y, results, axis, groups, center, epsilon, scale_offset, operands, &args));
  Scratch scratch;
  const size_t others = (args.sum != nullptr ? 1 : 0) + (center ? 1 : 0) + 1;  // the sum, the mean, rstd
  JAXNORM_RETURN_IF_ERROR(LastScratch(results, others, &scratch));
  return RunNormFwd(stream, args, scratch);
}

JAXNORM_REGISTER(norm_fwd, NormFwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .RemainingRets()
                     .Attr<int64_t>("axis")
                     .Attr<int64_t>("groups")
                     .Attr<bool>("center")
                     .Attr<double>("epsilon")
                     .Attr<double>("scale_offset")
                     .Attr<int64_t>("operands"),
                 {ffi::Traits::kCmdBufferCompatible});

Error NormBwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::RemainingArgs rest,
                     ffi::RemainingRets results, int64_t axis, int64_t groups, bool center, double scale_offset,
                     int64_t operands, int64_t need) {
  NormBwdArgs args;
  JAXNORM_RETURN_IF_ERROR(
      ParseNormBwd(x, dy, rest, results, axis, groups, center, scale_offset, operands, need, &args));
  Scratch scratch;
  JAXNORM_RETURN_IF_ERROR(LastScratch(results, std::popcount(static_cast<uint64_t>(need)), &scratch));
  return RunNormBwd(stream, args, scratch);
}

JAXNORM_REGISTER(norm_bwd, NormBwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .RemainingRets()
                     .Attr<int64_t>("axis")
                     .Attr<int64_t>("groups")
                     .Attr<bool>("center")
                     .Attr<double>("scale_offset")
                     .Attr<int64_t>("operands")
                     .Attr<int64_t>("need"),
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
