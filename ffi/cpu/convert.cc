#include "convert.h"

#include <cstdint>

#include "simd.h"

namespace jaxnorm {
namespace {

JAXNORM_SIMD_CLONES void WidenRun(const BF16* from, float* to, int64_t n) { ToAccRun(from, to, n); }
JAXNORM_SIMD_CLONES void NarrowRun(const float* from, BF16* to, int64_t n) { FromAccRun(from, to, n); }

}  // namespace

// Float16 has no clones: those with other instructions than the baseline's have its own for the conversion.
void Widen(ffi::DataType dtype, const void* from, float* to, int64_t n) {
  if (dtype == ffi::F16) {
    ToAccRun(static_cast<const F16*>(from), to, n);
  } else {
    WidenRun(static_cast<const BF16*>(from), to, n);
  }
}

void Narrow(ffi::DataType dtype, const float* from, void* to, int64_t n) {
  if (dtype == ffi::F16) {
    FromAccRun(from, static_cast<F16*>(to), n);
  } else {
    NarrowRun(from, static_cast<BF16*>(to), n);
  }
}

}  // namespace jaxnorm
