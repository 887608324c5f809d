// layer_norm and rms_norm, forward, of rows of whole slots in chunks. They load few parameters, and blocks of one chunk each
// were measured to be faster than those that stay for several.
#include "norm_fwd_chunk.cuh"

namespace jaxnorm {

template <typename Op>
bool LaunchNormFwdChunks(const DeviceInfo& device, cudaStream_t stream, const Op& op, const char* name, Error* status) {
  return LaunchChunks</*kOdd=*/false, ChunkSize<4, 1, 128, 7>>(device, stream, op, name, status);
}

#define JAXNORM_INSTANTIATE(T)                                                                        \
  template bool LaunchNormFwdChunks(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, \
                                    const char* name, Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
