// layer_norm and rms_norm over the last dimensions, and their gradients.
//
// A row is one chunk if it is not too long for the cache: its statistics are found in one or two passes over it, and its
// results written in another. Of a longer row first the statistics of all chunks are found, then merged, then used to
// write the results. Short rows are worked on many at a time (norm_short.h), if there is no mask.
//
// Rows are cut into blocks, by shape alone. A block's gradients of the parameters are summed in order, then those of
// all blocks, so that results do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "loops.h"
#include "norm_args.h"
#include "norm_rows.h"
#include "norm_short.h"
#include "parallel.h"
#include "simd.h"

namespace jaxnorm {
namespace {

// ---- Kernels ----
//
// Reduce finds the statistics of a chunk, Apply writes the results of one, given those of the whole row. If a row is one
// chunk, Apply follows at once (`again`). `sums` are a block's rows of partial sums, nullptr where there are none.

// Of the elements that count: their number, mean (0 if not centred), and sum of squared deviations from it.
template <typename A>
struct Moments {
  A count = 0, mean = 0, squares = 0;

  // Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".
  JAXNORM_INLINE void Merge(const Moments& other) {
    if (other.count == 0) return;
    const A total = count + other.count, delta = other.mean - mean;
    squares += other.squares + delta * delta * (count * other.count / total);
    mean += delta * (other.count / total);
    count = total;
  }
};

template <typename T>
struct Forward {
  using A = Acc<T>;
  using Statistics = Moments<A>;
  struct Parameters {
    const A* factor;
    const A* shift;
  };
  static constexpr bool kShort = false, kReduces = true;
  const NormFwdArgs& args;

  JAXNORM_INLINE Parameters Load(int64_t group, const Chunk& chunk) const {
    return {LoadFactor<T>(args.scale, args.parameter_dtype, group, chunk, args.scale_offset),
            LoadShift<T>(args.bias, args.parameter_dtype, group, chunk)};
  }

  JAXNORM_INLINE Statistics Reduce(const Chunk& chunk, const Parameters&, A*) const {
    const Source<T>* values = Values(chunk, /*again=*/false);
    const uint8_t* mask = MaskOf(args.mask, chunk);
    const A count = CountOf<A>(mask, chunk.n);
    if (count == 0) return {};
    if (mask == nullptr) {
      return ReduceKept(chunk.n, count, [=](int64_t i, A) JAXNORM_INLINE_LAMBDA { return ToAcc(values[i]); });
    }
    return ReduceKept(chunk.n, count, [=](int64_t i, A otherwise) JAXNORM_INLINE_LAMBDA {
      return mask[i] != 0 ? ToAcc(values[i]) : otherwise;
    });
  }

  JAXNORM_INLINE void Apply(const Chunk& chunk, const Statistics& moments, const Parameters& parameters, A*,
                            bool again) const {
    const Source<T>* values = Values(chunk, again);
    const A inverse = 1 / moments.count;
    const A mean = moments.count == 0 ? std::numeric_limits<A>::quiet_NaN() : moments.mean;
    const A rstd = 1 / std::sqrt(moments.squares * inverse + static_cast<A>(args.epsilon));
    if (chunk.start == 0) {
      if (args.center) static_cast<A*>(args.mean)[chunk.row] = mean;
      static_cast<A*>(args.rstd)[chunk.row] = rstd;
    }
    Store(static_cast<T*>(args.y) + Offset(chunk), chunk.n, kFirst, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
      return (ToAcc(values[i]) - mean) * rstd * parameters.factor[i] + parameters.shift[i];
    });
  }

 private:
  JAXNORM_INLINE int64_t Offset(const Chunk& chunk) const { return chunk.row * args.shape.cols + chunk.start; }

  // What is normalised: x, or the sum, as it was rounded, because backward will see it so.
  JAXNORM_INLINE const Source<T>* Values(const Chunk& chunk, bool again) const {
    const T* x = RowOf<T>(args.x, chunk);
    if (!args.residual) return Stage(x, chunk.n, kFirst, again);
    T* sum = static_cast<T*>(args.sum) + Offset(chunk);
    if (!again) {
      const Source<T>* first = Stage(x, chunk.n, kFirst);
      const Source<T>* second = Stage(RowOf<T>(args.residual, chunk), chunk.n, kSecond);
      Store(sum, chunk.n, kFirst, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return ToAcc(first[i]) + ToAcc(second[i]); });
    }
    return Stage(static_cast<const T*>(sum), chunk.n, kFirst, again);
  }

  // value(i, otherwise) is the element if it counts.
  template <typename Value>
  JAXNORM_INLINE Statistics ReduceKept(int64_t n, A count, Value value) const {
    const A inverse = 1 / count;
    if (!args.center) {
      const A squares = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
                          const A x = value(i, A{0});
                          return Two<A>{A{0}, x * x};
                        }).second;
      return {count, A{0}, squares};
    }
    const A mean =
        Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return Two<A>{value(i, A{0}), A{0}}; }).first * inverse;
    const Two<A> sums = Sum<A>(n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
      const A deviation = value(i, mean) - mean;
      return Two<A>{deviation, deviation * deviation};
    });
    // The mean was rounded; that of the deviations corrects it, and the sum of squares.
    const A shift = sums.first * inverse, squares = sums.second - sums.first * shift;
    return {count, mean + shift, squares < 0 ? A{0} : squares};
  }
};

// Sums over a row, as norm_args.h names them.
template <typename A>
struct BackwardSums {
  A count = 0, w = 0, product = 0;

  JAXNORM_INLINE void Merge(const BackwardSums& other) {
    count += other.count;
    w += other.w;
    product += other.product;
  }
};

// The partial sums of a block are a row for dscale, then one for dbias.
template <typename T, bool kDx, bool kParameters>
struct Backward {
  using A = Acc<T>;
  using Statistics = BackwardSums<A>;
  struct Parameters {
    const A* factor;
  };
  static constexpr bool kShort = false, kReduces = kDx;
  const NormBwdArgs& args;

  JAXNORM_INLINE Parameters Load(int64_t group, const Chunk& chunk) const {
    return {LoadFactor<T>(args.scale, args.parameter_dtype, group, chunk, args.scale_offset)};
  }

  JAXNORM_INLINE Statistics Reduce(const Chunk& chunk, const Parameters& parameters, A* sums) const {
    const Row row(*this, chunk, /*again=*/false);
    const A* factor = parameters.factor;
    A* dscale = sums + chunk.start;
    A* dbias = dscale + args.shape.cols;
    Two<A> totals;
    if (kParameters && sums != nullptr) {
      totals = Sum<A>(chunk.n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        const A xhat = row.xhat(i), dy = row.dy(i), w = dy * factor[i];
        dscale[i] += dy * xhat;
        dbias[i] += dy;
        return Two<A>{w, w * xhat};
      });
    } else {
      totals = Sum<A>(chunk.n, [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        const A w = row.dy(i) * factor[i];
        return Two<A>{w, w * row.xhat(i)};
      });
    }
    return {CountOf<A>(MaskOf(args.mask, chunk), chunk.n), totals.first, totals.second};
  }

  JAXNORM_INLINE void Apply(const Chunk& chunk, const Statistics& statistics, const Parameters& parameters, A* sums,
                            bool again) const {
    const Row row(*this, chunk, again);
    if (kParameters && !again) {
      A* dscale = sums + chunk.start;
      A* dbias = dscale + args.shape.cols;
#pragma omp simd
      for (int64_t i = 0; i < chunk.n; ++i) {
        dscale[i] += row.dy(i) * row.xhat(i);
        dbias[i] += row.dy(i);
      }
    }
    if constexpr (kDx) {
      const A* factor = parameters.factor;
      const A inverse = 1 / statistics.count;
      const A of_w = args.center ? statistics.w * inverse : A{0}, of_product = statistics.product * inverse;
      const uint8_t* mask = MaskOf(args.mask, chunk);
      const auto whole = [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        return row.rstd * (row.dy(i) * factor[i] - (of_w + row.xhat(i) * of_product));
      };
      const auto masked = [=](int64_t i) JAXNORM_INLINE_LAMBDA {
        const A drift = of_w + row.xhat(i) * of_product;
        return row.rstd * (row.dy(i) * factor[i] - (mask[i] != 0 ? drift : A{0}));
      };
      mask == nullptr ? StoreDx(chunk, whole) : StoreDx(chunk, masked);
    }
  }

 private:
  // The elements of a chunk.
  struct Row {
    const Source<T>* x;
    const Source<T>* dy_data;
    A mean, rstd;

    JAXNORM_INLINE Row(const Backward& call, const Chunk& chunk, bool again)
        : x(Stage(RowOf<T>(call.args.x, chunk), chunk.n, kFirst, again)),
          dy_data(Stage(RowOf<T>(call.args.dy, chunk), chunk.n, kSecond, again)),
          mean(call.args.center ? *RowOf<A>(call.args.mean, {chunk.row, 0, 1}) : A{0}),
          rstd(*RowOf<A>(call.args.rstd, {chunk.row, 0, 1})) {}

    JAXNORM_INLINE A xhat(int64_t i) const { return (ToAcc(x[i]) - mean) * rstd; }
    JAXNORM_INLINE A dy(int64_t i) const { return ToAcc(dy_data[i]); }
  };

  template <typename F>
  JAXNORM_INLINE void StoreDx(const Chunk& chunk, F f) const {
    T* dx = static_cast<T*>(args.dx) + chunk.row * args.shape.cols + chunk.start;
    if (!args.dsum) {
      Store(dx, chunk.n, kFirst, f);
      return;
    }
    const Source<T>* dsum = Stage(RowOf<T>(args.dsum, chunk), chunk.n, kShift);
    Store(dx, chunk.n, kFirst, [=](int64_t i) JAXNORM_INLINE_LAMBDA { return f(i) + ToAcc(dsum[i]); });
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

// A block, row by row or all of them.
template <typename Kernel>
JAXNORM_SIMD_CLONES void RunBlock(const Kernel& kernel, const Grid& grid, int64_t block, typename Kernel::A* sums) {
  const int64_t group = grid.group(block), first = grid.first_row(block), end = grid.last_row(block);
  if constexpr (Kernel::kShort) {
    kernel(group, first, end, sums);
  } else {
    typename Kernel::Parameters parameters;
    if (grid.chunks == 1) parameters = kernel.Load(group, grid.at(0, 0));
    for (int64_t row = first; row < end; ++row) {
      typename Kernel::Statistics statistics;
      if (grid.chunks == 1 && Kernel::kReduces) {
        const Chunk chunk = grid.at(row, 0);
        statistics = kernel.Reduce(chunk, parameters, sums);
        kernel.Apply(chunk, statistics, parameters, sums, /*again=*/true);
        continue;
      }
      for (int64_t i = 0; i < grid.chunks && Kernel::kReduces; ++i) {
        const Chunk chunk = grid.at(row, i);
        statistics.Merge(kernel.Reduce(chunk, kernel.Load(group, chunk), nullptr));
      }
      for (int64_t i = 0; i < grid.chunks; ++i) {
        const Chunk chunk = grid.at(row, i);
        if (grid.chunks > 1) parameters = kernel.Load(group, chunk);
        kernel.Apply(chunk, statistics, parameters, sums, /*again=*/false);
      }
    }
  }
}

// One chunk of all rows of a block: its statistics, or its results.
template <typename Kernel>
JAXNORM_SIMD_CLONES void ReduceChunks(const Kernel& kernel, const Grid& grid, int64_t block, int64_t index,
                                      typename Kernel::Statistics* statistics) {
  const int64_t first = grid.first_row(block), end = grid.last_row(block);
  const auto parameters = kernel.Load(grid.group(block), grid.at(first, index));
  for (int64_t row = first; row < end; ++row) {
    statistics[row * grid.chunks + index] = kernel.Reduce(grid.at(row, index), parameters, nullptr);
  }
}
template <typename Kernel>
JAXNORM_SIMD_CLONES void ApplyChunks(const Kernel& kernel, const Grid& grid, int64_t block, int64_t index,
                                     const typename Kernel::Statistics* statistics, typename Kernel::A* sums) {
  const int64_t first = grid.first_row(block), end = grid.last_row(block);
  const auto parameters = kernel.Load(grid.group(block), grid.at(first, index));
  for (int64_t row = first; row < end; ++row) {
    kernel.Apply(grid.at(row, index), statistics[row * grid.chunks], parameters, sums, /*again=*/false);
  }
}

// Runs all blocks; sums[i * pitch...] are the partial sums of block i, which start at 0.
template <typename Kernel>
void RunBlocks(ffi::ThreadPool& pool, const Kernel& kernel, const Grid& grid, typename Kernel::A* sums, int64_t pitch) {
  const int64_t blocks = grid.blocks(), chunks = grid.chunks;
  const auto clear = [&](int64_t block, int64_t from, int64_t to) {
    for (int64_t half = 0; half < 2 && sums != nullptr; ++half) {
      std::fill(sums + block * pitch + half * pitch / 2 + from, sums + block * pitch + half * pitch / 2 + to, 0);
    }
  };
  // With blocks enough for all threads a row stays on one, whose cache may still hold it when it is read again.
  // Otherwise each step is spread by itself.
  constexpr int64_t kBlocksPerThread = 4;
  if (chunks == 1 || blocks >= kBlocksPerThread * pool.num_threads()) {
    ParallelFor(pool, blocks, grid.block_rows * grid.shape.cols, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        clear(block, 0, pitch / 2);
        RunBlock(kernel, grid, block, sums != nullptr ? sums + block * pitch : nullptr);
      }
    });
    return;
  }
  if constexpr (!Kernel::kShort) {
    using Statistics = typename Kernel::Statistics;
    const std::unique_ptr<Statistics[]> statistics(new Statistics[grid.shape.rows() * chunks]);
    if (Kernel::kReduces) {
      ParallelFor(pool, blocks * chunks, grid.block_rows * grid.chunk, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ReduceChunks(kernel, grid, i / chunks, i % chunks, statistics.get());
      });
      for (int64_t row = 0; row < grid.shape.rows(); ++row) {
        Statistics* first = &statistics[row * chunks];
        Statistics merged;  // from nothing, as RunBlock does
        for (int64_t i = 0; i < chunks; ++i) merged.Merge(first[i]);
        *first = merged;
      }
    }
    ParallelFor(pool, blocks * chunks, grid.block_rows * grid.chunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t block = i / chunks;
        const Chunk chunk = grid.at(0, i % chunks);
        clear(block, chunk.start, chunk.start + chunk.n);
        ApplyChunks(kernel, grid, block, i % chunks, statistics.get(),
                    sums != nullptr ? sums + block * pitch : nullptr);
      }
    });
  }
}

template <typename T>
ffi::Error RunForward(ffi::ThreadPool& pool, const NormFwdArgs& args) {
  const int64_t rows = std::max<int64_t>(1, kGrainElements / args.shape.cols);
  const Grid grid(args.shape, kLongestChunk<Acc<T>>, rows);
  if (args.shape.cols <= kShortRow && !args.mask) {
    RunBlocks(pool, ShortForward<T>{args}, grid, static_cast<Acc<T>*>(nullptr), 0);
  } else {
    RunBlocks(pool, Forward<T>{args}, grid, static_cast<Acc<T>*>(nullptr), 0);
  }
  return ffi::Error::Success();
}

// Columns [begin, end) of all blocks' partial sums, added up.
template <typename U, typename A>
JAXNORM_SIMD_CLONES void AddPartials(const A* sums, int64_t blocks, int64_t pitch, int64_t begin, int64_t end, U* out) {
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
    FromAccRun<U>(totals, out + start, n);
  }
}

template <typename T>
ffi::Error RunBackward(ffi::ThreadPool& pool, const NormBwdArgs& args) {
  using A = Acc<T>;
  const NormShape& shape = args.shape;
  const int64_t group_size = shape.rows_per_group * shape.cols;
  const bool is_short = shape.cols <= kShortRow && !args.mask;
  if (args.dscale == nullptr && args.dbias == nullptr) {
    const Grid grid(shape, kLongestChunk<A>, std::max<int64_t>(1, kGrainElements / shape.cols));
    if (is_short) {
      RunBlocks(pool, ShortBackward<T>{args}, grid, static_cast<A*>(nullptr), 0);
    } else {
      RunBlocks(pool, Backward<T, true, false>{args}, grid, static_cast<A*>(nullptr), 0);
    }
    return ffi::Error::Success();
  }
  // Partial sums cost two rows per block, so blocks have many rows; enough blocks for the threads there may be.
  constexpr int64_t kLeastRows = 16, kMostBlocks = 64;
  const int64_t wanted = std::min({kMostBlocks, shape.rows_per_group / kLeastRows, group_size / kGrainElements});
  const int64_t blocks = std::max<int64_t>(1, wanted);
  const Grid grid(shape, kLongestChunk<A>, std::max<int64_t>(1, (shape.rows_per_group + blocks - 1) / blocks));
  const int64_t pitch = 2 * shape.cols;
  const std::unique_ptr<A[]> sums(new A[grid.blocks() * pitch]);
  if (is_short) {
    RunBlocks(pool, ShortBackward<T>{args}, grid, sums.get(), pitch);
  } else if (args.dx != nullptr) {
    RunBlocks(pool, Backward<T, true, true>{args}, grid, sums.get(), pitch);
  } else {
    RunBlocks(pool, Backward<T, false, true>{args}, grid, sums.get(), pitch);
  }

  const int64_t per_group = grid.blocks_per_group;
  const auto finish = [&]<typename U>(U* out, int64_t offset) {
    if (shape.groups > 1) {
      ParallelFor(pool, shape.groups, shape.cols * per_group, [&](int64_t begin, int64_t end) {
        for (int64_t group = begin; group < end; ++group) {
          AddPartials(sums.get() + group * per_group * pitch + offset, per_group, pitch, 0, shape.cols,
                      out + group * shape.cols);
        }
      });
    } else {
      ParallelFor(pool, shape.cols, per_group, [&](int64_t begin, int64_t end) {
        AddPartials(sums.get() + offset, per_group, pitch, begin, end, out);
      });
    }
  };
  for (auto [out, offset] : {std::pair{args.dscale, int64_t{0}}, std::pair{args.dbias, pitch / 2}}) {
    if (out == nullptr) continue;
    if (args.gradient_dtype == args.dtype) {
      finish(static_cast<T*>(out), offset);
    } else {
      finish(static_cast<A*>(out), offset);
    }
  }
  return ffi::Error::Success();
}

// ---- Handlers ----

ffi::Error NormFwd(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y,
                   ffi::RemainingRets results, int64_t axis, int64_t groups, bool center, double epsilon,
                   double scale_offset, int64_t operands) {
  NormFwdArgs args;
  JAXNORM_RETURN_IF_ERROR(
      ParseNormFwd(x, rest, *y, results, axis, groups, center, epsilon, scale_offset, operands, &args));
  return DispatchFloat(args.dtype, [&]<typename T>(T) {
    if (args.shape.cols > 0) return RunForward<T>(pool, args);
    for (void* statistic : {args.mean, args.rstd}) {
      if (statistic == nullptr) continue;
      std::fill_n(static_cast<Acc<T>*>(statistic), args.shape.rows(), std::numeric_limits<Acc<T>>::quiet_NaN());
    }
    return ffi::Error::Success();
  });
}

ffi::Error NormBwd(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::RemainingArgs rest,
                   ffi::RemainingRets results, int64_t axis, int64_t groups, bool center, double scale_offset,
                   int64_t operands, int64_t need) {
  NormBwdArgs args;
  JAXNORM_RETURN_IF_ERROR(
      ParseNormBwd(x, dy, rest, results, axis, groups, center, scale_offset, operands, need, &args));
  if (args.shape.cols == 0) return ffi::Error::Success();
  return DispatchFloat(args.dtype, [&]<typename T>(T) { return RunBackward<T>(pool, args); });
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
