// Handlers of the batch_norm calls.
#include <bit>

#include "batch_norm_parse.h"
#include "calls.h"
#include "registry.h"

namespace jaxnorm {
namespace {

// Of a call with scratch.
Error Parse(ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups, int64_t axis, int64_t end,
            int64_t operand_names, int64_t result_names, BatchNormArgs* args, Scratch* scratch) {
  JAXNORM_RETURN_IF_ERROR(ParseBatchNorm(operands, results, groups, axis, end, operand_names, result_names, args));
  return LastScratch(results, std::popcount(static_cast<uint64_t>(result_names)), scratch);
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("groups")
      .Attr<int64_t>("axis")
      .Attr<int64_t>("end")
      .Attr<int64_t>("operands")
      .Attr<int64_t>("results");
}

Error BatchNormStats(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                     int64_t axis, int64_t end, int64_t operand_names, int64_t result_names) {
  BatchNormArgs args;
  Scratch scratch;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormStats(operand_names, result_names));
  JAXNORM_RETURN_IF_ERROR(Parse(operands, results, groups, axis, end, operand_names, result_names, &args, &scratch));
  return RunBatchNormStats(stream, args, scratch);
}

JAXNORM_REGISTER(batch_norm_stats, BatchNormStats, Binding(), {ffi::Traits::kCmdBufferCompatible});

Error BatchNormFwd(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                   int64_t axis, int64_t end, int64_t operand_names, int64_t result_names, double epsilon, bool relu) {
  BatchNormArgs args;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormFwd(operand_names, result_names, relu));
  JAXNORM_RETURN_IF_ERROR(ParseBatchNorm(operands, results, groups, axis, end, operand_names, result_names, &args));
  return RunBatchNormFwd(stream, args, epsilon, relu);
}

JAXNORM_REGISTER(batch_norm_fwd, BatchNormFwd, Binding().Attr<double>("epsilon").Attr<bool>("relu"),
                 {ffi::Traits::kCmdBufferCompatible});

Error BatchNormSums(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                    int64_t axis, int64_t end, int64_t operand_names, int64_t result_names, double epsilon) {
  BatchNormArgs args;
  Scratch scratch;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormSums(operand_names, result_names));
  JAXNORM_RETURN_IF_ERROR(Parse(operands, results, groups, axis, end, operand_names, result_names, &args, &scratch));
  return RunBatchNormSums(stream, args, epsilon, scratch);
}

JAXNORM_REGISTER(batch_norm_sums, BatchNormSums, Binding().Attr<double>("epsilon"),
                 {ffi::Traits::kCmdBufferCompatible});

Error BatchNormDx(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                  int64_t axis, int64_t end, int64_t operand_names, int64_t result_names, double epsilon,
                  int64_t replicas) {
  BatchNormArgs args;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormDx(operand_names, result_names, replicas));
  JAXNORM_RETURN_IF_ERROR(ParseBatchNorm(operands, results, groups, axis, end, operand_names, result_names, &args));
  return RunBatchNormDx(stream, args, epsilon, replicas);
}

JAXNORM_REGISTER(batch_norm_dx, BatchNormDx, Binding().Attr<double>("epsilon").Attr<int64_t>("replicas"),
                 {ffi::Traits::kCmdBufferCompatible});

Error BatchNormTrain(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                     int64_t axis, int64_t end, int64_t operand_names, int64_t result_names, double epsilon,
                     bool relu) {
  BatchNormArgs args;
  Scratch scratch;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormTrain(operand_names, result_names, relu));
  JAXNORM_RETURN_IF_ERROR(Parse(operands, results, groups, axis, end, operand_names, result_names, &args, &scratch));
  return RunBatchNormTrain(stream, args, epsilon, relu, scratch);
}

JAXNORM_REGISTER(batch_norm_train, BatchNormTrain, Binding().Attr<double>("epsilon").Attr<bool>("relu"),
                 {ffi::Traits::kCmdBufferCompatible});

Error BatchNormBwd(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                   int64_t axis, int64_t end, int64_t operand_names, int64_t result_names, double epsilon,
                   int64_t replicas) {
  BatchNormArgs args;
  Scratch scratch;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormBwd(operand_names, result_names, replicas));
  JAXNORM_RETURN_IF_ERROR(Parse(operands, results, groups, axis, end, operand_names, result_names, &args, &scratch));
  return RunBatchNormBwd(stream, args, epsilon, replicas, scratch);
}

JAXNORM_REGISTER(batch_norm_bwd, BatchNormBwd, Binding().Attr<double>("epsilon").Attr<int64_t>("replicas"),
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
