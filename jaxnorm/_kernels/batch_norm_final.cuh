// The second launch of a reduction, which merges the partial results of a channel. `Partial` is the type of a partial
// result.

constexpr int kFinalBits = 7, kFinalThreads = 1 << kFinalBits;
constexpr int kFinalAtOnce = 4;  // partial results that a thread reads before it uses the first

// Members are in the order of their use, so that few lines of the constant cache are waited for.
struct FinalPlan {
  const void* partials;
  i64 channels, inner;
  // A channel has 2^tile_bits * 2^span_bits lanes, each for some tiles and some spans.
  int tile_bits, span_bits;
  u32 blocks, spans;       // of a group
  u32 slots, tiles, tile;  // as in Partials and Lines
  bool one_tile;           // one tile has all elements of a channel in a line
  GroupArray other;        // x, or var if dscale is wanted
  GroupArray results[3];   // mean, var, count; or dbias, dscale
};

// All of the time is latency, and instructions that are fetched for the first time contribute most to it. So the code
// is short. There are two ways to the partial results. With channels last, a channel has many partial results, and a
// thread has several loads under way at once. Otherwise there are so many lanes that each lane finds about one partial
// result.
extern "C" __global__ void __launch_bounds__(kFinalThreads)
    jaxnorm_batch_norm_final(const __grid_constant__ FinalPlan plan, A epsilon, const __grid_constant__ Lines lines) {
  using P = Partial;
  let_next_begin();
  const int width_bits = kFinalBits - plan.tile_bits - plan.span_bits;
  const u32 width = 1u << width_bits, lane = threadIdx.x >> width_bits, group = blockIdx.x / plan.blocks;
  const i64 channel = i64{blockIdx.x - group * plan.blocks} * width + (threadIdx.x & (width - 1));
  const bool there = channel < plan.channels;
  A other{};  // loaded while the partial results are on their way
  if (lane == 0 && there && plan.other) {
    other = P::LoadOther(plan.other, group, channel, plan.inner);
  }
  P merged;
  const u64 span_stride = u64{plan.tiles} * plan.slots;
  const P* const partials = (const P*)plan.partials + WaitForLaunchBefore((i64)(u64{group} * plan.spans * span_stride));
  if (there && plan.one_tile) {
    const u32 tile = plan.tiles == 1 ? 0 : static_cast<u32>(channel) / plan.tile;
    const P* const of_tile = partials + u64{tile} * plan.slots + (channel - i64{tile} * plan.tile);
#pragma unroll 1
    for (u32 begin = lane; begin < plan.spans; begin += kFinalAtOnce << plan.span_bits) {
      P found[kFinalAtOnce];
#pragma unroll
      for (int i = 0; i < kFinalAtOnce; ++i) {
        const u32 span = begin + (i << plan.span_bits);
        if (span < plan.spans) found[i] = of_tile[span * span_stride];
      }
#pragma unroll
      for (int step = kFinalAtOnce / 2; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < step; ++i) found[i] = P::Merge(found[i], found[i + step]);
      }
      merged = P::Merge(merged, found[0]);
    }
  } else if (there) {
    // If a line holds each channel once, a channel's tiles are neighbours, and no channel wraps around.
    const bool once = lines.period == lines.cols;
    const int first = once ? lines.TileOf(channel * lines.inner) : 0;
    const int end = once ? lines.TileOf((channel + 1) * lines.inner - 1) + 1 : lines.tiles;
#pragma unroll 1
    for (int tile = first + static_cast<int>(lane & ((1u << plan.tile_bits) - 1)); tile < end;
         tile += 1 << plan.tile_bits) {
      i64 inner_index, q = channel - lines.Channel(i64{tile} * lines.tile, &inner_index);
      if (q < 0) q += lines.channels;
      if (!once && q >= lines.ChannelsFrom(inner_index, lines.Width(tile))) continue;
      const P* const of_tile = partials + i64{tile} * plan.slots + q;
#pragma unroll 1
      for (u32 span = lane >> plan.tile_bits; span < plan.spans; span += 1u << plan.span_bits) {
        merged = P::Merge(merged, of_tile[span * span_stride]);
      }
    }
  }
  // Merges the lanes of a channel: first the lanes of a warp, then the warps.
#pragma unroll 1
  for (u32 distance = width; distance < kWarp; distance *= 2) {
    merged = P::Merge(merged, ShuffleXor(merged, distance));
  }
  __shared__ P shared[kFinalThreads];
  shared[threadIdx.x] = merged;
  __syncthreads();
  if (lane > 0 || !there) return;
  const u32 step = max(width, u32{kWarp});
#pragma unroll 1
  for (u32 i = threadIdx.x + step; i < kFinalThreads; i += step) merged = P::Merge(merged, shared[i]);
  merged.StoreChannel(plan.results, group, channel, other, epsilon);
}
