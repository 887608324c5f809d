// Loops over rows of at most a few vectors, many rows at a time.
//
// A loop along such a row would spend its time on the remainder beside whole vectors, and on adding up the lanes of a
// vector. Here rows adjoin in memory. A row is read in whole vectors; the last lanes belong to the next rows and are
// dropped. Lanes are added up for many rows together. Elements written beyond a row are overwritten by the next row.
// Buffers therefore have room for one more vector.
#ifndef JAXNORM_CPU_SHORT_ROWS_H_
#define JAXNORM_CPU_SHORT_ROWS_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "bits.h"
#include "call.h"
#include "simd.h"

namespace jaxnorm {

// Longer rows are as fast one at a time.
inline constexpr int64_t kShortRow = 192;
// The most rows and elements of a tile: three arrays of float32 stay in the first-level cache.
inline constexpr int64_t kShortTileRows = 512, kShortTileElements = 2048;
// Elements of the widest vector, and rows whose lanes are added up together.
inline constexpr int64_t kWidestVector = 16, kRowsTogether = 16;

template <typename A>
struct alignas(64) ShortTile {
  A data[kShortTileElements + kWidestVector];
};
// A number for each row of a tile, or for each column.
template <typename A>
struct alignas(64) ShortRowNumbers {
  A data[kShortTileRows];
};
template <typename A>
struct alignas(64) ShortColumnNumbers {
  A data[kShortRow + kWidestVector] = {};
};

// Copies the numbers of rows [row, row + n) to `out`. An operand with a number for each of all `rows` rows is
// contiguous.
template <typename U>
JAXNORM_INLINE void LoadNumbers(const Operand& operand, int64_t rows, int64_t row, int64_t n, U* out) {
  const U* data = static_cast<const U*>(operand.data);
  if (operand.elements == rows) {
    std::copy_n(data + row, n, out);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = data[operand.view.RowOffset(row + i)];
  }
}

inline int64_t RowsOfShortTile(int64_t columns) { return std::min(kShortTileRows, kShortTileElements / columns); }

// Loops over a tile reach up to a vector beyond the tile. They can work in place if that stays within the piece of
// work.
JAXNORM_INLINE bool HasSlack(int64_t elements_behind) { return elements_behind >= kWidestVector; }
template <typename T>
JAXNORM_INLINE bool InPlace(int64_t elements_behind) {
  return std::is_same_v<T, Acc<T>> && HasSlack(elements_behind);
}

// The n elements of a tile as type Acc<T>: in place, or in the buffer.
template <typename T>
JAXNORM_INLINE const Acc<T>* ReadTile(const T* from, int64_t n, bool in_place, Acc<T>* buffer) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    if (in_place) return from;
  }
  ToAccRun(from, buffer, n);
  return buffer;
}

// The array that loops write a tile to: its place, or the buffer. StoreTile then moves the tile from the buffer to its
// place.
template <typename T>
JAXNORM_INLINE Acc<T>* WriteTile(T* to, bool in_place, Acc<T>* buffer) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    if (in_place) return to;
  }
  return buffer;
}
template <typename T>
JAXNORM_INLINE void StoreTile(const Acc<T>* results, int64_t n, bool in_place, T* to) {
  if (!in_place) FromAccRun<T>(results, to, n);
}

// Calls body(integral_constant(elements of a vector)) with the narrowest vector that spans the columns, at most
// kWidestVector.
template <typename Body>
JAXNORM_INLINE void DispatchVector(int64_t columns, const Body& body) {
  if (columns <= 4) {
    body(std::integral_constant<int64_t, 4>());
  } else if (columns <= 8) {
    body(std::integral_constant<int64_t, 8>());
  } else {
    body(std::integral_constant<int64_t, kWidestVector>());
  }
}

// Adds up the lanes of each of kRowsTogether vectors, neighbours first: lanes[r] becomes the sum of vector r.
template <int64_t kVector, typename A>
JAXNORM_INLINE void AddLanes(A* lanes) {
#pragma GCC unroll 8
  for (int64_t half = kVector / 2; half > 0; half /= 2) {
#pragma omp simd
    for (int64_t i = 0; i < kRowsTogether * half; ++i) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
  }
}

// x where `keep` is all ones, else 0. Not a select, for which the compiler would branch.
template <typename A>
JAXNORM_INLINE A Keep(BitsOf<A> keep, A x) {
  return std::bit_cast<A>(std::bit_cast<BitsOf<A>>(x) & keep);
}

// Sums of both values of f(row, column) over each row. f is called for columns beyond the last one too. `second` may be
// null.
template <int64_t kVector, typename A, typename F>
JAXNORM_INLINE void SumRows(int64_t rows, int64_t columns, const F& f, A* first, A* second) {
  const int64_t whole = columns & -kVector;
  alignas(64) BitsOf<A> keep[kVector];
#pragma omp simd
  for (int64_t i = 0; i < kVector; ++i) keep[i] = whole + i < columns ? ~BitsOf<A>{0} : BitsOf<A>{0};
  for (int64_t start = 0; start < rows; start += kRowsTogether) {
    alignas(64) A of_first[kRowsTogether * kVector], of_second[kRowsTogether * kVector];
    const int64_t count = std::min(kRowsTogether, rows - start);
    for (int64_t r = 0; r < count; ++r) {
      A sum_first[kVector] = {}, sum_second[kVector] = {};
      for (int64_t column = 0; column < whole; column += kVector) {
#pragma omp simd
        for (int64_t i = 0; i < kVector; ++i) {
          const Two<A> terms = f(start + r, column + i);
          sum_first[i] += terms.first;
          sum_second[i] += terms.second;
        }
      }
      if (whole < columns) {
#pragma omp simd
        for (int64_t i = 0; i < kVector; ++i) {
          const Two<A> terms = f(start + r, whole + i);
          sum_first[i] += Keep(keep[i], terms.first);
          sum_second[i] += Keep(keep[i], terms.second);
        }
      }
#pragma omp simd
      for (int64_t i = 0; i < kVector; ++i) {
        of_first[r * kVector + i] = sum_first[i];
        of_second[r * kVector + i] = sum_second[i];
      }
    }
    AddLanes<kVector>(of_first);
    std::copy_n(of_first, count, first + start);
    if (second == nullptr) continue;
    AddLanes<kVector>(of_second);
    std::copy_n(of_second, count, second + start);
  }
}

// Writes f(row, column) to a tile, row by row. f is called for columns beyond the last one too.
template <int64_t kVector, typename A, typename F>
JAXNORM_INLINE void WriteRows(int64_t rows, int64_t columns, const F& f, A* out) {
  for (int64_t row = 0; row < rows; ++row) {
    A* to = out + row * columns;
    for (int64_t column = 0; column < columns; column += kVector) {
#pragma omp simd
      for (int64_t i = 0; i < kVector; ++i) to[column + i] = f(row, column + i);
    }
  }
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_SHORT_ROWS_H_
