// Cross-entropy of softmax along any axis against integer labels, and its linear map.
//
// Along the last axis, a row is processed in chunks that stay in the first-level cache. The forward reads a chunk
// twice, for the maximum and for the sum of exponentials, and merges both into the maximum and sum of the row so far.
// Probabilities live in registers only. float16, bfloat16 and masked rows go through a buffer of float32 (float64). The
// forward transposes short rows, several at a time, so that vectors go across rows: adding up the lanes of a vector
// takes as long as 100 elements. The backward processes many short rows at a time in their own layout (short_rows.h).
// Along other axes rows lie side by side, and vectors go across rows anyway: a block of rows is processed line by line.
//
// The maximum may lose a NaN: e^(NaN - max) is NaN, so the sum is NaN, and with the sum the whole row.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cross_entropy_call.h"
#include "parallel.h"
#include "short_rows.h"
#include "simd.h"

namespace jaxnorm {
namespace {

inline constexpr int64_t kChunk = 4096;

// Sums of the forward over a row: the maximum m, sum(e^(x - m)), and for smoothing sum(x - m) and the number of
// classes.
template <typename A>
struct RowSums {
  A max = -kInfinity<A>, sum = 0, deviation = 0, count = 0;
};

// The number to subtract from x in a part of the row. In a part that is all -inf, -inf - (-inf) would be NaN.
template <typename A>
JAXNORM_INLINE A FiniteShift(A max) {
  return max == -kInfinity<A> ? A{0} : max;
}

// The chunk in the type of the arithmetic, with `fill` where the mask is off. It is x itself if there is nothing to
// convert or to mask, else `buffer`.
template <typename T>
JAXNORM_INLINE const Acc<T>* LoadChunk(const T* x, const uint8_t* keep, int64_t n, Acc<T> fill, Acc<T>* buffer) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    if (!keep) return x;
  }
  ToAccRun(x, buffer, n);
  if (keep) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) buffer[i] = keep[i] ? buffer[i] : fill;
  }
  return buffer;
}

// Combines f(i) over i < n, with whole vectors of partial results.
template <typename A, typename F, typename Combine>
JAXNORM_INLINE A Reduce(int64_t n, A identity, F f, Combine combine) {
  constexpr int64_t kStep = kLanes<A>;
  A lanes[kStep];
  for (int64_t i = 0; i < kStep; ++i) lanes[i] = identity;
  int64_t at = 0;
  for (; at + kStep <= n; at += kStep) {
#pragma omp simd
    for (int64_t i = 0; i < kStep; ++i) lanes[i] = combine(f(at + i), lanes[i]);
  }
  for (int64_t i = 0; at + i < n; ++i) lanes[i] = combine(f(at + i), lanes[i]);
  for (int64_t half = kStep / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] = combine(lanes[half + i], lanes[i]);
  }
  return lanes[0];
}

template <typename A, typename F>
JAXNORM_INLINE A Sum(int64_t n, F f) {
  return Reduce(n, A{0}, f, [](A x, A s) JAXNORM_INLINE_LAMBDA { return x + s; });
}

template <typename T>
JAXNORM_SIMD_CLONES void SumRow(const T* x, const uint8_t* keep, int64_t columns, bool smooth,
                                RowSums<Acc<T>>* result) {
  using A = Acc<T>;
  alignas(64) A buffer[kChunk];
  RowSums<A> row;
  for (int64_t start = 0; start < columns; start += kChunk) {
    const int64_t n = std::min(kChunk, columns - start);
    const uint8_t* kept = keep ? keep + start : nullptr;
    const A* z = LoadChunk(x + start, kept, n, -kInfinity<A>, buffer);
    const A chunk_max = Reduce(
        n, -kInfinity<A>, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return z[i]; },
        [](A v, A m) JAXNORM_INLINE_LAMBDA { return v > m ? v : m; });
    const A max = chunk_max > row.max ? chunk_max : row.max, shift = FiniteShift(max);
    row.sum =
        row.sum * Exp(row.max - shift) + Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return Exp(z[i] - shift); });
    if (smooth) {
      row.deviation += row.count * (FiniteShift(row.max) - shift);
      row.deviation +=
          Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return kept && !kept[i] ? A{0} : z[i] - shift; });
      row.count += static_cast<A>(
          kept ? Sum<float>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return kept[i] ? 1.0f : 0.0f; }) : n);
    }
    row.max = max;
  }
  *result = row;
}

inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kShortColumns = 128;

// SumRow for `rows` <= kTileRows rows of at most kShortColumns, with the logarithms of the sums.
template <typename T>
JAXNORM_SIMD_CLONES void SumShortRows(const T* x, int64_t rows, int64_t columns, bool smooth, RowSums<Acc<T>>* result,
                                      Acc<T>* log_sum) {
  using A = Acc<T>;
  alignas(64) A buffer[kTileRows * kShortColumns], tile[kShortColumns][kTileRows];
  const A* const z = LoadChunk(x, nullptr, rows * columns, A{0}, buffer);
  for (int64_t c = 0; c < columns; ++c) {
#pragma omp simd
    for (int64_t r = 0; r < kTileRows; ++r) tile[c][r] = z[(r < rows ? r : 0) * columns + c];
  }
  A max[kTileRows], shift[kTileRows], sum[kTileRows] = {}, deviation[kTileRows] = {};
  for (int64_t r = 0; r < kTileRows; ++r) max[r] = -kInfinity<A>;
  for (int64_t c = 0; c < columns; ++c) {
#pragma omp simd
    for (int64_t r = 0; r < kTileRows; ++r) max[r] = tile[c][r] > max[r] ? tile[c][r] : max[r];
  }
#pragma omp simd
  for (int64_t r = 0; r < kTileRows; ++r) shift[r] = FiniteShift(max[r]);
  for (int64_t c = 0; c < columns; ++c) {
#pragma omp simd
    for (int64_t r = 0; r < kTileRows; ++r) sum[r] += Exp(tile[c][r] - shift[r]);
  }
  for (int64_t c = 0; smooth && c < columns; ++c) {
#pragma omp simd
    for (int64_t r = 0; r < kTileRows; ++r) deviation[r] += tile[c][r] - shift[r];
  }
#pragma omp simd
  for (int64_t r = 0; r < kTileRows; ++r) log_sum[r] = Log(sum[r]);
  for (int64_t r = 0; r < rows; ++r) result[r] = {max[r], sum[r], deviation[r], static_cast<A>(columns)};
}

// Lines that are processed together. A line has an element of each of up to kMaxWidth rows, which lie side by side. The
// lines stay in the second-level cache.
inline constexpr int64_t kBlockLines = 32;

// The sums of up to kMaxWidth rows.
template <typename A>
struct BlockSums {
  alignas(64) A max[kMaxWidth<A>], sum[kMaxWidth<A>], deviation[kMaxWidth<A>];
};

// SumRow for `rows` <= kMaxWidth rows that lie side by side. The elements of one class make a line; lines lie `pitch`
// elements apart.
template <typename T>
JAXNORM_SIMD_CLONES void SumBlock(const T* x, int64_t pitch, int64_t rows, int64_t columns, bool smooth,
                                  BlockSums<Acc<T>>* result) {
  using A = Acc<T>;
  constexpr bool kDirect = std::is_same_v<T, A>;
  alignas(64) static thread_local A buffer[kDirect ? 1 : kBlockLines * kMaxWidth<A>];
  alignas(64) A max[kMaxWidth<A>];
  A* next = result->max;
  A* sum = result->sum;
  A* deviation = result->deviation;
  for (int64_t r = 0; r < rows; ++r) next[r] = -kInfinity<A>;
  std::fill_n(sum, rows, A{0});
  std::fill_n(deviation, rows, A{0});
  for (int64_t start = 0; start < columns; start += kBlockLines) {
    const int64_t lines = std::min(kBlockLines, columns - start);
    std::copy_n(next, rows, max);
    for (int64_t c = 0; c < lines; ++c) {
      const A* z = LoadChunk(x + (start + c) * pitch, nullptr, rows, A{0}, buffer + (kDirect ? 0 : c * kMaxWidth<A>));
#pragma omp simd
      for (int64_t r = 0; r < rows; ++r) next[r] = z[r] > next[r] ? z[r] : next[r];
    }
    const A before = static_cast<A>(start);
#pragma omp simd
    for (int64_t r = 0; r < rows; ++r) {
      const A shift = FiniteShift(next[r]);
      deviation[r] += before * (FiniteShift(max[r]) - shift);
      sum[r] *= Exp(max[r] - shift);
    }
    for (int64_t c = 0; c < lines; ++c) {
      const A* z = buffer + c * kMaxWidth<A>;
      if constexpr (kDirect) z = x + (start + c) * pitch;
#pragma omp simd
      for (int64_t r = 0; r < rows; ++r) sum[r] += Exp(z[r] - FiniteShift(next[r]));
      if (!smooth) continue;
#pragma omp simd
      for (int64_t r = 0; r < rows; ++r) deviation[r] += z[r] - FiniteShift(next[r]);
    }
  }
}

// The labels of up to kMaxWidth rows. `valid`: the label is a class. `x_label`: the logit of this class.
template <typename A>
struct BlockLabels {
  alignas(64) A x_label[kMaxWidth<A>];
  alignas(64) int32_t labels[kMaxWidth<A>], valid[kMaxWidth<A>];
};

// FinishRow for a block of rows without a mask.
template <typename A>
JAXNORM_SIMD_CLONES void FinishBlock(const BlockSums<A>& sums, const BlockLabels<A>& block, int64_t rows,
                                     int64_t columns, A smoothing, A* lse, A* nll) {
  const A of_label = 1 - smoothing, of_class = smoothing / static_cast<A>(columns);
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) {
    const A shift = FiniteShift(sums.max[r]), log_sum = Log(sums.sum[r]);
    const A picked = (block.x_label[r] - shift) * of_label, spread = sums.deviation[r] * of_class;
    const A loss = log_sum - (smoothing < 1 ? picked : A{0}) - (smoothing != 0 ? spread : A{0});
    lse[r] = shift + log_sum;
    nll[r] = block.valid[r] != 0 ? loss : std::numeric_limits<A>::quiet_NaN();
  }
}

// The numbers of the rows for the backward. base = b * smoothing / number of classes.
template <typename A>
struct BlockNumbers : BlockLabels<A> {
  alignas(64) A lse[kMaxWidth<A>], a[kMaxWidth<A>], b[kMaxWidth<A>], base[kMaxWidth<A>];
};

// The results at the labels: a * e^(x - lse) - base - b_label * b.
template <typename A, typename T>
JAXNORM_INLINE void WriteLabels(const BlockNumbers<A>& block, int64_t rows, int64_t row_pitch, int64_t pitch, A b_label,
                                T* out) {
  alignas(64) A results[kMaxWidth<A>];
#pragma omp simd
  for (int64_t r = 0; r < rows; ++r) {
    results[r] = (block.a[r] * Exp(block.x_label[r] - block.lse[r]) - block.base[r]) - block.b[r] * b_label;
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (block.valid[r]) out[block.labels[r] * pitch + r * row_pitch] = FromAcc<T>(results[r]);
  }
}

// out = a * e^(x - lse) - base for a block of rows, with the results of WriteLabels at the labels; 0 for rows that are
// not valid.
template <typename T>
JAXNORM_SIMD_CLONES void WriteBlock(const T* x, int64_t pitch, int64_t rows, int64_t columns, Acc<T> b_label,
                                    const BlockNumbers<Acc<T>>& block, T* out) {
  using A = Acc<T>;
  constexpr bool kDirect = std::is_same_v<T, A>;
  alignas(64) A buffer[kMaxWidth<A>];
  for (int64_t c = 0; c < columns; ++c) {
    const A* z = LoadChunk(x + c * pitch, nullptr, rows, A{0}, buffer);
    A* results = buffer;
    if constexpr (kDirect) results = out + c * pitch;
#pragma omp simd
    for (int64_t r = 0; r < rows; ++r) {
      const A value = block.a[r] * Exp(z[r] - block.lse[r]) - block.base[r];
      results[r] = block.valid[r] ? value : A{0};
    }
    if constexpr (!kDirect) FromAccRun<T>(results, out + c * pitch, rows);
  }
  WriteLabels(block, rows, 1, pitch, b_label, out);
}

// out = a * e^(x - lse) - base, 0 where masked.
template <typename T>
JAXNORM_SIMD_CLONES void WriteRow(const T* x, const uint8_t* keep, int64_t columns, Acc<T> lse, Acc<T> a, Acc<T> base,
                                  T* out) {
  using A = Acc<T>;
  constexpr bool kDirect = std::is_same_v<T, A>;
  alignas(64) A buffer[kChunk];
  for (int64_t start = 0; start < columns; start += kChunk) {
    const int64_t n = std::min(kChunk, columns - start);
    const uint8_t* kept = keep ? keep + start : nullptr;
    const A* z = LoadChunk(x + start, kept, n, A{0}, buffer);
    A* results = buffer;
    if constexpr (kDirect) results = out + start;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) results[i] = a * Exp(z[i] - lse) - base;
    if (kept) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) results[i] = kept[i] ? results[i] : A{0};
    }
    if constexpr (!kDirect) FromAccRun<T>(results, out + start, n);
  }
}

template <typename U>
const U* RowOf(const Operand& operand, int64_t row) {
  return static_cast<const U*>(operand.data) + operand.view.RowOffset(row);
}

// A row of the mask. A mask with one entry for all classes keeps all of them (returns null) or no class (sets `none`).
const uint8_t* MaskOf(const CrossEntropyArgs& args, int64_t row, bool* none) {
  *none = false;
  if (!args.where) return nullptr;
  const uint8_t* keep = RowOf<uint8_t>(args.where, row);
  if (args.where.view.axis_stride != 0) return keep;
  *none = !*keep;
  return nullptr;
}

// Writes a row's results. log_sum is the logarithm of sums.sum.
template <typename T>
void FinishRow(const CrossEntropyArgs& args, int64_t row, const uint8_t* keep, const RowSums<Acc<T>>& sums,
               Acc<T> log_sum) {
  using A = Acc<T>;
  A& nll = static_cast<A*>(args.nll)[row];
  const A shift = FiniteShift(sums.max);
  static_cast<A*>(args.lse_out)[row] = shift + log_sum;
  const int32_t label = *RowOf<int32_t>(args.labels, row);
  if (label < 0 || label >= args.shape.axis) {
    nll = std::numeric_limits<A>::quiet_NaN();
    return;
  }
  nll = log_sum;
  if (args.smoothing < 1) {
    const A picked =
        keep && !keep[label] ? -kInfinity<A> : ToAcc(RowOf<T>(args.x, row)[label * args.x.view.axis_stride]);
    nll -= (picked - shift) * static_cast<A>(1 - args.smoothing);
  }
  if (args.smoothing != 0) nll -= sums.deviation / sums.count * static_cast<A>(args.smoothing);
}

template <typename T>
void ForwardRow(const CrossEntropyArgs& args, int64_t row) {
  using A = Acc<T>;
  bool none;
  const uint8_t* keep = MaskOf(args, row, &none);
  if (none) {
    static_cast<A*>(args.nll)[row] = std::numeric_limits<A>::quiet_NaN();
    static_cast<A*>(args.lse_out)[row] = -kInfinity<A>;
    return;
  }
  RowSums<A> sums;
  SumRow(RowOf<T>(args.x, row), keep, args.shape.axis, args.smoothing != 0, &sums);
  FinishRow<T>(args, row, keep, sums, std::log(sums.sum));
}

template <typename T>
void ForwardRows(const CrossEntropyArgs& args, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const int64_t columns = args.shape.axis;
  if (args.where || columns > kShortColumns || args.x.elements != args.shape.size()) {
    for (int64_t row = begin; row < end; ++row) ForwardRow<T>(args, row);
    return;
  }
  for (int64_t first = begin; first < end; first += kTileRows) {
    const int64_t rows = std::min(kTileRows, end - first);
    RowSums<A> sums[kTileRows];
    A log_sums[kTileRows];
    SumShortRows(RowOf<T>(args.x, first), rows, columns, args.smoothing != 0, sums, log_sums);
    for (int64_t r = 0; r < rows; ++r) FinishRow<T>(args, first + r, nullptr, sums[r], log_sums[r]);
  }
}

template <typename T>
void BackwardRow(const CrossEntropyArgs& args, int64_t row) {
  using A = Acc<T>;
  T* out = static_cast<T*>(args.out) + row * args.shape.axis;
  const int32_t label = *RowOf<int32_t>(args.labels, row);
  bool none;
  const uint8_t* keep = MaskOf(args, row, &none);
  if (none || label < 0 || label >= args.shape.axis) {
    std::fill_n(out, args.shape.axis, FromAcc<T>(A{0}));
    return;
  }
  const T* x = RowOf<T>(args.x, row);
  const A lse = *RowOf<A>(args.lse, row), a = *RowOf<A>(args.a, row), b = *RowOf<A>(args.b, row);
  A base = 0;
  if (args.smoothing != 0) {
    int64_t count = args.shape.axis;
    if (keep) count = std::count_if(keep, keep + args.shape.axis, [](uint8_t k) { return k != 0; });
    base = b * (static_cast<A>(args.smoothing) / static_cast<A>(count));
  }
  const A of_label = (a * Exp(ToAcc(x[label]) - lse) - base) - b * static_cast<A>(1 - args.smoothing);
  WriteRow(x, keep, args.shape.axis, lse, a, base, out);
  if (!keep || keep[label]) out[label] = FromAcc<T>(of_label);
}

// Blocks of rows (inner > 1) are for a full array without a mask. Python lowers the formula in other cases.
bool SuitsBlocks(const CrossEntropyArgs& args) {
  return args.shape.inner == 1 || (!args.where && args.x.elements == args.shape.size());
}

// Calls f(row, rows) for blocks of rows that lie side by side.
template <typename A, typename F>
Error ForBlocks(ffi::ThreadPool& pool, const AxisShape& shape, F f) {
  const int64_t width = BlockWidth<A>(shape.inner), blocks = (shape.inner + width - 1) / width;
  ParallelFor(pool, shape.outer * blocks, width * shape.axis, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * width;
      f(i / blocks * shape.inner + first, std::min(width, shape.inner - first));
    }
  });
  return Error::Success();
}

// Loads the labels of rows [row, row + rows). The first row begins at x. Rows lie `row_pitch` elements apart, classes
// `pitch`.
template <typename T>
void LoadLabels(const CrossEntropyArgs& args, const T* x, int64_t row, int64_t rows, int64_t row_pitch, int64_t pitch,
                BlockLabels<Acc<T>>* block) {
  LoadNumbers(args.labels, args.shape.rows(), row, rows, block->labels);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t label = block->labels[r];
    block->valid[r] = label >= 0 && label < args.shape.axis;
    block->x_label[r] = block->valid[r] ? ToAcc(x[label * pitch + r * row_pitch]) : Acc<T>{0};
  }
}

template <typename T>
void ForwardBlock(const CrossEntropyArgs& args, int64_t row, int64_t rows) {
  using A = Acc<T>;
  const int64_t pitch = args.shape.inner, columns = args.shape.axis;
  const T* x = RowOf<T>(args.x, row);
  BlockSums<A> sums;
  BlockLabels<A> block;
  SumBlock(x, pitch, rows, columns, args.smoothing != 0, &sums);
  LoadLabels(args, x, row, rows, 1, pitch, &block);
  FinishBlock(sums, block, rows, columns, static_cast<A>(args.smoothing), static_cast<A*>(args.lse_out) + row,
              static_cast<A*>(args.nll) + row);
}

// LoadLabels, and the other numbers of the rows.
template <typename T>
void LoadBlockNumbers(const CrossEntropyArgs& args, const T* x, int64_t row, int64_t rows, int64_t row_pitch,
                      int64_t pitch, BlockNumbers<Acc<T>>* block) {
  using A = Acc<T>;
  LoadLabels(args, x, row, rows, row_pitch, pitch, block);
  LoadNumbers(args.lse, args.shape.rows(), row, rows, block->lse);
  LoadNumbers(args.a, args.shape.rows(), row, rows, block->a);
  LoadNumbers(args.b, args.shape.rows(), row, rows, block->b);
  const A of_class = static_cast<A>(args.smoothing) / static_cast<A>(args.shape.axis);
  for (int64_t r = 0; r < rows; ++r) block->base[r] = block->b[r] * of_class;
}

template <typename T>
void BackwardBlock(const CrossEntropyArgs& args, int64_t row, int64_t rows) {
  const int64_t pitch = args.shape.inner, columns = args.shape.axis;
  const T* x = RowOf<T>(args.x, row);
  T* out = static_cast<T*>(args.out) + (row / pitch * columns * pitch + row % pitch);
  BlockNumbers<Acc<T>> block;
  LoadBlockNumbers(args, x, row, rows, 1, pitch, &block);
  WriteBlock(x, pitch, rows, columns, static_cast<Acc<T>>(1 - args.smoothing), block, out);
}

template <typename T>
JAXNORM_SIMD_CLONES void BackwardShortRows(const CrossEntropyArgs& args, int64_t begin, int64_t end) {
  using A = Acc<T>;
  static_assert(kShortTileRows <= kMaxWidth<A> && kShortColumns <= kShortRow);
  static thread_local ShortTile<A> values, results;
  const int64_t columns = args.shape.axis, step = RowsOfShortTile(columns);
  for (int64_t row = begin; row < end; row += step) {
    const int64_t rows = std::min(step, end - row), size = rows * columns;
    const bool in_place = InPlace<T>((end - row) * columns - size);
    const T* x = static_cast<const T*>(args.x.data) + row * columns;
    T* out = static_cast<T*>(args.out) + row * columns;
    BlockNumbers<A> numbers;
    LoadBlockNumbers(args, x, row, rows, columns, 1, &numbers);
    const A* z = ReadTile(x, size, in_place, values.data);
    A* to = WriteTile(out, in_place, results.data);
    const BlockNumbers<A>& block = numbers;
    DispatchVector(columns, [&](auto vector) JAXNORM_INLINE_LAMBDA {
      WriteRows<vector>(
          rows, columns,
          [=, &block](int64_t r, int64_t c) JAXNORM_INLINE_LAMBDA {
            const A value = block.a[r] * Exp(z[r * columns + c] - block.lse[r]) - block.base[r];
            return block.valid[r] ? value : A{0};
          },
          to);
    });
    WriteLabels(block, rows, columns, 1, static_cast<A>(1 - args.smoothing), to);
    StoreTile(to, size, in_place, out);
  }
}

// Calls f(begin, end) for ranges of rows, which are independent. A range has several rows if they are short.
template <typename F>
Error ForRows(ffi::ThreadPool& pool, const CrossEntropyArgs& args, F f) {
  ParallelFor(pool, args.shape.rows(), args.shape.axis, f);
  return Error::Success();
}

Error CrossEntropyFwd(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer labels, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> nll, ffi::Result<ffi::AnyBuffer> lse, int64_t axis,
                      double smoothing) {
  CrossEntropyArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseCrossEntropyFwd(x, labels, rest, *nll, *lse, axis, smoothing, &args));
  JAXNORM_CHECK(SuitsBlocks(args));
  return DispatchFloat(args.dtype, [&]<typename T>(T) {
    if (args.shape.inner > 1) {
      return ForBlocks<Acc<T>>(pool, args.shape, [&](int64_t row, int64_t rows) { ForwardBlock<T>(args, row, rows); });
    }
    return ForRows(pool, args, [&](int64_t begin, int64_t end) { ForwardRows<T>(args, begin, end); });
  });
}

Error CrossEntropyBwd(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer lse, ffi::AnyBuffer labels,
                      ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                      int64_t axis, double smoothing) {
  CrossEntropyArgs args;
  JAXNORM_RETURN_IF_ERROR(ParseCrossEntropyBwd(x, lse, labels, a, b, rest, *out, axis, smoothing, &args));
  JAXNORM_CHECK(SuitsBlocks(args));
  if (args.shape.size() == 0) return Error::Success();
  return DispatchFloat(args.dtype, [&]<typename T>(T) {
    if (args.shape.inner > 1) {
      return ForBlocks<Acc<T>>(pool, args.shape, [&](int64_t row, int64_t rows) { BackwardBlock<T>(args, row, rows); });
    }
    const bool is_short = args.shape.axis <= kShortColumns && !args.where && args.x.elements == args.shape.size();
    return ForRows(pool, args, [&](int64_t begin, int64_t end) {
      if (is_short) return BackwardShortRows<T>(args, begin, end);
      for (int64_t row = begin; row < end; ++row) BackwardRow<T>(args, row);
    });
  });
}

}  // namespace

JAXNORM_REGISTER(cross_entropy_fwd, CrossEntropyFwd,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int64_t>("axis")
                     .Attr<double>("smoothing"));

JAXNORM_REGISTER(cross_entropy_bwd, CrossEntropyBwd,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .Attr<int64_t>("axis")
                     .Attr<double>("smoothing"));

}  // namespace jaxnorm
