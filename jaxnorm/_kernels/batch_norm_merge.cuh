// How a block of batch_norm's resident kernels merges its threads' sums of each channel.

// A plane has 4 of a thread's 2 * kCols sums of neighbouring channels (MergePlanes).
constexpr int kPlaneNumbers = 4, kPlanes = 2 * kCols / kPlaneNumbers;

// Calls f(slot, lane, whether there is such a slot) by 2^bits lanes for each of `count` slots. Warps without a slot do
// not call f: their instructions would take turns with the instructions of the other warps.
template <class F>
DEVICE void ForGroups(u32 bits, u32 count, F f) {
  const u32 lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (u32 first = (threadIdx.x - lane) >> bits; first < count; first += blockDim.x >> bits) {
    const u32 slot = first + (lane >> bits);
    f(slot, lane & ((1u << bits) - 1), slot < count);
  }
}

// Calls write(slot, sums) by one thread for each slot. `sums` is the total of add(slot, lane) over 2^lane_bits lanes.
template <class F, class Add>
DEVICE void MergeLanes(const Resident& block, F write, Add add) {
  const ResidentPlan& plan = block.plan;
  ForGroups(plan.lane_bits, plan.slots, [&](u32 slot, u32 lane, bool there) {
    const Sums sums = LaneSums(there ? add(slot, lane) : Sums(), 1u << plan.lane_bits);
    if (there && lane == 0) write(slot, sums);
  });
}

// Merge where the columns of a thread are of one channel.
template <class F>
DEVICE void MergeAlike(const Resident& block, Sums sums, F write) {
  const ResidentPlan& plan = block.plan;
  const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, row_threads = plan.by_row_threads.divisor;
  if (plan.slots == 1) {
    sums = LaneSums(sums, kWarp);
    if (lane == 0) block.entries[warp] = sums;
    __syncthreads();
    if (warp == 0) {
      sums = LaneSums(lane < blockDim.x / kWarp ? block.entries[lane] : Sums(), kWarp);
      if (lane == 0) write(0, sums);
    }
  } else {
    block.entries[threadIdx.x] = sums;
    __syncthreads();
    MergeLanes(block, write, [&](u32 slot, u32 i) {
      Sums sums;
      for (; i < plan.rows * plan.own_entries; i += 1u << plan.lane_bits) {
        u32 column;
        const u32 row = plan.by_own_entries.DivMod(i, &column);
        sums += block.entries[row * row_threads + slot * plan.own_entries + column];
      }
      return sums;
    });
  }
}

// Merge where the columns of a thread are of neighbouring channels, backward.
template <class F>
DEVICE void MergeColumns(const Resident& block, const ColumnNumbers& first, const ColumnNumbers& second, F write) {
  const ResidentPlan& plan = block.plan;
  const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, row_threads = plan.by_row_threads.divisor;
  // Lanes with the same columns halve their columns, as long as a lane has several. A warp then has each column once.
  Sums columns[kCols];
#pragma unroll
  for (int j = 0; j < kCols; ++j) columns[j] = {first[j], second[j]};
  u32 offset = kWarp / 2, own = 0, count = kCols;
#pragma unroll
  for (int half = kCols / 2; half > 0; half /= 2) {
    if (offset < row_threads) break;
    const bool upper = lane & offset;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const Sums sent = upper ? columns[j] : columns[half + j];
      columns[j] = upper ? columns[half + j] : columns[j];
      columns[j] += ShuffleXor(sent, offset);
    }
    own += upper ? half : 0;
    count = half;
    offset /= 2;
  }
  for (; offset >= row_threads && offset > 0; offset /= 2) columns[0] += ShuffleXor(columns[0], offset);
  // A slot has an entry for each warp, or for each row of threads if a row has several warps.
  const u32 entry = row_threads < kWarp ? warp : threadIdx.x / row_threads;
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    if (j == count) break;
    if (lane % 4 < row_threads) block.entries[entry * (plan.slots + 1) + block.own_slot + own + j] = columns[j];
  }
  __syncthreads();
  MergeLanes(block, write, [&](u32 slot, u32 i) {
    Sums sums;
    for (; i < plan.own_entries; i += 1u << plan.lane_bits) sums += block.entries[i * (plan.slots + 1) + slot];
    return sums;
  });
}

// Merge where the columns of a thread are of neighbouring channels, forward. It goes through shared memory, for which
// backward has no room. That takes fewer instructions, and every launch fetches its instructions anew. (With half the
// room it takes no less time than shuffles.) The numbers of a plane are first added up to `fold` sums, which belong
// to columns of some lines, and then to one sum for each column.
template <class F>
DEVICE void MergePlanes(const Resident& block, const ColumnNumbers& first, const ColumnNumbers& second, F write) {
  const ResidentPlan& plan = block.plan;
  const u32 fold = plan.by_fold.divisor, numbers = kPlaneNumbers * blockDim.x;  // numbers of a plane
  float4* const planes = reinterpret_cast<float4*>(block.entries);
  float* const folded = reinterpret_cast<float*>(planes + kPlanes * blockDim.x);
#pragma unroll
  for (int p = 0; p < kPlanes; ++p) {
    const ColumnNumbers& from = p < kPlanes / 2 ? first : second;
    const int j = p % (kPlanes / 2) * kPlaneNumbers;
    planes[p * blockDim.x + threadIdx.x] = {from[j], from[j + 1], from[j + 2], from[j + 3]};
  }
  __syncthreads();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < kPlanes * fold; i += blockDim.x) {
    u32 at;
    const float* const plane = reinterpret_cast<const float*>(planes + plan.by_fold.DivMod(i, &at) * blockDim.x);
    float values[kPlaneNumbers * kPlanes];  // room for all numbers that are `fold` apart
#pragma unroll
    for (int k = 0; k < kPlaneNumbers * kPlanes; ++k, at += fold) values[k] = at < numbers ? plane[at] : 0;
    folded[i] = TreeSum(values);
  }
  __syncthreads();
  MergeLanes(block, write, [&](u32 slot, u32 lane) {
    const u32 line = kPlaneNumbers * plan.by_row_threads.divisor;
    const u32 column = slot / kCols * kPlaneNumbers + slot % kPlaneNumbers;
    const float* const plane = folded + slot % kCols / kPlaneNumbers * fold + column;
    Sums sums;
#pragma unroll 4
    for (u32 at = lane * line; at < fold; at += line << plan.lane_bits) {
      sums += {plane[at], plane[at + kPlanes / 2 * fold]};
    }
    return sums;
  });
}

// Calls write(slot, sums) by one thread for each slot, with the sums of all columns of the block.
template <class F>
DEVICE void Merge(const Resident& block, const ColumnNumbers& first, const ColumnNumbers& second, F write) {
  if constexpr (kAlike) {
    MergeAlike(block, {first[0], second[0]}, write);
  } else if constexpr (RESIDENT_ARRAYS == 1) {
    MergePlanes(block, first, second, write);
  } else {
    MergeColumns(block, first, second, write);
  }
  __syncthreads();
}
