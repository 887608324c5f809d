// layer_norm and rms_norm over the last dimensions, and their gradients.
//
// A row that fits the cache is one chunk: one or two passes over the row find its statistics, and another pass writes
// its results. For a longer row, the statistics of all chunks are computed and merged before the results are written.
// Short rows without a mask are processed many at a time (norm_short.h).
//
// Rows are cut into blocks, by shape alone. The parameter gradients of each block are summed in order, and then the
// sums of all blocks, so that results do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "convert.h"
#include "loops.h"
#include "norm_call.h"
#include "norm_rows.h"
#include "norm_short.h"
#include "parallel.h"
#include "simd.h"

namespace jaxnorm {
namespace {

// ---- Kernels ----
//
// Reduce returns the statistics of a chunk. Apply writes the results of a chunk, given the statistics of the whole row.
// If a row is one chunk, Apply follows at once (`again`). Reduce adds to `sums`, a block's rows of partial sums; `sums`
// is nullptr where there are no partial sums.

// The number of elements that count, their mean (0 if not centred), and their sum of squared deviations from the mean.
template <typename A>
struct Moments {
  A count = 0, mean = 0, squares = 0;

  // Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".
  JAXNORM_INLINE void Merge(const Moments& other) {
    if (other.count == 0) return;
    if (count == 0) {
      *this = other;
      return;
    }
    const A total = count + other.count, delta = other.mean - mean;
    squares += other.squares + delta * delta * (count * other.count / total);
    mean += delta * (other.count / total);
    count = total;
  }
};

template <typename Number>
struct Forward {
  using A = Number;
  using Statistics = Moments<A>;
  struct Parameters {
    const A* factor;
    const A* shift;
  };
  static constexpr bool kShort = false;
  const NormFwdArgs& args;

  bool HasResults() const { return true; }

  JAXNORM_INLINE Parameters Load(int64_t group, const Chunk& chunk) const {
    return {LoadFactor<A>(args.scale, args.parameter_dtype, group, chunk, args.scale_offset),
            LoadShift<A>(args.bias, args.parameter_dtype, group, chunk)};
  }

  JAXNORM_INLINE Statistics Reduce(const Chunk& chunk, const Parameters&, A*) const {
    const A* values = Values(chunk, /*again=*/false);
    const uint8_t* mask = MaskOf(args.mask, chunk);
    const int64_t n = chunk.n;
    const A count = CountOf<A>(mask, n), inverse = 1 / count;
    if (count == 0) return {};
    const A* kept = Kept(values, mask, A{0}, n);
    if (!args.center) {
      const A squares =
          Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return Two<A>{A{0}, kept[i] * kept[i]}; }).second;
      return {count, A{0}, squares};
    }
    const A mean = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return Two<A>{kept[i], A{0}}; }).first * inverse;
    const A* around = Kept(values, mask, mean, n);
    const Two<A> sums = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
      const A deviation = around[i] - mean;
      return Two<A>{deviation, deviation * deviation};
    });
    // The mean was rounded: the mean of the deviations corrects both the mean and the sum of squares.
    const A shift = sums.first * inverse, squares = sums.second - sums.first * shift;
    return {count, mean + shift, squares < 0 ? A{0} : squares};
  }

  JAXNORM_INLINE void Apply(const Chunk& chunk, const Statistics& moments, const Parameters& parameters,
                            bool again) const {
    const A* values = Values(chunk, again);
    const A inverse = 1 / moments.count;
    const A mean = moments.count == 0 ? std::numeric_limits<A>::quiet_NaN() : moments.mean;
    const A rstd = 1 / std::sqrt(moments.squares * inverse + static_cast<A>(args.epsilon));
    if (chunk.start == 0) {
      if (args.center) static_cast<A*>(args.mean)[chunk.row] = mean;
      static_cast<A*>(args.rstd)[chunk.row] = rstd;
    }
    Store<A>(args.dtype, Result(args.y, chunk), chunk.n, kFirst, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
      return (values[i] - mean) * rstd * parameters.factor[i] + parameters.shift[i];
    });
  }

 private:
  JAXNORM_INLINE void* Result(void* array, const Chunk& chunk) const {
    return At<A>(args.dtype, array, chunk.row * args.shape.cols + chunk.start);
  }

  // The values to normalise: x, or the rounded sum x + residual, because backward reads the rounded sum.
  JAXNORM_INLINE const A* Values(const Chunk& chunk, bool again) const {
    if (!args.residual) return StageChunk<A>(args.dtype, args.x, chunk, kFirst, again);
    void* sum = Result(args.sum, chunk);
    if (!again) {
      const A* first = StageChunk<A>(args.dtype, args.x, chunk, kFirst);
      const A* second = StageChunk<A>(args.dtype, args.residual, chunk, kSecond);
      Store<A>(args.dtype, sum, chunk.n, kFirst, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return first[i] + second[i]; });
    }
    return Stage<A>(args.dtype, sum, chunk.n, kFirst, again);
  }

  // The values, with `otherwise` in place of elements that do not count.
  JAXNORM_INLINE const A* Kept(const A* values, const uint8_t* mask, A otherwise, int64_t n) const {
    if (mask == nullptr) return values;
    A* kept = ThreadBuffer<A>(kSecond);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) kept[i] = mask[i] != 0 ? values[i] : otherwise;
    return kept;
  }
};

// Sums over a row, as norm_call.h names them.
template <typename A>
struct BackwardSums {
  A count = 0, w = 0, product = 0;

  JAXNORM_INLINE void Merge(const BackwardSums& other) {
    count += other.count;
    w += other.w;
    product += other.product;
  }
};

// The partial sums of a block are a row for dscale, then a row for dbias.
template <typename Number>
struct Backward {
  using A = Number;
  using Statistics = BackwardSums<A>;
  struct Parameters {
    const A* factor;
  };
  static constexpr bool kShort = false;
  const NormBwdArgs& args;

  bool HasResults() const { return args.dx != nullptr; }

  JAXNORM_INLINE Parameters Load(int64_t group, const Chunk& chunk) const {
    return {LoadFactor<A>(args.scale, args.parameter_dtype, group, chunk, args.scale_offset)};
  }

  JAXNORM_INLINE Statistics Reduce(const Chunk& chunk, const Parameters& parameters, A* sums) const {
    const Row row(args, chunk, /*again=*/false);
    const A* factor = parameters.factor;
    A* dscale = sums + chunk.start;
    A* dbias = dscale + args.shape.cols;
    if (args.dx == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < chunk.n; ++i) {
        dscale[i] += row.dy[i] * row.xhat(i);
        dbias[i] += row.dy[i];
      }
      return {};
    }
    Two<A> totals;
    if (sums != nullptr) {
      totals = Sum<A>(chunk.n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        const A xhat = row.xhat(i), dy = row.dy[i], w = dy * factor[i];
        dscale[i] += dy * xhat;
        dbias[i] += dy;
        return Two<A>{w, w * xhat};
      });
    } else {
      totals = Sum<A>(chunk.n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        const A w = row.dy[i] * factor[i];
        return Two<A>{w, w * row.xhat(i)};
      });
    }
    return {CountOf<A>(MaskOf(args.mask, chunk), chunk.n), totals.first, totals.second};
  }

  JAXNORM_INLINE void Apply(const Chunk& chunk, const Statistics& statistics, const Parameters& parameters,
                            bool again) const {
    const Row row(args, chunk, again);
    const A* factor = parameters.factor;
    const A inverse = 1 / statistics.count;
    const A of_w = args.center ? statistics.w * inverse : A{0}, of_product = statistics.product * inverse;
    const uint8_t* mask = MaskOf(args.mask, chunk);
    const auto whole = [=](int64_t i) JAXNORM_INLINE_LAMBDA {
      return row.rstd * (row.dy[i] * factor[i] - (of_w + row.xhat(i) * of_product));
    };
    const auto masked = [=](int64_t i) JAXNORM_INLINE_LAMBDA {
      const A drift = of_w + row.xhat(i) * of_product;
      return row.rstd * (row.dy[i] * factor[i] - (mask[i] != 0 ? drift : A{0}));
    };
    mask == nullptr ? StoreDx(chunk, whole) : StoreDx(chunk, masked);
  }

 private:
  // The elements of a chunk.
  struct Row {
    const A* x;
    const A* dy;
    A mean, rstd;

    JAXNORM_INLINE Row(const NormBwdArgs& args, const Chunk& chunk, bool again)
        : x(StageChunk<A>(args.dtype, args.x, chunk, kFirst, again)),
          dy(StageChunk<A>(args.dtype, args.dy, chunk, kSecond, again)),
          mean(args.center ? StatisticOf(args.mean, chunk.row) : A{0}),
          rstd(StatisticOf(args.rstd, chunk.row)) {}

    JAXNORM_INLINE A xhat(int64_t i) const { return (x[i] - mean) * rstd; }

   private:
    JAXNORM_INLINE static A StatisticOf(const Operand& operand, int64_t row) {
      return static_cast<const A*>(operand.data)[operand.view.RowOffset(row)];
    }
  };

  template <typename F>
  JAXNORM_INLINE void StoreDx(const Chunk& chunk, F f) const {
    void* dx = At<A>(args.dtype, args.dx, chunk.row * args.shape.cols + chunk.start);
    if (!args.dsum) {
      Store<A>(args.dtype, dx, chunk.n, kFirst, f);
      return;
    }
    const A* dsum = StageChunk<A>(args.dtype, args.dsum, chunk, kShift);
    Store<A>(args.dtype, dx, chunk.n, kFirst, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return f(i) + dsum[i]; });
  }
};

// ---- Execution ----

// How a call is cut: rows into blocks that lie within one group each, columns into chunks.
struct Grid {
  NormShape shape;
  int64_t chunk, chunks, block_rows, blocks_per_group;

  Grid(const NormShape& shape, int64_t longest_chunk, int64_t block_rows)
      : shape(shape),
        chunk(shape.cols <= longest_chunk ? shape.cols : kChunk),
        chunks((shape.cols + chunk - 1) / chunk),
        block_rows(block_rows),
        blocks_per_group((shape.rows_per_group + block_rows - 1) / block_rows) {}

  int64_t blocks() const { return shape.groups * blocks_per_group; }
  int64_t group(int64_t block) const { return block / blocks_per_group; }
  int64_t first_row(int64_t block) const {
    return group(block) * shape.rows_per_group + block % blocks_per_group * block_rows;
  }
  int64_t last_row(int64_t block) const {  // one beyond
    return std::min(first_row(block) + block_rows, (group(block) + 1) * shape.rows_per_group);
  }
  Chunk at(int64_t row, int64_t index) const {
    return {row, index * chunk, std::min(chunk, shape.cols - index * chunk)};
  }
};

// The work on the rows of a block: all of it, or one of two steps that are spread over the threads separately.
enum Steps { kWhole, kStatistics, kResults };

// Runs chunks [begin, end) of a block. `statistics` is [rows][chunks], and is not used with kWhole: kStatistics writes
// the statistics of chunk `begin` of each row, kResults reads the statistics of a row from the place of its first
// chunk.
template <typename Kernel>
JAXNORM_SIMD_CLONES void RunChunks(const Kernel& kernel, const Grid& grid, int64_t block, int64_t begin, int64_t end,
                                   Steps steps, typename Kernel::Statistics* statistics, typename Kernel::A* sums) {
  const int64_t group = grid.group(block);
  const bool one = end - begin == 1;
  typename Kernel::Parameters parameters;
  if (one) parameters = kernel.Load(group, grid.at(0, begin));
  for (int64_t row = grid.first_row(block); row < grid.last_row(block); ++row) {
    typename Kernel::Statistics of_row;
    if (steps == kResults) {
      of_row = statistics[row * grid.chunks];
    } else {
      for (int64_t i = begin; i < end; ++i) {
        const Chunk chunk = grid.at(row, i);
        if (!one) parameters = kernel.Load(group, chunk);
        of_row.Merge(kernel.Reduce(chunk, parameters, sums));
      }
    }
    if (steps == kStatistics) {
      statistics[row * grid.chunks + begin] = of_row;
      continue;
    }
    if (!kernel.HasResults()) continue;
    for (int64_t i = begin; i < end; ++i) {
      const Chunk chunk = grid.at(row, i);
      if (!one) parameters = kernel.Load(group, chunk);
      kernel.Apply(chunk, of_row, parameters, /*again=*/grid.chunks == 1);
    }
  }
}

// A block of short rows.
template <typename Kernel>
JAXNORM_SIMD_CLONES void RunShort(const Kernel& kernel, const Grid& grid, int64_t block, typename Kernel::A* sums) {
  kernel(grid.group(block), grid.first_row(block), grid.last_row(block), sums);
}

// Runs all blocks. The partial sums of block i are at sums[i * pitch], and are set to 0 first.
template <typename Kernel>
void RunBlocks(ffi::ThreadPool& pool, const Kernel& kernel, const Grid& grid, typename Kernel::A* sums, int64_t pitch) {
  const int64_t blocks = grid.blocks(), chunks = grid.chunks;
  const auto sums_of = [&](int64_t block) { return sums != nullptr ? sums + block * pitch : nullptr; };
  const auto clear = [&](int64_t block, int64_t from, int64_t to) {
    for (int64_t half = 0; half < 2 && sums != nullptr; ++half) {
      std::fill(sums + block * pitch + half * pitch / 2 + from, sums + block * pitch + half * pitch / 2 + to, 0);
    }
  };
  // With enough blocks for all threads, one thread processes a whole row, and its cache may still hold the row at the
  // second reading. Otherwise each step is spread over the threads separately.
  constexpr int64_t kBlocksPerThread = 4;
  if (chunks == 1 || blocks >= kBlocksPerThread * pool.num_threads()) {
    ParallelFor(pool, blocks, grid.block_rows * grid.shape.cols, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        clear(block, 0, pitch / 2);
        if constexpr (Kernel::kShort) {
          RunShort(kernel, grid, block, sums_of(block));
        } else {
          RunChunks(kernel, grid, block, 0, chunks, kWhole, nullptr, sums_of(block));
        }
      }
    });
    return;
  }
  if constexpr (!Kernel::kShort) {
    using Statistics = typename Kernel::Statistics;
    const std::unique_ptr<Statistics[]> statistics(new Statistics[grid.shape.rows() * chunks]);
    const auto run = [&](Steps steps) {
      ParallelFor(pool, blocks * chunks, grid.block_rows * grid.chunk, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t block = i / chunks, index = i % chunks;
          const Chunk chunk = grid.at(0, index);
          if (steps == kStatistics) clear(block, chunk.start, chunk.start + chunk.n);
          RunChunks(kernel, grid, block, index, index + 1, steps, statistics.get(), sums_of(block));
        }
      });
    };
    run(kStatistics);
    if (!kernel.HasResults()) return;
    for (int64_t row = 0; row < grid.shape.rows(); ++row) {
      Statistics* first = &statistics[row * chunks];
      for (int64_t i = 1; i < chunks; ++i) first->Merge(first[i]);
    }
    run(kResults);
  }
}

template <typename A>
Error RunForward(ffi::ThreadPool& pool, const NormFwdArgs& args) {
  const int64_t rows = std::max<int64_t>(1, kGrainElements / args.shape.cols);
  const Grid grid(args.shape, kLongestChunk<A>, rows);
  if (args.shape.cols <= kShortRow && !args.mask) {
    RunBlocks(pool, ShortForward<A>{args}, grid, static_cast<A*>(nullptr), 0);
  } else {
    RunBlocks(pool, Forward<A>{args}, grid, static_cast<A*>(nullptr), 0);
  }
  return Error::Success();
}

// Columns [begin, end) of all blocks' partial sums, added up; `out` is where column `begin` belongs.
template <typename A>
JAXNORM_SIMD_CLONES void AddPartials(const A* sums, int64_t blocks, int64_t pitch, int64_t begin, int64_t end,
                                     DataType dtype, void* out) {
  constexpr int64_t kTogether = 256;
  A totals[kTogether];
  for (int64_t start = begin; start < end; start += kTogether) {
    const int64_t n = std::min(kTogether, end - start);
    std::fill_n(totals, n, A{0});
    for (int64_t block = 0; block < blocks; ++block) {
      const A* from = sums + block * pitch + start;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) totals[i] += from[i];
    }
    Write(dtype, totals, At<A>(dtype, out, start - begin), n);
  }
}

template <typename A>
Error RunBackward(ffi::ThreadPool& pool, const NormBwdArgs& args) {
  const NormShape& shape = args.shape;
  const int64_t group_size = shape.rows_per_group * shape.cols;
  const auto run = [&](const Grid& grid, A* sums, int64_t pitch) {
    if (shape.cols <= kShortRow && !args.mask) {
      RunBlocks(pool, ShortBackward<A>{args}, grid, sums, pitch);
    } else {
      RunBlocks(pool, Backward<A>{args}, grid, sums, pitch);
    }
  };
  if (args.dscale == nullptr && args.dbias == nullptr) {
    const Grid grid(shape, kLongestChunk<A>, std::max<int64_t>(1, kGrainElements / shape.cols));
    run(grid, nullptr, 0);
    return Error::Success();
  }
  // Partial sums cost two rows per block, so a block has many rows. kMostBlocks is enough for the threads there may be.
  constexpr int64_t kLeastRows = 16, kMostBlocks = 64;
  const int64_t wanted = std::min({kMostBlocks, shape.rows_per_group / kLeastRows, group_size / kGrainElements});
  const int64_t blocks = std::max<int64_t>(1, wanted);
  const Grid grid(shape, kLongestChunk<A>, std::max<int64_t>(1, (shape.rows_per_group + blocks - 1) / blocks));
  const int64_t pitch = 2 * shape.cols;
  const std::unique_ptr<A[]> sums(new A[grid.blocks() * pitch]);
  run(grid, sums.get(), pitch);

  const int64_t per_group = grid.blocks_per_group;
  const DataType dtype = args.gradient_dtype;
  for (auto [out, offset] : {std::pair{args.dscale, int64_t{0}}, std::pair{args.dbias, pitch / 2}}) {
    if (out == nullptr) continue;
    const A* from = sums.get() + offset;
    if (shape.groups > 1) {
      ParallelFor(pool, shape.groups, shape.cols * per_group, [&](int64_t begin, int64_t end) {
        for (int64_t group = begin; group < end; ++group) {
          AddPartials(from + group * per_group * pitch, per_group, pitch, 0, shape.cols, dtype,
                      At<A>(dtype, out, group * shape.cols));
        }
      });
    } else {
      ParallelFor(pool, shape.cols, per_group, [&](int64_t begin, int64_t end) {
        AddPartials(from, per_group, pitch, begin, end, dtype, At<A>(dtype, out, begin));
      });
    }
  }
  return Error::Success();
}

// ---- Handlers ----

Error NormFwd(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
              ffi::RemainingRets results, int64_t axis, int64_t groups, bool center, double epsilon,
              double scale_offset, int64_t operands) {
  NormFwdArgs args;
  JAXNORM_RETURN_IF_ERROR(
      ParseNormFwd(x, rest, *y, results, axis, groups, center, epsilon, scale_offset, operands, &args));
  return DispatchAcc(args.dtype, [&]<typename A>(A) {
    if (args.shape.cols > 0) return RunForward<A>(pool, args);
    for (void* statistic : {args.mean, args.rstd}) {
      if (statistic == nullptr) continue;
      std::fill_n(static_cast<A*>(statistic), args.shape.rows(), std::numeric_limits<A>::quiet_NaN());
    }
    return Error::Success();
  });
}

Error NormBwd(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::RemainingArgs rest,
              ffi::RemainingRets results, int64_t axis, int64_t groups, bool center, double scale_offset,
              int64_t operands, int64_t need) {
  NormBwdArgs args;
  JAXNORM_RETURN_IF_ERROR(
      ParseNormBwd(x, dy, rest, results, axis, groups, center, scale_offset, operands, need, &args));
  if (args.shape.groups == 0 || args.shape.cols == 0) return Error::Success();  // no gradients
  return DispatchAcc(args.dtype, [&]<typename A>(A) { return RunBackward<A>(pool, args); });
}

}  // namespace

JAXNORM_REGISTER(norm_fwd, NormFwd,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .Ret<ffi::AnyBuffer>()
                     .RemainingRets()
                     .Attr<int64_t>("axis")
                     .Attr<int64_t>("groups")
                     .Attr<bool>("center")
                     .Attr<double>("epsilon")
                     .Attr<double>("scale_offset")
                     .Attr<int64_t>("operands"));

JAXNORM_REGISTER(norm_bwd, NormBwd,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::ThreadPool>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .RemainingRets()
                     .Attr<int64_t>("axis")
                     .Attr<int64_t>("groups")
                     .Attr<bool>("center")
                     .Attr<double>("scale_offset")
                     .Attr<int64_t>("operands")
                     .Attr<int64_t>("need"));

}  // namespace jaxnorm
