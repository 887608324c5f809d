// batch_norm: statistics, the normalised result with its residual and ReLU, and both passes of backward.
//
// A group is seen in one of two ways (View). Where channels vary fastest, or inner runs are short, a group is rows of
// columns: each column belongs to one channel, and loops run along a row. Where inner runs are long, loops run along a
// run, which belongs to one channel. Both ways keep the order of memory; nothing is transposed.
//
// Reductions are cut into pieces by shape alone, and the results of the pieces are merged in order, so that results do
// not depend on the number of threads. Variances are merged from the mean and squared deviations of tiles (Chan, Golub
// and LeVeque 1983). A tile is read twice while it is in cache.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "batch_norm_call.h"
#include "bits.h"
#include "convert.h"
#include "loops.h"
#include "parallel.h"
#include "short_rows.h"
#include "simd.h"

namespace jaxnorm {
namespace {

// ---- How a group is seen ----

// An inner run shorter than this is seen as columns, one for each element. The limit is higher for statistics, which
// gain more because they read each tile twice. With columns, the other loops read the numbers of a channel once for
// each column of the channel.
inline constexpr int64_t kShortRun = 16, kShortRunOfStatistics = 256;
// Several narrow rows are joined to a row of up to this many columns.
inline constexpr int64_t kNarrow = 512;
// Columns that are reduced together: their sums stay in the first-level cache.
inline constexpr int64_t kColumns = 1024;
// Elements of an inner run that are reduced at once. Statistics read them twice, the second time from the first-level
// cache.
inline constexpr int64_t kRun = 4096;
// Rows of a tile. Merging is most of what a tile costs besides its elements.
inline constexpr int64_t kLeastTileRows = 16, kMostTileRows = 64;
inline constexpr int64_t kTileElements = kColumns * kLeastTileRows;
// The most pieces of a reduction: enough for the threads there may be.
inline constexpr int64_t kMostPieces = 64;

struct View {
  int64_t size, channels, inner;
  bool columns;    // else runs
  int64_t width;   // columns: the columns of a row; runs: channels
  int64_t fold;    // columns: channels repeat after this many columns
  int64_t steps;   // columns: rows, the last of which may be shorter; runs: chunks, each with all channels
  int64_t chunks;  // runs: chunks of one run
  int64_t pieces;  // parts of the steps
  int64_t strips;  // parts of the width, which are reduced independently
  int64_t strip;   // width of a strip

  explicit View(const BatchNormShape& shape, int64_t short_run = kShortRun)
      : size(shape.group_size()), channels(shape.channels), inner(shape.inner), columns(shape.inner < short_run) {
    fold = channels * inner;
    if (columns) {
      width = fold * std::clamp<int64_t>(kNarrow / std::max<int64_t>(1, fold), 1, std::max<int64_t>(1, shape.outer));
      chunks = 1;
      steps = width > 0 ? (size + width - 1) / width : 0;
      pieces = std::min({kMostPieces, steps / kMostTileRows, size / kGrainElements});
      strip = kColumns;
    } else {
      width = channels;
      chunks = (inner + kRun - 1) / kRun;
      steps = shape.outer * chunks;
      pieces = std::min({kMostPieces, steps, size / kGrainElements});
      strip = (channels * std::max<int64_t>(1, pieces) + kMostPieces - 1) / kMostPieces;
    }
    pieces = std::max<int64_t>(1, pieces);
    strip = std::max<int64_t>(1, strip);
    strips = (width + strip - 1) / strip;
  }

  int64_t channel(int64_t slot) const { return columns ? slot % fold / inner : slot; }
};

// The work of a thread in a reduction: steps [begin, end) of a group, slots (columns or channels) [first, last).
struct Unit {
  int64_t group, piece, begin, end, first, last;
};

Unit UnitAt(const View& view, int64_t index) {
  Unit unit;
  const int64_t strip = index % view.strips;
  unit.piece = index / view.strips % view.pieces;
  unit.group = index / view.strips / view.pieces;
  unit.begin = view.steps * unit.piece / view.pieces;
  unit.end = view.steps * (unit.piece + 1) / view.pieces;
  unit.first = strip * view.strip;
  unit.last = std::min(view.width, unit.first + view.strip);
  return unit;
}

// A piece has three rows of results, each with a number per slot. A unit fills in its slots.
template <typename A>
struct Partials {
  A* first;
  A* second;
  A* count;

  Partials(A* base, const View& view, int64_t group, int64_t piece)
      : first(base + (group * view.pieces + piece) * 3 * view.width),
        second(first + view.width),
        count(second + view.width) {}
};

// ---- Masks and bits of a contiguous range of a group ----

// keep[i] != 0 where element begin + i of the group counts.
inline void LoadMask(const BatchNormArgs& args, int64_t group, int64_t begin, int64_t n, uint8_t* keep) {
  const BatchNormShape& shape = args.shape;
  const int64_t cols = shape.inner == 1 ? shape.channels : shape.inner;
  const uint8_t* data = static_cast<const uint8_t*>(args.mask.data);
  int64_t row = group * (shape.group_size() / cols) + begin / cols, col = begin % cols;
  for (int64_t done = 0; done < n; ++row, col = 0) {
    const int64_t take = std::min(cols - col, n - done);
    const uint8_t* from = data + args.mask.view.RowOffset(row);
    if (args.mask.view.axis_stride != 0) {
      std::memcpy(keep + done, from + col, take);
    } else {
      std::memset(keep + done, *from, take);
    }
    done += take;
  }
}

// LoadFlags writes a flag per element, and may overwrite this many bytes before and after the flags.
inline constexpr int64_t kFlagMargin = 64;
JAXNORM_INLINE void LoadFlags(const uint8_t* bits, int64_t last, int64_t begin, int64_t n, uint8_t* flags) {
  const int64_t row_bytes = (last + 7) / 8;
  if (last % 8 == 0) {  // rows adjoin
    UnpackRun(bits + begin / 8, (begin % 8 + n + 7) / 8, flags - begin % 8);
    return;
  }
  const int64_t row = begin / last, col = begin % last;
  if (row_bytes <= kShortRowBytes) {
    UnpackMask(bits + row * row_bytes, (col + n + last - 1) / last, last, flags - col);
    return;
  }
  for (int64_t done = 0, at = col, r = row; done < n; at = 0, ++r) {
    const int64_t take = std::min(last - at, n - done);
    UnpackRun(bits + r * row_bytes + at / 8, (at + take + 7) / 8 - at / 8, flags + done - at % 8);
    done += take;
  }
}

// The address of element i of a group, in an array of x's dtype.
template <typename E>
JAXNORM_INLINE void* ElementAt(const BatchNormArgs& args, const BatchNormBuffer& array, int64_t group, int64_t i) {
  return At<E>(args.dtype, array.data, array.groups.RowOffset(group) + i);
}

// The elements as type E: in place, or converted into `buffer`.
template <typename E>
JAXNORM_INLINE const E* Stage(DataType dtype, const void* from, int64_t n, E* buffer) {
  if (IsNative<E>(dtype)) return static_cast<const E*>(from);
  Read(dtype, from, buffer, n);
  return buffer;
}
// Size of a buffer for Stage, which converts to float only. With another E the buffer is not used.
template <typename E>
inline constexpr int64_t kStageSize(int64_t n) {
  return std::is_same_v<E, float> ? n : 1;
}

// to[i] = from[i] where the flag is set, else 0. This is a loop of its own: loops over short segments would do much of
// the work in their scalar remainders, where each flag is a branch.
template <typename Bits>
JAXNORM_INLINE void SelectBits(const void* from, const uint8_t* flags, int64_t n, void* to) {
  const Bits* from_bits = static_cast<const Bits*>(from);
  Bits* to_bits = static_cast<Bits*>(to);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const Bits value = from_bits[i];
    to_bits[i] = flags[i] != 0 ? value : Bits{0};
  }
}
template <typename E>
JAXNORM_INLINE void Select(DataType dtype, const void* from, const uint8_t* flags, int64_t n, void* to) {
  if (IsNative<E>(dtype)) {
    SelectBits<BitsOf<E>>(from, flags, n, to);
  } else {
    SelectBits<uint16_t>(from, flags, n, to);
  }
}

// Calls body(true_type) or body(false_type).
template <typename Body>
JAXNORM_INLINE void Choose(bool value, const Body& body) {
  if (value) {
    body(std::true_type());
  } else {
    body(std::false_type());
  }
}

// ---- g: dy where the bit is set, if there are bits ----

// Elements [begin, begin + n) of g as type E, n at most kMost. `selected` and `staged` are buffers for elements that
// can not be read in place.
template <int64_t kMost, typename E>
JAXNORM_INLINE const E* LoadCotangent(const BatchNormArgs& args, int64_t group, int64_t begin, int64_t n, E* selected,
                                      E* staged) {
  const void* dy = ElementAt<E>(args, args.dy, group, begin);
  if (args.bits) {
    alignas(64) uint8_t flags[kMost + 2 * kFlagMargin];
    LoadFlags(args.bits.Group<uint8_t>(group), args.shape.last, begin, n, flags + kFlagMargin);
    Select<E>(args.dtype, dy, flags + kFlagMargin, n, selected);
    dy = selected;
  }
  return Stage(args.dtype, dy, n, staged);
}

// ---- Statistics: mean, sum of squared deviations, count ----

// Calls body(row, integral_constant(rows)) for groups of four rows, then for single rows.
template <typename Body>
JAXNORM_INLINE void ForRows(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int64_t, 4>());
  for (; row < rows; ++row) body(row, std::integral_constant<int64_t, 1>());
}

// Merges the mean, sum of squared deviations and count of a second set into the numbers of the first set.
template <typename A>
JAXNORM_INLINE void Merge(A& mean, A& squares, A& count, A other_mean, A other_squares, A other_count) {
  const A total = count + other_count, delta = other_mean - mean;
  const A weight = total > 0 ? other_count / total : A{0};
  const A between = delta * (delta * (count * weight));
  // A select: with an empty set the term is 0, even if delta is not finite.
  squares += other_squares + (count > 0 && other_count > 0 ? between : A{0});
  mean = count > 0 ? mean + (other_count > 0 ? delta * weight : A{0}) : other_mean;
  count = total;
}

// Corrects the mean of `count` elements, and their sum of squared deviations, for the rounding of the mean.
// `deviations` is the sum of the deviations from the rounded mean.
template <typename A>
JAXNORM_INLINE void Correct(A& mean, A& squares, A deviations, A count) {
  const A inverse = count > 0 ? 1 / count : A{0}, shift = deviations * inverse;
  squares -= deviations * shift;
  squares = squares < 0 ? A{0} : squares;
  mean += shift;
}

// One shift for each slot: the first value of the channel that counts, if this value is far from 0 compared with the
// spread of the first kSamples values, else 0. Means are kept as distances from the shift, so that the means of tiles,
// pieces and the whole channel have the precision of the deviations, however far from 0 the values are.
template <typename A>
void FindShifts(const BatchNormArgs& args, const View& view, int64_t group, A* shifts) {
  constexpr int64_t kMostRows = 64, kSamples = 8;
  constexpr A kFar = 8;
  const BatchNormShape& shape = args.shape;
  const void* x = ElementAt<A>(args, args.x, group, 0);
  const int64_t step = std::min(shape.inner, kRun), run = view.columns ? view.inner : 1;
  const std::unique_ptr<uint8_t[]> keep(new uint8_t[std::max<int64_t>(1, step)]);
  std::fill_n(keep.get(), step, 1);
  for (int64_t c = 0; c < shape.channels; ++c) {
    A first{0}, spread{0};
    int64_t found = 0;
    for (int64_t row = 0; row < std::min(shape.outer, kMostRows) && found < kSamples; ++row) {
      const int64_t begin = (row * shape.channels + c) * shape.inner;
      if (args.mask) LoadMask(args, group, begin, step, keep.get());
      for (int64_t i = 0; i < step && found < kSamples; ++i) {
        if (keep[i] == 0) continue;
        const A value = ValueAt<A>(args.dtype, x, begin + i);
        if (found++ == 0) first = value;
        spread = std::max(spread, std::abs(value - first));
      }
    }
    const A shift = std::isfinite(first) && std::abs(first) > kFar * spread ? first : A{0};
    std::fill_n(shifts + c * run, run, shift);
  }
  for (int64_t i = view.fold; view.columns && i < view.width; i += view.fold)
    std::copy_n(shifts, view.fold, shifts + i);
}

// Statistics of the values minus the shift of their slot.
template <typename Number>
struct Stats {
  using A = Number;
  const BatchNormArgs& args;
  const A* shifts;  // [groups][view.width]

  // Merges rows [row, row + rows) of columns [first, last) into `out`, which holds `before` rows already.
  JAXNORM_INLINE void Tile(const void* x, const View& view, const A* shift, int64_t row, int64_t rows, int64_t first,
                           int64_t last, A before, const Partials<A>& out) const {
    alignas(64) A mean[kColumns], deviations[kColumns], squares[kColumns];
    alignas(64) A buffer[kStageSize<A>(kTileElements)];
    const int64_t n = last - first;
    const A* values = static_cast<const A*>(x) + row * view.width + first;
    int64_t stride = view.width;
    if (!IsNative<A>(args.dtype)) {
      for (int64_t r = 0; r < rows; ++r) {
        Read(args.dtype, At<A>(args.dtype, x, (row + r) * view.width + first), buffer + r * n, n);
      }
      values = buffer;
      stride = n;
    }
    std::fill_n(mean, n, A{0});
    std::fill_n(deviations, n, A{0});
    std::fill_n(squares, n, A{0});
    // Four rows at a time, so that sums are loaded and stored less often than values.
    ForRows(rows, [&](int64_t r, auto together) JAXNORM_INLINE_LAMBDA {
      const A* from = values + r * stride;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        A sum{0};
        for (int64_t k = 0; k < together; ++k) sum += from[k * stride + i] - shift[i];
        mean[i] += sum;
      }
    });
    const A count = static_cast<A>(rows), inverse = 1 / count;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) mean[i] *= inverse;
    ForRows(rows, [&](int64_t r, auto together) JAXNORM_INLINE_LAMBDA {
      const A* from = values + r * stride;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        A sum{0}, of_squares{0};
        for (int64_t k = 0; k < together; ++k) {
          const A deviation = (from[k * stride + i] - shift[i]) - mean[i];
          sum += deviation;
          of_squares += deviation * deviation;
        }
        deviations[i] += sum;
        squares[i] += of_squares;
      }
    });
    A* to_mean = out.first + first;
    A* to_squares = out.second + first;
    const A weight = count / (before + count), between = before * weight;
    if (before == 0) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        Correct(mean[i], squares[i], deviations[i], count);
        to_mean[i] = mean[i];
        to_squares[i] = squares[i];
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        Correct(mean[i], squares[i], deviations[i], count);
        const A delta = mean[i] - to_mean[i];
        to_mean[i] += delta * weight;
        to_squares[i] += squares[i] + delta * (delta * between);
      }
    }
  }

  // Tile with a mask, which says which elements count.
  JAXNORM_INLINE void MaskedTile(const void* x, const View& view, const A* shift, int64_t group, int64_t row,
                                 int64_t rows, int64_t first, int64_t last, const Partials<A>& out) const {
    alignas(64) A count[kColumns], mean[kColumns], deviations[kColumns], squares[kColumns];
    alignas(64) A buffer[kStageSize<A>(kColumns)];
    alignas(64) uint8_t keep[kTileElements];
    const int64_t n = last - first;
    std::fill_n(count, n, A{0});
    std::fill_n(mean, n, A{0});
    std::fill_n(deviations, n, A{0});
    std::fill_n(squares, n, A{0});
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = (row + r) * view.width + first;
      uint8_t* kept = keep + r * n;
      LoadMask(args, group, begin, n, kept);
      const A* from = Stage(args.dtype, At<A>(args.dtype, x, begin), n, buffer);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        mean[i] += kept[i] != 0 ? from[i] - shift[i] : A{0};
        count[i] += kept[i] != 0 ? A{1} : A{0};
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) mean[i] = count[i] > 0 ? mean[i] / count[i] : A{0};
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* kept = keep + r * n;
      const A* from = Stage(args.dtype, At<A>(args.dtype, x, (row + r) * view.width + first), n, buffer);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const A deviation = kept[i] != 0 ? (from[i] - shift[i]) - mean[i] : A{0};
        deviations[i] += deviation;
        squares[i] += deviation * deviation;
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      Correct(mean[i], squares[i], deviations[i], count[i]);
      Merge(out.first[first + i], out.second[first + i], out.count[first + i], mean[i], squares[i], count[i]);
    }
  }

  JAXNORM_INLINE void Columns(const void* x, const View& view, const Unit& unit, const Partials<A>& out) const {
    const A* shift = shifts + unit.group * view.width + unit.first;
    const int64_t first = unit.first, last = unit.last, whole = std::min(unit.end, view.size / view.width);
    const int64_t tile = std::clamp(kTileElements / (last - first), kLeastTileRows, kMostTileRows);
    const auto reduce = [&](int64_t row, int64_t rows, int64_t stop) JAXNORM_INLINE_LAMBDA {
      if (args.mask) {
        MaskedTile(x, view, shift, unit.group, row, rows, first, stop, out);
      } else {
        Tile(x, view, shift, row, rows, first, stop, static_cast<A>(row - unit.begin), out);
        for (int64_t i = first; i < stop; ++i) out.count[i] += static_cast<A>(rows);
      }
    };
    // The last row, if it is shorter, is a tile of its own.
    for (int64_t row = unit.begin, rows; row < unit.end; row += rows) {
      rows = row < whole ? std::min(tile, whole - row) : 1;
      const int64_t stop = row < whole ? last : std::min(last, view.size % view.width);
      if (stop > first) reduce(row, rows, stop);
    }
  }

  JAXNORM_INLINE void Run(const void* x, A shift, int64_t group, int64_t begin, int64_t n, int64_t channel,
                          const Partials<A>& out) const {
    alignas(64) A buffer[kStageSize<A>(kRun)];
    const A* values = Stage(args.dtype, At<A>(args.dtype, x, begin), n, buffer);
    A count = static_cast<A>(n), mean, squares;
    if (!args.mask) {
      mean = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return Two<A>{values[i] - shift, A{0}}; }).first / count;
      const Two<A> sums = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        const A deviation = (values[i] - shift) - mean;
        return Two<A>{deviation, deviation * deviation};
      });
      squares = sums.second;
      Correct(mean, squares, sums.first, count);
    } else {
      alignas(64) uint8_t keep[kRun];
      LoadMask(args, group, begin, n, keep);
      const uint8_t* kept = keep;
      const Two<A> totals = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        return Two<A>{kept[i] != 0 ? values[i] - shift : A{0}, kept[i] != 0 ? A{1} : A{0}};
      });
      count = totals.second;
      mean = count > 0 ? totals.first / count : A{0};
      const Two<A> sums = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        const A deviation = kept[i] != 0 ? (values[i] - shift) - mean : A{0};
        return Two<A>{deviation, deviation * deviation};
      });
      squares = sums.second;
      Correct(mean, squares, sums.first, count);
    }
    Merge(out.first[channel], out.second[channel], out.count[channel], mean, squares, count);
  }

  JAXNORM_INLINE void operator()(const View& view, const Unit& unit, const Partials<A>& out) const {
    const void* x = ElementAt<A>(args, args.x, unit.group, 0);
    if (view.columns) {
      Columns(x, view, unit, out);
      return;
    }
    for (int64_t step = unit.begin; step < unit.end; ++step) {
      const int64_t at = step % view.chunks * kRun, n = std::min(kRun, view.inner - at);
      for (int64_t c = unit.first; c < unit.last; ++c) {
        Run(x, shifts[unit.group * view.width + c], unit.group,
            (step / view.chunks * view.channels + c) * view.inner + at, n, c, out);
      }
    }
  }

  static JAXNORM_INLINE void Combine(A& first, A& second, A& count, A other_first, A other_second, A other_count) {
    Merge(first, second, count, other_first, other_second, other_count);
  }

  // Merges the n columns of one channel into the first of these columns.
  static JAXNORM_INLINE void Fold(A* mean, A* squares, A* count, int64_t n) {
    if (n == 1) return;
    const A origin = mean[0];
    const Two<A> sums =
        Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return Two<A>{count[i], count[i] * (mean[i] - origin)}; });
    const A shift = sums.first > 0 ? sums.second / sums.first : A{0}, centre = origin + shift;
    const A within = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
                       const A distance = mean[i] - centre;
                       return Two<A>{squares[i] + count[i] * (distance * distance), A{0}};
                     }).first;
    mean[0] = centre;
    squares[0] = within;
    count[0] = sums.first;
  }

  void Store(const View& view, int64_t group, int64_t channel, A mean, A squares, A count) const {
    const bool any = count > 0;
    const A shift = shifts[group * view.width + channel * (view.columns ? view.inner : 1)];
    args.mean.Group<A>(group)[channel] = any ? shift + mean : std::numeric_limits<A>::quiet_NaN();
    args.var.Group<A>(group)[channel] = any ? squares / count : std::numeric_limits<A>::quiet_NaN();
    if (args.count) args.count.Group<A>(group)[channel] = count;
  }
};

// ---- Sums of g and of g * (x - mean), whose product with rstd is dscale ----

template <typename E>
struct Sums {
  using A = Acc<E>;
  const BatchNormArgs& args;
  const double epsilon;

  // The factors of g in the second sum before `mean` is subtracted. Without dscale, which is rare, g itself serves as
  // its factor: the products are not used.
  JAXNORM_INLINE const E* LoadFactors(int64_t group, int64_t begin, int64_t n, const E* g, E* buffer) const {
    return args.dscale ? Stage(args.dtype, ElementAt<E>(args, args.x, group, begin), n, buffer) : g;
  }
  JAXNORM_INLINE A MeanOf(int64_t group, int64_t channel) const {
    return args.dscale ? args.mean.Group<A>(group)[channel] : A{0};
  }

  // Adds rows [row, row + rows) of columns [first, last) to `out`; mean[i] belongs to column first + i.
  JAXNORM_INLINE void Rows(int64_t group, const A* mean, const View& view, int64_t row, int64_t rows, int64_t first,
                           int64_t last, const Partials<A>& out) const {
    alignas(64) A dbias[kColumns], dscale[kColumns];
    alignas(64) E x_buffer[kStageSize<E>(kColumns)], dy_buffer[kStageSize<E>(kColumns)], selected[kColumns];
    const int64_t n = last - first;
    std::fill_n(dbias, n, A{0});
    std::fill_n(dscale, n, A{0});
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = (row + r) * view.width + first;
      const E* dy = LoadCotangent<kColumns>(args, group, begin, n, selected, dy_buffer);
      const E* x = LoadFactors(group, begin, n, dy, x_buffer);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const A g = ToAcc(dy[i]);
        dbias[i] += g;
        dscale[i] += g * (ToAcc(x[i]) - mean[i]);
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      out.first[first + i] += dbias[i];
      out.second[first + i] += dscale[i];
    }
  }

  JAXNORM_INLINE void Columns(const View& view, const Unit& unit, const Partials<A>& out) const {
    alignas(64) A mean[kColumns];
    for (int64_t i = unit.first; i < unit.last; ++i) mean[i - unit.first] = MeanOf(unit.group, view.channel(i));
    const int64_t whole = std::min(unit.end, view.size / view.width);
    // The last row, if it is shorter, is a tile of its own.
    for (int64_t row = unit.begin, rows; row < unit.end; row += rows) {
      rows = row < whole ? std::min(kMostTileRows, whole - row) : 1;
      const int64_t last = row < whole ? unit.last : std::min(unit.last, view.size % view.width);
      if (last > unit.first) Rows(unit.group, mean, view, row, rows, unit.first, last, out);
    }
  }

  // Adds one run of `n` elements of each channel in [first, last) to `out`. The runs adjoin, and have at most kRun
  // elements together.
  JAXNORM_INLINE void Runs(int64_t group, int64_t group_size, int64_t begin, int64_t n, int64_t first, int64_t last,
                           const Partials<A>& out) const {
    alignas(64) E x_buffer[kStageSize<E>(kRun + kWidestVector)], dy_buffer[kStageSize<E>(kRun + kWidestVector)];
    alignas(64) E selected[kRun + kWidestVector];
    const int64_t size = (last - first) * n;
    const E* all_dy = LoadCotangent<kRun>(args, group, begin, size, selected, dy_buffer);
    const E* all_x = LoadFactors(group, begin, size, all_dy, x_buffer);
    if (n <= kShortRow && begin + size + kWidestVector <= group_size) {  // short rows, with slack: see short_rows.h
      A dbias[kRun / kShortRun], dscale[kRun / kShortRun], means[kRun / kShortRun];
      for (int64_t r = 0; r < last - first; ++r) means[r] = MeanOf(group, first + r);
      const A* mean = means;
      SumRows<kWidestVector>(
          last - first, n,
          [=](int64_t r, int64_t i) JAXNORM_INLINE_LAMBDA {
            const A g = ToAcc(all_dy[r * n + i]);
            return Two<A>{g, g * (ToAcc(all_x[r * n + i]) - mean[r])};
          },
          dbias, dscale);
#pragma omp simd
      for (int64_t r = 0; r < last - first; ++r) {
        out.first[first + r] += dbias[r];
        out.second[first + r] += dscale[r];
      }
      return;
    }
    for (int64_t channel = first; channel < last; ++channel) {
      const E* dy = all_dy + (channel - first) * n;
      const E* x = all_x + (channel - first) * n;
      const A mean = MeanOf(group, channel);
      const Two<A> sums = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        const A g = ToAcc(dy[i]);
        return Two<A>{g, g * (ToAcc(x[i]) - mean)};
      });
      out.first[channel] += sums.first;
      out.second[channel] += sums.second;
    }
  }

  JAXNORM_INLINE void operator()(const View& view, const Unit& unit, const Partials<A>& out) const {
    if (view.columns) {
      Columns(view, unit, out);
      return;
    }
    const int64_t together = view.chunks > 1 ? 1 : kRun / view.inner;
    for (int64_t step = unit.begin; step < unit.end; ++step) {
      const int64_t at = step % view.chunks * kRun, n = std::min(kRun, view.inner - at);
      for (int64_t c = unit.first; c < unit.last; c += together) {
        const int64_t begin = (step / view.chunks * view.channels + c) * view.inner + at;
        Runs(unit.group, view.size, begin, n, c, std::min(unit.last, c + together), out);
      }
    }
  }

  static JAXNORM_INLINE void Combine(A& first, A& second, A& count, A other_first, A other_second, A other_count) {
    first += other_first;
    second += other_second;
    count += other_count;
  }

  static JAXNORM_INLINE void Fold(A* dbias, A* dscale, A*, int64_t n) {
    if (n == 1) return;
    const Two<A> sums = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return Two<A>{dbias[i], dscale[i]}; });
    dbias[0] = sums.first;
    dscale[0] = sums.second;
  }

  void Store(const View&, int64_t group, int64_t channel, A dbias, A dscale, A) const {
    if (args.dbias) args.dbias.Group<A>(group)[channel] = dbias;
    if (args.dscale) {
      // dscale of an empty batch is 0, although the variance of the batch is NaN.
      const A var = args.shape.reduced() > 0 ? args.var.Group<A>(group)[channel] : A{1};
      args.dscale.Group<A>(group)[channel] = dscale / std::sqrt(var + static_cast<A>(epsilon));
    }
  }
};

// ---- Reductions ----

template <typename Kernel>
JAXNORM_SIMD_CLONES void ReduceUnit(const Kernel& kernel, const View& view, const Unit& unit,
                                    const Partials<typename Kernel::A>& out) {
  for (auto* part : {out.first, out.second, out.count}) std::fill(part + unit.first, part + unit.last, 0);
  kernel(view, unit, out);
}

// Combines slots [begin, end) of all parts of a group into the first part, `to`. Parts lie `pitch` numbers apart.
template <typename Kernel>
JAXNORM_SIMD_CLONES void CombineParts(const Partials<typename Kernel::A>& to, int64_t parts, int64_t pitch,
                                      int64_t begin, int64_t end) {
  for (int64_t part = 1; part < parts; ++part) {
    const int64_t at = part * pitch;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      Kernel::Combine(to.first[i], to.second[i], to.count[i], to.first[at + i], to.second[at + i], to.count[at + i]);
    }
  }
}

// Folds the columns of each channel in [begin, end), and stores the channel's results.
template <typename Kernel>
JAXNORM_SIMD_CLONES void FinishChannels(const Kernel& kernel, const View& view, int64_t group, int64_t begin,
                                        int64_t end, const Partials<typename Kernel::A>& sums) {
  const int64_t run = view.columns ? view.inner : 1;
  for (int64_t c = begin; c < end; ++c) {
    const int64_t i = c * run;
    Kernel::Fold(sums.first + i, sums.second + i, sums.count + i, run);
    kernel.Store(view, group, c, sums.first[i], sums.second[i], sums.count[i]);
  }
}

template <typename Kernel>
Error Reduce(ffi::ThreadPool& pool, const Kernel& kernel, const View& view, int64_t groups) {
  using A = typename Kernel::A;
  const int64_t units = groups * view.pieces * view.strips;
  // At least one slot per channel, also where there are no elements.
  const int64_t slots = std::max(view.width, view.channels);
  const std::unique_ptr<A[]> partials(new A[groups * view.pieces * 3 * slots]());
  const int64_t per_unit = view.size / std::max<int64_t>(1, view.pieces * view.strips);
  ParallelFor(pool, view.size > 0 ? units : 0, per_unit, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Unit unit = UnitAt(view, i);
      ReduceUnit(kernel, view, unit, Partials<A>(partials.get(), view, unit.group, unit.piece));
    }
  });
  const int64_t distinct = view.columns ? view.fold : view.width, repeats = view.size > 0 ? view.width / distinct : 1;
  const int64_t run = view.columns ? std::max<int64_t>(1, view.inner) : 1;
  for (int64_t group = 0; group < groups; ++group) {
    const Partials<A> sums(partials.get(), view, group, 0);
    ParallelFor(pool, view.channels, view.pieces * run * repeats, [&](int64_t begin, int64_t end) {
      for (int64_t k = 0; k < repeats && view.size > 0; ++k) {
        const int64_t at = k * distinct;
        CombineParts<Kernel>(sums, view.pieces, 3 * view.width, at + begin * run, at + end * run);
      }
      CombineParts<Kernel>(sums, repeats, distinct, begin * run, end * run);
      FinishChannels(kernel, view, group, begin, end, sums);
    });
  }
  return Error::Success();
}

// ---- Elementwise passes ----

// A group's array is cut into blocks. A block is whole runs of the last dimension or a part of one run, because bits
// are packed along a run.
struct Blocks {
  int64_t size, last, together, per_run, count;

  explicit Blocks(const BatchNormShape& shape) : size(shape.group_size()) {
    // Where the bits of a run fill whole bytes, the bits of all runs adjoin, and the group is treated as one run.
    last = shape.last % 8 == 0 ? size : shape.last;
    together = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, last));
    per_run = (last + kBlockElements - 1) / kBlockElements;
    const int64_t runs = last > 0 ? size / last : 0;
    count = last <= kBlockElements ? (runs + together - 1) / together : runs * per_run;
  }
};

struct Block {
  int64_t begin, runs, cols, bits;  // bits: index of the first byte

  Block(const Blocks& blocks, int64_t index) {
    const int64_t run_bytes = (blocks.last + 7) / 8;
    if (blocks.last <= kBlockElements) {
      const int64_t run = index * blocks.together;
      begin = run * blocks.last;
      bits = run * run_bytes;
      runs = std::min(blocks.together, blocks.size / blocks.last - run);
      cols = blocks.last;
    } else {
      const int64_t run = index / blocks.per_run, at = index % blocks.per_run * kBlockElements;
      begin = run * blocks.last + at;
      bits = run * run_bytes + at / 8;
      runs = 1;
      cols = std::min(kBlockElements, blocks.last - at);
    }
  }
  int64_t size() const { return runs * cols; }
};

// kNumbers numbers for each slot (column or channel) of the view.
template <typename A, int kNumbers>
struct Table {
  const View view;
  std::unique_ptr<A[]> data;

  // of_channel(c, numbers) fills in the numbers of channel c.
  template <typename F>
  Table(const View& view, const F& of_channel) : view(view), data(new A[std::max<int64_t>(1, kNumbers * view.width)]) {
    const int64_t distinct = view.columns ? view.fold : view.width, run = view.columns ? view.inner : 1;
    for (int64_t c = 0; c < view.channels; ++c) {
      A numbers[kNumbers];
      of_channel(c, numbers);
      for (int k = 0; k < kNumbers; ++k) std::fill_n(data.get() + k * view.width + c * run, run, numbers[k]);
    }
    for (int k = 0; k < kNumbers; ++k) {
      A* row = data.get() + k * view.width;
      for (int64_t i = distinct; i < view.width; i += distinct) std::copy_n(row, distinct, row + i);
    }
  }
};

// A number for each element of a segment: read from an array with an entry per column, or the same for the whole run.
template <typename A, bool kColumnwise>
struct Numbers {
  const A* from;
  A one;
  JAXNORM_INLINE Numbers(const A* from) : from(from), one(kColumnwise ? A{0} : *from) {}
  JAXNORM_INLINE A operator()(int64_t i) const {
    if constexpr (kColumnwise) return from[i];
    return one;
  }
};

// Cuts elements [begin, begin + n) of a group into segments that lie in one row or one run, and calls segment(offset in
// the range, elements, slot) for each segment.
template <bool kColumnwise, typename F>
JAXNORM_INLINE void ForSegments(const View& view, int64_t begin, int64_t n, const F& segment) {
  const int64_t length = kColumnwise ? view.width : view.inner;
  int64_t at = begin % length, channel = kColumnwise ? 0 : begin / length % view.channels;
  for (int64_t done = 0; done < n; at = 0) {
    const int64_t take = std::min(length - at, n - done);
    segment(done, take, kColumnwise ? at : channel);
    if constexpr (!kColumnwise) channel = channel + 1 == view.channels ? 0 : channel + 1;
    done += take;
  }
}

enum ForwardNumber { kMeanOf, kFactorOf, kShiftOf, kForwardNumbers };

template <typename Number>
struct Forward {
  using A = Number;
  const BatchNormArgs& args;
  const Table<A, kForwardNumbers>& table;
  const bool relu;

  JAXNORM_INLINE void operator()(int64_t group, const Block& block) const {
    alignas(64) A x_buffer[kStageSize<A>(kBlockElements)], z_buffer[kStageSize<A>(kBlockElements)];
    const int64_t n = block.size();
    const A* x = Stage(args.dtype, ElementAt<A>(args, args.x, group, block.begin), n, x_buffer);
    void* y = ElementAt<A>(args, args.y, group, block.begin);
    A* out = IsNative<A>(args.dtype) ? static_cast<A*>(y) : x_buffer;
    const A* z = nullptr;
    if (args.residual) z = Stage(args.dtype, ElementAt<A>(args, args.residual, group, block.begin), n, z_buffer);
    Choose(table.view.columns, [&](auto columnwise) JAXNORM_INLINE_LAMBDA {
      if (z != nullptr) {
        Compute<columnwise>(block, x, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return z[i]; }, out);
      } else {
        Compute<columnwise>(block, x, [](int64_t) JAXNORM_INLINE_LAMBDA { return A{0}; }, out);
      }
    });
    if (!IsNative<A>(args.dtype)) Write(args.dtype, out, y, n);
    if (args.bits) StoreBits(y, block, args.bits.Group<uint8_t>(group) + block.bits);
  }

 private:
  template <bool kColumnwise, typename Addend>
  JAXNORM_INLINE void Compute(const Block& block, const A* x, const Addend& addend, A* out) const {
    const int64_t width = table.view.width;
    const A least = relu ? A{0} : -kInfinity<A>;
    ForSegments<kColumnwise>(table.view, block.begin, block.size(),
                             [&](int64_t at, int64_t count, int64_t slot) JAXNORM_INLINE_LAMBDA {
                               const A* numbers = table.data.get() + slot;
                               const Numbers<A, kColumnwise> mean(numbers + kMeanOf * width),
                                   factor(numbers + kFactorOf * width), shift(numbers + kShiftOf * width);
                               const A* from = x + at;
                               A* to = out + at;
#pragma omp simd
                               for (int64_t i = 0; i < count; ++i) {
                                 const A v = (from[i] - mean(i)) * factor(i) + shift(i) + addend(at + i);
                                 to[i] = v <= least ? least : v;  // NaN stays
                               }
                             });
  }

  // Packs the bits of all segments at once, for the reason given at SelectBits.
  JAXNORM_INLINE void StoreBits(const void* y, const Block& block, uint8_t* bits) const {
    alignas(64) uint8_t flags[kBlockElements + 8];
    if (IsNative<A>(args.dtype)) {
      FlagPositive<A>(y, block.size(), flags);
    } else if (args.dtype == DataType::kF16) {
      FlagPositive<F16>(y, block.size(), flags);
    } else {
      FlagPositive<BF16>(y, block.size(), flags);
    }
    PackMask(flags, block.runs, block.cols, bits);
  }
  template <typename T>
  JAXNORM_INLINE static void FlagPositive(const void* y, int64_t n, uint8_t* flags) {
    const auto* rounded = static_cast<const BitsOf<T>*>(y);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) flags[i] = IsPositive<T>(rounded[i]);
  }
};

// dx = g * factor + keep * (offset + (x - mean) * slope).
enum BackwardNumber { kCentre, kScaleOf, kOffset, kSlope, kBackwardNumbers };

template <typename E>
struct Backward {
  using A = Acc<E>;
  const BatchNormArgs& args;
  const Table<A, kBackwardNumbers>& table;
  const bool reduced;  // else offset and slope are 0, and there is no x

  JAXNORM_INLINE void operator()(int64_t group, const Block& block) const {
    alignas(64) E selected[kBlockElements];
    const int64_t n = block.size();
    const void* g_data = ElementAt<E>(args, args.dy, group, block.begin);
    void* dresidual = args.dresidual ? ElementAt<E>(args, args.dresidual, group, block.begin) : nullptr;
    if (args.bits) {
      alignas(64) uint8_t flags[kBlockElements + 8];
      UnpackMask(args.bits.Group<uint8_t>(group) + block.bits, block.runs, block.cols, flags);
      void* to = dresidual != nullptr ? dresidual : selected;
      Select<E>(args.dtype, g_data, flags, n, to);
      g_data = to;
    } else if (dresidual != nullptr) {
      std::memcpy(dresidual, g_data, n * args.dresidual.item_bytes);
    }
    if (!args.dx) return;
    alignas(64) E x_buffer[kStageSize<E>(kBlockElements)], g_buffer[kStageSize<E>(kBlockElements)];
    alignas(64) uint8_t keep[kBlockElements];
    const E* g = Stage(args.dtype, g_data, n, g_buffer);
    const E* x = nullptr;
    if (reduced) x = Stage(args.dtype, ElementAt<E>(args, args.x, group, block.begin), n, x_buffer);
    if (reduced && args.mask) LoadMask(args, group, block.begin, n, keep);
    const uint8_t* kept = keep;
    void* dx = ElementAt<E>(args, args.dx, group, block.begin);
    E* out = IsNative<E>(args.dtype) ? static_cast<E*>(dx) : g_buffer;
    Choose(table.view.columns, [&](auto columnwise) JAXNORM_INLINE_LAMBDA {
      if (!reduced) {
        Compute<columnwise>(
            block, [=](int64_t i, A, A scale, A, A) JAXNORM_INLINE_LAMBDA { return ToAcc(g[i]) * scale; }, out);
      } else if (!args.mask) {
        Compute<columnwise>(
            block,
            [=](int64_t i, A centre, A scale, A offset, A slope)
                JAXNORM_INLINE_LAMBDA { return ToAcc(g[i]) * scale + (offset + (ToAcc(x[i]) - centre) * slope); },
            out);
      } else {
        Compute<columnwise>(
            block,
            [=](int64_t i, A centre, A scale, A offset, A slope) JAXNORM_INLINE_LAMBDA {
              const A drift = offset + (ToAcc(x[i]) - centre) * slope;
              return ToAcc(g[i]) * scale + (kept[i] != 0 ? drift : A{0});
            },
            out);
      }
    });
    if (!IsNative<E>(args.dtype)) Write(args.dtype, out, dx, n);
  }

 private:
  // out[i] = f(i, numbers of its column or channel).
  template <bool kColumnwise, typename F>
  JAXNORM_INLINE void Compute(const Block& block, const F& f, E* out) const {
    const int64_t width = table.view.width;
    ForSegments<kColumnwise>(
        table.view, block.begin, block.size(), [&](int64_t at, int64_t count, int64_t slot) JAXNORM_INLINE_LAMBDA {
          const A* numbers = table.data.get() + slot;
          const Numbers<A, kColumnwise> centre(numbers + kCentre * width), scale(numbers + kScaleOf * width),
              offset(numbers + kOffset * width), slope(numbers + kSlope * width);
          E* to = out + at;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) to[i] = FromAcc<E>(f(at + i, centre(i), scale(i), offset(i), slope(i)));
        });
  }
};

template <typename Kernel>
JAXNORM_SIMD_CLONES void RunBlocks(const Kernel& kernel, const Blocks& blocks, int64_t group, int64_t begin,
                                   int64_t end) {
  for (int64_t i = begin; i < end; ++i) kernel(group, Block(blocks, i));
}

template <typename Kernel>
void Elementwise(ffi::ThreadPool& pool, const Kernel& kernel, const BatchNormShape& shape, int64_t group) {
  const Blocks blocks(shape);
  ParallelFor(pool, blocks.count, kBlockElements,
              [&](int64_t begin, int64_t end) { RunBlocks(kernel, blocks, group, begin, end); });
}

template <typename A>
A Reciprocal(const BatchNormArgs& args, int64_t group, int64_t channel, double epsilon) {
  return 1 / std::sqrt(args.var.Group<A>(group)[channel] + static_cast<A>(epsilon));
}
template <typename A>
A ScaleOf(const BatchNormArgs& args, int64_t group, int64_t channel) {
  return args.scale ? args.scale.Group<A>(group)[channel] : A{1};
}

template <typename A>
Error RunForward(ffi::ThreadPool& pool, const BatchNormArgs& args, double epsilon, bool relu) {
  const View view(args.shape);
  for (int64_t group = 0; group < args.shape.groups; ++group) {
    const Table<A, kForwardNumbers> table(view, [&](int64_t c, A* numbers) {
      numbers[kMeanOf] = args.mean.Group<A>(group)[c];
      numbers[kFactorOf] = Reciprocal<A>(args, group, c, epsilon) * ScaleOf<A>(args, group, c);
      numbers[kShiftOf] = args.bias ? args.bias.Group<A>(group)[c] : A{0};
    });
    Elementwise(pool, Forward<A>{args, table, relu}, args.shape, group);
  }
  return Error::Success();
}

template <typename E>
Error RunBackward(ffi::ThreadPool& pool, const BatchNormArgs& args, double epsilon, int64_t replicas) {
  using A = Acc<E>;
  const View view(args.shape);
  const bool reduced = args.dx && (args.dbias || args.dmean);
  for (int64_t group = 0; group < args.shape.groups; ++group) {
    const Table<A, kBackwardNumbers> table(view, [&](int64_t c, A* numbers) {
      std::fill_n(numbers, kBackwardNumbers, A{0});
      if (!args.dx) return;
      const A rstd = Reciprocal<A>(args, group, c, epsilon), factor = rstd * ScaleOf<A>(args, group, c);
      numbers[kScaleOf] = factor;
      if (!reduced) return;
      const A n =
          args.count ? args.count.Group<A>(group)[c] : static_cast<A>(args.shape.reduced()) * static_cast<A>(replicas);
      A offset{0}, slope{0};
      if (args.dbias) {
        offset = -factor * args.dbias.Group<A>(group)[c];
        slope = -factor * rstd * args.dscale.Group<A>(group)[c];
      }
      if (args.dmean) {
        offset += args.dmean.Group<A>(group)[c];
        slope += 2 * args.dvar.Group<A>(group)[c];
      }
      numbers[kCentre] = args.mean.Group<A>(group)[c];
      numbers[kOffset] = offset / n;
      numbers[kSlope] = slope / n;
    });
    Elementwise(pool, Backward<E>{args, table, reduced}, args.shape, group);
  }
  return Error::Success();
}

// ---- Handlers ----

Error BatchNormStats(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                     int64_t axis, int64_t end, int64_t operand_names, int64_t result_names) {
  BatchNormArgs args;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormStats(operand_names, result_names));
  JAXNORM_RETURN_IF_ERROR(ParseBatchNorm(operands, results, groups, axis, end, operand_names, result_names, &args));
  return DispatchAcc(args.dtype, [&]<typename A>(A) {
    const View view(args.shape, kShortRunOfStatistics);
    const std::unique_ptr<A[]> shifts(new A[args.shape.groups * std::max(view.width, view.channels)]());
    for (int64_t group = 0; group < args.shape.groups && view.size > 0; ++group) {
      FindShifts<A>(args, view, group, shifts.get() + group * view.width);
    }
    return Reduce(pool, Stats<A>{args, shifts.get()}, view, args.shape.groups);
  });
}

Error BatchNormFwd(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                   int64_t axis, int64_t end, int64_t operand_names, int64_t result_names, double epsilon, bool relu) {
  BatchNormArgs args;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormFwd(operand_names, result_names, relu));
  JAXNORM_RETURN_IF_ERROR(ParseBatchNorm(operands, results, groups, axis, end, operand_names, result_names, &args));
  if (args.shape.group_size() == 0) return Error::Success();
  return DispatchAcc(args.dtype, [&]<typename A>(A) { return RunForward<A>(pool, args, epsilon, relu); });
}

Error BatchNormSums(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                    int64_t axis, int64_t end, int64_t operand_names, int64_t result_names, double epsilon) {
  BatchNormArgs args;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormSums(operand_names, result_names));
  JAXNORM_RETURN_IF_ERROR(ParseBatchNorm(operands, results, groups, axis, end, operand_names, result_names, &args));
  return DispatchElement(args.dtype, [&]<typename E>(E) {
    return Reduce(pool, Sums<E>{args, epsilon}, View(args.shape), args.shape.groups);
  });
}

Error BatchNormDx(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t groups,
                  int64_t axis, int64_t end, int64_t operand_names, int64_t result_names, double epsilon,
                  int64_t replicas) {
  BatchNormArgs args;
  JAXNORM_RETURN_IF_ERROR(CheckBatchNormDx(operand_names, result_names, replicas));
  JAXNORM_RETURN_IF_ERROR(ParseBatchNorm(operands, results, groups, axis, end, operand_names, result_names, &args));
  if (args.shape.group_size() == 0) return Error::Success();
  return DispatchElement(args.dtype, [&]<typename E>(E) { return RunBackward<E>(pool, args, epsilon, replicas); });
}

}  // namespace

#define JAXNORM_BATCH_NORM_BINDING() \
  ffi::Ffi::Bind()                   \
      .Ctx<ffi::ThreadPool>()        \
      .RemainingArgs()               \
      .RemainingRets()               \
      .Attr<int64_t>("groups")       \
      .Attr<int64_t>("axis")         \
      .Attr<int64_t>("end")          \
      .Attr<int64_t>("operands")     \
      .Attr<int64_t>("results")

JAXNORM_REGISTER(batch_norm_stats, BatchNormStats, JAXNORM_BATCH_NORM_BINDING());
JAXNORM_REGISTER(batch_norm_fwd, BatchNormFwd, JAXNORM_BATCH_NORM_BINDING().Attr<double>("epsilon").Attr<bool>("relu"));
JAXNORM_REGISTER(batch_norm_sums, BatchNormSums, JAXNORM_BATCH_NORM_BINDING().Attr<double>("epsilon"));
JAXNORM_REGISTER(batch_norm_dx, BatchNormDx,
                 JAXNORM_BATCH_NORM_BINDING().Attr<double>("epsilon").Attr<int64_t>("replicas"));

}  // namespace jaxnorm
