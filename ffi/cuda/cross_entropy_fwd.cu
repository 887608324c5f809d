// Cross-entropy forward: the call, and its kernels without smoothing.
#include "cross_entropy_fwd.cuh"

namespace jaxnorm {
namespace {

template <typename T, Mode kMode>
using Sharp = CrossEntropyFwd<T, kMode, false>;

}  // namespace

Error RunCrossEntropyFwd(cudaStream_t stream, const CrossEntropyArgs& args, Scratch scratch) {
  if (args.smoothing != 0) return LaunchSmoothCrossEntropyFwd(stream, args, scratch);
  return LaunchCrossEntropy<Sharp>(stream, args, scratch, "cross_entropy_fwd");
}

}  // namespace jaxnorm
