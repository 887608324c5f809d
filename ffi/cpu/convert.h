// Arrays whose dtype is known only at run time, as loops over float (double for float64) read and write them: in place,
// or with 16-bit floats converted in bulk before and after. So the loops are compiled for two types instead of four, and
// 16-bit floats that a loop reads twice are converted once.
#ifndef JAXNORM_CPU_CONVERT_H_
#define JAXNORM_CPU_CONVERT_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "registry.h"
#include "simd.h"

namespace jaxnorm {

// to[i] = from[i] for n elements; dtype is float16 or bfloat16.
void Widen(ffi::DataType dtype, const void* from, float* to, int64_t n);
void Narrow(ffi::DataType dtype, const float* from, void* to, int64_t n);

template <typename A>
JAXNORM_INLINE bool IsAcc(ffi::DataType dtype) {
  return std::is_same_v<A, double> || dtype == ffi::F32;
}

// The address of element i.
template <typename A>
JAXNORM_INLINE const void* At(ffi::DataType dtype, const void* array, int64_t i) {
  return static_cast<const char*>(array) + i * (IsAcc<A>(dtype) ? sizeof(A) : sizeof(uint16_t));
}
template <typename A>
JAXNORM_INLINE void* At(ffi::DataType dtype, void* array, int64_t i) {
  return static_cast<char*>(array) + i * (IsAcc<A>(dtype) ? sizeof(A) : sizeof(uint16_t));
}

template <typename A>
JAXNORM_INLINE void Read(ffi::DataType dtype, const void* from, A* to, int64_t n) {
  if (IsAcc<A>(dtype)) {
    std::copy_n(static_cast<const A*>(from), n, to);
  } else if constexpr (std::is_same_v<A, float>) {
    Widen(dtype, from, to, n);
  }
}
template <typename A>
JAXNORM_INLINE void Write(ffi::DataType dtype, const A* from, void* to, int64_t n) {
  if (IsAcc<A>(dtype)) {
    std::copy_n(from, n, static_cast<A*>(to));
  } else if constexpr (std::is_same_v<A, float>) {
    Narrow(dtype, from, to, n);
  }
}

// Calls body(A{}) with the type that arithmetic on `dtype` is done in; body returns an ffi::Error.
template <typename Body>
ffi::Error DispatchAcc(ffi::DataType dtype, Body&& body) {
  return DispatchFloat(dtype, [&]<typename T>(T) { return body(Acc<T>{}); });
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_CONVERT_H_
