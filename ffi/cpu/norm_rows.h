// What the kernels of norm.cc and norm_short.h read: rows or chunks of them, their masks, parameters.
#ifndef JAXNORM_CPU_NORM_ROWS_H_
#define JAXNORM_CPU_NORM_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "loops.h"
#include "norm_args.h"
#include "simd.h"

namespace jaxnorm {

// ---- Loops ----

// Rows up to this length are one chunk: 128 KiB of float32, so that its arrays stay in the second-level cache.
template <typename A>
inline constexpr int64_t kLongestChunk = 128 * 1024 / sizeof(A);
// The chunks of a longer row are short enough for the first-level cache, because they are read twice.
inline constexpr int64_t kChunk = 4096;
// Per thread, one chunk each: for what can not be read in place.
enum BufferUse { kFirst, kSecond, kFactor, kShift, kBuffers };

// Not inlined: GCC would look up the thread's storage, a call, again in every step of a loop.
template <typename A>
__attribute__((noinline)) A* ThreadBuffer(BufferUse use) {
  alignas(64) static thread_local A buffers[kBuffers][kLongestChunk<A>];
  return buffers[use];
}

// The elements as a loop reads them. `again`: the buffer holds them already.
template <typename T>
JAXNORM_INLINE const Source<T>* Stage(const T* from, int64_t n, BufferUse use, bool again = false) {
  if constexpr (kStaged<T>) {
    float* buffer = ThreadBuffer<float>(use);
    if (!again) ToAccRun(from, buffer, n);
    return buffer;
  } else {
    return from;
  }
}

// out[i] = f(i). May overwrite the buffer, if f(i) reads that at i alone.
template <typename T, typename F>
JAXNORM_INLINE void Store(T* out, int64_t n, BufferUse use, F f) {
  if constexpr (kStaged<T>) {
    float* buffer = ThreadBuffer<float>(use);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) buffer[i] = f(i);
    FromAccRun<T>(buffer, out, n);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = FromAcc<T>(f(i));
  }
}

// ---- Work ----

// A part of one row: `n` columns from `start` on.
struct Chunk {
  int64_t row, start, n;
};

template <typename T>
JAXNORM_INLINE const T* RowOf(const Operand& operand, const Chunk& chunk) {
  const Broadcast& view = operand.view;
  return static_cast<const T*>(operand.data) + view.RowOffset(chunk.row) + chunk.start * view.axis_stride;
}

// One byte per element of the chunk; nullptr without a mask.
JAXNORM_INLINE const uint8_t* MaskOf(const Operand& mask, const Chunk& chunk) {
  if (!mask) return nullptr;
  const uint8_t* row = RowOf<uint8_t>(mask, chunk);
  if (mask.view.axis_stride == 1) return row;
  static thread_local uint8_t buffer[kLongestChunk<float>];
  std::fill_n(buffer, chunk.n, *row);
  return buffer;
}

template <typename A>
JAXNORM_INLINE A CountOf(const uint8_t* mask, int64_t n) {
  if (mask == nullptr) return static_cast<A>(n);
  int32_t count = 0;
#pragma omp simd reduction(+ : count)
  for (int64_t i = 0; i < n; ++i) count += mask[i] != 0;
  return static_cast<A>(count);
}

// Parameters of a group, for the columns of a chunk: in place if they can be read as they are, else in a buffer;
// `absent` where there are none.
template <typename T>
JAXNORM_INLINE const Acc<T>* LoadParameter(const NormParameter& parameter, ffi::DataType dtype, int64_t group,
                                           const Chunk& chunk, Acc<T> absent, Acc<T> offset, BufferUse use) {
  using A = Acc<T>;
  const int64_t at = group * parameter.group_stride + chunk.start;
  const bool is_acc = dtype == ffi::F32 || dtype == ffi::F64;
  if (parameter && is_acc && offset == 0) return static_cast<const A*>(parameter.data) + at;
  A* buffer = ThreadBuffer<A>(use);
  if (!parameter) {
    std::fill_n(buffer, chunk.n, absent);
    return buffer;
  }
  if (is_acc) {
    ToAccRun(static_cast<const A*>(parameter.data) + at, buffer, chunk.n);
  } else {
    ToAccRun(static_cast<const T*>(parameter.data) + at, buffer, chunk.n);
  }
#pragma omp simd
  for (int64_t i = 0; i < chunk.n; ++i) buffer[i] += offset;
  return buffer;
}

template <typename T>
JAXNORM_INLINE const Acc<T>* LoadFactor(const NormParameter& scale, ffi::DataType dtype, int64_t group,
                                        const Chunk& chunk, double offset) {
  return LoadParameter<T>(scale, dtype, group, chunk, Acc<T>{1}, static_cast<Acc<T>>(offset), kFactor);
}
template <typename T>
JAXNORM_INLINE const Acc<T>* LoadShift(const NormParameter& bias, ffi::DataType dtype, int64_t group,
                                       const Chunk& chunk) {
  return LoadParameter<T>(bias, dtype, group, chunk, Acc<T>{0}, Acc<T>{0}, kShift);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_NORM_ROWS_H_
