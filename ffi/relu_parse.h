// Decodes and checks the ReLU calls, once for both platforms.
#ifndef JAXNORM_RELU_PARSE_H_
#define JAXNORM_RELU_PARSE_H_

#include "buffers.h"
#include "relu_args.h"

namespace jaxnorm {

inline Error ParseRelu(ffi::AnyBuffer x, ffi::AnyBuffer y, ffi::AnyBuffer mask, ReluArgs* args) {
  const Dims dims = x.dimensions(), mask_dims = mask.dimensions();
  JAXNORM_CHECK(dims.size() >= 1 && SameDims(dims, y.dimensions()));
  AxisShape shape;
  JAXNORM_RETURN_IF_ERROR(SplitAtAxis(dims, static_cast<int64_t>(dims.size()) - 1, &shape));
  args->rows = shape.outer;
  args->cols = shape.axis;
  JAXNORM_CHECK(TypeOf(mask) == DataType::kU8 && mask_dims.size() == dims.size());
  for (size_t i = 0; i + 1 < dims.size(); ++i) JAXNORM_CHECK(mask_dims[i] == dims[i]);
  JAXNORM_CHECK(mask_dims.back() == args->mask_cols());
  args->dtype = TypeOf(x);
  JAXNORM_CHECK(TypeOf(y) == args->dtype);
  args->x = x.untyped_data();
  args->y = y.untyped_data();
  args->mask = static_cast<uint8_t*>(mask.untyped_data());
  return Error::Success();
}

inline Error ParseReluFwd(ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::AnyBuffer y, ffi::AnyBuffer mask,
                          ReluArgs* args) {
  JAXNORM_RETURN_IF_ERROR(ParseRelu(x, y, mask, args));
  JAXNORM_CHECK(rest.size() <= 1);
  if (rest.size() == 1) {
    auto z = rest.get<ffi::AnyBuffer>(0);
    if (z.has_error()) return FromFfi(z.error());
    JAXNORM_CHECK(TypeOf(*z) == args->dtype && SameDims(z->dimensions(), x.dimensions()));
    args->z = z->untyped_data();
  }
  return Error::Success();
}

}  // namespace jaxnorm

#endif  // JAXNORM_RELU_PARSE_H_
