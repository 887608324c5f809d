// batch_norm forward, statistics and result in one launch, of x that the device holds.
//
// Bytes per element of b bytes: 2b, with a residual 3b, and 1/8 for the bits.

// Numbers of each channel. kCentre: the centre of squared distances, about the mean of the block's elements. kOrigin:
// the origin of all blocks' means, the channel's first element.
enum : int { kCentre, kMean, kFactor, kBias, kOrigin, kNumbers };

// Operands of a channel, as loaded: arithmetic would wait for the loads.
struct ChannelOperands {
  T first;
  float scale, bias;
};

DEVICE ChannelOperands LoadOperands(const GroupArrays& arrays, u32 inner, u32 channel) {
  return {arrays.x.Of<T>(0)[channel * inner], arrays.scale ? arrays.scale.Of<float>(0)[channel] : 1,
          arrays.bias ? arrays.bias.Of<float>(0)[channel] : 0};
}

// The second pass over the block's elements, which writes y and its bits.
DEVICE void WriteResults(const Resident& block, const ResidentTile& tile, const GroupArrays& arrays, const T* residual,
                         bool relu) {
  const auto mean = block.Numbers(kMean), factor = block.Numbers(kFactor), bias = block.Numbers(kBias);
  T* const y = arrays.y.Of<T>(0);
  const auto write = [&](u32 first, u32 end) {
    ForTurns<2>(first, end, [&](auto count, u32 turn) {
      Cells cells[count];
      [[maybe_unused]] Cells residuals[count];
#pragma unroll
      for (int k = 0; k < count; ++k) {
        if constexpr (TRAIN_RESIDUAL) residuals[k].Load(residual + (block.at + (turn + k) * block.stride));
        cells[k] = block.Load(0, turn + k);
      }
#pragma unroll
      for (int k = 0; k < count; ++k) {
        float values[kCols];
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          values[j] = (cells[k].GetAcc().v[j] - mean[j]) * factor[j] + bias[j];
          if constexpr (TRAIN_RESIDUAL) values[j] += residuals[k].GetAcc().v[j];
        }
        const u32 at = block.at + (turn + k) * block.stride;
        const Vec<T, kCols> line = TRAIN_BITS != kNoBits || relu ? RoundRelu<T>(values) : RoundVec<T>(values);
        cells[k].Set(line);
        cells[k].Store(y + at);
        if constexpr (TRAIN_BITS != kNoBits) KeepBits(block, turn + k - first, PositiveBits(line));
      }
    });
  };
  if constexpr (TRAIN_BITS == kNoBits) {
    write(0, block.turns);
  } else {
    // All bits are written at once, unless the arrays leave too little room for them.
#pragma unroll 1
    for (u32 first = 0; first * block.plan.rows < tile.lines; first += block.plan.kept_turns) {
      if (first > 0) __syncthreads();
      write(first, min(first + block.plan.kept_turns, block.turns));
      __syncthreads();
      WriteBits(block, tile, first, arrays.bits.Of<u8>(0));
    }
  }
}

extern "C" __global__ void __launch_bounds__(kResidentThreads, 1)
    jaxnorm_batch_norm_train(const __grid_constant__ ResidentPlan plan, const __grid_constant__ GroupArrays arrays,
                             u32 inner, float epsilon, int relu) {
  uint4* const shared_bytes = (uint4*)dynamic_shared();
  const ResidentTile tile(plan, shared_bytes);
  tile.Copy(plan, shared_bytes);
  const Resident block(plan, tile, shared_bytes);
  // The loads of the channels' operands are behind the copies, so their results are used last.
  const auto keep = [&](u32 slot, const ChannelOperands& operands) {
    block.Number(kOrigin, slot) = Origin(ToAcc(operands.first));
    block.Number(kFactor, slot) = operands.scale;
    block.Number(kBias, slot) = operands.bias;
  };
  const u32 own_slot = (threadIdx.x < kWarp ? blockDim.x : 0) + threadIdx.x - kWarp;  // warp 0 has the last slots
  ChannelOperands own;
  if (own_slot < plan.slots) own = LoadOperands(arrays, inner, block.first_channel + own_slot);
#pragma unroll 1
  for (u32 slot = own_slot + blockDim.x; slot < plan.slots; slot += blockDim.x) {
    keep(slot, LoadOperands(arrays, inner, block.first_channel + slot));
  }
  __syncthreads();

  // Pass 0 finds the mean of the first group of copies, which is 1/16 of the elements or all. Pass 1 sums distances
  // from this mean, and their squares: the final subtraction then loses at most four bits.
  const float inverse_held = 1 / static_cast<float>(block.held);
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    block.WaitForGroup(0);
    const auto centre = pass == 0 ? block.Firsts() : block.Numbers(kCentre);
    float sum[kCols] = {}, square[kCols] = {};
    u32 turn = 0;
#pragma unroll 1
    for (int group = 0; group < (pass == 0 ? 1 : kCopyGroups); ++group) {
      const u32 end = block.WaitForGroup(group);
#pragma unroll 1
      for (; turn < end; ++turn) {
        const auto values = block.Load(0, turn).GetAcc();
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          const float d = values.v[j] - centre[j];
          sum[j] += d;
          square[j] += d * d;
        }
      }
    }
    if (pass == 0 && turn > 0) {
      const float weight = static_cast<float>(block.turns) * Reciprocal(static_cast<float>(turn));
#pragma unroll
      for (float& number : sum) number *= weight;
    }
    if (pass == 1 && own_slot < plan.slots) keep(own_slot, own);
    Merge(block, ColumnNumbers::Sum(sum), ColumnNumbers::Sum(square), [&](u32 slot, const Sums& sums) {
      const float mean = sums.first * inverse_held;
      float& centre = block.Number(kCentre, slot);
      if (pass == 0) {
        centre = Origin(block.First(slot) + mean);
      } else {
        const float m2 = max(sums.second - sums.first * mean, 0.f) + (mean - mean);  // max drops NaN
        block.Write(slot, {(centre - block.Number(kOrigin, slot)) + mean, m2});
      }
    });
  }
  const T* const residual = TRAIN_RESIDUAL ? arrays.residual.Of<T>(0) : nullptr;
  if constexpr (TRAIN_RESIDUAL) {
    for (u32 turn = 0; turn < block.turns; ++turn) {
      PrefetchToL2(residual + (block.at + turn * block.stride));
    }
  }

  Exchange(
      block,
      [&](auto sums) {
        const float shift = sums([](Sums post, float count) { return count * post.first; }) * plan.inverse_count;
        const float var = sums([&](Sums post, float count) {
          const float distance = post.first - shift;
          return post.second + count * distance * distance;
        });
        return Sums{shift, var * plan.inverse_count};
      },
      [&](u32 slot, Sums total) {
        const float mean = block.Number(kOrigin, slot) + total.first;
        block.Number(kMean, slot) = mean;
        block.Number(kFactor, slot) *= rsqrt(total.second + epsilon);
        if (block.sharer == 0) {
          arrays.mean.Of<float>(0)[block.first_channel + slot] = mean;
          arrays.var.Of<float>(0)[block.first_channel + slot] = total.second;
        }
      });
  const u64 left_before = threadIdx.x == 0 ? Leave(block) : 0;
  WriteResults(block, tile, arrays, residual, relu);
  ClearAfterLast(block, left_before);
}
