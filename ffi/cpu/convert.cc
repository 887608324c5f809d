#include "convert.h"

#include <cstdint>

#include "simd.h"

namespace jaxnorm {

void Widen(DataType dtype, const void* from, float* to, int64_t n) {
  if (dtype == DataType::kF16) {
    ToAccRun(static_cast<const F16*>(from), to, n);
  } else {
    ToAccRun(static_cast<const BF16*>(from), to, n);
  }
}

void Narrow(DataType dtype, const float* from, void* to, int64_t n) {
  if (dtype == DataType::kF16) {
    FromAccRun(from, static_cast<F16*>(to), n);
  } else {
    FromAccRun(from, static_cast<BF16*>(to), n);
  }
}

}  // namespace jaxnorm
