// layer_norm and rms_norm, forward, of few and very long rows: all multiprocessors together, in one launch.
//
// A block has the same columns of up to kFewRows rows, so that it loads their parameters once, which would take several
// times as many bytes as the rows. It keeps its elements in shared memory, and sums them up as they come, row after row.
// The blocks of a row exchange what they have of it through global memory. A warp for each row does nothing else, so that
// this goes on while other rows are still coming, or are already written.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kFewThreads = 512;  // that have slots; those of the exchange come after them
inline constexpr int kFewWarps = kFewThreads / kWarp;
inline constexpr int kFewRows = 8;   // of a block, at most
inline constexpr int kTogether = 2;  // rows that a warp sums up at once: one waits for the other's shuffles
inline constexpr int kHeld = 2;      // slots of a thread whose parameters it has in registers

// What a block tells the others of its share of a row. How many elements that has they know.
template <typename Acc>
struct FewMoments {
  Acc mean, squares;
};

// Block i has chunk i % chunks of rows [i / chunks * rows, i / chunks * rows + rows).
template <typename Acc>
struct FewPlan {
  int rows = 1;
  int chunk_slots = 0;
  FastDiv by_chunks;
  Post<FewMoments<Acc>>* posts = nullptr;  // of each block and row
  uint64_t tag = 0;

  __device__ __forceinline__ int Chunks() const { return static_cast<int>(by_chunks.divisor()); }  // of a row
};

// Of a row, from what its blocks have posted; by a warp. Every block waits for this: how many elements each has is known.
template <typename Op, typename Center>
__device__ __forceinline__ typename Op::Final FinishPosts(const Op& op, Center center,
                                                          const Post<FewMoments<typename Op::Acc>>* posts,
                                                          const FewPlan<typename Op::Acc>& plan) {
  using Acc = typename Op::Acc;
  FewMoments<Acc> values[kLanePosts];
  ReadPosts(posts, plan.Chunks(), plan.tag, values);
  const int chunk_cols = plan.chunk_slots * Op::kVec, begin = threadIdx.x % kWarp * chunk_cols;
  typename Op::Partial parts[kLanePosts];
#pragma unroll
  for (int i = 0; i < kLanePosts; ++i) {
    const int count = max(min(op.cols - (begin + i * (kWarp * chunk_cols)), chunk_cols), 0);  // 0 beside the posts
    parts[i] = {static_cast<Acc>(count), values[i].mean, values[i].squares};
  }
  const auto all = op.MergeLanes(center, parts, kWarp, static_cast<Acc>(op.cols), op.inverse_cols);
  return {all.mean, InverseSqrt(fma(all.squares, op.inverse_cols, op.epsilon))};
}

template <typename Op, bool kCenter>
__global__ void __launch_bounds__(kFewThreads + kFewRows * kWarp, 1)
    NormFwdFewKernel(const FewPlan<typename Op::Acc> plan, const __grid_constant__ Op op) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  using V = Vec<T, Op::kVec>;
  using Partial = typename Op::Partial;
  constexpr int kVec = Op::kVec, kRows = kFewRows;
  constexpr auto variant = std::bool_constant<kCenter>();
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ Partial shared_parts[kRows][kFewWarps];
  __shared__ typename Op::Final shared_final[kRows];
  __shared__ uint64_t summed[kRows], known[kRows];  // barriers: the block's share of a row, and its final
  uint32_t chunk;
  const uint32_t group = plan.by_chunks.DivMod(blockIdx.x, &chunk);
  const int first_row = group * plan.rows, rows = min(static_cast<int>(op.rows) - first_row, plan.rows);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  const int begin = chunk * plan.chunk_slots, slots = min(plan.chunk_slots, op.cols / kVec - begin);
  const int64_t offset = int64_t{first_row} * op.cols + begin * kVec;
  const uint32_t own = SharedAddress(shared_bytes) + threadIdx.x * kVecBytes;
  const uint32_t row_bytes = plan.chunk_slots * kVecBytes;
  constexpr uint32_t kTurnBytes = kFewThreads * kVecBytes;  // from one of a thread's slots to the next
  Acc factor[kHeld][kVec], shift[kHeld][kVec];
  if (warp < kFewWarps) {
    const T* from = op.x.data + (offset + threadIdx.x * kVec);
    const L2Policy once = EvictFirst();
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) {
        uint32_t to = own + r * row_bytes;
#pragma unroll 1
        for (int slot = threadIdx.x; slot < slots; slot += kFewThreads, to += kTurnBytes) {
          CopyAsync(to, from + (slot - threadIdx.x) * kVec, once);
        }
        from += op.cols;
      }
      CopyCommit();
    }
    // Parameters of a thread's first slots are on their way from now on: later was measured to be too late.
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int slot = threadIdx.x + h * kFewThreads;
      if (slot < slots) op.Parameters((begin + slot) * kVec, factor[h], shift[h]);
    }
  } else if (lane == 0) {
    InitBarrier(&summed[warp - kFewWarps], kFewWarps);
    InitBarrier(&known[warp - kFewWarps], 1);
  }
  __syncthreads();

  if (warp >= kFewWarps) {
    const int r = warp - kFewWarps;
    if (r >= rows) return;
    const Acc block_count = static_cast<Acc>(slots * kVec), inverse_block_count = Partial::Inverse(block_count);
    WaitForBarrier(SharedAddress(&summed[r]), 0);
    const Partial of_warp[] = {lane < kFewWarps ? shared_parts[r][lane] : Partial::Identity()};
    const Partial part = op.MergeLanes(variant, of_warp, kFewWarps, block_count, inverse_block_count);
    Post<FewMoments<Acc>>* const posts = plan.posts + (group * kRows + r) * plan.Chunks();
    if (lane == 0) posts[chunk].Write({part.mean, part.squares}, plan.tag);
    const auto final = FinishPosts<Op>(op, variant, posts, plan);
    int left_before = 0;
    if (lane == 0) {
      shared_final[r] = final;
      ArriveAtBarrier(SharedAddress(&known[r]));
      if (chunk == 0) op.StoreStatistics(variant, first_row + r, final);
      left_before = posts[0].Count();
    }
    ClearAfterLast(posts, plan.Chunks(), left_before);
    return;
  }

  // As many elements in each row.
  const int own_slots = max(slots - static_cast<int>(threadIdx.x) + kFewThreads - 1, 0) / kFewThreads;
  const auto all = WarpCount<Acc>::Of(static_cast<Acc>(own_slots * kVec));
  constexpr int kLanes = kWarp / kTogether;
  // Not unrolled: the instructions for the last rows, for which all wait, have been fetched for the first ones.
#pragma unroll 1
  for (int r = 0; r < rows; r += kTogether) {
    // Each row's copies are one group. Empty groups take the places of those that have come, so that it is always as many
    // that may still be on their way.
    CopyWait<kRows - kTogether>();
#pragma unroll
    for (int p = 0; p < kTogether; ++p) CopyCommit();
    uint32_t from[kTogether];
    Acc pivots[kTogether];
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      from[p] = own + min(r + p, rows - 1) * row_bytes;
      // Of lane 0, which has a slot if any lane does.
      if (kCenter) {
        pivots[p] = __shfl_sync(kAllLanes, threadIdx.x < slots ? Op::MeanOfSlot(LoadShared<V>(from[p])) : Acc(0), 0);
      }
    }
    const Partial part = SumWarp<Op, kCenter>(pivots, all, lane, [&](auto& running) {
      uint32_t turn = 0;
#pragma unroll 1
      for (int slot = threadIdx.x; slot < slots; slot += kFewThreads, turn += kTurnBytes) {
        V held[kTogether];
#pragma unroll
        for (int p = 0; p < kTogether; ++p) held[p] = LoadShared<V>(from[p] + turn);
        op.Accumulate(variant, held, running);
      }
    });
    if (const int row = r + lane / kLanes; lane % kLanes == 0 && row < rows) {
      shared_parts[row][warp] = part;
      ArriveAtBarrier(SharedAddress(&summed[row]));
    }
  }

  const auto write = [&](int r, int slot, const typename Op::Final& final, const Acc(&factor)[kVec],
                         const Acc(&shift)[kVec]) {
    Acc out[kVec];
    ToAccAll(LoadShared<V>(own + r * row_bytes + (slot - threadIdx.x) * kVecBytes), out);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      out[i] = fma((kCenter ? out[i] - final.mean : out[i]) * final.rstd, factor[i], shift[i]);
    }
    jaxnorm::Store(op.y + (offset + r * int64_t{op.cols} + slot * kVec), RoundVec<T>(out));
  };
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    WaitForBarrier(SharedAddress(&known[r]), 0);
    const auto final = shared_final[r];
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      if (const int slot = threadIdx.x + h * kFewThreads; slot < slots) write(r, slot, final, factor[h], shift[h]);
    }
  }
  for (int slot = threadIdx.x + kHeld * kFewThreads; slot < slots; slot += kFewThreads) {
    op.Parameters((begin + slot) * kVec, factor[0], shift[0]);
    for (int r = 0; r < rows; ++r) write(r, slot, shared_final[r], factor[0], shift[0]);
  }
}

template <typename Op, bool kCenter>
bool LaunchKernel(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, Scratch scratch,
                  const char* name, Error* status) {
  using Acc = typename Op::Acc;
  const int64_t groups = CeilDiv(op.rows, kFewRows);
  if (groups > device.sms || op.Has(1)) return false;
  FewPlan<Acc> plan = {.rows = static_cast<int>(CeilDiv(op.rows, groups))};
  plan.chunk_slots = static_cast<int>(PartSlots(slots, std::min(device.sms / groups, int64_t{kMaxPosts})));
  const int64_t chunks = CeilDiv(slots, plan.chunk_slots);
  plan.by_chunks = FastDiv(static_cast<int32_t>(chunks));
  const int64_t shared_bytes = int64_t{plan.chunk_slots} * kVecBytes * plan.rows;
  const int64_t posts = groups * kFewRows * chunks;
  if (shared_bytes > device.max_shared_bytes - kStaticSharedBytes ||
      posts * static_cast<int64_t>(sizeof(*plan.posts)) > static_cast<int64_t>(scratch.bytes)) {
    return false;
  }
  plan.posts = static_cast<Post<FewMoments<Acc>>*>(scratch.data);
  plan.tag = LaunchTag();
  const Grid grid = {.blocks = groups * chunks,
                     .threads = kFewThreads + kFewRows * kWarp,
                     .shared_bytes = static_cast<int>(shared_bytes),
                     .cooperative = true};
  *status = Launch<NormFwdFewKernel<Op, kCenter>>(device, stream, grid, name, plan, op);
  return true;
}

}  // namespace

template <typename Op>
bool LaunchNormFwdFew(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, Scratch scratch,
                      const char* name, Error* status) {
  if (op.center) return LaunchKernel<Op, true>(device, stream, op, slots, scratch, name, status);
  return LaunchKernel<Op, false>(device, stream, op, slots, scratch, name, status);
}

#define JAXNORM_INSTANTIATE(T)                                                                                         \
  template bool LaunchNormFwdFew(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, int slots, Scratch, \
                                 const char*, Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
