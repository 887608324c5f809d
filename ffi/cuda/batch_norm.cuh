// What the batch_norm kernels share: how they see an array, and how they read and write it.
//
// One group of an array is flat memory in which channels come back: element p belongs to channel p % cols / inner, with
// cols = channels * inner. That is all the kernels know of a layout, so that channels last (inner = 1), channels first
// and whatever is between are the same code. The array is cut into lines of `period` elements, a multiple of cols and of
// 8, so that what stands below each other in two lines is of one channel. A thread has 8 neighbouring columns and goes
// down the lines: what it needs to know of its channels it finds once, and every access is a whole aligned 16 bytes,
// which also makes a byte of the ReLU's bits. A block has the columns of a tile: 4 KiB of 16-bit elements at most.
//
// Bits of rows that are not whole bytes are moved by one thread of the block to the other through shared memory,
// several lines in one word (bits.cuh).
#ifndef JAXNORM_CUDA_BATCH_NORM_CUH_
#define JAXNORM_CUDA_BATCH_NORM_CUH_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

#include "batch_norm_args.h"
#include "calls.h"
#include "cuda/bits.cuh"
#include "cuda/launch.cuh"
#include "cuda/operand.cuh"
#include "cuda/vec.cuh"

namespace jaxnorm {

inline constexpr int kCols = 8;  // of one thread

// Threads of a block at most; shared memory holds some numbers for each column.
template <typename T>
inline constexpr int kBatchNormThreads = sizeof(T) == 8 ? 128 : 256;

// 1 / x for x > 0, to the last bit but one.
template <typename A>
__device__ __forceinline__ A Reciprocal(A x) {
  if constexpr (std::is_same_v<A, float>) {
    const float guess = ApproximateReciprocal(x);
    return fmaf(guess, fmaf(-x, guess, 1), guess);
  } else {
    return 1 / x;
  }
}

// What means are distances from. Any finite number will do.
template <typename A>
__device__ __forceinline__ A Origin(A first) {
  return first - first == 0 ? first : A{0};
}

// ---- Operands and results ----

// What group g has begins at data + g * stride elements.
struct GroupArray {
  void* data = nullptr;
  int64_t stride = 0;
  __host__ __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }

  template <typename T>
  __device__ __forceinline__ T* Of(uint32_t group) const {
    return static_cast<T*>(data) + group * stride;
  }
};

// Those of batch_norm_args.h, of one launch.
struct GroupArrays {
  GroupArray x, dy, y, bits, mean, var, count, scale, bias, residual, dbias, dscale, dmean, dvar, dx, dresidual;
  int64_t first_group = 0, groups = 1;
};

// Calls launch(GroupArrays) for as many groups at a time as lie evenly in every array: for all, unless several vmaps
// mapped different operands.
template <typename F>
Error ForGroups(const BatchNormArgs& args, F&& launch) {
  using B = BatchNormArgs;
  using G = GroupArrays;
  constexpr std::pair<BatchNormBuffer B::*, GroupArray G::*> kMembers[] = {{&B::x, &G::x},
                                                                           {&B::dy, &G::dy},
                                                                           {&B::y, &G::y},
                                                                           {&B::bits, &G::bits},
                                                                           {&B::mean, &G::mean},
                                                                           {&B::var, &G::var},
                                                                           {&B::count, &G::count},
                                                                           {&B::scale, &G::scale},
                                                                           {&B::bias, &G::bias},
                                                                           {&B::dx, &G::dx},
                                                                           {&B::dbias, &G::dbias},
                                                                           {&B::dscale, &G::dscale},
                                                                           {&B::dmean, &G::dmean},
                                                                           {&B::dvar, &G::dvar},
                                                                           {&B::residual, &G::residual},
                                                                           {&B::dresidual, &G::dresidual}};
  // The innermost dimensions of the views are products of trailing dimensions, so the smallest divides the others.
  int64_t at_once = args.shape.groups;
  for (const auto& [from, to] : kMembers) {
    const Broadcast& view = (args.*from).groups;
    if (view.ndim > 0) at_once = std::min(at_once, view.size[view.ndim - 1]);
  }
  for (int64_t group = 0; group < args.shape.groups; group += at_once) {
    GroupArrays arrays;
    arrays.first_group = group;
    arrays.groups = at_once;
    for (const auto& [from, to] : kMembers) {
      const BatchNormBuffer& buffer = args.*from;
      const Broadcast& view = buffer.groups;
      if (!buffer) continue;
      arrays.*to = {static_cast<char*>(buffer.data) + view.RowOffset(group) * buffer.item_bytes,
                    view.ndim > 0 ? view.stride[view.ndim - 1] : 0};
    }
    JAXNORM_RETURN_IF_ERROR(launch(arrays));
  }
  return Error::Success();
}

// Whether arrays of T begin on 16 bytes for every group.
template <typename T, typename... Arrays>
bool AllAligned(const Arrays&... arrays) {
  return (... && (IsVecAligned(arrays.data) && arrays.stride * static_cast<int64_t>(sizeof(T)) % kVecBytes == 0));
}

// ---- How an array is cut ----

// Not inline: 64-bit divisions are long, and kernels whose code does not fit the instruction cache start slowly.
static __device__ __noinline__ int64_t SlowDivide(int64_t a, int64_t b) { return a / b; }

struct Lines {
  int64_t size = 0;             // elements of a group
  int64_t cols = 1, inner = 1;  // of a group: channels * inner, elements of a channel that are neighbours
  int64_t channels = 1;
  int64_t period = 8;           // elements of a line, a multiple of 8 and of cols
  int64_t lines = 0, full = 0;  // all, and those that do not end early: all, or all but the last
  int tile = 8, tiles = 1;      // columns of a tile, a multiple of 8 (the last tile of a line may be narrower)
  int rows = 1;                 // lines that a block works on at once
  FastDiv by_cols, by_inner, by_tile;
  bool wide = false;  // beyond what FastDiv divides

  // Of a column of a line.
  __device__ __forceinline__ int64_t Channel(int64_t column, int64_t* inner_index) const {
    if (wide) {
      column -= SlowDivide(column, cols) * cols;
      const int64_t channel = SlowDivide(column, inner);
      *inner_index = column - channel * inner;
      return channel;
    }
    uint32_t in_cols, i;
    by_cols.DivMod(static_cast<uint32_t>(column), &in_cols);
    const uint32_t channel = by_inner.DivMod(in_cols, &i);
    *inner_index = i;
    return channel;
  }

  // The tile that has a column of a line.
  __device__ __forceinline__ int TileOf(int64_t column) const {
    if (wide) return static_cast<int>(SlowDivide(column, tile));
    return static_cast<int>(by_tile.Div(static_cast<uint32_t>(column)));
  }

  // How often `width` columns from one that is `inner_index` in its channel on see another channel, with the first.
  __device__ __forceinline__ int64_t ChannelsFrom(int64_t inner_index, int width) const {
    const int64_t last = inner_index + width - 1;
    return (wide ? SlowDivide(last, inner) : by_inner.Div(static_cast<uint32_t>(last))) + 1;
  }

  // Columns that tile `t` has.
  __device__ __forceinline__ int Width(int t) const {
    return static_cast<int>(min(int64_t{tile}, period - int64_t{t} * tile));
  }
};

// Tiles of at most `most` columns (a multiple of 8).
inline Lines MakeLines(const BatchNormShape& shape, int64_t most) {
  Lines lines;
  lines.size = shape.group_size();
  lines.channels = shape.channels;
  lines.inner = std::max<int64_t>(1, shape.inner);
  lines.cols = std::max<int64_t>(1, shape.channels) * lines.inner;
  const int64_t whole = lines.cols * (kCols / std::gcd(lines.cols, int64_t{kCols}));  // fits: sizes are below 2^59
  lines.period = whole * std::max<int64_t>(1, most / whole);
  lines.lines = (lines.size + lines.period - 1) / lines.period;
  lines.full = lines.size / lines.period;
  const int64_t tiles = (lines.period + most - 1) / most;
  lines.tile = static_cast<int>(((lines.period + tiles - 1) / tiles + kCols - 1) / kCols * kCols);
  lines.tiles = static_cast<int>((lines.period + lines.tile - 1) / lines.tile);
  lines.wide = lines.period > INT32_MAX;
  if (!lines.wide) {
    lines.by_cols = FastDiv(static_cast<int32_t>(lines.cols));
    lines.by_inner = FastDiv(static_cast<int32_t>(lines.inner));
    lines.by_tile = FastDiv(lines.tile);
  }
  return lines;
}

// A launch: each block has a tile and `span` lines of a group. Neighbouring blocks have neighbouring tiles, so that
// together they walk through memory in order.
struct Spans {
  int span = 1;        // lines of a block
  uint32_t spans = 1;  // of a group: blocks that share a tile
  FastDiv by_blocks;   // of a group: spans * tiles
  FastDiv by_tiles;
  bool aligned = false;  // arrays begin on 16 bytes

  int64_t blocks() const { return by_blocks.divisor(); }
};

// ---- What a block and a thread have ----

struct Part {
  uint32_t group;
  int64_t begin, full, end;  // lines; those before `full` by vectors
  int tile, width;
  int64_t column;  // this thread's first, in a line
  int place;       // and in the tile
  int row;         // its first line, from that of the block
  bool active;     // it has columns of the tile
};

// `reversed`: the last blocks of the launch begin where memory begins.
__device__ __forceinline__ Part FindPart(const Lines& lines, const Spans& spans, bool reversed) {
  Part part;
  const uint32_t index = reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  uint32_t block, tile;
  part.group = spans.by_blocks.DivMod(index, &block);
  const uint32_t span = spans.by_tiles.DivMod(block, &tile);
  part.tile = static_cast<int>(tile);
  part.width = lines.Width(part.tile);
  part.begin = int64_t{span} * spans.span;
  part.end = min(lines.lines, part.begin + spans.span);
  part.full = spans.aligned ? min(lines.full, part.end) : part.begin;
  const int threads = lines.tile / kCols;  // of a row
  part.row = lines.rows == 1 ? 0 : static_cast<int>(threadIdx.x) / threads;
  part.place = (static_cast<int>(threadIdx.x) - part.row * threads) * kCols;
  part.column = int64_t{part.tile} * lines.tile + part.place;
  part.active = part.row < lines.rows && part.place < part.width;
  return part;
}

// Calls step(std::integral_constant<int, n>, line) for all lines of the part: for kLines lines (of each row) together
// where all are there to be read by vectors, which n = kLines says, else for one line.
template <int kLines, typename F>
__device__ __forceinline__ void ForLines(const Lines& lines, const Part& part, F&& step) {
  int64_t line = part.begin;
  for (; line + kLines * lines.rows <= part.full; line += kLines * lines.rows) {
    step(std::integral_constant<int, kLines>(), line);
  }
  for (; line < part.end; line += lines.rows) step(std::integral_constant<int, 1>(), line);
}

// The channels of a thread's columns.
class Channels {
 public:
  __device__ __forceinline__ Channels(const Lines& lines, int64_t column) : lines_(lines) {
    first_ = lines.Channel(column < lines.period ? column : column - lines.period, &inner_index_);
  }

  // values[i][j] = arrays[i][channel of column j * stride], of the arrays that are there. All loads are under way before one
  // is waited for: array after array took an eighth of the time of blocks that have few lines.
  template <int kN, typename V, typename A>
  __device__ __forceinline__ void Load(const V* const (&arrays)[kN], A (&values)[kN][kCols], int64_t stride = 1) const {
    constexpr int kWide = kVecSize<V>;
    if (lines_.inner >= kCols) {
      // Two channels at most, of which the first one has `own` columns.
      const auto own = static_cast<int>(min(lines_.inner - inner_index_, int64_t{kCols}));
      const int64_t next = own == kCols ? first_ : first_ + 1 == lines_.channels ? 0 : first_ + 1;
      V loaded[kN][2];
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        if (arrays[i] == nullptr) continue;
        loaded[i][0] = arrays[i][first_ * stride];
        loaded[i][1] = arrays[i][next * stride];
      }
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        if (arrays[i] == nullptr) continue;
#pragma unroll
        for (int j = 0; j < kCols; ++j) values[i][j] = ToAcc(j < own ? loaded[i][0] : loaded[i][1]);
      }
    } else if (lines_.inner == 1 && first_ + kCols <= lines_.channels && AreAligned(arrays)) {
      Vec<V, kWide> loaded[kN][kCols / kWide];
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; j += kWide) {
          if (arrays[i] != nullptr) loaded[i][j / kWide] = jaxnorm::Load(arrays[i] + first_ + j);
        }
      }
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        if (arrays[i] == nullptr) continue;
#pragma unroll
        for (int j = 0; j < kCols; ++j) values[i][j] = ToAcc(loaded[i][j / kWide].v[j % kWide]);
      }
    } else {
      auto left = static_cast<int>(lines_.inner - inner_index_);
      int64_t channel = first_;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          if (arrays[i] != nullptr) values[i][j] = ToAcc(arrays[i][channel * stride]);
        }
        if (--left == 0) {
          left = static_cast<int>(lines_.inner);
          if (++channel == lines_.channels) channel = 0;
        }
      }
    }
  }

 private:
  template <int kN, typename V>
  __device__ __forceinline__ bool AreAligned(const V* const (&arrays)[kN]) const {
    bool aligned = true;
#pragma unroll
    for (int i = 0; i < kN; ++i) aligned &= arrays[i] == nullptr || IsVecAligned(arrays[i] + first_);
    return aligned;
  }

  const Lines& lines_;
  int64_t first_, inner_index_;  // of the first column
};

// What a thread knows of its columns: `kCount` numbers of each. Its own, but in shared memory: a register for each would
// leave too few threads to keep the memory busy. Neighbouring threads have neighbouring vectors.
template <typename T, int kCount, int kWidth_ = kVecSize<AccT<T>>>
struct Constants {
  using A = AccT<T>;
  static constexpr int kWidth = kWidth_, kParts = kCols / kWidth;  // columns that are read at once, and how often
  Vec<A, kWidth> values[kCount][kParts][kBatchNormThreads<T>];

  __device__ __forceinline__ void Set(int which, const A (&of)[kCols]) {
#pragma unroll
    for (int q = 0; q < kParts; ++q) {
      Vec<A, kWidth> some;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) some.v[j] = of[q * kWidth + j];
      values[which][q][threadIdx.x] = some;
    }
  }

  // Columns q * kWidth and following.
  __device__ __forceinline__ Vec<A, kWidth> Get(int which, int q) const { return values[which][q][threadIdx.x]; }

  __device__ __forceinline__ Vec<A, kCols> GetAll(int which) const {
    struct Parts {
      Vec<A, kWidth> of[kParts];
    } parts;
#pragma unroll
    for (int q = 0; q < kParts; ++q) parts.of[q] = Get(which, q);
    return std::bit_cast<Vec<A, kCols>>(parts);
  }
};

// rstd from the variance that is there, and factor = rstd * scale from the scale.
template <typename A>
__device__ __forceinline__ void SetFactor(A epsilon, A (&rstd)[kCols], A (&factor)[kCols]) {
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    rstd[j] = rsqrt(rstd[j] + epsilon);
    factor[j] *= rstd[j];
  }
}

// ---- Elements ----

// This thread's columns of one line, as words: 16-bit elements would take a register each.
template <typename T>
struct Cells {
  static constexpr int kVecs = kCols * sizeof(T) / kVecBytes;
  uint4 words[kVecs];

  __device__ __forceinline__ Vec<T, kCols> Get() const { return std::bit_cast<Vec<T, kCols>>(*this); }
  __device__ __forceinline__ Vec<AccT<T>, kCols> GetAcc() const {
    Vec<AccT<T>, kCols> values;
    ToAccAll(Get(), values.v);
    return values;
  }
  __device__ __forceinline__ void Set(const Vec<T, kCols>& values) { *this = std::bit_cast<Cells>(values); }

  // Columns [kN * q, kN * (q + 1)), rounded.
  template <int kN>
  __device__ __forceinline__ void SetSome(int q, const AccT<T> (&values)[kN]) {
    struct Parts {
      Vec<T, kN> parts[kCols / kN];
    };
    auto all = std::bit_cast<Parts>(*this);
    all.parts[q] = RoundVec<T>(values);
    *this = std::bit_cast<Cells>(all);
  }

  // Puts 0 where the bit of a column is off.
  __device__ __forceinline__ void Select(uint32_t bits) {
    if constexpr (sizeof(T) == 2) {
      auto pairs = std::bit_cast<Words<kCols / 2>>(*this);
      const uint32_t apart = (bits & 0xff) * 0x8001;  // those of odd columns also 15 higher
#pragma unroll
      for (int i = 0; i < kCols / 2; ++i) pairs.w[i] &= SignsOfHalves(apart << (15 - 2 * i));
      *this = std::bit_cast<Cells>(pairs);
    } else {
      Vec<T, kCols> values = Get();
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        if (!(bits >> j & 1)) values.v[j] = T{};
      }
      Set(values);
    }
  }

  __device__ __forceinline__ void Load(const T* p) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) words[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
  }
  __device__ __forceinline__ void Load(const T* p, L2Policy policy) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) words[i] = LoadWords(p + i * kVecSize<T>, policy);
  }
  __device__ __forceinline__ void Store(T* p) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      jaxnorm::Store(p + i * kVecSize<T>, std::bit_cast<Vec<T, kVecSize<T>>>(words[i]));
    }
  }
  // The first `count` elements; the others are 0, or left alone.
  __device__ __forceinline__ void LoadSome(const T* p, int count) {
    Vec<T, kCols> values;
#pragma unroll
    for (int j = 0; j < kCols; ++j) values.v[j] = j < count ? p[j] : T{};
    Set(values);
  }
  __device__ __forceinline__ void StoreSome(T* p, int count) const {
    const Vec<T, kCols> values = Get();
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      if (j < count) p[j] = values.v[j];
    }
  }
};

// Lines of each of `kArrays` arrays that a thread reads before it looks at the first: 64 bytes or more are then
// under way.
template <typename T, int kArrays>
inline constexpr int kBatch = std::max(2, 8 / static_cast<int>(sizeof(T)) / kArrays);

// The lines that a thread works on in one step of ForLines.
template <int kLines>
struct Batch {
  int64_t at, stride;  // the first element, and from one line to the next
  int count;           // elements of each line that are there
  bool whole = true;   // by vectors

  __device__ __forceinline__ Batch(const Lines& lines, const Part& part, int64_t line, bool active)
      : at((line + part.row) * lines.period + part.column), stride(lines.rows * lines.period) {
    count = active ? kCols : 0;
    if constexpr (kLines == 1) {
      const int64_t left = line + part.row < part.end ? lines.size - at : 0;
      count = static_cast<int>(max(int64_t{0}, min(int64_t{count}, left)));
      whole = line + part.row < part.full;
    }
  }

  // With an L2Policy, or without.
  template <typename T, typename... Policy>
  __device__ __forceinline__ void Load(const T* p, Cells<T> (&cells)[kLines], Policy... policy) const {
    if (whole) {
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        if (count > 0) cells[k].Load(p + at + k * stride, policy...);
      }
    } else {
      cells[0].LoadSome(p + at, count);
    }
  }

  template <typename T>
  __device__ __forceinline__ void Store(T* p, const Cells<T> (&cells)[kLines]) const {
    if (whole) {
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        if (count > 0) cells[k].Store(p + at + k * stride);
      }
    } else {
      cells[0].StoreSome(p + at, count);
    }
  }

  // Brings the lines into the L2 cache, without registers to wait in.
  template <typename... T>
  __device__ __forceinline__ void Prefetch(const T*... arrays) const {
    const auto prefetch = [&](const auto* p) {
      if (p == nullptr || count == 0) return;
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p + at + k * stride)));
      }
    };
    (prefetch(arrays), ...);
  }
};

// ---- The ReLU's bits ----

enum class Bits { kNone, kFlat, kRagged };

// What kernels are given of the bits.
struct BitsView {
  Rows rows;
  int64_t line_bytes, group_bytes;  // of a line and of a group; both are whole rows
  BitsView(const BatchNormShape& shape, const Lines& lines)
      : rows(shape.last),
        line_bytes(lines.period / shape.last * shape.bits_cols()),
        group_bytes(lines.size / shape.last * shape.bits_cols()) {}
};

// The bits of a tile whose rows are not whole bytes. Each byte of a word is of another line.
template <typename T>
class RaggedBits {
  using Word = uint32_t;
  static constexpr int kThreads = kBatchNormThreads<T>;

 public:
  static constexpr int kMostLines = sizeof(Word);

  // Of the columns of a thread each, in the tile and just behind it; or bytes of the mask. Every other call has its own,
  // so that one barrier is enough.
  struct Shared {
    Word words[2][kThreads * kCols / 2];
  };

  __device__ __forceinline__ RaggedBits(const BitsView& view, const Lines& lines, const Part& part, Shared& shared)
      : shared_(shared), place_(view.rows.Find(int64_t{part.tile} * lines.tile)) {}

  // `flat`: the bits of this thread's columns in kLines lines. `turn` counts the calls.
  template <int kLines>
  __device__ __forceinline__ void Store(const BitsView& view, const Part& part, int64_t line, int turn, Word flat,
                                        uint8_t* bits) const {
    Word* own = shared_.words[turn % 2];
    own[threadIdx.x] = flat;
    __syncthreads();
    const uint32_t end = view.rows.ByteFrom(place_.col + part.width);
    const int64_t first = line * view.line_bytes + place_.first_byte;
    for (uint32_t byte = view.rows.ByteFrom(place_.col) + threadIdx.x; byte < end; byte += blockDim.x) {
      const Word value = view.rows.FlatToByte(own, place_.col, byte);
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        const int64_t i = first + k * view.line_bytes + byte;
        if (kLines > 1 || i < view.group_bytes) bits[i] = static_cast<uint8_t>(value >> 8 * k);
      }
    }
  }

  // The bits of this thread's columns in kLines lines.
  template <int kLines>
  __device__ __forceinline__ Word Load(const BitsView& view, const Part& part, int64_t line, int turn,
                                       const uint8_t* bits) const {
    Word* own = shared_.words[turn % 2];
    const uint32_t begin = view.rows.ByteOf(place_.col), last = view.rows.ByteOf(place_.col + part.width - 1);
    const int64_t first = line * view.line_bytes + place_.first_byte;
    for (uint32_t byte = begin + threadIdx.x; byte <= last; byte += blockDim.x) {
      Word value = 0;
#pragma unroll
      for (int k = 0; k < kLines; ++k) {
        const int64_t i = first + k * view.line_bytes + byte;
        if (kLines > 1 || i < view.group_bytes) value |= Word{bits[i]} << 8 * k;
      }
      own[byte - begin] = value;
    }
    __syncthreads();
    return part.active ? view.rows.template BytesToFlat<kCols>(own, begin, place_.col + part.place) : 0;
  }

 private:
  Shared& shared_;
  Place place_;
};

// Columns of a tile at most, where bits are read. With rows of one element there is a byte for each column, and half as many
// find room.
template <typename T>
int64_t MostColumns(const BatchNormShape& shape) {
  return kBatchNormThreads<T> * kCols / (shape.last == 1 ? 2 : 1);
}

// What moves the bits, if they are to be moved.
struct NoBitsMover {
  struct Shared {};
  __device__ __forceinline__ NoBitsMover(const BitsView&, const Lines&, const Part&, Shared&) {}
};
template <typename T, Bits kBits>
using BitsMover = std::conditional_t<kBits == Bits::kRagged, RaggedBits<T>, NoBitsMover>;

// Bit 8k + j is that of this thread's column j in the batch's line k.
template <Bits kBits, int kLines, typename M>
__device__ __forceinline__ uint32_t LoadBits(const Batch<kLines>& batch, const BitsView& view, const Part& part,
                                             int64_t line, int turn, const uint8_t* bits, const M& mover) {
  if constexpr (kBits == Bits::kRagged) {
    return mover.template Load<kLines>(view, part, line, turn, bits);
  } else {
    uint32_t on = 0;
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      if (batch.count > 0) on |= uint32_t{bits[(batch.at + k * batch.stride) / kCols]} << kCols * k;
    }
    return on;
  }
}

// The same of flat bits, to the mask.
template <int kLines>
__device__ __forceinline__ void StoreFlatBits(const Batch<kLines>& batch, uint32_t on, uint8_t* bits) {
  if (batch.count == 0) return;
  const uint32_t there = kLines > 1 ? 0xff : (1u << batch.count) - 1;
#pragma unroll
  for (int k = 0; k < kLines; ++k) {
    bits[(batch.at + k * batch.stride) / kCols] = static_cast<uint8_t>(on >> kCols * k & there);
  }
}

// What kernels take a call's bits for: those that nobody waits for take flat ones as ragged, which is as right.
inline Bits BitsOf(const BatchNormArgs& args) {
  if (!args.bits) return Bits::kNone;
  // Rows of whole bytes, or one row, whose spare bits come after the last element.
  const bool flat = args.shape.last % 8 == 0 || args.shape.group_size() == args.shape.last;
  return flat && !args.mask && ByteWidth(args.dtype) < 8 ? Bits::kFlat : Bits::kRagged;
}

// Calls f with the std::integral_constant of them.
template <typename T, typename F>
Error DispatchBits(const BatchNormArgs& args, F&& f) {
  const Bits bits = BitsOf(args);
  if (bits == Bits::kNone) return f(std::integral_constant<Bits, Bits::kNone>());
  if constexpr (sizeof(T) < 8) {
    if (bits == Bits::kFlat) return f(std::integral_constant<Bits, Bits::kFlat>());
  }
  return f(std::integral_constant<Bits, Bits::kRagged>());
}

// ---- The mask of what counts ----

// The mask's rows are those of batch_norm_args.h; a line is a number of whole rows.
struct MaskView {
  DeviceOperand<bool> mask;
  int64_t cols = 1, group_rows = 0, line_rows = 0, first_row = 0;
  MaskView(const BatchNormArgs& args, const Lines& lines, int64_t first_group) {
    if (!args.mask) return;
    cols = args.shape.inner == 1 ? args.shape.channels : args.shape.inner;
    group_rows = lines.size / cols;
    line_rows = lines.period / cols;
    first_row = first_group * group_rows;
    mask = DeviceOperand<bool>(args.mask, group_rows * args.shape.groups);
  }
};

// What counts of this thread's columns.
class Counted {
 public:
  __device__ __forceinline__ Counted(const MaskView& view, const Part& part)
      : view_(view), row_(SlowDivide(part.column, view.cols)), col_(part.column - row_ * view.cols) {
    row_ += view.first_row + part.group * view.group_rows;
  }

  // Bit j is that of column j in a line, of which the first `count` columns are there.
  __device__ __forceinline__ uint32_t Line(int64_t line, int count) const {
    if (count == 0) return 0;
    int64_t row = row_ + line * view_.line_rows, col = col_, offset = view_.mask.RowOffset(row);
    uint32_t bits = 0;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      bits |= static_cast<uint32_t>(view_.mask.data[offset + col * view_.mask.axis_stride]) << j;
      if (++col == view_.cols && j + 1 < count) {
        col = 0;
        offset = view_.mask.RowOffset(++row);
      }
    }
    return bits;
  }

 private:
  const MaskView& view_;
  int64_t row_, col_;
};

// ---- Launching ----

inline int ThreadsFor(const Lines& lines) { return (lines.tile / kCols * lines.rows + 31) / 32 * 32; }

// Of blocks of passes that write each element by itself: many short ones even out how fast multiprocessors are, in which devices of
// one kind differ. Where bits are moved in the block, one H200 took 5 to 12 % more with one or two waves, and another one did not.
inline constexpr int kElementwiseWaves = 10;

// How many blocks share a tile: enough for `waves` times the `at_once` blocks that run at the same time, at most `most`,
// and so many that the last of them do not leave much of the device idle. Each block has a multiple of the `batch` lines
// that each of its rows reads at once, and at least `least` times as many.
inline Spans MakeSpans(const Lines& lines, int64_t groups, int64_t at_once, int waves, int batch, int least,
                       bool aligned, int64_t most = INT32_MAX) {
  // What a block does besides, in batches of lines.
  constexpr int64_t kOverhead = 3;
  const int64_t step = int64_t{batch} * lines.rows, steps = std::max<int64_t>(1, (lines.lines + step - 1) / step);
  const int64_t tiles = groups * lines.tiles;
  const int64_t first =
      std::clamp<int64_t>(waves * at_once / tiles, 1, std::max<int64_t>(1, std::min(most, steps / least)));
  int64_t best = 0, best_time = INT64_MAX;
  for (int64_t share = first; share <= std::min({most, steps, 2 * first + 2}); ++share) {
    const int64_t span = (steps + share - 1) / share, blocks = tiles * ((steps + span - 1) / span);
    const int64_t time = (blocks + at_once - 1) / at_once * (span + kOverhead);
    if (time < best_time) {
      best_time = time;
      best = span;
    }
  }
  Spans spans;
  spans.span = static_cast<int>(std::min(best, INT32_MAX / step) * step);
  spans.spans = static_cast<uint32_t>((lines.lines + spans.span - 1) / spans.span);
  spans.by_blocks = FastDiv(static_cast<int32_t>(spans.spans * lines.tiles));
  spans.by_tiles = FastDiv(lines.tiles);
  spans.aligned = aligned;
  return spans;
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_BATCH_NORM_CUH_
