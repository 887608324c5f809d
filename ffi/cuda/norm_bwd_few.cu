// layer_norm and rms_norm, backward, of few and very long rows: all multiprocessors together, in one launch.
//
// Each group of blocks has some of the rows, and each of its blocks some columns of them: a thread owns a slot or two, whose
// scale and sums for gradients it keeps in registers. Rows are on their way to shared memory several turns before they
// are reduced, and stay there until they are written, some turns later. Meanwhile the blocks exchange their sums
// through global memory, for which a block has warps of its own. Likewise groups exchange their sums for the gradients of
// parameters, which are complete while the last rows wait to be written; each adds up a part of its columns.
#include "norm_bwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kFewThreads = 512;  // that have slots; those of the exchange come after them
inline constexpr int kFewWarps = kFewThreads / kWarp, kExchangeWarps = 4;
inline constexpr int kFewSlots = 2;    // of a thread, at most
inline constexpr int kFewRows = 64;    // of a group, at most
inline constexpr int kFewPlaces = 16;  // for the sums of rows: more than are between those that any two warps work on

// Sums for gradients are written when they are complete, before the last rows. The loop then needs registers that there are
// none left of before Hopper.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kStoreEarly = false;
#else
inline constexpr bool kStoreEarly = true;
#endif

// Rows in shared memory, and turns from reducing one to writing it. The exchange takes about as long as the larger lag
// if a thread has one slot, and as the smaller one if it has two. kOnce: reads are evict-first, as arrays are so large that
// what a call reads would else displace what calls before have written (8 x 1048576 6% less time; smaller ones 1% more).
template <int kStages_, int kLag_, bool kOnce_>
struct FewWindow {
  static constexpr int kStages = kStages_, kLag = kLag_;
  static constexpr bool kOnce = kOnce_;
  static_assert(kFewPlaces > 2 * kLag && kStages > kLag + 1);
};
using WideWindow = FewWindow<7, 3, true>;
using NarrowWindow = FewWindow<13, 6, false>;

// Block i has chunk i % chunks of rows [i / chunks * rows, i / chunks * rows + rows).
template <typename Sums>
struct NormBwdFewPlan {
  int rows = 1, groups = 1;
  int chunks = 1, chunk_slots = 0;
  Post<Sums>* posts = nullptr;           // [op.rows][chunks]
  Post<Sums>* gradient_posts = nullptr;  // [chunks][groups], which say that partial sums are there
  uint64_t tag = 0;
};

template <typename Op, typename Window>
__global__ void __launch_bounds__(kFewThreads + kExchangeWarps * kWarp, 1)
    NormBwdFewKernel(const __grid_constant__ Op op, const NormBwdFewPlan<typename Op::Sums> plan,
                     typename Op::Acc* partials, const NormBwdGradients gradients) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  using V = typename Op::V;
  using Sums = typename Op::Sums;
  constexpr int kVec = Op::kVec, kSlots = kFewSlots, kStages = Window::kStages, kLag = Window::kLag;
  static_assert(Op::kMode == Mode::kPlain);
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ alignas(kVecBytes) Sums parts[kFewPlaces][kFewWarps];
  __shared__ typename Op::Final finals[kFewPlaces];
  __shared__ typename Op::Statistics statistics[kFewRows];
  // Barriers: the block's share of a row, and its final; behind the last row the block's partial sums, and those of others.
  __shared__ uint64_t summed[kFewRows + 1], known[kFewRows + 1];
  const int group = blockIdx.x / plan.chunks, chunk = blockIdx.x - group * plan.chunks;
  const int64_t first_row = int64_t{group} * plan.rows;
  const int rows = static_cast<int>(min(op.rows - first_row, static_cast<int64_t>(plan.rows)));
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const bool groups_meet = plan.groups > 1 && op.Outputs() > 0;

  const int begin = chunk * plan.chunk_slots, slots = min(plan.chunk_slots, op.Slots() - begin);
  const auto active = [&](int h) { return static_cast<int>(threadIdx.x) + h * kFewThreads < slots; };
  const auto column = [&](int h) { return (begin + static_cast<int>(threadIdx.x) + h * kFewThreads) * kVec; };
  const int64_t offset = first_row * op.cols + column(0);  // of this thread's first slot in row 0
  const uint32_t own = SharedAddress(shared_bytes) + threadIdx.x * kVecBytes;
  const uint32_t array_bytes = plan.chunk_slots * kVecBytes;
  const auto at = [&](int stage, int h, int k) {
    return own + (stage * 2 + k) * array_bytes + h * (kFewThreads * kVecBytes);
  };
  const auto from = [&](int r, int k) { return op.Beside(op.x.data + (offset + r * int64_t{op.cols}), k); };
  const L2Policy once = EvictFirst();
  const auto copy = [&](int r, int stage) {
    if (r >= rows) return;
    // Not unrolled: of two such copies with a policy, ptxas 13.0 makes an instruction that there is not.
#pragma unroll 1
    for (int k = 0; k < 2; ++k) {
      const T* const global = from(r, k);
      const uint32_t shared = at(stage, 0, k);
#pragma unroll
      for (int h = 0; h < kSlots; ++h) {
        if (!active(h)) continue;
        const uint32_t to = shared + h * (kFewThreads * kVecBytes);
        if constexpr (Window::kOnce) {
          CopyAsync(to, global + h * (kFewThreads * kVec), once);
        } else {
          CopyAsync(to, global + h * (kFewThreads * kVec));
        }
      }
    }
  };
  Acc sc[kSlots][kVec], dscale[kSlots][kVec], dbias[kSlots][kVec];
  if (warp < kFewWarps) {
    const auto load_scale = [&] {
#pragma unroll
      for (int h = 0; h < kSlots; ++h) op.Scale(0, active(h) ? column(h) : 0, sc[h]);
    };
    // The first row's sums wait for them, and behind the copies they would come last. Only if they need not be converted, for
    // which the copies would wait.
    if (!op.narrow) load_scale();
#pragma unroll 1
    for (int r = 0; r < kStages; ++r) {
      copy(r, r);
      CopyCommit();
    }
    if (op.narrow) load_scale();
  } else {
    for (int r = threadIdx.x - kFewThreads; r <= rows; r += kExchangeWarps * kWarp) {
      InitBarrier(&summed[r], kFewWarps);
      InitBarrier(&known[r], 1);
      if (r < rows) statistics[r] = op.StatisticsOf(first_row + r, true);
    }
  }
  __syncthreads();

  if (warp >= kFewWarps) {
    // Tells `own` to the `count` blocks that share posts, this one as its `rank`, and calls `use` with each lane's share of
    // the sum of what all have told.
    const auto exchange = [&](Post<Sums>* posts, int count, int rank, const Sums& own, uint64_t& done,
                              const auto& use) {
      if (lane == 0) posts[rank].Write(own, plan.tag);
      Sums of_blocks[kLanePosts];
      ReadPosts(posts, count, plan.tag, of_blocks);
      Sums sums = Sums::Identity();
#pragma unroll
      for (const Sums& of_block : of_blocks) sums = Sums::Merge(sums, of_block);
      use(sums);
      int left_before = 0;
      if (lane == 0) {
        ArriveAtBarrier(SharedAddress(&done));
        left_before = posts[0].Count();
      }
      ClearAfterLast(posts, count, left_before);
    };
    int r = warp - kFewWarps;
    for (; r < rows; r += kExchangeWarps) {
      WaitForBarrier(SharedAddress(&summed[r]), 0);
      const Sums of_warp = lane < kFewWarps ? parts[r % kFewPlaces][lane] : Sums::Identity();
      exchange(plan.posts + (first_row + r) * plan.chunks, plan.chunks, chunk, Sums::MergeLanes(of_warp, kWarp),
               known[r], [&](Sums sums) {
                 sums = Sums::MergeLanes(sums, kWarp);
                 if (lane == 0) finals[r % kFewPlaces] = op.Finish(sums);
               });
    }
    // Groups only tell that their partial sums are there: written before the post, and read after those of others.
    if (r == rows && groups_meet) {
      WaitForBarrier(SharedAddress(&summed[rows]), 0);
      __threadfence();
      exchange(plan.gradient_posts + chunk * plan.groups, plan.groups, group, Sums::Identity(), known[rows],
               [](const Sums&) { __threadfence(); });
    }
    return;
  }

#pragma unroll
  for (int h = 0; h < kSlots; ++h) {
    op.Offset(sc[h]);
#pragma unroll
    for (int i = 0; i < kVec; ++i) dscale[h][i] = dbias[h][i] = 0;
  }

  const auto store_sums = [&] {
#pragma unroll
    for (int h = 0; h < kSlots; ++h) {
      if (active(h)) StoreGradients(op, gradients, partials, plan.groups, group, column(h), dscale[h], dbias[h]);
    }
    __syncwarp();
    if (lane == 0) ArriveAtBarrier(SharedAddress(&summed[rows]));
  };
  const auto after = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
  int stage = 0, written_stage = 0;
#pragma unroll 1
  for (int turn = 0; turn < rows + kLag; ++turn) {
    // Turns before kLag end with an empty group of copies.
    if (turn < kStages) {
      CopyWait<kStages - 1>();
    } else {
      CopyWait<kStages - 1 - kLag>();
    }
    if (turn < rows) {
      Sums sums = Sums::Identity();
#pragma unroll
      for (int h = 0; h < kSlots; ++h) {
        if (!active(h)) continue;
        op.Reduce({}, statistics[turn], column(h), LoadShared<V>(at(stage, h, 0)), LoadShared<V>(at(stage, h, 1)),
                  sc[h], sums, dscale[h], dbias[h]);
      }
      Sums::StoreMerged(SharedAddress(&parts[turn % kFewPlaces][warp]), sums, lane);
      __syncwarp();
      if (lane == 0) ArriveAtBarrier(SharedAddress(&summed[turn]));
      stage = after(stage);
    } else if (kStoreEarly && turn == rows) {
      store_sums();
    }
    if (const int r = turn - kLag; r >= 0) {
      V added[kSlots];
#pragma unroll
      for (int h = 0; h < kSlots; ++h) {
        if (op.Has(2) && active(h)) added[h] = jaxnorm::Load(from(r, 2) + h * (kFewThreads * kVec));
      }
      WaitForBarrier(SharedAddress(&known[r]), 0);
      const auto final = finals[r % kFewPlaces];
#pragma unroll
      for (int h = 0; h < kSlots; ++h) {
        if (!active(h)) continue;
        Acc out[kVec];
        op.Dx({}, statistics[r], column(h), LoadShared<V>(at(written_stage, h, 0)),
              LoadShared<V>(at(written_stage, h, 1)), sc[h], final, out);
        if (op.Has(2)) op.Add(added[h], out);
        op.Store(op.dx + (offset + r * int64_t{op.cols} + h * (kFewThreads * kVec)), column(h), out);
      }
      copy(r + kStages, written_stage);
      written_stage = after(written_stage);
    }
    CopyCommit();
  }
  if (!kStoreEarly) store_sums();
  if (!groups_meet) return;
  WaitForBarrier(SharedAddress(&known[rows]), 0);
#pragma unroll 1
  for (int i = group * kFewThreads + threadIdx.x; i < op.Outputs() * slots; i += plan.groups * kFewThreads) {
    const bool second = i >= slots;
    const int first = (begin + (second ? i - slots : i)) * kVec;
    const Acc* of_group = partials + (second ? op.cols : 0) + first;
    Acc sum[kVec] = {};
#pragma unroll 4
    for (int g = 0; g < plan.groups; ++g, of_group += op.Outputs() * op.cols) {
      const auto more = *reinterpret_cast<const Vec<Acc, kVec>*>(of_group);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[j] += more.v[j];
    }
    StoreGradient(op, gradients, second || !op.need_scale, first, sum);
  }
}

}  // namespace

template <typename Op>
bool LaunchNormBwdFew(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                      Scratch scratch, Error* status) {
  using Acc = typename Op::Acc;
  using Sums = typename Op::Sums;
  if (args.shape.groups != 1 || !op.need_x) return false;
  // As many groups as give all threads a slot: each leaves a row of partial sums for the gradients of parameters.
  NormBwdFewPlan<Sums> plan;
  const int64_t groups = std::clamp<int64_t>(int64_t{device.sms} * kFewThreads / op.Slots(), 1, op.rows);
  plan.rows = static_cast<int>(std::min<int64_t>(CeilDiv(op.rows, groups), kFewRows + 1));
  plan.groups = static_cast<int>(CeilDiv(op.rows, plan.rows));
  plan.chunk_slots = static_cast<int>(PartSlots(op.Slots(), std::clamp(device.sms / plan.groups, 1, kMaxPosts)));
  plan.chunks = static_cast<int>(CeilDiv(op.Slots(), plan.chunk_slots));
  const int64_t row_bytes = int64_t{2} * plan.chunk_slots * kVecBytes;
  const int64_t room = device.max_shared_bytes - kStaticSharedBytes;
  const int64_t posts = op.rows * plan.chunks, all_posts = posts + int64_t{plan.chunks} * plan.groups;
  const int64_t post_bytes = all_posts * static_cast<int64_t>(sizeof(Post<Sums>));
  const int64_t partial_bytes =
      plan.groups == 1 ? 0 : int64_t{plan.groups} * op.Outputs() * op.cols * static_cast<int64_t>(sizeof(Acc));
  if (plan.rows > kFewRows || plan.groups > std::min(device.sms, kMaxPosts) ||
      plan.chunk_slots > kFewThreads * kFewSlots || WideWindow::kStages * row_bytes > room ||
      post_bytes + partial_bytes > static_cast<int64_t>(scratch.bytes)) {
    return false;
  }
  plan.posts = static_cast<Post<Sums>*>(scratch.data);
  plan.gradient_posts = plan.posts + posts;
  plan.tag = LaunchTag();
  Acc* const partials = reinterpret_cast<Acc*>(static_cast<char*>(scratch.data) + post_bytes);
  const auto launch = [&]<typename Window>(Window) {
    const Grid grid = {.blocks = int64_t{plan.groups} * plan.chunks,
                       .threads = kFewThreads + kExchangeWarps * kWarp,
                       .shared_bytes = static_cast<int>(Window::kStages * row_bytes),
                       .cooperative = true};
    return Launch<NormBwdFewKernel<Op, Window>>(device, stream, grid, "norm_bwd", op, plan, partials,
                                                Gradients<Op>(args));
  };
  *status = NarrowWindow::kStages * row_bytes <= room ? launch(NarrowWindow()) : launch(WideWindow());
  return true;
}

#define JAXNORM_INSTANTIATE(T)                                                                                         \
  template bool LaunchNormBwdFew(const DeviceInfo&, cudaStream_t, const NormBwd<T, Mode::kPlain>&, const NormBwdArgs&, \
                                 Scratch, Error*);
JAXNORM_INSTANTIATE(float)
JAXNORM_INSTANTIATE(__half)
JAXNORM_INSTANTIATE(__nv_bfloat16)
#undef JAXNORM_INSTANTIATE

}  // namespace jaxnorm
