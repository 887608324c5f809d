// layer_norm and rms_norm, forward: x (and the residual) read once, y (and the sum) written once, and one or two
// numbers per row.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

// float64 takes the general mode always: it is there to be right, not to fill the code with more kernels.
Error LaunchNormFwd(cudaStream_t stream, const NormFwdArgs& args, Scratch scratch) {
  const NormShape& shape = args.shape;
  JAXNORM_CHECK(shape.cols < INT32_MAX / 2);  // positions within a row are 32-bit; Python lowers the formula instead
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) -> Error {
    constexpr const char* name = "norm_fwd";
    using General = NormFwd<T, Mode::kGeneral>;
    const General general(args);
    // Only kGeneral knows an offset together with centring, which no operation has.
    bool full = !args.mask && !(args.center && args.scale_offset != 0);
    for (const Operand* input : {&args.x, &args.residual}) {
      full = full && IsVecAligned(input->data) && (!*input || input->elements == shape.size());
    }
    full = full && IsVecAligned(args.y) && IsVecAligned(args.sum);
    const bool whole = shape.cols % kVecSize<T> == 0;
    const int slots = static_cast<int>(CeilDiv(shape.cols, kVecSize<T>)) + (full && whole ? 0 : 1);
    const bool split = slots > MaxRowSlots(general, *device);
    if constexpr (!std::is_same_v<T, double>) {
      const NormFwd<T, Mode::kRagged> ragged(args);
      const bool aligned = full && whole && general.scale.VecAligned() && general.bias.VecAligned();
      auto status = Error::Success();
      if (aligned && slots >= kMinSplitSlots && !general.grouped) {
        const NormFwd<T, Mode::kPlain> plain(args);
        if (LaunchNormFwdFew(*device, stream, plain, slots, scratch, name, &status)) return status;
      }
      if (full && split) return LaunchSplit(*device, stream, ragged, slots, scratch, name);
      if (aligned) {
        const NormFwd<T, Mode::kPlain> plain(args);
        if (!plain.grouped) {
          if constexpr (sizeof(T) == 2) {
            if (LaunchNormFwdAtOnce(*device, stream, plain, name, &status)) return status;
          }
          if (slots <= kMaxShortSlots) return LaunchNormFwdShort(*device, stream, plain, slots, name);
          if (LaunchNormFwdChunks(*device, stream, plain, name, &status)) return status;
          if (slots > MaxBundleSlots(plain.center) && LaunchNormFwdLong(*device, stream, plain, slots, name, &status)) {
            return status;
          }
          if (LaunchNormFwdBundles(*device, stream, plain, scratch, name, &status)) return status;
        }
        return LaunchRow(*device, stream, plain, slots, name);
      }
      if (full) {
        if (!ragged.grouped) {
          if (LaunchNormFwdRagged(*device, stream, ragged, name, &status)) return status;
          if (LaunchNormFwdLongRagged(*device, stream, ragged, name, &status)) return status;
          const NormFwd<T, Mode::kRagged, /*kShifted=*/true> shifted(args);
          if (LaunchNormFwdBundles(*device, stream, shifted, scratch, name, &status)) return status;
        }
        return LaunchRow(*device, stream, ragged, slots, name);
      }
    }
    if (split) return LaunchSplit(*device, stream, general, slots, scratch, name);
    return LaunchRow(*device, stream, general, slots, name);
  });
}

}  // namespace

Error RunNormFwd(cudaStream_t stream, const NormFwdArgs& args, Scratch scratch) {
  const int64_t rows = args.shape.rows();
  if (rows == 0) return Error::Success();
  if (args.shape.cols > 0) return LaunchNormFwd(stream, args, scratch);
  for (void* statistic : {args.mean, args.rstd}) {
    if (statistic == nullptr) continue;
    const size_t bytes = rows * ByteWidth(AccDtype(args.dtype));
    const cudaError_t status = cudaMemsetAsync(statistic, 0xff, bytes, stream);  // all bits set is a NaN
    JAXNORM_RETURN_IF_ERROR(LaunchStatus(status, "norm_fwd"));
  }
  return Error::Success();
}

}  // namespace jaxnorm
