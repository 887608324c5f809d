// Access of loops over elements of type E to arrays whose dtype is known only at run time: in place, or with 16-bit
// floats converted in bulk before and after the loop. Loops are therefore compiled for two types instead of four, and
// elements that a loop reads twice are converted once. E is float or double, or BF16 in loops that read each element
// once: converting bfloat16 is so little work that these loops do it themselves.
#ifndef JAXNORM_CPU_CONVERT_H_
#define JAXNORM_CPU_CONVERT_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "call.h"
#include "simd.h"

namespace jaxnorm {

// to[i] = from[i] for n elements; dtype is float16 or bfloat16.
void Widen(DataType dtype, const void* from, float* to, int64_t n);
void Narrow(DataType dtype, const float* from, void* to, int64_t n);

// Whether elements of `dtype` are read as type E in place. Otherwise they are converted to E.
template <typename E>
JAXNORM_INLINE bool IsNative(DataType dtype) {
  return !std::is_same_v<E, float> || dtype == DataType::kF32;
}

// The address of element i.
template <typename E>
JAXNORM_INLINE const void* At(DataType dtype, const void* array, int64_t i) {
  return static_cast<const char*>(array) + i * (IsNative<E>(dtype) ? sizeof(E) : sizeof(uint16_t));
}
template <typename E>
JAXNORM_INLINE void* At(DataType dtype, void* array, int64_t i) {
  return static_cast<char*>(array) + i * (IsNative<E>(dtype) ? sizeof(E) : sizeof(uint16_t));
}

// Converts elements of `dtype` to type E, and back.
template <typename E>
JAXNORM_INLINE void Read(DataType dtype, const void* from, E* to, int64_t n) {
  if (IsNative<E>(dtype)) {
    std::copy_n(static_cast<const E*>(from), n, to);
  } else if constexpr (std::is_same_v<E, float>) {
    Widen(dtype, from, to, n);
  }
}
template <typename E>
JAXNORM_INLINE void Write(DataType dtype, const E* from, void* to, int64_t n) {
  if (IsNative<E>(dtype)) {
    std::copy_n(from, n, static_cast<E*>(to));
  } else if constexpr (std::is_same_v<E, float>) {
    Narrow(dtype, from, to, n);
  }
}

// Element i alone.
template <typename A>
JAXNORM_INLINE A ValueAt(DataType dtype, const void* array, int64_t i) {
  if (dtype == DataType::kF16) return ToAcc(static_cast<const F16*>(array)[i]);
  if (dtype == DataType::kBF16) return ToAcc(static_cast<const BF16*>(array)[i]);
  return static_cast<const A*>(array)[i];
}

// Calls body(E{}) with the type that loops over elements of `dtype` are compiled for; body returns an Error.
template <typename Body>
Error DispatchElement(DataType dtype, Body&& body) {
  return dtype == DataType::kF16 ? body(float{}) : DispatchFloat(dtype, body);
}
// The same for loops that do not take BF16.
template <typename Body>
Error DispatchAcc(DataType dtype, Body&& body) {
  return DispatchFloat(dtype, [&]<typename T>(T) { return body(Acc<T>{}); });
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_CONVERT_H_
