// batch_norm backward, its sums and dx in one launch, of x and dy that the device holds.
//
// Bytes per element of b bytes: 3b, with the residual's cotangent 4b, and 1/8 for the bits.

// Numbers of each channel. kSlope holds rstd until the slope is known.
enum : int { kMean, kFactor, kSlope, kOffset, kNumbers };

constexpr int kFirstBits = 16;  // a thread's bytes of bits that are loaded before cells are copied

// Operands of a channel, as loaded: arithmetic would wait for the loads.
struct ChannelOperands {
  float mean, var, scale;
};

DEVICE ChannelOperands LoadOperands(const GroupArrays& arrays, u32 channel) {
  return {arrays.mean.Of<float>(0)[channel], arrays.var.Of<float>(0)[channel],
          arrays.scale ? arrays.scale.Of<float>(0)[channel] : 1};
}

extern "C" __global__ void __launch_bounds__(kResidentThreads, 1)
    jaxnorm_batch_norm_bwd(const __grid_constant__ ResidentPlan plan, const __grid_constant__ GroupArrays arrays,
                           float epsilon) {
  uint4* const shared_bytes = (uint4*)dynamic_shared();
  const ResidentTile tile(plan, shared_bytes);
  const Resident block(plan, tile, shared_bytes);
  [[maybe_unused]] const u8* const bits = BWD_BITS == kNoBits ? nullptr : arrays.bits.Of<u8>(0);
  const auto load_bits = [&](u32 turn) { return bits[(block.at + turn * block.stride) / kCols]; };
  // These loads come before the copies: behind the copies they would arrive last.
  ChannelOperands operands;
  if (threadIdx.x < plan.slots) operands = LoadOperands(arrays, block.first_channel + threadIdx.x);
  [[maybe_unused]] u8 first_bits[kFirstBits];
  if constexpr (BWD_BITS != kNoBits) {
#pragma unroll
    for (int turn = 0; turn < kFirstBits; ++turn) {
      if (turn < block.turns) first_bits[turn] = load_bits(turn);
    }
  }
  tile.Copy(plan, shared_bytes);
#pragma unroll 1
  for (u32 slot = threadIdx.x; slot < plan.slots; slot += blockDim.x) {
    if (slot >= blockDim.x) operands = LoadOperands(arrays, block.first_channel + slot);
    block.Number(kMean, slot) = operands.mean;
    const float rstd = rsqrt(operands.var + epsilon);
    block.Number(kFactor, slot) = rstd * operands.scale;
    block.Number(kSlope, slot) = rstd;
  }
  if constexpr (BWD_BITS != kNoBits) {
#pragma unroll
    for (int turn = 0; turn < kFirstBits; ++turn) {
      if (turn < block.turns) StoreSharedByte(block.ByteAddress(turn), first_bits[turn]);
    }
#pragma unroll 1
    for (u32 turn = kFirstBits; turn < block.turns; ++turn) {
      StoreSharedByte(block.ByteAddress(turn), load_bits(turn));
    }
  }
  __syncthreads();

  const auto mean = block.Numbers(kMean);
  T* const dresidual = arrays.dresidual ? arrays.dresidual.Of<T>(0) : nullptr;
  float sum[kCols] = {}, product[kCols] = {};
  u32 turn = 0;
#pragma unroll 1
  for (int group = 0; group < kCopyGroups; ++group) {
    const u32 end = block.WaitForGroup(group);
#pragma unroll 1
    for (; turn < end; ++turn) {
      Cells g = block.Load(0, turn);
      const auto values = block.Load(1, turn).GetAcc();
      if constexpr (BWD_BITS != kNoBits) {
        g.Select(LoadSharedByte(block.ByteAddress(turn)));
        block.Store(0, turn, g);
      }
      if (dresidual) g.Store(dresidual + (block.at + turn * block.stride));
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const float v = g.GetAcc().v[j];
        sum[j] += v;
        product[j] += v * (values.v[j] - mean[j]);
      }
    }
  }
  Merge(block, ColumnNumbers::Sum(sum), ColumnNumbers::Sum(product),
        [&](u32 slot, const Sums& sums) { block.Write(slot, sums); });

  Exchange(
      block, [](auto sums) { return sums([](Sums post, float) { return post; }); },
      [&](u32 slot, Sums total) {
        const float factor = block.Number(kFactor, slot), rstd = block.Number(kSlope, slot);
        const float dscale = total.second * rstd;
        block.Number(kSlope, slot) = -factor * rstd * dscale * plan.inverse_count;
        block.Number(kOffset, slot) = -factor * total.first * plan.inverse_count;
        if (block.sharer == 0) {
          arrays.dbias.Of<float>(0)[block.first_channel + slot] = total.first;
          arrays.dscale.Of<float>(0)[block.first_channel + slot] = dscale;
        }
      });
  const u64 left_before = threadIdx.x == 0 ? Leave(block) : 0;
  const auto factor = block.Numbers(kFactor), slope = block.Numbers(kSlope), offset = block.Numbers(kOffset);
  T* const dx = arrays.dx.Of<T>(0);
  ForTurns<2>(0, block.turns, [&](auto count, u32 turn) {
    Cells g[count], v[count];
#pragma unroll
    for (int k = 0; k < count; ++k) {
      g[k] = block.Load(0, turn + k);
      v[k] = block.Load(1, turn + k);
    }
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float values[kCols];
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        const float drift = slope[j] * (v[k].GetAcc().v[j] - mean[j]) + offset[j];
        values[j] = factor[j] * g[k].GetAcc().v[j] + drift;
      }
      g[k].Set(RoundVec<T>(values));
      g[k].Store(dx + (block.at + (turn + k) * block.stride));
    }
  });
  ClearAfterLast(block, left_before);
}
