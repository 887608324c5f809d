// Loads for the kernels of norm.cc and norm_short.h: chunks of rows, their masks, and parameters.
#ifndef JAXNORM_CPU_NORM_ROWS_H_
#define JAXNORM_CPU_NORM_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "convert.h"
#include "norm_call.h"
#include "simd.h"

namespace jaxnorm {

// ---- Loops ----

// Rows up to this length are one chunk: 128 KiB of float32, so that its arrays stay in the second-level cache.
template <typename A>
inline constexpr int64_t kLongestChunk = 128 * 1024 / sizeof(A);
// The chunks of a longer row are short enough for the first-level cache, because they are read twice.
inline constexpr int64_t kChunk = 4096;
// Buffers of a thread, one chunk each, for data that can not be read in place.
enum BufferUse { kFirst, kSecond, kFactor, kShift, kBuffers };

// Not inlined: GCC would look up the thread's storage, which is a call, in every step of a loop.
template <typename A>
__attribute__((noinline)) A* ThreadBuffer(BufferUse use) {
  alignas(64) static thread_local A buffers[kBuffers][kLongestChunk<A>];
  return buffers[use];
}

// The elements as type A: in place, or converted into a buffer. `again`: the buffer holds the elements already.
template <typename A>
JAXNORM_INLINE const A* Stage(DataType dtype, const void* from, int64_t n, BufferUse use, bool again = false) {
  if (IsNative<A>(dtype)) return static_cast<const A*>(from);
  A* buffer = ThreadBuffer<A>(use);
  if (!again) Read(dtype, from, buffer, n);
  return buffer;
}

// out[i] = f(i). f(i) may read element i of the buffer `use`, but no other element.
template <typename A, typename F>
JAXNORM_INLINE void Store(DataType dtype, void* out, int64_t n, BufferUse use, F f) {
  A* to = IsNative<A>(dtype) ? static_cast<A*>(out) : ThreadBuffer<A>(use);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = f(i);
  if (!IsNative<A>(dtype)) Write(dtype, to, out, n);
}

// ---- Work ----

// A part of one row: `n` columns from `start` on.
struct Chunk {
  int64_t row, start, n;
};

// Where the chunk begins, in elements of the operand.
JAXNORM_INLINE int64_t OffsetIn(const Operand& operand, const Chunk& chunk) {
  return operand.view.RowOffset(chunk.row) + chunk.start * operand.view.axis_stride;
}

// The chunk's elements of an operand, in place or in a buffer.
template <typename A>
JAXNORM_INLINE const A* StageChunk(DataType dtype, const Operand& operand, const Chunk& chunk, BufferUse use,
                                   bool again = false) {
  return Stage<A>(dtype, At<A>(dtype, operand.data, OffsetIn(operand, chunk)), chunk.n, use, again);
}

// One byte per element of the chunk; nullptr without a mask.
JAXNORM_INLINE const uint8_t* MaskOf(const Operand& mask, const Chunk& chunk) {
  if (!mask) return nullptr;
  const uint8_t* row = static_cast<const uint8_t*>(mask.data) + OffsetIn(mask, chunk);
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

// Parameters of a group for the columns of a chunk: in place where possible, else in a buffer; `absent` in place of an
// absent parameter.
template <typename A>
JAXNORM_INLINE const A* LoadParameter(const NormParameter& parameter, DataType dtype, int64_t group, const Chunk& chunk,
                                      A absent, A offset, BufferUse use) {
  if (!parameter) {
    A* buffer = ThreadBuffer<A>(use);
    std::fill_n(buffer, chunk.n, absent);
    return buffer;
  }
  const void* from = At<A>(dtype, parameter.data, group * parameter.group_stride + chunk.start);
  if (offset == 0) return Stage<A>(dtype, from, chunk.n, use);
  A* buffer = ThreadBuffer<A>(use);
  Read(dtype, from, buffer, chunk.n);
#pragma omp simd
  for (int64_t i = 0; i < chunk.n; ++i) buffer[i] += offset;
  return buffer;
}

template <typename A>
JAXNORM_INLINE const A* LoadFactor(const NormParameter& scale, DataType dtype, int64_t group, const Chunk& chunk,
                                   double offset) {
  return LoadParameter<A>(scale, dtype, group, chunk, A{1}, static_cast<A>(offset), kFactor);
}
template <typename A>
JAXNORM_INLINE const A* LoadShift(const NormParameter& bias, DataType dtype, int64_t group, const Chunk& chunk) {
  return LoadParameter<A>(bias, dtype, group, chunk, A{0}, A{0}, kShift);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_NORM_ROWS_H_
