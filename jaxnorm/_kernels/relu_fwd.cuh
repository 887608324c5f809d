// ReLU forward: y = max(x, 0), or max(x + z, 0), and the mask, whose bits say where y > 0.
//
// RELU_ADD: there is z. RELU_FLAT: the mask is flat, bit i % 8 of byte i / 8 is element i.
using Elements = Vec<T, kVecSize<T>>;

// x + z, rounded.
DEVICE Elements Sum(const Elements& x, const Elements& z) {
  const auto a = ToAccAll(x), b = ToAccAll(z);
  Acc<T> sums[kVecSize<T>];
#pragma unroll
  for (int j = 0; j < kVecSize<T>; ++j) sums[j] = a.v[j] + b.v[j];
  return RoundVec<T>(sums);
}

// Joins the bits of the 8 / kVecSize<T> neighbouring threads that hold the elements of one byte.
DEVICE u8 JoinBits(u32 bits) {
  constexpr int kLanes = 8 / kVecSize<T>;
  bits <<= threadIdx.x % kLanes * kVecSize<T>;
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) bits |= __shfl_xor_sync(kAllLanes, bits, lane);
  return (u8)bits;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    jaxnorm_relu_fwd(const T* __restrict__ x, const T* __restrict__ z, T* __restrict__ y, u8* __restrict__ mask,
                     i64 size, Rows rows) {
  const i64 begin = i64{blockIdx.x} * kTile<T>;
  const u32 count = (u32)min(size - begin, i64{kTile<T>});

  Tile tile = LoadTile(x + begin, count), addend;
  if constexpr (RELU_ADD) addend = LoadTile(z + begin, count);

  // Bits in flat order, where the mask is not flat: the bits of this tile, and of the next 8 elements, which the last
  // byte may reach into.
  __shared__ u8 flat[RELU_FLAT ? 1 : kTile<T> / 8 + 1];
  __shared__ Place place;
  if constexpr (!RELU_FLAT) {
    if (threadIdx.x == 0) place = rows.Find(begin);
    if (threadIdx.x / kWarp == 1) {
      const i64 i = begin + kTile<T> + threadIdx.x % kWarp;
      bool positive = false;  // a sum rounds to 0 only if it is 0
      if (threadIdx.x % kWarp < 8 && i < size) positive = ToAcc(x[i]) + (RELU_ADD ? ToAcc(z[i]) : 0) > 0;
      const u32 bits = __ballot_sync(kAllLanes, positive);
      if (threadIdx.x % kWarp == 0) flat[kTile<T> / 8] = (u8)bits;
    }
  }
#pragma unroll
  for (int k = 0; k < kVecsPerThread; ++k) {
    auto s = BitsAs<Elements>(tile.words[k]);
    if constexpr (RELU_ADD) s = Sum(s, BitsAs<Elements>(addend.words[k]));
    const u8 bits = JoinBits(PositiveBits(s));
    tile.words[k] = BitsAs<uint4>(Relu(s));
    const u32 i = VecBegin<T>() + k * kVecStride<T>;
    if (i % 8 != 0) continue;
    if constexpr (RELU_FLAT) {
      if (i < count) mask[begin / 8 + i / 8] = bits;
    } else {
      flat[i / 8] = bits;
    }
  }
  StoreTile(y + begin, tile, count);

  if constexpr (!RELU_FLAT) {
    __syncthreads();
    const u32 end = rows.ByteFrom(place.col + count);
    for (u32 byte = rows.ByteFrom(place.col) + threadIdx.x; byte < end; byte += kThreads) {
      mask[place.first_byte + byte] = rows.FlatToByte(flat, place.col, byte);
    }
  }
}
