// layer_norm and rms_norm, forward, of rows that are not whole slots, in chunks.
#include "norm_fwd_chunk.cuh"

namespace jaxnorm {
namespace {

// Measured to be the fastest for rows of up to 512, 1024 and 4096 16-bit elements.
template <bool kOdd, typename Op>
bool LaunchSizes(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status) {
  return LaunchChunks<kOdd, ChunkSize<8, 2, 128, 5>, ChunkSize<4, 4, 128, 6>, ChunkSize<2, 4, 512, 2>>(
      device, stream, op, name, status);
}

}  // namespace

template <typename Op>
bool LaunchNormFwdRagged(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status) {
  if constexpr (sizeof(typename Op::T) == 2) {
    if (op.cols % 2 != 0) return LaunchSizes<true>(device, stream, op, name, status);
  }
  return LaunchSizes<false>(device, stream, op, name, status);
}

#define JAXNORM_INSTANTIATE(T)                                                                                      \
  template bool LaunchNormFwdRagged(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kRagged>&, const char*, \
                                    Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
