// layer_norm and rms_norm, forward, of few and very long rows: all multiprocessors together, in one launch.
//
// A block has the same columns of up to kFewRows rows, so that it loads their parameters once, which would take several
// times as many bytes as the rows. It keeps its elements in shared memory, and sums them up as they come, row after row.
// The blocks of a row exchange what they have of it through global memory.
#include "norm_fwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kFewThreads = 512;
inline constexpr int kFewWarps = kFewThreads / kWarp;
inline constexpr int kFewRows = 8;  // of a block, at most
inline constexpr int kHeld = 2;     // slots of a thread whose parameters it has in registers

// Block i has chunk i % chunks of rows [i / chunks * rows, i / chunks * rows + rows).
template <typename Partial>
struct FewPlan {
  int rows = 1;
  int chunks = 1;
  int chunk_slots = 0;
  Post<Partial>* posts = nullptr;  // of each block and row
  uint64_t tag = 0;
};

// For the copies of row r: each row's are one group.
template <int kRow = 0>
__device__ __forceinline__ void WaitForRow(int r) {
  if (r == kRow) {
    CopyWait<kFewRows - 1 - kRow>();
  } else if constexpr (kRow + 1 < kFewRows) {
    WaitForRow<kRow + 1>(r);
  }
}

template <typename Op, bool kCenter>
__global__ void __launch_bounds__(kFewThreads, 1)
    NormFwdFewKernel(const __grid_constant__ Op op, const FewPlan<typename Op::Partial> plan) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  using V = Vec<T, Op::kVec>;
  using Partial = typename Op::Partial;
  constexpr int kVec = Op::kVec, kRows = kFewRows;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ Partial shared_parts[kRows][kFewWarps];
  __shared__ typename Op::Final shared_final[kRows];
  const int group = blockIdx.x / plan.chunks, chunk = blockIdx.x - group * plan.chunks;
  const int64_t first_row = int64_t{group} * plan.rows;
  const int rows = static_cast<int>(min(op.rows - first_row, static_cast<int64_t>(plan.rows)));
  const int begin = chunk * plan.chunk_slots, slots = min(plan.chunk_slots, op.cols / kVec - begin);
  const int64_t offset = first_row * op.cols + int64_t{begin} * kVec;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t own = SharedAddress(shared_bytes) + threadIdx.x * kVecBytes;
  const uint32_t row_bytes = plan.chunk_slots * kVecBytes;
  constexpr uint32_t kTurnBytes = kFewThreads * kVecBytes;  // from one of a thread's slots to the next

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    uint32_t to = own + r * row_bytes;
    for (int slot = threadIdx.x; r < rows && slot < slots; slot += kFewThreads, to += kTurnBytes) {
      CopyAsync(to, op.x.data + (offset + r * int64_t{op.cols} + slot * kVec));
    }
    CopyCommit();
  }
  // Parameters of a thread's first slots are on their way from now on.
  Acc factor[kHeld][kVec], shift[kHeld][kVec];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const int slot = threadIdx.x + h * kFewThreads;
    if (slot < slots) op.Parameters((begin + slot) * kVec, factor[h], shift[h]);
  }
  constexpr auto variant = std::bool_constant<kCenter>();
  Partial parts[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    typename Op::template Running<1> running = {};
    WaitForRow(r);
    uint32_t from = own + r * row_bytes;
    for (int slot = threadIdx.x; r < rows && slot < slots; slot += kFewThreads, from += kTurnBytes) {
      const typename Op::Slot kept[] = {{.s = LoadShared<V>(from)}};
      op.Accumulate(variant, kept, running);
    }
    Partial part[1];
    op.Totals(variant, running, part);
    parts[r] = part[0];
  }
  op.MergeLanes(variant, parts, kWarp);  // of all rows at once
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane == 0) shared_parts[r][warp] = parts[r];
  }
  __syncthreads();

  // Warp r posts what this block has of row r, and merges what all have.
  Post<Partial>* const posts = plan.posts + int64_t{group} * kRows * plan.chunks;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (warp != r || r >= rows) continue;
    Partial part[] = {lane < kFewWarps ? shared_parts[r][lane] : Partial::Identity()};
    op.MergeLanes(variant, part, kWarp);
    if (lane == 0) posts[r * plan.chunks + chunk].Write(part[0], plan.tag);
    Partial total = Partial::Identity();
    for (int i = lane; i < plan.chunks; i += kWarp) {
      total = Partial::Merge(total, posts[r * plan.chunks + i].Read(plan.tag));
    }
    total = Partial::MergeLanes(total, kWarp);
    const auto final = op.Finish(variant, total);
    if (lane == 0) {
      shared_final[r] = final;
      if (chunk == 0) op.StoreStatistics(variant, first_row + r, final);
    }
  }
  __syncthreads();
  // A graph is launched again with the same tag, so the last block that has read the posts removes them.
  int left_before = 0;
  if (threadIdx.x == 0) left_before = posts[0].Count();

  const auto write = [&](int slot, const Acc(&factor)[kVec], const Acc(&shift)[kVec]) {
    const uint32_t from = own + (slot - threadIdx.x) * kVecBytes;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      const auto final = shared_final[r];
      Acc out[kVec];
      ToAccAll(LoadShared<V>(from + r * row_bytes), out);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        out[i] = fma((kCenter ? out[i] - final.mean : out[i]) * final.rstd, factor[i], shift[i]);
      }
      jaxnorm::Store(op.y + (offset + r * int64_t{op.cols} + slot * kVec), RoundVec<T>(out));
    }
  };
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    if (const int slot = threadIdx.x + h * kFewThreads; slot < slots) write(slot, factor[h], shift[h]);
  }
  for (int slot = threadIdx.x + kHeld * kFewThreads; slot < slots; slot += kFewThreads) {
    op.Parameters((begin + slot) * kVec, factor[0], shift[0]);
    write(slot, factor[0], shift[0]);
  }
  if (!__syncthreads_or(threadIdx.x == 0 && left_before == plan.chunks - 1)) return;
  for (int i = threadIdx.x; i < kRows * plan.chunks; i += kFewThreads) posts[i].Clear();
}

template <typename Op, bool kCenter>
bool LaunchKernel(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, ffi::AnyBuffer scratch,
                  const char* name, ffi::Error* status) {
  using Partial = typename Op::Partial;
  const int64_t groups = CeilDiv(op.rows, kFewRows);
  if (groups > device.sms || op.Has(1)) return false;
  FewPlan<Partial> plan = {.rows = static_cast<int>(CeilDiv(op.rows, groups))};
  plan.chunk_slots = static_cast<int>(CeilDiv(slots, device.sms / groups));
  plan.chunks = static_cast<int>(CeilDiv(slots, plan.chunk_slots));
  const int64_t shared_bytes = int64_t{plan.chunk_slots} * kVecBytes * plan.rows;
  const int64_t posts = groups * kFewRows * plan.chunks;
  if (shared_bytes > device.max_shared_bytes - kStaticSharedBytes ||
      posts * static_cast<int64_t>(sizeof(Post<Partial>)) > static_cast<int64_t>(scratch.size_bytes())) {
    return false;
  }
  plan.posts = static_cast<Post<Partial>*>(scratch.untyped_data());
  plan.tag = LaunchTag();
  const Grid grid = {.blocks = groups * plan.chunks,
                     .threads = kFewThreads,
                     .shared_bytes = static_cast<int>(shared_bytes),
                     .cooperative = true};
  *status = Launch<NormFwdFewKernel<Op, kCenter>>(device, stream, grid, name, op, plan);
  return true;
}

}  // namespace

template <typename Op>
bool LaunchNormFwdFew(const DeviceInfo& device, cudaStream_t stream, const Op& op, int slots, ffi::AnyBuffer scratch,
                      const char* name, ffi::Error* status) {
  if (op.center) return LaunchKernel<Op, true>(device, stream, op, slots, scratch, name, status);
  return LaunchKernel<Op, false>(device, stream, op, slots, scratch, name, status);
}

#define JAXNORM_INSTANTIATE(T)                                                                                \
  template bool LaunchNormFwdFew(const DeviceInfo&, cudaStream_t, const NormFwd<T, Mode::kPlain>&, int slots, \
                                 ffi::AnyBuffer, const char*, ffi::Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
