// The batch_norm calls: their formulas, and the arguments that kernels get.
//
// An array of x's shape is seen as [groups][outer][channels][inner]. The first `groups` dimensions were mapped by vmap:
// each group is a batch of its own. Dimensions [axis, end) are the features ("channels"). All other dimensions are
// reduced: outer before the features, inner after them. Arithmetic is float32, or float64 for float64 (A below).
//
// With n the number of elements that count for a channel, rstd = (var + epsilon)^-1/2, xhat = (x - mean) * rstd, and
// g = dy where the bit is set, else 0 (a select; without bits g = dy):
//
// jaxnorm_batch_norm_stats: operands x, [mask]; results mean, var = mean of (x - mean)^2, [count] = n with a mask. The
//   mask says which elements count. If no element counts, mean and var are NaN.
// jaxnorm_batch_norm_fwd: operands x, mean, var, [scale], [bias], [residual]; results y, [bits].
//   y = (x - mean) * rstd * scale + bias + residual, then max(y, 0) if `relu` (NaN passes); bits = packbits(y > 0) as
//   in relu_call.h, of the rounded y. Without `relu` there are no bits.
// jaxnorm_batch_norm_sums: operands dy, [bits], and for dscale x, mean, var; results [dbias] = sum of g, [dscale] = sum
//   of g * xhat.
// jaxnorm_batch_norm_dx: operands dy, [bits], [x], [mask, count], [mean], [var], [scale], [dbias, dscale], [dmean,
//   dvar]; results [dx], [dresidual].
//   dx = rstd * scale * g - keep / n * (rstd * scale * (dbias + xhat * dscale) - dmean - 2 * (x - mean) * dvar),
//   dresidual = g,
//   with keep = 1 where the mask is on and 0 elsewhere (a select). The terms of absent operands are left out. n is the
//   count, or without a mask outer * inner * `replicas`. dx needs var; with dbias or dmean it also needs x and mean.
//   Operands that are not needed may be present.
//
// The attributes `operands` and `results` name the operands and results, which come in the order of the bits below.
// Arrays (x, dy, residual, y, dx, dresidual) have one dtype. mean, var, count, scale, bias and the gradients of mean,
// var, scale and bias are A, with size 1 in the reduced dimensions. An operand has size 1 in the group dimensions in
// which it was not mapped; a result has the full size in all group dimensions. The mask has size 1 or the full size in
// each dimension. Along the inner dimensions (along the features if inner == 1), it has size 1 in all or the full size
// in all.
#ifndef JAXNORM_CPU_BATCH_NORM_CALL_H_
#define JAXNORM_CPU_BATCH_NORM_CALL_H_

#include <utility>
#include <vector>

#include "buffers.h"

namespace jaxnorm {

// jaxnorm/_ops/batch_norm_primitives.py holds the same numbers.
enum BatchNormName : int64_t {
  kBatchNormX = 1 << 0,
  kBatchNormDy = 1 << 1,
  kBatchNormY = 1 << 2,
  kBatchNormBits = 1 << 3,
  kBatchNormMask = 1 << 4,
  kBatchNormMean = 1 << 5,
  kBatchNormVar = 1 << 6,
  kBatchNormCount = 1 << 7,
  kBatchNormScale = 1 << 8,
  kBatchNormBias = 1 << 9,
  kBatchNormResidual = 1 << 10,
  kBatchNormDbias = 1 << 11,
  kBatchNormDscale = 1 << 12,
  kBatchNormDmean = 1 << 13,
  kBatchNormDvar = 1 << 14,
  kBatchNormDx = 1 << 15,
  kBatchNormDresidual = 1 << 16,
};
inline constexpr int kBatchNormNames = 17;

struct BatchNormShape {
  int64_t groups = 1, outer = 1, channels = 1, inner = 1;
  int64_t last = 1;  // length of the last dimension, whose bits are packed
  int64_t reduced() const { return outer * inner; }
  int64_t group_size() const { return outer * channels * inner; }
  int64_t bits_cols() const { return (last + 7) / 8; }  // bytes of bits for one run along the last dimension
};

// A group's part of an operand or result begins at element groups.RowOffset(group) of data.
struct BatchNormBuffer {
  void* data = nullptr;
  int64_t item_bytes = 0;  // bytes of an element
  Broadcast groups;
  explicit operator bool() const { return data != nullptr; }

  template <typename T>
  T* Group(int64_t group) const {
    return static_cast<T*>(data) + groups.RowOffset(group);
  }
};

struct BatchNormArgs {
  DataType dtype;
  BatchNormShape shape;
  BatchNormBuffer x, dy, y, bits, mean, var, count, scale, bias, residual, dbias, dscale, dmean, dvar, dx, dresidual;
  // Rows are (group, outer) with channels as columns if inner is 1, else (group, outer, channel) with inner as columns.
  Operand mask;
};

// ---- decoding and checks ----

namespace batch_norm_internal {

using DimList = std::vector<int64_t>;

inline Dims Span(const DimList& dims) { return Dims(dims.data(), dims.size()); }

struct Layout {
  DimList full;
  int64_t groups, axis, end;
  DataType dtype = DataType::kF32;

  // Widens the group dimensions to what one more buffer broadcasts to.
  Error Include(Dims dims) {
    JAXNORM_CHECK(dims.size() == full.size());
    for (int64_t i = 0; i < groups; ++i) {
      if (full[i] == 1) full[i] = dims[i];
    }
    return Error::Success();
  }

  Error Shape(BatchNormShape* shape) const {
    JAXNORM_CHECK(0 <= groups && groups <= axis && axis < end && end <= static_cast<int64_t>(full.size()));
    AxisShape all;
    JAXNORM_RETURN_IF_ERROR(SplitAtAxis(Span(full), axis, &all));  // all products fit
    *shape = {};
    for (int64_t i = 0; i < static_cast<int64_t>(full.size()); ++i) {
      (i < groups ? shape->groups : i < axis ? shape->outer : i < end ? shape->channels : shape->inner) *= full[i];
    }
    shape->last = full.back();
    return Error::Success();
  }

  // A buffer whose dimensions after the group dimensions are `own`.
  Error Grouped(ffi::AnyBuffer buffer, DataType type, const DimList& own, BatchNormBuffer* out) const {
    JAXNORM_CHECK(TypeOf(buffer) == type);
    const Dims dims = buffer.dimensions();
    JAXNORM_CHECK(dims.size() == full.size());
    int64_t block = 1;
    for (size_t i = groups; i < dims.size(); ++i) {
      JAXNORM_CHECK(dims[i] == own[i]);
      block *= dims[i];
    }
    DimList all(full.begin(), full.begin() + groups), here(dims.begin(), dims.begin() + groups);
    all.push_back(block);
    here.push_back(block);
    JAXNORM_RETURN_IF_ERROR(MakeBroadcast(Span(all), groups, Span(here), &out->groups));
    out->data = buffer.untyped_data();
    out->item_bytes = static_cast<int64_t>(ByteWidth(type));
    return Error::Success();
  }

  Error Array(ffi::AnyBuffer buffer, BatchNormBuffer* out) const { return Grouped(buffer, dtype, full, out); }

  Error Channels(ffi::AnyBuffer buffer, BatchNormBuffer* out) const {
    DimList own = full;
    for (int64_t i = groups; i < static_cast<int64_t>(own.size()); ++i) {
      if (i < axis || i >= end) own[i] = 1;
    }
    return Grouped(buffer, AccDtype(dtype), own, out);
  }

  Error Bits(ffi::AnyBuffer buffer, BatchNormBuffer* out) const {
    DimList own = full;
    own.back() = (own.back() + 7) / 8;
    return Grouped(buffer, DataType::kU8, own, out);
  }

  Error Mask(ffi::AnyBuffer buffer, int64_t inner, Operand* out) const {
    JAXNORM_CHECK(TypeOf(buffer) == DataType::kPred);
    const Dims dims = buffer.dimensions();
    JAXNORM_CHECK(dims.size() == full.size());
    const int64_t split = inner == 1 ? axis : end;  // rows before `split`, columns from `split` on
    DimList all(full.begin(), full.begin() + split), here(dims.begin(), dims.begin() + split);
    int64_t cols = 1, own_cols = 1;
    for (size_t i = split; i < dims.size(); ++i) {
      JAXNORM_CHECK(dims[i] == full[i] || dims[i] == 1);
      cols *= full[i];
      own_cols *= dims[i];
    }
    JAXNORM_CHECK(own_cols == cols || own_cols == 1);
    all.push_back(cols);
    here.push_back(own_cols);
    JAXNORM_RETURN_IF_ERROR(MakeBroadcast(Span(all), split, Span(here), &out->view));
    out->data = buffer.untyped_data();
    out->elements = static_cast<int64_t>(buffer.element_count());
    return Error::Success();
  }

  Error Read(BatchNormName name, ffi::AnyBuffer buffer, BatchNormArgs* args) const {
    switch (name) {
      case kBatchNormX:
        return Array(buffer, &args->x);
      case kBatchNormDy:
        return Array(buffer, &args->dy);
      case kBatchNormY:
        return Array(buffer, &args->y);
      case kBatchNormResidual:
        return Array(buffer, &args->residual);
      case kBatchNormDx:
        return Array(buffer, &args->dx);
      case kBatchNormDresidual:
        return Array(buffer, &args->dresidual);
      case kBatchNormBits:
        return Bits(buffer, &args->bits);
      case kBatchNormMask:
        return Mask(buffer, args->shape.inner, &args->mask);
      case kBatchNormMean:
        return Channels(buffer, &args->mean);
      case kBatchNormVar:
        return Channels(buffer, &args->var);
      case kBatchNormCount:
        return Channels(buffer, &args->count);
      case kBatchNormScale:
        return Channels(buffer, &args->scale);
      case kBatchNormBias:
        return Channels(buffer, &args->bias);
      case kBatchNormDbias:
        return Channels(buffer, &args->dbias);
      case kBatchNormDscale:
        return Channels(buffer, &args->dscale);
      case kBatchNormDmean:
        return Channels(buffer, &args->dmean);
      case kBatchNormDvar:
        return Channels(buffer, &args->dvar);
    }
    return Error::InvalidArgument("jaxnorm: batch_norm: unknown name");
  }
};

inline bool Has(int64_t names, int64_t wanted) { return (names & wanted) == wanted; }
inline bool Within(int64_t names, int64_t allowed) { return names >= 0 && (names & ~allowed) == 0; }

}  // namespace batch_norm_internal

// Decodes a call. With the functions below, a handler checks that the call has what its kernel takes.
inline Error ParseBatchNorm(ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups, int64_t axis,
                            int64_t end, int64_t operand_names, int64_t result_names, BatchNormArgs* args) {
  constexpr int64_t kArrays = kBatchNormX | kBatchNormDy;
  std::vector<std::pair<BatchNormName, ffi::AnyBuffer>> buffers;
  size_t next = 0;
  JAXNORM_CHECK(batch_norm_internal::Within(operand_names | result_names, (int64_t{1} << kBatchNormNames) - 1));
  JAXNORM_CHECK((operand_names & kArrays) != 0);
  for (int i = 0; i < kBatchNormNames; ++i) {
    if (!(operand_names >> i & 1)) continue;
    auto buffer = operands.get<ffi::AnyBuffer>(next++);
    if (buffer.has_error()) return FromFfi(buffer.error());
    buffers.emplace_back(static_cast<BatchNormName>(int64_t{1} << i), *buffer);
  }
  JAXNORM_CHECK(next == operands.size());
  const Dims dims = buffers[0].second.dimensions();  // x or dy comes first
  batch_norm_internal::Layout layout{{dims.begin(), dims.end()}, groups, axis, end};
  layout.dtype = TypeOf(buffers[0].second);
  JAXNORM_CHECK(groups >= 0 && groups <= static_cast<int64_t>(dims.size()));
  for (const auto& [name, buffer] : buffers) JAXNORM_RETURN_IF_ERROR(layout.Include(buffer.dimensions()));
  JAXNORM_RETURN_IF_ERROR(layout.Shape(&args->shape));
  args->dtype = layout.dtype;
  for (const auto& [name, buffer] : buffers) JAXNORM_RETURN_IF_ERROR(layout.Read(name, buffer, args));
  next = 0;
  for (int i = 0; i < kBatchNormNames; ++i) {
    if (!(result_names >> i & 1)) continue;
    auto buffer = results.get<ffi::AnyBuffer>(next++);
    if (buffer.has_error()) return FromFfi(buffer.error());
    const auto name = static_cast<BatchNormName>(int64_t{1} << i);
    const Dims result = (*buffer)->dimensions();
    JAXNORM_CHECK(result.size() == layout.full.size());
    for (int64_t d = 0; d < groups; ++d) JAXNORM_CHECK(result[d] == layout.full[d]);
    JAXNORM_RETURN_IF_ERROR(layout.Read(name, **buffer, args));
  }
  JAXNORM_CHECK(next > 0 && next == results.size());
  return Error::Success();
}

inline Error CheckBatchNormStats(int64_t operands, int64_t results) {
  constexpr int64_t kMoments = kBatchNormMean | kBatchNormVar;
  JAXNORM_CHECK(operands == kBatchNormX || operands == (kBatchNormX | kBatchNormMask));
  JAXNORM_CHECK(results == kMoments || (results == (kMoments | kBatchNormCount) && (operands & kBatchNormMask)));
  return Error::Success();
}

inline Error CheckBatchNormFwd(int64_t operands, int64_t results, bool relu) {
  using batch_norm_internal::Has, batch_norm_internal::Within;
  constexpr int64_t kNeeded = kBatchNormX | kBatchNormMean | kBatchNormVar;
  JAXNORM_CHECK(Has(operands, kNeeded));
  JAXNORM_CHECK(Within(operands, kNeeded | kBatchNormScale | kBatchNormBias | kBatchNormResidual));
  JAXNORM_CHECK(results == kBatchNormY || (relu && results == (kBatchNormY | kBatchNormBits)));
  return Error::Success();
}

inline Error CheckBatchNormSums(int64_t operands, int64_t results) {
  using batch_norm_internal::Has, batch_norm_internal::Within;
  constexpr int64_t kForScale = kBatchNormX | kBatchNormMean | kBatchNormVar;
  JAXNORM_CHECK(Has(operands, kBatchNormDy) && Within(operands, kBatchNormDy | kBatchNormBits | kForScale));
  JAXNORM_CHECK(Within(results, kBatchNormDbias | kBatchNormDscale));
  JAXNORM_CHECK(!(results & kBatchNormDscale) || Has(operands, kForScale));
  return Error::Success();
}

inline Error CheckBatchNormDx(int64_t operands, int64_t results, int64_t replicas) {
  using batch_norm_internal::Has, batch_norm_internal::Within;
  constexpr int64_t kSums = kBatchNormDbias | kBatchNormDscale, kMoments = kBatchNormDmean | kBatchNormDvar;
  constexpr int64_t kCounted = kBatchNormMask | kBatchNormCount, kXhat = kBatchNormX | kBatchNormMean;
  JAXNORM_CHECK(Has(operands, kBatchNormDy));
  JAXNORM_CHECK(Within(
      operands, kBatchNormDy | kBatchNormBits | kXhat | kCounted | kBatchNormVar | kBatchNormScale | kSums | kMoments));
  JAXNORM_CHECK(Within(results, kBatchNormDx | kBatchNormDresidual) && replicas > 0);
  JAXNORM_CHECK(!(operands & kCounted) || Has(operands, kCounted));
  if (results & kBatchNormDx) {
    JAXNORM_CHECK(Has(operands, kBatchNormVar));
    JAXNORM_CHECK(!(operands & kSums) || Has(operands, kSums));
    JAXNORM_CHECK(!(operands & kMoments) || Has(operands, kMoments));
    JAXNORM_CHECK(!(operands & (kSums | kMoments)) || Has(operands, kXhat));
  }
  return Error::Success();
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_BATCH_NORM_CALL_H_
