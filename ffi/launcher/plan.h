// What a call of a row program asks for, decoded and checked, and the sizes of its launches. Nothing here needs a GPU.
#ifndef JAXNORM_LAUNCHER_PLAN_H_
#define JAXNORM_LAUNCHER_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "call.h"

namespace jaxnorm {

inline constexpr int kMaxBuffers = 64;
inline constexpr int kMaxRowDims = 8;

template <typename T, int kMax>
struct FixedVector {
  std::array<T, kMax> items;
  int size = 0;

  void Append(const T& item) { items[size++] = item; }
  const T& operator[](int i) const { return items[i]; }
  const T* begin() const { return items.data(); }
  const T* end() const { return items.data() + size; }
};

struct Integers {
  const int64_t* data = nullptr;
  size_t size = 0;
  int64_t operator[](size_t i) const { return data[i]; }
};

// A call's attributes as they come. They are part of exported programs, hence the version: a change of what they mean
// is another number.
struct Attributes {
  static constexpr int64_t kVersion = 1;

  int64_t version = 0;
  std::string_view source;    // CUDA text with the kernels row_program and, with `finish`, row_program_finish
  Integers launch;            // threads, shared_bytes, cluster, rows_per_tile, blocks, chunk_multiple, group_dims,
                              // optionally together
  Integers sizes;             // for each row dimension: buffer (-1: none), dimension (or the size itself), divisor
  Integers arguments;         // buffers that row_program is given
  Integers finish;            // none, or blocks along x and z
  Integers finish_arguments;  // buffers that row_program_finish is given
};

struct RowDim {
  int buffer;         // -1: the size does not depend on a buffer
  int64_t dimension;  // of the buffer, or the size itself
  int64_t divisor;
};

// Buffers are the operands, then the results.
using BufferList = FixedVector<int, kMaxBuffers>;

// Attributes that passed all checks which need no buffers.
struct Plan {
  int threads;             // of a block
  int shared_bytes;        // dynamic shared memory of a block
  int cluster;             // blocks of a cluster, which then stands where a block would
  bool together;           // the blocks of a cluster may be anywhere in the grid, all of which runs at once
  int64_t rows_per_tile;   // rows that a block takes at a time
  int64_t blocks;          // 0: a block for each tile. Otherwise at most so many, which go from tile to tile
  int64_t chunk_multiple;  // with `blocks`: the number of chunks is a multiple of this, or less
  int group_dims;          // leading row dimensions that number the groups of rows
  FixedVector<RowDim, kMaxRowDims> sizes;
  BufferList arguments;
  bool has_finish;
  int finish_x, finish_z;
  BufferList finish_arguments;
};
Error DecodePlan(const Attributes& attributes, Plan* plan);

struct Buffer {
  void* data;
  const int64_t* dims;
  int rank;
};
using Buffers = FixedVector<Buffer, kMaxBuffers>;

struct Grid {
  unsigned x, y, z;  // x 0: not launched
};

// A group's rows are cut into tiles, which are dealt to `chunks` blocks.
struct Launches {
  std::array<int32_t, kMaxRowDims> dims;
  int64_t rows;
  int32_t groups, chunks;
  Grid grid, finish_grid;
  unsigned finish_threads_y;  // of 32 along x
};

// `resident`: how many blocks (or clusters) of row_program the device holds at once.
Error SizeLaunches(const Plan& plan, const Buffers& buffers, int64_t resident, Launches* launches);

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_PLAN_H_
