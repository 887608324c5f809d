// softmax and log_softmax along any axis, and their linear maps.
//
// An array is seen as [outer, axis, inner], and work is cut into tiles. With inner == 1, a tile is a range of the axis
// of one or more rows, and vector code runs along a row (RowLoops). Otherwise a tile is a range of the axis of a block
// of neighbouring rows, and vector code runs across the rows (ColumnLoops). FwdCore and BwdCore hold the formulas,
// written once for all kinds of loops. A tile that spans the axis is finished in one go. With a longer axis, the
// statistics of all chunks are computed and merged before the results are written.
//
// Tiles are read in place where possible. A tile with a mask, scale, bias or broadcast operand is first gathered into a
// buffer of float32 (float64), and the core for that type runs on the buffer.
//
// The maximum may lose a NaN: e^(NaN - max) is NaN, so the sum is NaN, and with the sum the whole row.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "softmax_call.h"

namespace jaxnorm {
namespace {

// ---- Tiles ----

// Elements of a tile: 128 KiB of float32, so that a buffer stays in the second-level cache.
template <typename A>
inline constexpr int64_t kTileElements = 128 * 1024 / sizeof(A);
// Elements of the backward's tiles across rows, in place: y and t of a tile fit the first-level cache. The forward is
// better with larger tiles, since merging the statistics of a tile costs it more.
template <typename A>
inline constexpr int64_t kSmallTileElements = 32 * 1024 / sizeof(A);
// The chunks of a longer row are short enough for the first-level cache, because they are read twice.
inline constexpr int64_t kRowChunk = 4096;
// Elements of a part of a group, which is the work of one thread: 256 KiB of float32, which the second-level cache
// still holds when the results are written.
inline constexpr int64_t kPartElements = 64 * 1024;
// Rows up to this length are worth interleaving; four of them fit the first-level cache.
inline constexpr int64_t kShortRow = 2048;
// For rows up to this length vector code runs across rows (ShortRowLoops), in a buffer with the layout of memory.
inline constexpr int64_t kShortestRow = 8;
// The most elements in a vector: 64 bytes of a 16-bit type.
inline constexpr int64_t kMaxLanes = 32;
inline constexpr int64_t kGatheredElements = 4096;
inline constexpr int64_t kMinGatheredWidth = 64;  // of tiles across rows, in elements
// The most statistics that an operation has.
inline constexpr int kMaxStats = 2;

// `width` neighbouring rows from `row` on, times `length` axis positions from `start` on. `offset` is the index of the
// tile's first element in the full array.
struct Tile {
  int64_t row, width, start, length, offset;
};

// How an array is cut: its rows into groups of `width` neighbours, its axis into chunks. A group and a chunk make a
// tile. Consecutive chunks of a group make a part, which is the work of one thread.
struct Grid {
  AxisShape shape;
  int64_t width, blocks, groups, chunk, chunks, part, parts;

  Grid(const AxisShape& shape, int64_t width, int64_t chunk)
      : shape(shape),
        width(width),
        blocks((shape.inner + width - 1) / width),
        groups(shape.outer * blocks),
        chunk(chunk),
        chunks((shape.axis + chunk - 1) / chunk),
        part(std::max<int64_t>(1, kPartElements / (width * chunk))),
        parts((chunks + part - 1) / part) {}

  // The chunks [first, last) of a unit of work. Units are numbered [group][part].
  int64_t first(int64_t unit) const { return unit % parts * part; }
  int64_t last(int64_t unit) const { return std::min(first(unit) + part, chunks); }

  Tile tile(int64_t group, int64_t index) const {
    const int64_t outer = blocks == 1 ? group : group / blocks, i = (group - outer * blocks) * width;
    const int64_t start = index * chunk;
    return {outer * shape.inner + i, std::min(width, shape.inner - i), start, std::min(chunk, shape.axis - start),
            (outer * shape.axis + start) * shape.inner + i};
  }
};

// A gathered tile that does not span the axis is gathered twice. Gathered tiles are therefore narrower, to span a
// longer axis.
template <typename A>
Grid MakeGrid(const AxisShape& shape, int64_t column_tile, bool in_place) {
  if (shape.inner == 1) return Grid(shape, 1, shape.axis <= kTileElements<A> ? shape.axis : kRowChunk);
  int64_t width = BlockWidth<A>(shape.inner);
  if (!in_place) width = std::min(width, std::max(kMinGatheredWidth, column_tile / shape.axis & -kMaxLanes));
  return Grid(shape, width, std::min(shape.axis, column_tile / width));
}

// ---- Gathering ----

// The layout of a tile in a buffer and in a full array: `lines` runs of `n` elements. In the buffer, rows longer than
// kShortestRow are padded to whole vectors.
struct Layout {
  int64_t lines, n, buffer_pitch, memory_pitch;

  Layout(const AxisShape& shape, const Tile& tile) {
    if (shape.inner == 1) {
      *this = {tile.width, tile.length, RowPitch(shape.axis, tile.length), shape.axis};
    } else {
      *this = {tile.length, tile.width, tile.width, shape.inner};
    }
  }

  // Whether lines adjoin both in the buffer and in the full array. Then all lines are one run.
  JAXNORM_INLINE bool Adjoin() const { return buffer_pitch == n && memory_pitch == n; }

  // The distance in the buffer from one row to the next, where a tile has `length` elements of each row.
  JAXNORM_INLINE static int64_t RowPitch(int64_t axis, int64_t length) {
    return axis <= kShortestRow ? length : (length + kMaxLanes - 1) & -kMaxLanes;
  }

 private:
  Layout(int64_t lines, int64_t n, int64_t buffer_pitch, int64_t memory_pitch)
      : lines(lines), n(n), buffer_pitch(buffer_pitch), memory_pitch(memory_pitch) {}
};

// Two buffers per thread, each for one gathered tile and the slack of a loop that runs to the end of a vector.
template <typename A, int kIndex>
A* ThreadBuffer() {
  alignas(64) static thread_local A buffer[kTileElements<A> + kMaxLanes];
  return buffer;
}

// Whether the operand has the full shape. A broadcast operand has fewer elements, so its last element lies earlier.
bool IsFull(const Operand& operand, const AxisShape& shape) {
  return operand.view.RowOffset(shape.rows() - 1) + (shape.axis - 1) * operand.view.axis_stride == shape.size() - 1;
}

// Calls f(source, step, out, n) for each run of n elements of the operand in the tile. The elements lie `step` (0 or 1)
// apart, and belong at buffer[out, out + n).
template <typename U, typename F>
JAXNORM_INLINE void ForEachRun(const Operand& operand, const AxisShape& shape, const Tile& tile, F f) {
  const Broadcast& view = operand.view;
  const Layout layout(shape, tile);
  const U* data = static_cast<const U*>(operand.data) + tile.start * view.axis_stride;
  if (shape.inner == 1) {
    const int64_t last = view.ndim - 1;
    if (layout.Adjoin() && last == 0 && view.axis_stride == 1 && view.stride[last] == layout.n) {
      f(data + view.RowOffset(tile.row), 1, 0, layout.lines * layout.n);
      return;
    }
    for (int64_t line = 0; line < layout.lines; ++line) {
      f(data + view.RowOffset(tile.row + line), view.axis_stride, line * layout.buffer_pitch, layout.n);
    }
    return;
  }
  // Neighbouring rows are evenly spaced as long as only the last digit of their index moves.
  const int64_t last = view.ndim - 1;
  for (int64_t done = 0, n; done < layout.n; done += n) {
    const int64_t row = tile.row + done;
    n = std::min(layout.n - done, view.size[last] - row % view.size[last]);
    const U* source = data + view.RowOffset(row);
    if (layout.Adjoin() && n == layout.n && view.stride[last] == 1 && view.axis_stride == n) {
      f(source, 1, 0, layout.lines * n);
      return;
    }
    for (int64_t line = 0; line < layout.lines; ++line) {
      f(source + line * view.axis_stride, view.stride[last], line * layout.buffer_pitch + done, n);
    }
  }
}

template <typename T>
JAXNORM_SIMD_CLONES void Gather(const Operand& operand, const AxisShape& shape, const Tile& tile, Acc<T>* buffer) {
  ForEachRun<T>(operand, shape, tile, [=](const T* source, int64_t step, int64_t out, int64_t n) JAXNORM_INLINE_LAMBDA {
    if (step == 0) {
      std::fill_n(buffer + out, n, ToAcc(*source));
    } else {
      ToAccRun(source, buffer + out, n);
    }
  });
}

template <typename T>
JAXNORM_SIMD_CLONES void Scatter(const Acc<T>* buffer, const AxisShape& shape, const Tile& tile, T* out) {
  const Layout layout(shape, tile);
  if (layout.Adjoin()) return FromAccRun<T>(buffer, out + tile.offset, layout.lines * layout.n);
  for (int64_t line = 0; line < layout.lines; ++line) {
    FromAccRun<T>(buffer + line * layout.buffer_pitch, out + tile.offset + line * layout.memory_pitch, layout.n);
  }
}

// buffer[i] = value where the mask is off. A select, so that the old value does not matter.
template <typename A>
JAXNORM_SIMD_CLONES void FillMasked(const Operand& where, const AxisShape& shape, const Tile& tile, A value,
                                    A* buffer) {
  const auto fill = [=](const uint8_t* keep, int64_t step, int64_t out, int64_t n) JAXNORM_INLINE_LAMBDA {
    if (step == 0) {
      if (!*keep) std::fill_n(buffer + out, n, value);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) buffer[out + i] = keep[i] ? buffer[out + i] : value;
    }
  };
  ForEachRun<uint8_t>(where, shape, tile, fill);
}

template <typename A>
JAXNORM_SIMD_CLONES void Multiply(const A* by, A* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) z[i] *= by[i];
}

// z[i] = factor * z[i] + bias[i]; no bias is a null pointer.
template <typename A>
JAXNORM_SIMD_CLONES void MultiplyAdd(A factor, const A* bias, A* z, int64_t n) {
  if (bias) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) z[i] = factor * z[i] + bias[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) z[i] *= factor;
  }
}

// ---- Loops ----
//
// Max and Sum reduce f over the axis into one statistic per row; ForEach only calls f. f(at, row) gets the element's
// offset from the tile's first element in memory, and the index of its statistic. A vector of the type that is read has
// kStep elements.

// Loops over kRows contiguous rows at once. The steps of one row wait for one another, so several short rows take less
// time when they are interleaved. The loops run over whole vectors, since remainder loops would dominate short rows: f
// is called for up to kStep - 1 elements beyond each row. There, results are dropped, and stores must do no harm.
// Elements beyond a row are stored before the elements of the next row.
template <int kRows>
class RowLoops {
 public:
  // Rows lie `pitch` elements apart.
  RowLoops(const Tile& tile, int64_t pitch) : n_(tile.length), pitch_(pitch) {}

  template <int64_t kStep, typename A, typename F>
  JAXNORM_INLINE void Max(A* max, F f) const {
    Reduce<kStep>(-kInfinity<A>, f, [](A x, A m) JAXNORM_INLINE_LAMBDA { return x > m ? x : m; }, max);
  }

  template <int64_t kStep, typename A, typename F>
  JAXNORM_INLINE void Sum(A* sum, F f) const {
    Reduce<kStep>(A{0}, f, [](A x, A s) JAXNORM_INLINE_LAMBDA { return x + s; }, sum);
  }

  template <int64_t kStep, typename F>
  JAXNORM_INLINE void ForEach(F f) const {
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      for (int64_t start = 0; start < n_; start += kStep) {
        const int64_t at = row * pitch_ + start;
#pragma omp simd
        for (int64_t i = 0; i < kStep; ++i) f(at + i, row);
      }
    }
  }

  // Calls f(row) for every statistic.
  template <typename F>
  JAXNORM_INLINE void ForEachRow(F f) const {
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) f(row);
  }

  template <typename A>
  JAXNORM_INLINE void Load(const A* from, A* stat) const {
    std::copy_n(from, kRows, stat);
  }

  // f reads statistics from a copy, because a store through a pointer might change the array.
  template <typename A>
  struct Copy {
    A values[kRows];
    JAXNORM_INLINE A operator[](int64_t row) const { return values[row]; }
  };
  template <typename A>
  JAXNORM_INLINE Copy<A> View(const A* stat) const {
    Copy<A> copy;
    ForEachRow([&](int64_t row) JAXNORM_INLINE_LAMBDA { copy.values[row] = stat[row]; });
    return copy;
  }

 private:
  // Steps of a block. Each block is summed by itself before it joins the total, so that rounding errors grow with the
  // number of blocks, not of steps.
  static constexpr int64_t kBlockSteps = 32;

  // Combines f of all elements of each row, with `identity` in place of elements beyond the row. `lanes` and `totals`
  // have one element per vector lane, and the compiler keeps them in registers.
  template <int64_t kStep, typename A, typename F, typename Combine>
  JAXNORM_INLINE void Reduce(A identity, F f, Combine combine, A* result) const {
    A lanes[kRows][kStep], totals[kRows][kStep];
    for (int row = 0; row < kRows; ++row) {
#pragma omp simd
      for (int64_t i = 0; i < kStep; ++i) lanes[row][i] = totals[row][i] = identity;
    }
    const int64_t last = (n_ - 1) & -kStep;
    for (int64_t block = 0; block < last; block += kBlockSteps * kStep) {
      const int64_t stop = std::min(block + kBlockSteps * kStep, last);
      for (int64_t start = block; start < stop; start += kStep) {
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const int64_t at = row * pitch_ + start;
#pragma omp simd
          for (int64_t i = 0; i < kStep; ++i) lanes[row][i] = combine(f(at + i, row), lanes[row][i]);
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
#pragma omp simd
        for (int64_t i = 0; i < kStep; ++i) {
          totals[row][i] = combine(lanes[row][i], totals[row][i]);
          lanes[row][i] = identity;
        }
      }
    }
    const int32_t valid = static_cast<int32_t>(n_ - last);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const int64_t at = row * pitch_ + last;
#pragma omp simd
      for (int32_t i = 0; i < kStep; ++i) {
        const A x = f(at + i, row);
        lanes[row][i] = combine(i < valid ? x : identity, totals[row][i]);
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      for (int64_t half = kStep / 2; half > 0; half /= 2) {
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) lanes[row][i] = combine(lanes[row][half + i], lanes[row][i]);
      }
      result[row] = lanes[row][0];
    }
  }

  int64_t n_, pitch_;
};

// Loops across neighbouring rows; statistics are arrays. Lines so short that they would leave vectors empty are joined
// to longer lines where they adjoin in memory. A joined line has several copies of each row's statistic, which are
// merged at the end.
class ColumnLoops {
 public:
  // Lines of the tile lie `pitch` elements apart.
  ColumnLoops(const Tile& tile, int64_t pitch) : width_(tile.width), n_(tile.width), pitch_(pitch) {
    const int64_t size = tile.length * width_;
    if (width_ == pitch && width_ < kNarrow) {
      n_ = std::min(size, kNarrowLine / width_ / 16 * 16 * width_);
      pitch_ = n_;
    }
    lines_ = (size + n_ - 1) / n_;
    last_n_ = size - (lines_ - 1) * n_;
  }

  template <int64_t kStep, typename A, typename F>
  JAXNORM_INLINE void Max(A* max, F f) const {
    const auto take = [=](int64_t row, A x) JAXNORM_INLINE_LAMBDA { max[row] = x > max[row] ? x : max[row]; };
    for (int64_t row = 0; row < n_; ++row) max[row] = -kInfinity<A>;
    ForEach<kStep>([=](int64_t at, int64_t row) JAXNORM_INLINE_LAMBDA { take(row, f(at, row)); });
    MergeCopies(max, take);
  }

  template <int64_t kStep, typename A, typename F>
  JAXNORM_INLINE void Sum(A* sum, F f) const {
    const auto take = [=](int64_t row, A x) JAXNORM_INLINE_LAMBDA { sum[row] += x; };
    for (int64_t row = 0; row < n_; ++row) sum[row] = 0;
    ForEach<kStep>([=](int64_t at, int64_t row) JAXNORM_INLINE_LAMBDA { take(row, f(at, row)); });
    MergeCopies(sum, take);
  }

  template <int64_t kStep, typename F>
  JAXNORM_INLINE void ForEach(F f) const {
    for (int64_t line = 0; line < lines_; ++line) {
      const int64_t n = line + 1 < lines_ ? n_ : last_n_;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) f(line * pitch_ + i, i);
    }
  }

  template <typename F>
  JAXNORM_INLINE void ForEachRow(F f) const {
#pragma omp simd
    for (int64_t row = 0; row < n_; ++row) f(row);
  }

  template <typename A>
  JAXNORM_INLINE void Load(const A* from, A* stat) const {
    for (int64_t i = 0; i < width_; ++i) stat[i] = from[i];
    MakeCopies(stat);
  }

  template <typename A>
  JAXNORM_INLINE const A* View(const A* stat) const {
    return stat;
  }

 private:
  static constexpr int64_t kNarrow = 32, kNarrowLine = 512;

  template <typename A, typename Take>
  JAXNORM_INLINE void MergeCopies(A* stat, Take take) const {
    for (int64_t copy = width_; copy < n_; copy += width_) {
      for (int64_t i = 0; i < width_; ++i) take(i, stat[copy + i]);
    }
    MakeCopies(stat);
  }

  template <typename A>
  JAXNORM_INLINE void MakeCopies(A* stat) const {
    for (int64_t copy = width_; copy < n_; ++copy) stat[copy] = stat[copy - width_];
  }

  int64_t width_, n_, pitch_, lines_, last_n_;
};

// Loops over rows so short that vectors along a row would be mostly empty. Vector code runs across the rows, as in
// ColumnLoops, but the elements of a row are neighbours. With a constant length (kLength > 0) for which the compiler
// has permutations, it loads vectors of several rows; with kLength == 0, it loads element by element.
template <int kLength>
class ShortRowLoops {
 public:
  ShortRowLoops(const Tile& tile, int64_t) : rows_(tile.width), length_(tile.length) {}

  template <int64_t kStep, typename A, typename F>
  JAXNORM_INLINE void Max(A* max, F f) const {
    Reduce(-kInfinity<A>, max, f, [](A x, A m) JAXNORM_INLINE_LAMBDA { return x > m ? x : m; });
  }

  template <int64_t kStep, typename A, typename F>
  JAXNORM_INLINE void Sum(A* sum, F f) const {
    Reduce(A{0}, sum, f, [](A x, A s) JAXNORM_INLINE_LAMBDA { return x + s; });
  }

  template <int64_t kStep, typename F>
  JAXNORM_INLINE void ForEach(F f) const {
    if constexpr (kLength > 0) {
#pragma omp simd
      for (int64_t row = 0; row < rows_; ++row) {
#pragma GCC unroll 8
        for (int i = 0; i < kLength; ++i) f(row * kLength + i, row);
      }
    } else {
      for (int64_t i = 0; i < length_; ++i) {
#pragma omp simd
        for (int64_t row = 0; row < rows_; ++row) f(row * length_ + i, row);
      }
    }
  }

  template <typename F>
  JAXNORM_INLINE void ForEachRow(F f) const {
#pragma omp simd
    for (int64_t row = 0; row < rows_; ++row) f(row);
  }

  template <typename A>
  JAXNORM_INLINE void Load(const A* from, A* stat) const {
    std::copy_n(from, rows_, stat);
  }

  template <typename A>
  JAXNORM_INLINE const A* View(const A* stat) const {
    return stat;
  }

 private:
  template <typename A, typename F, typename Combine>
  JAXNORM_INLINE void Reduce(A identity, A* result, F f, Combine combine) const {
    if constexpr (kLength > 0) {
#pragma omp simd
      for (int64_t row = 0; row < rows_; ++row) {
        A r = identity;
#pragma GCC unroll 8
        for (int i = 0; i < kLength; ++i) r = combine(f(row * kLength + i, row), r);
        result[row] = r;
      }
    } else {
      for (int64_t row = 0; row < rows_; ++row) result[row] = identity;
      ForEach<1>([=](int64_t at, int64_t row)
                     JAXNORM_INLINE_LAMBDA { result[row] = combine(f(at, row), result[row]); });
    }
  }

  int64_t rows_, length_;
};

// ---- Cores ----
//
// A core does `steps` of one tile. Its statistics are kStats arrays of the tile's width, one after the other.

enum Steps { kWhole, kStatistics, kResults };

// z is x, or factor * x if kScaled. Statistics: the maximum m of z, and the sum s of e^(z - m).
template <typename S, bool kScaled>
struct FwdCore {
  using A = Acc<S>;
  static constexpr int kStats = 2;
  static constexpr int kRowsTogether = 4;
  static constexpr int64_t kStep = kLanes<S>;
  const S* x;
  S* y;
  A factor;
  bool log;

  template <typename Loops>
  JAXNORM_INLINE void Run(const Tile& tile, int64_t pitch, Steps steps, A* stats) const {
    const Loops loops(tile, pitch);
    const S* x_tile = x + tile.offset;
    S* y_tile = y + tile.offset;
    // min(product, infinity) changes nothing, but the compiler does not know that the variable is infinity. The minimum
    // keeps the compiler from fusing the product with the subtraction of the maximum. The maximum is a rounded product:
    // its difference from an exact product would be large for a huge logit.
    A infinity = kInfinity<A>;
    asm("" : "+m"(infinity));
    const auto z = [=, *this](int64_t at) JAXNORM_INLINE_LAMBDA {
      const A element = ToAcc(x_tile[at]);
      if constexpr (!kScaled) return element;
      const A product = element * factor;
      return product > infinity ? infinity : product;
    };
    A max[kMaxWidth<A>], sum[kMaxWidth<A>];
    if (steps == kResults) {
      loops.Load(stats, max);
      loops.Load(stats + tile.width, sum);
    } else {
      A shift[kMaxWidth<A>];
      loops.template Max<kStep>(max, [=](int64_t at, int64_t) JAXNORM_INLINE_LAMBDA { return z(at); });
      loops.ForEachRow([&](int64_t row) JAXNORM_INLINE_LAMBDA { shift[row] = FiniteShift(max[row]); });
      loops.template Sum<kStep>(sum, [=, m = loops.View(shift)](int64_t at, int64_t row)
                                         JAXNORM_INLINE_LAMBDA { return Exp(z(at) - m[row]); });
    }
    if (steps == kStatistics) {
      std::copy_n(max, tile.width, stats);
      std::copy_n(sum, tile.width, stats + tile.width);
    } else if (log) {
      loops.ForEachRow([&](int64_t row) JAXNORM_INLINE_LAMBDA { sum[row] = std::log(sum[row]); });
      loops.template ForEach<kStep>([=, m = loops.View(max), s = loops.View(sum)](int64_t at, int64_t row)
                                        JAXNORM_INLINE_LAMBDA { y_tile[at] = FromAcc<S>((z(at) - m[row]) - s[row]); });
    } else {
      // Computing the exponential again is as fast as keeping it in a buffer, and faster in rows of some thousands.
      loops.ForEachRow([&](int64_t row) JAXNORM_INLINE_LAMBDA { sum[row] = 1 / sum[row]; });
      loops.template ForEach<kStep>(
          [=, m = loops.View(max), s = loops.View(sum)](int64_t at, int64_t row)
              JAXNORM_INLINE_LAMBDA { y_tile[at] = FromAcc<S>(Exp(z(at) - m[row]) * s[row]); });
    }
  }

  JAXNORM_INLINE static void Merge(const A* from, A* into, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const A max = from[i] > into[i] ? from[i] : into[i], shift = FiniteShift(max);
      into[width + i] = into[width + i] * Exp(into[i] - shift) + from[width + i] * Exp(from[i] - shift);
      into[i] = max;
    }
  }

 private:
  // The number to subtract from z in a sum over a part of the row. In a part that is all -inf, -inf - (-inf) would be
  // NaN, which would spread to the whole row. If the whole row is -inf, z - max still makes the NaN that belongs there.
  JAXNORM_INLINE static A FiniteShift(A max) { return max == -kInfinity<A> ? A{0} : max; }
};

// Statistic: the sum that the form asks for.
template <typename S, SoftmaxForm kForm>
struct BwdCore {
  using A = Acc<S>;
  static constexpr int kStats = 1;
  static constexpr int kRowsTogether = 1;  // the steps are short, and memory traffic takes the time
  static constexpr int64_t kStep = kLanes<S>;
  const S* y;
  const S* t;
  S* out;
  A factor;

  template <typename Loops>
  JAXNORM_INLINE void Run(const Tile& tile, int64_t pitch, Steps steps, A* stats) const {
    const Loops loops(tile, pitch);
    const S* y_tile = y + tile.offset;
    const S* t_tile = t + tile.offset;
    S* out_tile = out + tile.offset;
    const A factor = this->factor;
    A sum[kMaxWidth<A>];
    if (steps == kResults) {
      loops.Load(stats, sum);
    } else {
      loops.template Sum<kStep>(
          sum, [=](int64_t at, int64_t) JAXNORM_INLINE_LAMBDA { return Term(ToAcc(y_tile[at]), ToAcc(t_tile[at])); });
    }
    if (steps == kStatistics) {
      std::copy_n(sum, tile.width, stats);
      return;
    }
    loops.template ForEach<kStep>([=, s = loops.View(sum)](int64_t at, int64_t row) JAXNORM_INLINE_LAMBDA {
      out_tile[at] = FromAcc<S>(factor * Result(ToAcc(y_tile[at]), ToAcc(t_tile[at]), s[row]));
    });
  }

  JAXNORM_INLINE static void Merge(const A* from, A* into, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) into[i] += from[i];
  }

 private:
  JAXNORM_INLINE static A Term(A y, A t) {
    if constexpr (kForm == SoftmaxForm::kSoftmax) return y * t;
    if constexpr (kForm == SoftmaxForm::kLogJvp) return Exp(y) * t;
    return t;
  }

  JAXNORM_INLINE static A Result(A y, A t, A sum) {
    if constexpr (kForm == SoftmaxForm::kSoftmax) return y * (t - sum);
    if constexpr (kForm == SoftmaxForm::kLogJvp) return t - sum;
    return t - Exp(y) * sum;
  }
};

// Runs the contiguous rows of a tile, which lie `pitch` apart. The tile has one row unless `steps` is kWhole.
template <typename Core>
JAXNORM_SIMD_CLONES void RunRows(const Core& core, const Tile& tile, int64_t pitch, Steps steps,
                                 typename Core::A* stats) {
  constexpr int kTogether = Core::kRowsTogether;
  const auto run = [&]<int kRows>(int64_t row, Steps steps) JAXNORM_INLINE_LAMBDA {
    const Tile rows{0, kRows, tile.start, tile.length, tile.offset + row * pitch};
    core.template Run<RowLoops<kRows>>(rows, pitch, steps, stats);
  };
  int64_t row = 0;
  if constexpr (kTogether > 1) {
    if (tile.length <= kShortRow) {
      for (; row + kTogether <= tile.width; row += kTogether) run.template operator()<kTogether>(row, kWhole);
    }
  }
  for (; row < tile.width; ++row) run.template operator()<1>(row, steps);
}

template <typename Loops, typename Core>
JAXNORM_SIMD_CLONES void RunTile(const Core& core, const Tile& tile, int64_t pitch, Steps steps,
                                 typename Core::A* stats) {
  core.template Run<Loops>(tile, pitch, steps, stats);
}

template <typename Core>
JAXNORM_SIMD_CLONES void MergeStatistics(const typename Core::A* from, typename Core::A* into, int64_t width) {
  Core::Merge(from, into, width);
}

template <typename Core>
void Run(const Core& core, bool along_rows, const Tile& tile, int64_t pitch, Steps steps, typename Core::A* stats) {
  if (along_rows) {
    RunRows(core, tile, pitch, steps, stats);
  } else {
    RunTile<ColumnLoops>(core, tile, pitch, steps, stats);
  }
}

// Rows up to kShortestRow, which are always gathered.
template <typename Core>
void RunShortRows(const Core& core, const Tile& tile, int64_t pitch, Steps steps, typename Core::A* stats) {
  const auto run = [&]<int kLength>() { RunTile<ShortRowLoops<kLength>>(core, tile, pitch, steps, stats); };
  switch (pitch) {
    case 2:
      return run.template operator()<2>();
    case 3:
      return run.template operator()<3>();
    case 4:
      return run.template operator()<4>();
    case 8:
      return run.template operator()<8>();
    default:
      return run.template operator()<0>();
  }
}

// ---- Kernels ----
//
// A kernel runs a core in place, or gathers a tile, runs a core in the buffer, and scatters the results. float16 is
// always gathered: its conversions are fast in bulk only (see ToAccRun).

// The interface of kernels for RunTiles. Its functions are virtual, so that RunTiles is compiled once per A.
template <typename A>
struct Kernel {
  AxisShape shape;
  int64_t column_tile;  // elements of a tile across rows
  int64_t stats;        // statistics of a row
  bool in_place;
  int64_t step;  // elements in a vector: in place, loops overrun rows to whole vectors

  bool along_rows() const { return shape.inner == 1; }
  bool short_rows() const { return along_rows() && shape.axis <= kShortestRow; }
  virtual ~Kernel() = default;
  virtual void RunInPlace(const Tile& tile, Steps steps, A* stats) const = 0;
  virtual void RunGathered(const Tile& tile, Steps steps, A* stats) const = 0;
  virtual void Merge(const A* from, A* into, int64_t width) const = 0;

 protected:
  // Runs a gathered tile, for which the core's pointers are buffers.
  template <typename Core>
  void RunBuffer(const Core& core, const Tile& tile, Steps steps, A* stats) const {
    const Tile gathered{0, tile.width, 0, tile.length, 0};
    const int64_t pitch = Layout(shape, tile).buffer_pitch;
    if (short_rows()) {
      RunShortRows(core, gathered, pitch, steps, stats);
    } else {
      Run(core, along_rows(), gathered, pitch, steps, stats);
    }
  }
};

template <typename T>
struct FwdKernel final : Kernel<Acc<T>> {
  using A = Acc<T>;
  static constexpr bool kMayBeInPlace = !std::is_same_v<T, F16>;
  const SoftmaxFwdArgs& args;

  explicit FwdKernel(const SoftmaxFwdArgs& args) : args(args) {
    this->shape = args.shape;
    this->column_tile = kTileElements<A>;
    this->stats = FwdCore<A, false>::kStats;
    this->in_place =
        kMayBeInPlace && !this->short_rows() && !args.where && !args.scale && !args.bias && IsFull(args.x, args.shape);
    this->step = kLanes<T>;
  }

  void RunInPlace(const Tile& tile, Steps steps, A* stats) const override {
    if constexpr (kMayBeInPlace) {
      const auto run = [&]<bool kScaled>() {
        const FwdCore<T, kScaled> core{static_cast<const T*>(args.x.data), static_cast<T*>(args.y),
                                       static_cast<A>(args.factor), args.log};
        Run(core, this->along_rows(), tile, Layout(args.shape, tile).memory_pitch, steps, stats);
      };
      args.factor == 1 ? run.template operator()<false>() : run.template operator()<true>();
    }
  }

  void RunGathered(const Tile& tile, Steps steps, A* stats) const override {
    A* z = ThreadBuffer<A, 0>();
    A* operand = ThreadBuffer<A, 1>();
    const Layout layout(args.shape, tile);
    const int64_t size = layout.lines * layout.buffer_pitch;
    Gather<T>(args.x, args.shape, tile, z);
    if (args.scale) {
      Gather<T>(args.scale, args.shape, tile, operand);
      Multiply(operand, z, size);
    }
    if (args.bias) Gather<T>(args.bias, args.shape, tile, operand);
    if (args.bias || args.factor != 1) MultiplyAdd(static_cast<A>(args.factor), args.bias ? operand : nullptr, z, size);
    if (args.where) FillMasked(args.where, args.shape, tile, -kInfinity<A>, z);
    this->RunBuffer(FwdCore<A, false>{z, z, A{1}, args.log}, tile, steps, stats);
    if (steps == kStatistics) return;
    // Needed for softmax too: a NaN elsewhere in the row has spread to the masked elements.
    if (args.where) FillMasked(args.where, args.shape, tile, args.log ? -kInfinity<A> : A{0}, z);
    Scatter<T>(z, args.shape, tile, static_cast<T*>(args.y));
  }

  void Merge(const A* from, A* into, int64_t width) const override {
    MergeStatistics<FwdCore<A, false>>(from, into, width);
  }
};

template <typename T, SoftmaxForm kForm>
struct BwdKernel final : Kernel<Acc<T>> {
  using A = Acc<T>;
  // Forward-mode derivatives of log_softmax are too rare to compile for every type.
  static constexpr bool kMayBeInPlace =
      !std::is_same_v<T, F16> && (std::is_same_v<T, A> || kForm != SoftmaxForm::kLogJvp);
  const SoftmaxBwdArgs& args;

  explicit BwdKernel(const SoftmaxBwdArgs& args) : args(args) {
    this->shape = args.shape;
    this->stats = BwdCore<A, kForm>::kStats;
    this->in_place =
        kMayBeInPlace && !this->short_rows() && !args.where && IsFull(args.y, args.shape) && IsFull(args.t, args.shape);
    this->column_tile = this->in_place ? kSmallTileElements<A> : kTileElements<A>;
    this->step = kLanes<T>;
  }

  void RunInPlace(const Tile& tile, Steps steps, A* stats) const override {
    if constexpr (kMayBeInPlace) {
      const BwdCore<T, kForm> core{static_cast<const T*>(args.y.data), static_cast<const T*>(args.t.data),
                                   static_cast<T*>(args.out), static_cast<A>(args.factor)};
      Run(core, this->along_rows(), tile, Layout(args.shape, tile).memory_pitch, steps, stats);
    }
  }

  void RunGathered(const Tile& tile, Steps steps, A* stats) const override {
    A* y = ThreadBuffer<A, 0>();
    A* t = ThreadBuffer<A, 1>();
    if (kForm != SoftmaxForm::kLogVjp || steps != kStatistics) {  // the statistic of kLogVjp is a sum of t alone
      Gather<T>(args.y, args.shape, tile, y);
      if (args.where) FillMasked(args.where, args.shape, tile, A{0}, y);
    }
    Gather<T>(args.t, args.shape, tile, t);
    if (args.where) FillMasked(args.where, args.shape, tile, A{0}, t);
    this->RunBuffer(BwdCore<A, kForm>{y, t, y, static_cast<A>(args.factor)}, tile, steps, stats);
    if (steps == kStatistics) return;
    if (args.where) FillMasked(args.where, args.shape, tile, A{0}, y);
    Scatter<T>(y, args.shape, tile, static_cast<T*>(args.out));
  }

  void Merge(const A* from, A* into, int64_t width) const override {
    MergeStatistics<BwdCore<A, SoftmaxForm::kSoftmax>>(from, into, width);  // a sum in every form
  }
};

// ---- Execution ----

// Runs groups [begin, end) of one tile each. In place, a row overruns into the next rows, which are written later. Rows
// that would overrun the last row of the range, where another thread may be at work, are gathered.
template <typename A>
void RunWhole(const Kernel<A>& kernel, const Grid& grid, int64_t begin, int64_t end) {
  const int64_t axis = grid.shape.axis;
  if (!kernel.along_rows()) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = grid.tile(i, 0);
      kernel.in_place ? kernel.RunInPlace(tile, kWhole, nullptr) : kernel.RunGathered(tile, kWhole, nullptr);
    }
    return;
  }
  if (kernel.in_place) {
    const int64_t overrun = -axis & (kernel.step - 1);
    Tile rows = grid.tile(begin, 0);
    rows.width = std::max<int64_t>(0, end - begin - (overrun + axis - 1) / axis);
    kernel.RunInPlace(rows, kWhole, nullptr);
    begin += rows.width;
  }
  // Short rows are gathered several at a time, as many as fit the first-level cache.
  const int64_t together = std::clamp<int64_t>(kGatheredElements / Layout::RowPitch(axis, axis), 1, kMaxWidth<A>);
  for (; begin < end; begin += together) {
    Tile rows = grid.tile(begin, 0);
    rows.width = std::min(together, end - begin);
    kernel.RunGathered(rows, kWhole, nullptr);
  }
}

// Runs a chunk of a group. A row must not overrun its chunk; a chunk where it would is gathered.
template <typename A>
void RunChunk(const Kernel<A>& kernel, const Tile& tile, Steps steps, A* stats) {
  const bool in_place = kernel.in_place && (!kernel.along_rows() || tile.length % kernel.step == 0);
  in_place ? kernel.RunInPlace(tile, steps, stats) : kernel.RunGathered(tile, steps, stats);
}

// The shape alone decides how the work is cut and in which order statistics are merged, and so the results: the number
// of threads and their timing do not matter.
template <typename A>
Error RunTiles(ffi::ThreadPool& pool, const Kernel<A>& kernel) {
  const Grid grid = MakeGrid<A>(kernel.shape, kernel.column_tile, kernel.in_place);
  if (grid.chunks == 1) {
    ParallelFor(pool, grid.groups, grid.width * grid.chunk,
                [&](int64_t begin, int64_t end) { RunWhole(kernel, grid, begin, end); });
    return Error::Success();
  }

  const int64_t stride = kernel.stats * grid.width, units = grid.groups * grid.parts;
  std::vector<A> stats(units * stride);
  const auto for_each = [&](int64_t n, int64_t elements, const auto& body) {
    ParallelFor(pool, n, elements, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  };
  const auto statistics = [&](int64_t unit) {
    A* total = &stats[unit * stride];
    A chunk[kMaxStats * kMaxWidth<A>];
    for (int64_t i = grid.first(unit); i < grid.last(unit); ++i) {
      const Tile tile = grid.tile(unit / grid.parts, i);
      const bool first = i == grid.first(unit);
      RunChunk(kernel, tile, kStatistics, first ? total : chunk);
      if (!first) kernel.Merge(chunk, total, tile.width);
    }
  };
  const auto results = [&](int64_t unit) {
    A* total = &stats[unit / grid.parts * grid.parts * stride];
    for (int64_t i = grid.first(unit); i < grid.last(unit); ++i) {
      RunChunk(kernel, grid.tile(unit / grid.parts, i), kResults, total);
    }
  };
  const int64_t part_elements = grid.width * grid.chunk * grid.part;
  if (grid.parts == 1) {
    for_each(units, part_elements, [&](int64_t unit) {
      statistics(unit);
      results(unit);
    });
    return Error::Success();
  }
  // A group that is too large for the cache is spread over the threads, step by step.
  for_each(units, part_elements, statistics);
  for_each(grid.groups, grid.parts * stride, [&](int64_t group) {
    A* total = &stats[group * grid.parts * stride];
    for (int64_t i = 1; i < grid.parts; ++i) kernel.Merge(total + i * stride, total, grid.tile(group, 0).width);
  });
  for_each(units, part_elements, results);
  return Error::Success();
}

// ---- Handlers ----

Error SoftmaxFwd(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                 int64_t axis, double factor, bool log, int64_t operands) {
  SoftmaxFwdArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseSoftmaxFwd(x, rest, *y, axis, factor, log, operands, &args));
  if (args.shape.size() == 0) return Error::Success();
  return DispatchFloat(args.dtype, [&]<typename T>(T) { return RunTiles<Acc<T>>(pool, FwdKernel<T>(args)); });
}

Error SoftmaxBwd(ffi::ThreadPool pool, ffi::AnyBuffer y, ffi::AnyBuffer t, ffi::RemainingArgs rest,
                 ffi::Result<ffi::AnyBuffer> out, int64_t axis, double factor, int64_t form) {
  SoftmaxBwdArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseSoftmaxBwd(y, t, rest, *out, axis, factor, form, &args));
  if (args.shape.size() == 0) return Error::Success();
  return DispatchFloat(args.dtype, [&]<typename T>(T) {
    switch (args.form) {
      case SoftmaxForm::kSoftmax:
        return RunTiles<Acc<T>>(pool, BwdKernel<T, SoftmaxForm::kSoftmax>(args));
      case SoftmaxForm::kLogJvp:
        return RunTiles<Acc<T>>(pool, BwdKernel<T, SoftmaxForm::kLogJvp>(args));
      default:
        return RunTiles<Acc<T>>(pool, BwdKernel<T, SoftmaxForm::kLogVjp>(args));
    }
  });
}

}  // namespace

JAXNORM_REGISTER(softmax_fwd, SoftmaxFwd,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int64_t>("axis")
                     .Attr<double>("factor")
                     .Attr<bool>("log")
                     .Attr<int64_t>("operands"));

JAXNORM_REGISTER(softmax_bwd, SoftmaxBwd,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int64_t>("axis")
                     .Attr<double>("factor")
                     .Attr<int64_t>("form"));

}  // namespace jaxnorm
