// Cross-entropy forward with smoothing.
#include "cross_entropy_fwd.cuh"

namespace jaxnorm {
namespace {

template <typename T, Mode kMode>
using Smooth = CrossEntropyFwd<T, kMode, true>;

}  // namespace

Error LaunchSmoothCrossEntropyFwd(cudaStream_t stream, const CrossEntropyArgs& args, Scratch scratch) {
  return LaunchCrossEntropy<Smooth>(stream, args, scratch, "cross_entropy_fwd");
}

}  // namespace jaxnorm
