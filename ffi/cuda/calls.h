// The calls as handlers make them (*.cc) and kernels' files define them (*.cu): on one side XLA's headers and no nvcc, on
// the other one nvcc and none of XLA's headers.
#ifndef JAXNORM_CUDA_CALLS_H_
#define JAXNORM_CUDA_CALLS_H_

#include <cuda_runtime_api.h>

#include "call.h"
#include "cross_entropy_args.h"
#include "norm_args.h"
#include "softmax_args.h"

namespace jaxnorm {

// `plain`: none of the operands that need not be there is.
Error RunSoftmaxFwd(cudaStream_t stream, const SoftmaxFwdArgs& args, bool plain, Scratch scratch);
Error RunSoftmaxBwd(cudaStream_t stream, const SoftmaxBwdArgs& args, bool plain, Scratch scratch);

Error RunCrossEntropyFwd(cudaStream_t stream, const CrossEntropyArgs& args, Scratch scratch);
Error RunCrossEntropyBwd(cudaStream_t stream, const CrossEntropyArgs& args, Scratch scratch);

Error RunNormFwd(cudaStream_t stream, const NormFwdArgs& args, Scratch scratch);
Error RunNormBwd(cudaStream_t stream, const NormBwdArgs& args, Scratch scratch);

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_CALLS_H_
