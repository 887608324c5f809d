// Loops that the norms share.
#ifndef JAXNORM_CPU_LOOPS_H_
#define JAXNORM_CPU_LOOPS_H_

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace jaxnorm {

// A sum is kept in this many lanes. Additions to one register wait for each other, so a sum needs several registers.
inline constexpr int64_t kLanesOfSum = 32;

// Sums of both values of f(i) for i in [0, n).
template <typename A, typename F>
JAXNORM_INLINE Two<A> Sum(int64_t n, F f) {
  // Blocks are summed by themselves, so that rounding errors grow with the number of blocks, not of elements.
  constexpr int64_t kBlock = 64 * kLanesOfSum;
  Two<A> total = {A{0}, A{0}};
  int64_t start = 0;
  while (start + kLanesOfSum <= n) {
    // One array element per vector lane: with constant indices throughout, the compiler keeps them in registers.
    A first[kLanesOfSum] = {}, second[kLanesOfSum] = {};
    const int64_t stop = std::min(n, start + kBlock) - kLanesOfSum;
    do {
#pragma omp simd
      for (int64_t i = 0; i < kLanesOfSum; ++i) {
        const Two<A> terms = f(start + i);
        first[i] += terms.first;
        second[i] += terms.second;
      }
      start += kLanesOfSum;
    } while (start <= stop);
#pragma GCC unroll 8
    for (int64_t half = kLanesOfSum / 2; half > 0; half /= 2) {
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        first[i] += first[half + i];
        second[i] += second[half + i];
      }
    }
    total.first += first[0];
    total.second += second[0];
  }
  A first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
  for (int64_t i = start; i < n; ++i) {
    const Two<A> terms = f(i);
    first += terms.first;
    second += terms.second;
  }
  return {total.first + first, total.second + second};
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_LOOPS_H_
