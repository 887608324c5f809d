// Decodes and checks the attributes of a call, and computes its launches for the buffers of an execution. Nothing here
// needs a GPU.
#ifndef JAXNORM_LAUNCHER_PLAN_H_
#define JAXNORM_LAUNCHER_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "errors.h"

namespace jaxnorm {

inline constexpr int kMaxBuffers = 64;
inline constexpr int kMaxRowDims = 8;
inline constexpr int kMaxLaunches = 256;
// Limits of one launch. A kernel takes 4 KiB of arguments.
inline constexpr int kMaxArguments = 128;
inline constexpr int kMaxWords = 512;

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

// A call's attributes as they come from jaxnorm/_launch.py. Exported programs contain them, hence the version: if the
// meaning of an attribute changes, so does kVersion.
struct Attributes {
  static constexpr int64_t kVersion = 2;

  int64_t version = 0;
  std::string_view operation;  // what error messages name
  std::string_view source;     // CUDA text
  std::string_view kernels;    // names of the kernels in the text, separated by spaces
  // For each launch: kernel, rule of the grid, grid (x, y, z), block (x, y, z), shared_bytes, cluster, flags (1:
  // cooperative, 2: early), number of arguments. For each argument: number of words. For each word: kind, value,
  // offset.
  Integers launches;
  Integers buffer_bytes;  // none, or for each buffer how many bytes it has
  Integers row_tiles;     // none, or rows_per_tile, blocks, chunk_multiple, group_dims
  Integers sizes;         // for each row dimension: buffer (-1: none), dimension (or the size itself), divisor
};

struct RowDim {
  int buffer;         // -1: the size does not depend on a buffer
  int64_t dimension;  // of the buffer, or the size itself
  int64_t divisor;
};

// A group's rows are cut into tiles, which are dealt to `chunks` blocks or clusters.
struct RowTiles {
  int64_t rows_per_tile = 1;   // rows that a block takes at a time
  int64_t blocks = 0;          // 0: a block for each tile. Otherwise the most blocks, which go from tile to tile
  int64_t chunk_multiple = 1;  // with `blocks`: the number of chunks is a multiple of this, or less
  int group_dims = 0;          // leading row dimensions that number the groups of rows
  FixedVector<RowDim, kMaxRowDims> sizes;
};

enum class Rule {
  kFixed,
  kTiles,         // a block or cluster for each chunk of each group, along x
  kGroupsAlongY,  // groups along y; 32 threads along x, and up to 32 (a power of two) along y, for chunks
};

struct Word {
  enum Kind { kNumber, kBuffer, kTag, kRows, kChunks, kGroups, kRowDim, kKinds };
  Kind kind;
  int64_t value;   // the number, or which buffer or dimension
  int64_t offset;  // bytes from the start of a buffer
};

struct Extent {
  unsigned x, y, z;
};

struct Launch {
  int kernel;
  Rule rule;
  Extent grid, block;
  int shared_bytes;        // dynamic shared memory of a block
  int cluster;             // blocks of a cluster; a grid by kTiles then counts clusters instead of blocks
  bool cooperative;        // all blocks run at once; the blocks of a cluster may be anywhere in the grid
  bool early;              // blocks may begin before the previous launch has ended, if the GPU supports it
  std::vector<int> words;  // number of words of each argument
  std::vector<Word> all_words;

  // Whether the launch has the GPU's cluster attribute.
  bool clustered() const { return cluster > 1 && !cooperative; }
};

// Attributes that passed all checks which need no buffers.
struct Plan {
  std::string operation;
  std::vector<std::string> kernels;
  std::vector<Launch> launches;
  std::vector<int64_t> buffer_bytes;
  bool has_rows = false;  // some launch has a rule
  RowTiles rows;

  Error Invalid(const std::string& what) const;
  Error Internal(const std::string& what) const;
};
Error DecodePlan(const Attributes& attributes, Plan* plan);

// Buffers are the operands, then the results.
struct Buffer {
  void* data;
  int64_t bytes;
  const int64_t* dims;
  int rank;
};
using Buffers = FixedVector<Buffer, kMaxBuffers>;

// Checks the number, sizes and alignment of the buffers against the plan.
Error CheckBuffers(const Plan& plan, const Buffers& buffers);

struct Rows {
  std::array<int32_t, kMaxRowDims> dims;
  int64_t rows = 0;
  int32_t groups = 1, chunks = 0;
};
// `resident`: how many blocks (or clusters) of the kernel with the rule kTiles the device holds at once.
Error CountRows(const Plan& plan, const Buffers& buffers, int64_t resident, Rows* rows);

struct Size {
  Extent grid, block;  // grid.x 0: not launched
};
Error SizeLaunch(const Plan& plan, const Launch& launch, const Rows& rows, Size* size);

// A launch's arguments in memory, and a pointer to each of them.
struct Arguments {
  std::array<uint64_t, kMaxWords> words;
  std::array<void*, kMaxArguments> pointers;
};
void FillArguments(const Launch& launch, const Buffers& buffers, const Rows& rows, uint64_t tag, Arguments* arguments);

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_PLAN_H_
