// ReLU, by hand because a row program is 5 to 8 % slower forward (on an H100, float16, 32768 x 4096: 0.92 of the speed)
// and has no bits for rows whose length is not a multiple of 8.
//
// Both directions are bound by memory traffic. Bytes per element of b bytes, each moved once:
//   forward 2b + 1/8, with a second addend 3b + 1/8; backward 2b + 1/8.
//
// The arrays are walked as flat memory, in tiles of 16 KiB per array, so every access is a whole aligned 16 bytes
// whatever the row length. Where the mask's bits are flat too (rows of whole bytes, or a single row), nothing else is
// needed. Other rows pad their last byte, so that the bits of the mask and the flat bits drift apart. A tile then
// translates between the two in shared memory, with the same traffic in global memory.

constexpr int kThreads = 256;
constexpr int kVecsPerThread = 4;  // 64 bytes of each input in flight per thread, 16 KiB per block

// Elements, or their bits as an unsigned integer.
template <class E>
constexpr u32 kTile = kThreads * kVecsPerThread * kVecSize<E>;  // of one block; a multiple of 8

// This thread's vectors of a tile. They are kept as words: 16-bit elements would take a register each.
struct Tile {
  uint4 words[kVecsPerThread];
};

// Vector k of this thread begins at element VecBegin<E>() + k * kVecStride<E> of the tile: neighbouring threads hold
// neighbouring vectors.
template <class E>
DEVICE u32 VecBegin() {
  return threadIdx.x * kVecSize<E>;
}
template <class E>
constexpr u32 kVecStride = kThreads * kVecSize<E>;

// Reads the first `count` elements of a tile, which is aligned to 16 bytes; elements past them are 0.
template <class E>
DEVICE Tile LoadTile(const E* p, u32 count) {
  p += VecBegin<E>();
  Tile tile;
  if (count == kTile<E>) {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) tile.words[k] = BitsAs<uint4>(LoadVec(p + k * kVecStride<E>));
  } else {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      Vec<E, kVecSize<E>> vec;
#pragma unroll
      for (int j = 0; j < kVecSize<E>; ++j) {
        const u32 i = k * kVecStride<E> + j;
        vec.v[j] = VecBegin<E>() + i < count ? p[i] : E{};
      }
      tile.words[k] = BitsAs<uint4>(vec);
    }
  }
  return tile;
}

// Writes the first `count` elements of a tile.
template <class E>
DEVICE void StoreTile(E* p, const Tile& tile, u32 count) {
  p += VecBegin<E>();
  if (count == kTile<E>) {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) StoreWords(p + k * kVecStride<E>, tile.words[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      const auto vec = BitsAs<Vec<E, kVecSize<E>>>(tile.words[k]);
#pragma unroll
      for (int j = 0; j < kVecSize<E>; ++j) {
        const u32 i = k * kVecStride<E> + j;
        if (VecBegin<E>() + i < count) p[i] = vec.v[j];
      }
    }
  }
}
