// One bit per element, of which side of the ReLU it is on: made from vectors, and moved between flat order and the order
// of a mask whose rows begin on whole bytes.
#ifndef JAXNORM_CUDA_BITS_CUH_
#define JAXNORM_CUDA_BITS_CUH_

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "cuda/vec.cuh"

namespace jaxnorm {

// Bit j is v.v[j] > 0.
template <typename T, int N>
__device__ __forceinline__ uint32_t PositiveBits(const Vec<T, N>& v) {
  uint32_t bits = 0;
  if constexpr (sizeof(T) == 2) {
    const auto& pairs = reinterpret_cast<const Pairs<T, N>&>(v);
    const Pair<T> zero(T{}, T{});
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      // Bit 2i from the lower half and 2i + 1 from the upper one, still 16 apart.
      bits |= __hgt2_mask(pairs.p[i], zero) & (1u << 2 * i | 1u << (2 * i + 17));
    }
    return (bits | bits >> 16) & 0xffff;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) bits |= static_cast<uint32_t>(v.v[i] > 0) << i;
    return bits;
  }
}

// A byte, in each byte of U: what is done to the bits of one row can be done to those of several at once.
template <typename U>
__device__ __forceinline__ constexpr U Repeat(uint32_t byte) {
  return static_cast<U>(static_cast<U>(0x01010101u) * byte);
}

// The place of an element in the mask: bit col % 8 of byte first_byte + col / 8.
struct Place {
  int64_t first_byte;
  uint32_t col;
};

// Translates between elements and bytes of the mask near some place. Elements ("positions") and bytes are counted from
// the start of the row that the place lies in, and run on through the rows that follow; that fits 31 bits and FastDiv.
//
// A row above 2^30 columns is treated as if its first `cut_` columns (whole bytes, leaving about 2^30) were missing. A
// tile that begins among them cannot see the row's end, so that only its column modulo 8 matters.
class Rows {
 public:
  explicit Rows(int64_t cols)
      : near_cols_(static_cast<int32_t>(cols <= kMaxNearCols ? cols : kMaxNearCols + cols % 8)),
        near_bytes_(static_cast<int32_t>((near_cols_.divisor() + 7) / 8)),
        cols_(cols),
        cut_(cols - near_cols_.divisor()) {}

  // The place of an element. Beyond the first 2^31 it takes a 64-bit division, ~100 instructions.
  __device__ Place Find(int64_t element) const {
    if (cut_ == 0 && element <= INT32_MAX) {
      uint32_t col;
      const uint32_t row = near_cols_.DivMod(static_cast<uint32_t>(element), &col);
      return {int64_t{row} * near_bytes_.divisor(), col};
    }
    const int64_t row = element / cols_;
    const int64_t true_col = element - row * cols_;
    const int64_t col = true_col < cut_ ? true_col % 8 : true_col - cut_;
    return {row * ((cols_ + 7) / 8) + (true_col - col) / 8, static_cast<uint32_t>(col)};
  }

  // The byte that holds the element at `position`.
  __host__ __device__ __forceinline__ uint32_t ByteOf(uint32_t position) const {
    uint32_t col;
    const uint32_t row = near_cols_.DivMod(position, &col);
    return row * near_bytes_.divisor() + col / 8;
  }

  // The first byte none of whose elements lies before `position`.
  __host__ __device__ __forceinline__ uint32_t ByteFrom(uint32_t position) const {
    uint32_t col;
    const uint32_t row = near_cols_.DivMod(position, &col);
    return row * near_bytes_.divisor() + (col + 7) / 8;
  }

  // The byte `byte` of the mask, made from the flat bits that begin at position `flat_begin`.
  template <typename U>
  __device__ __forceinline__ U FlatToByte(const U* flat, uint32_t flat_begin, uint32_t byte) const {
    uint32_t byte_in_row;
    const uint32_t row = near_bytes_.DivMod(byte, &byte_in_row);
    const uint32_t col = byte_in_row * 8;
    const uint32_t bit = row * near_cols_.divisor() + col - flat_begin, shift = bit % 8;
    const uint32_t kept = (1u << min(8u, near_cols_.divisor() - col)) - 1;
    const U low = flat[bit / 8] >> shift & Repeat<U>(0xff >> shift & kept);
    const U high = flat[bit / 8 + 1] << (8 - shift) & Repeat<U>(0xff << (8 - shift) & kept);
    return low | high;
  }

  // The kCount <= 8 flat bits from `position` on, taken from the bytes of the mask that begin with byte `bytes_begin`.
  template <int kCount, typename U>
  __device__ __forceinline__ U BytesToFlat(const U* bytes, uint32_t bytes_begin, uint32_t position) const {
    uint32_t col;
    const uint32_t row = near_cols_.DivMod(position, &col);
    const U* byte = bytes + (row * near_bytes_.divisor() + col / 8 - bytes_begin);
    U bits = 0;
    for (uint32_t have = 0; have < kCount; ++byte) {  // 1 or 2 rounds, and 1 more per row end
      const uint32_t take = min(min(8 - col % 8, near_cols_.divisor() - col), kCount - have);
      bits |= (*byte >> col % 8 & Repeat<U>((1u << take) - 1)) << have;
      have += take;
      col += take;
      if (col == near_cols_.divisor()) col = 0;
    }
    return bits;
  }

 private:
  static constexpr int64_t kMaxNearCols = 1 << 30;  // and a tile more is still below INT32_MAX

  FastDiv near_cols_, near_bytes_;
  int64_t cols_, cut_;
};

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_BITS_CUH_
