// layer_norm and rms_norm of short rows without a mask, and their gradients: many rows at a time, with the loops of
// short_rows.h.
#ifndef JAXNORM_CPU_NORM_SHORT_H_
#define JAXNORM_CPU_NORM_SHORT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "convert.h"
#include "norm_call.h"
#include "norm_rows.h"
#include "short_rows.h"
#include "simd.h"

namespace jaxnorm {

// Rows [row, row + n) of an operand as type A: in place, or in `buffer`.
template <typename A>
JAXNORM_INLINE const A* ReadRows(DataType dtype, const Operand& operand, const NormShape& shape, int64_t row, int64_t n,
                                 bool in_place, A* buffer) {
  if (operand.elements == shape.size()) {
    const void* from = At<A>(dtype, operand.data, row * shape.cols);
    if (in_place) return static_cast<const A*>(from);
    Read(dtype, from, buffer, n * shape.cols);
    return buffer;
  }
  for (int64_t i = 0; i < n; ++i) {
    const void* from = At<A>(dtype, operand.data, OffsetIn(operand, {row + i, 0, shape.cols}));
    Read(dtype, from, buffer + i * shape.cols, shape.cols);
  }
  return buffer;
}

template <typename A>
JAXNORM_INLINE void AddRun(const A* from, A* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

// Statistics are computed as in norm.cc. The array `rstd` holds the sums of squares until they are complete.
template <typename A>
JAXNORM_INLINE void NormalizeTile(int64_t rows, int64_t columns, const A* values, bool center, A epsilon,
                                  const A* factor, const A* shift, A* mean, A* rstd, A* out) {
  const A inverse = A{1} / static_cast<A>(columns);
  const auto value = [=](int64_t row, int64_t column) JAXNORM_INLINE_LAMBDA { return values[row * columns + column]; };
  DispatchVector(columns, [=](auto vector) JAXNORM_INLINE_LAMBDA {
    A* const squares = rstd;
    if (center) {
      SumRows<vector>(
          rows, columns,
          [=](int64_t row, int64_t column) JAXNORM_INLINE_LAMBDA { return Two<A>{value(row, column), A{0}}; }, mean,
          static_cast<A*>(nullptr));
#pragma omp simd
      for (int64_t row = 0; row < rows; ++row) mean[row] *= inverse;
      A deviations[kShortTileRows];
      SumRows<vector>(
          rows, columns,
          [=](int64_t row, int64_t column) JAXNORM_INLINE_LAMBDA {
            const A deviation = value(row, column) - mean[row];
            return Two<A>{deviation, deviation * deviation};
          },
          deviations, squares);
#pragma omp simd
      for (int64_t row = 0; row < rows; ++row) {
        const A correction = deviations[row] * inverse, corrected = squares[row] - deviations[row] * correction;
        mean[row] += correction;
        squares[row] = corrected < 0 ? A{0} : corrected;
      }
    } else {
      std::fill_n(mean, rows, A{0});
      SumRows<vector>(
          rows, columns,
          [=](int64_t row, int64_t column) JAXNORM_INLINE_LAMBDA {
            const A x = value(row, column);
            return Two<A>{x * x, A{0}};
          },
          squares, static_cast<A*>(nullptr));
    }
#pragma omp simd
    for (int64_t row = 0; row < rows; ++row) rstd[row] = 1 / std::sqrt(squares[row] * inverse + epsilon);
    WriteRows<vector>(
        rows, columns,
        [=](int64_t row, int64_t column) JAXNORM_INLINE_LAMBDA {
          return (value(row, column) - mean[row]) * rstd[row] * factor[column] + shift[column];
        },
        out);
  });
}

// ShortForward and ShortBackward process rows [begin, end) of a block in one call.
template <typename Number>
struct ShortForward {
  using A = Number;
  static constexpr bool kShort = true;
  const NormFwdArgs& args;

  JAXNORM_INLINE void operator()(int64_t group, int64_t begin, int64_t end, A*) const {
    static thread_local ShortTile<A> values, other, results;
    const int64_t columns = args.shape.cols, step = RowsOfShortTile(columns);
    ShortColumnNumbers<A> factor, shift;
    const Chunk whole{0, 0, columns};
    std::copy_n(LoadFactor<A>(args.scale, args.parameter_dtype, group, whole, args.scale_offset), columns, factor.data);
    std::copy_n(LoadShift<A>(args.bias, args.parameter_dtype, group, whole), columns, shift.data);
    for (int64_t row = begin; row < end; row += step) {
      const int64_t n = std::min(step, end - row), size = n * columns;
      const bool in_place = IsNative<A>(args.dtype) && HasSlack((end - row) * columns - size);
      const A* x = ReadRows(args.dtype, args.x, args.shape, row, n, in_place && !args.residual, values.data);
      if (args.residual) {
        AddRun(ReadRows(args.dtype, args.residual, args.shape, row, n, in_place, other.data), values.data, size);
        // The sum is rounded here, because backward reads the rounded sum.
        void* sum = At<A>(args.dtype, args.sum, row * columns);
        Write(args.dtype, values.data, sum, size);
        if (!IsNative<A>(args.dtype)) Read(args.dtype, sum, values.data, size);
      }
      void* y = At<A>(args.dtype, args.y, row * columns);
      A* out = in_place ? static_cast<A*>(y) : results.data;
      ShortRowNumbers<A> mean, rstd;
      NormalizeTile(n, columns, x, args.center, static_cast<A>(args.epsilon), factor.data, shift.data, mean.data,
                    rstd.data, out);
      if (args.center) std::copy_n(mean.data, n, static_cast<A*>(args.mean) + row);
      std::copy_n(rstd.data, n, static_cast<A*>(args.rstd) + row);
      if (!in_place) Write(args.dtype, out, y, size);
    }
  }
};

template <typename Number>
struct ShortBackward {
  using A = Number;
  static constexpr bool kShort = true;
  const NormBwdArgs& args;

  JAXNORM_INLINE void operator()(int64_t group, int64_t begin, int64_t end, A* sums) const {
    static thread_local ShortTile<A> first, second, results;
    const int64_t columns = args.shape.cols, step = RowsOfShortTile(columns);
    ShortColumnNumbers<A> factor, dscale, dbias;
    std::copy_n(LoadFactor<A>(args.scale, args.parameter_dtype, group, {0, 0, columns}, args.scale_offset), columns,
                factor.data);
    for (int64_t row = begin; row < end; row += step) {
      const int64_t n = std::min(step, end - row), size = n * columns;
      const bool in_place = IsNative<A>(args.dtype) && HasSlack((end - row) * columns - size);
      // If dx is in the place of dy, a row's writes beyond its end would overwrite elements of dy that are still to be
      // read.
      const bool write_in_place = in_place && args.dx != args.dy.data;
      const A* x = ReadRows(args.dtype, args.x, args.shape, row, n, in_place, first.data);
      const A* dy = ReadRows(args.dtype, args.dy, args.shape, row, n, in_place, second.data);
      ShortRowNumbers<A> mean, rstd;
      LoadNumbers(args.rstd, args.shape.rows(), row, n, rstd.data);
      if (args.center) {
        LoadNumbers(args.mean, args.shape.rows(), row, n, mean.data);
      } else {
        std::fill_n(mean.data, n, A{0});
      }
      const Tile tile{n, columns, x, dy, mean.data, rstd.data, factor.data};
      if (sums != nullptr) {
        DispatchVector(columns, [&](auto vector) JAXNORM_INLINE_LAMBDA {
          tile.template AddParameters<vector>(dscale.data, dbias.data);
        });
      }
      if (args.dx != nullptr) {
        void* dx = At<A>(args.dtype, args.dx, row * columns);
        A* out = write_in_place ? static_cast<A*>(dx) : results.data;
        DispatchVector(columns,
                       [&](auto vector) JAXNORM_INLINE_LAMBDA { tile.template WriteDx<vector>(args.center, out); });
        if (args.dsum) AddRun(ReadRows(args.dtype, args.dsum, args.shape, row, n, in_place, first.data), out, size);
        if (!write_in_place) Write(args.dtype, out, dx, size);
      }
    }
    if (sums == nullptr) return;
    for (int64_t i = 0; i < columns; ++i) {
      sums[i] += dscale.data[i];
      sums[columns + i] += dbias.data[i];
    }
  }

 private:
  struct Tile {
    int64_t rows, columns;
    const A* x;
    const A* dy;
    const A* mean;
    const A* rstd;
    const A* factor;

    JAXNORM_INLINE A xhat(int64_t row, int64_t column) const {
      return (x[row * columns + column] - mean[row]) * rstd[row];
    }
    JAXNORM_INLINE A w(int64_t row, int64_t column) const { return dy[row * columns + column] * factor[column]; }

    template <int64_t kVector>
    JAXNORM_INLINE void AddParameters(A* dscale, A* dbias) const {
      const Tile tile = *this;
      for (int64_t column = 0; column < columns; column += kVector) {
        A of_scale[kVector] = {}, of_bias[kVector] = {};
        for (int64_t row = 0; row < rows; ++row) {
#pragma omp simd
          for (int64_t i = 0; i < kVector; ++i) {
            const A g = tile.dy[row * tile.columns + column + i];
            of_scale[i] += g * tile.xhat(row, column + i);
            of_bias[i] += g;
          }
        }
#pragma omp simd
        for (int64_t i = 0; i < kVector; ++i) {
          dscale[column + i] += of_scale[i];
          dbias[column + i] += of_bias[i];
        }
      }
    }

    template <int64_t kVector>
    JAXNORM_INLINE void WriteDx(bool center, A* dx) const {
      const Tile tile = *this;
      A of_w[kShortTileRows], of_product[kShortTileRows];
      SumRows<kVector>(
          rows, columns,
          [=](int64_t row, int64_t column) JAXNORM_INLINE_LAMBDA {
            const A w = tile.w(row, column);
            return Two<A>{w, w * tile.xhat(row, column)};
          },
          of_w, of_product);
      const A inverse = A{1} / static_cast<A>(columns);
#pragma omp simd
      for (int64_t row = 0; row < rows; ++row) {
        of_w[row] = center ? of_w[row] * inverse : A{0};
        of_product[row] *= inverse;
      }
      const A* means_of_w = of_w;
      const A* means_of_product = of_product;
      WriteRows<kVector>(
          rows, columns,
          [=](int64_t row, int64_t column) JAXNORM_INLINE_LAMBDA {
            const A drift = means_of_w[row] + tile.xhat(row, column) * means_of_product[row];
            return tile.rstd[row] * (tile.w(row, column) - drift);
          },
          dx);
    }
  };
};

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_NORM_SHORT_H_
