// ReLU that keeps one bit per element for its backward pass; relu_args.h states the exact results.
//
// Both directions are bound by memory traffic. Bytes per element of b bytes, each moved once:
//   forward 2b + 1/8, with a second addend 3b + 1/8; backward 2b + 1/8.
//
// The arrays are walked as flat memory, in tiles of 16 KiB per array, so every access is a whole aligned 16 bytes
// whatever the row length. Where the mask's bits are flat too (rows of whole bytes, or a single row) nothing else is
// needed. Other rows pad their last byte, so the mask's bits and the flat ones drift apart; a tile then translates
// between the two in shared memory, and global memory sees the same traffic.
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "calls.h"
#include "cuda/bits.cuh"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"
#include "relu_args.h"

namespace jaxnorm {
namespace {

constexpr int kThreads = 256;
constexpr int kVecsPerThread = 4;  // 64 bytes of each input in flight per thread, 16 KiB per block
template <typename T>
constexpr uint32_t kTile = kThreads * kVecsPerThread * kVecSize<T>;  // elements of one block; a multiple of 8

// ---- Tiles in registers ----

// This thread's vectors of a tile. They are kept as words: 16-bit elements would take a register each.
struct Tile {
  uint4 words[kVecsPerThread];
};

// Vector k of this thread begins at element VecBegin<T>() + k * kVecStride<T> of the tile: neighbouring threads hold
// neighbouring vectors.
template <typename T>
__device__ __forceinline__ uint32_t VecBegin() {
  return threadIdx.x * kVecSize<T>;
}
template <typename T>
constexpr uint32_t kVecStride = kThreads * kVecSize<T>;

// Reads the `count` elements of a tile; elements past them are 0. `whole`: all of the tile, 16-byte aligned.
template <typename T>
__device__ __forceinline__ Tile LoadTile(const T* p, uint32_t count, bool whole) {
  p += VecBegin<T>();
  Tile tile;
  if (whole) {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) tile.words[k] = std::bit_cast<uint4>(Load(p + k * kVecStride<T>));
  } else {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      Vec<T, kVecSize<T>> vec;
#pragma unroll
      for (int j = 0; j < kVecSize<T>; ++j) {
        const uint32_t i = k * kVecStride<T> + j;
        vec.v[j] = VecBegin<T>() + i < count ? p[i] : T{};
      }
      tile.words[k] = std::bit_cast<uint4>(vec);
    }
  }
  return tile;
}

template <typename T>
__device__ __forceinline__ void StoreTile(T* p, const Tile& tile, uint32_t count, bool whole) {
  p += VecBegin<T>();
  if (whole) {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      Store(p + k * kVecStride<T>, std::bit_cast<Vec<T, kVecSize<T>>>(tile.words[k]));
    }
  } else {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      const auto vec = std::bit_cast<Vec<T, kVecSize<T>>>(tile.words[k]);
#pragma unroll
      for (int j = 0; j < kVecSize<T>; ++j) {
        const uint32_t i = k * kVecStride<T> + j;
        if (VecBegin<T>() + i < count) p[i] = vec.v[j];
      }
    }
  }
}

// ---- Forward ----

template <bool kAdd, typename T>
__device__ __forceinline__ T Sum(T x, T z) {
  if constexpr (kAdd) return FromAcc<T>(ToAcc(x) + ToAcc(z));
  return x;
}

// Joins the bits of the 8 / kVecSize<T> neighbouring threads that hold the elements of one byte.
template <typename T>
__device__ __forceinline__ uint8_t JoinBits(uint32_t bits) {
  constexpr int kLanes = 8 / kVecSize<T>;
  bits <<= threadIdx.x % kLanes * kVecSize<T>;
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) bits |= __shfl_xor_sync(~0u, bits, lane);
  return static_cast<uint8_t>(bits);
}

// kFlat: the mask is flat, bit i % 8 of byte i / 8 is element i. z is read only where kAdd.
template <typename T, bool kAdd, bool kFlat>
__global__ void __launch_bounds__(kThreads)
    ReluFwdKernel(const T* __restrict__ x, const T* __restrict__ z, T* __restrict__ y, uint8_t* __restrict__ mask,
                  int64_t size, bool aligned, Rows rows) {
  const int64_t begin = int64_t{blockIdx.x} * kTile<T>;
  const auto count = static_cast<uint32_t>(min(size - begin, int64_t{kTile<T>}));
  const bool whole = aligned && count == kTile<T>;

  Tile tile = LoadTile(x + begin, count, whole), addend;
  if constexpr (kAdd) addend = LoadTile(z + begin, count, whole);

  // Bits in flat order. They are the mask, or else this tile's and the next 8, which the last byte may reach into.
  __shared__ uint8_t flat[kFlat ? 1 : kTile<T> / 8 + 1];
  __shared__ Place place;
  if constexpr (!kFlat) {
    if (threadIdx.x == 0) place = rows.Find(begin);
    if (threadIdx.x / 32 == 1) {
      const int64_t i = begin + kTile<T> + threadIdx.x % 32;
      const bool positive = threadIdx.x % 32 < 8 && i < size && ToAcc(Sum<kAdd>(x[i], kAdd ? z[i] : T{})) > 0;
      const unsigned bits = __ballot_sync(~0u, positive);
      if (threadIdx.x % 32 == 0) flat[kTile<T> / 8] = static_cast<uint8_t>(bits);
    }
  }
#pragma unroll
  for (int k = 0; k < kVecsPerThread; ++k) {
    auto s = std::bit_cast<Vec<T, kVecSize<T>>>(tile.words[k]);
    if constexpr (kAdd) {
      const auto a = std::bit_cast<Vec<T, kVecSize<T>>>(addend.words[k]);
#pragma unroll
      for (int j = 0; j < kVecSize<T>; ++j) s.v[j] = Sum<true>(s.v[j], a.v[j]);
    }
    const uint8_t bits = JoinBits<T>(PositiveBits(s));
    tile.words[k] = std::bit_cast<uint4>(Relu(s));
    const uint32_t i = VecBegin<T>() + k * kVecStride<T>;
    if (i % 8 != 0) continue;
    if constexpr (kFlat) {
      if (i < count) mask[begin / 8 + i / 8] = bits;
    } else {
      flat[i / 8] = bits;
    }
  }
  StoreTile(y + begin, tile, count, whole);

  if constexpr (!kFlat) {
    __syncthreads();
    const uint32_t end = rows.ByteFrom(place.col + count);
    for (uint32_t byte = rows.ByteFrom(place.col) + threadIdx.x; byte < end; byte += kThreads) {
      mask[place.first_byte + byte] = rows.FlatToByte(flat, place.col, byte);
    }
  }
}

// ---- Backward ----

// Bits, not numbers, are selected: T is the unsigned integer of the dtype's width.
template <typename T, bool kFlat>
__global__ void __launch_bounds__(kThreads) ReluBwdKernel(const uint8_t* __restrict__ mask, const T* __restrict__ t,
                                                          T* __restrict__ out, int64_t size, bool aligned, Rows rows) {
  const int64_t begin = int64_t{blockIdx.x} * kTile<T>;
  const auto count = static_cast<uint32_t>(min(size - begin, int64_t{kTile<T>}));
  const bool whole = aligned && count == kTile<T>;

  Tile tile = LoadTile(t + begin, count, whole);
  uint32_t bits[kVecsPerThread];
  if constexpr (kFlat) {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      const uint32_t i = VecBegin<T>() + k * kVecStride<T>;
      bits[k] = i < count ? mask[begin / 8 + i / 8] >> i % 8 : 0;
    }
  } else {
    __shared__ uint8_t bytes[kTile<T>];  // rows of one column: a byte per element
    __shared__ Place place;
    if (threadIdx.x == 0) place = rows.Find(begin);
    __syncthreads();
    const uint32_t first = rows.ByteOf(place.col), last = rows.ByteOf(place.col + count - 1);
    for (uint32_t byte = first + threadIdx.x; byte <= last; byte += kThreads) {
      bytes[byte - first] = mask[place.first_byte + byte];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      bits[k] = rows.BytesToFlat<kVecSize<T>>(bytes, first, place.col + VecBegin<T>() + k * kVecStride<T>);
    }
  }
#pragma unroll
  for (int k = 0; k < kVecsPerThread; ++k) {
    auto vec = std::bit_cast<Vec<T, kVecSize<T>>>(tile.words[k]);
#pragma unroll
    for (int j = 0; j < kVecSize<T>; ++j) {
      if (!(bits[k] >> j & 1)) vec.v[j] = 0;
    }
    tile.words[k] = std::bit_cast<uint4>(vec);
  }
  StoreTile(out + begin, tile, count, whole);
}

// ---- Launch ----

// One row is flat too: its spare bits come after the last element.
bool IsFlat(const ReluArgs& args) { return args.cols % 8 == 0 || args.rows == 1; }

template <typename T>
int64_t Tiles(const ReluArgs& args) {
  return (args.size() + kTile<T> - 1) / kTile<T>;
}

template <typename T>
Error LaunchReluFwd(cudaStream_t stream, const ReluArgs& args) {
  const int64_t tiles = Tiles<T>(args);
  JAXNORM_CHECK(tiles <= std::numeric_limits<int32_t>::max());
  auto* kernel = IsFlat(args) ? (args.z ? ReluFwdKernel<T, true, true> : ReluFwdKernel<T, false, true>)
                              : (args.z ? ReluFwdKernel<T, true, false> : ReluFwdKernel<T, false, false>);
  const bool aligned = IsVecAligned(args.x) && IsVecAligned(args.z) && IsVecAligned(args.y);
  kernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(static_cast<const T*>(args.x),
                                                                static_cast<const T*>(args.z), static_cast<T*>(args.y),
                                                                args.mask, args.size(), aligned, Rows(args.cols));
  return LaunchStatus(cudaGetLastError(), "ReluFwdKernel");
}

template <typename T>
Error LaunchReluBwd(cudaStream_t stream, const ReluArgs& args) {
  const int64_t tiles = Tiles<T>(args);
  JAXNORM_CHECK(tiles <= std::numeric_limits<int32_t>::max());
  auto* kernel = IsFlat(args) ? ReluBwdKernel<T, true> : ReluBwdKernel<T, false>;
  kernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(
      args.mask, static_cast<const T*>(args.x), static_cast<T*>(args.y), args.size(),
      IsVecAligned(args.x) && IsVecAligned(args.y), Rows(args.cols));
  return LaunchStatus(cudaGetLastError(), "ReluBwdKernel");
}

}  // namespace

Error RunReluFwd(cudaStream_t stream, const ReluArgs& args) {
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) {
    return args.size() == 0 ? Error::Success() : LaunchReluFwd<T>(stream, args);
  });
}

Error RunReluBwd(cudaStream_t stream, const ReluArgs& args) {
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    return args.size() == 0 ? Error::Success() : LaunchReluBwd<Bits>(stream, args);
  });
}

}  // namespace jaxnorm
