// ReLU backward: t where the mask's bit is set, else 0.
//
// RELU_FLAT: the mask is flat, bit i % 8 of byte i / 8 is element i.
template <int kBytes>
struct UnsignedOf {
  using type = u64;
};
template <>
struct UnsignedOf<4> {
  using type = u32;
};
template <>
struct UnsignedOf<2> {
  using type = u16;
};
// Bits, not numbers, are selected.
using Bits = UnsignedOf<sizeof(T)>::type;

extern "C" __global__ void __launch_bounds__(kThreads)
    jaxnorm_relu_bwd(const u8* __restrict__ mask, const Bits* __restrict__ t, Bits* __restrict__ out, i64 size,
                     Rows rows) {
  const i64 begin = i64{blockIdx.x} * kTile<Bits>;
  const u32 count = (u32)min(size - begin, i64{kTile<Bits>});

  Tile tile = LoadTile(t + begin, count);
  u32 bits[kVecsPerThread];
  if constexpr (RELU_FLAT) {
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      const u32 i = VecBegin<Bits>() + k * kVecStride<Bits>;
      bits[k] = i < count ? mask[begin / 8 + i / 8] >> i % 8 : 0;
    }
  } else {
    __shared__ u8 bytes[kTile<Bits>];  // room for rows of one column, which have a byte per element
    __shared__ Place place;
    if (threadIdx.x == 0) place = rows.Find(begin);
    __syncthreads();
    const u32 first = rows.ByteOf(place.col), last = rows.ByteOf(place.col + count - 1);
    for (u32 byte = first + threadIdx.x; byte <= last; byte += kThreads) {
      bytes[byte - first] = mask[place.first_byte + byte];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kVecsPerThread; ++k) {
      bits[k] = rows.BytesToFlat<kVecSize<Bits>>(bytes, first, place.col + VecBegin<Bits>() + k * kVecStride<Bits>);
    }
  }
#pragma unroll
  for (int k = 0; k < kVecsPerThread; ++k) {
    auto vec = BitsAs<Vec<Bits, kVecSize<Bits>>>(tile.words[k]);
#pragma unroll
    for (int j = 0; j < kVecSize<Bits>; ++j) {
      if (!(bits[k] >> j & 1)) vec.v[j] = 0;
    }
    tile.words[k] = BitsAs<uint4>(vec);
  }
  StoreTile(out + begin, tile, count);
}
