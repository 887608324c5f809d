// layer_norm and rms_norm, backward: the formulas are in norm_args.h.
//
// x and dy are read once, dx is written once. Gradients of the parameters are sums over rows, so blocks stay for many
// rows: a thread owns the same columns of each of its rows and keeps their scale and their sums in registers. A block
// then leaves one row of partial sums in float32, and a second, small launch adds those up. Nothing depends on the order
// in which blocks run, so results are the same bits every time.
//
// Rows are on their way to shared memory several turns before they are needed. Each thread copies and reads its own
// slots only, which takes no barrier. What a turn does is shifted by one row between the two passes: the first one sums
// row t + 1 while the sums of row t travel between warps and between the blocks of a cluster, then the second one writes
// row t.
#include <algorithm>

#include "norm_bwd.cuh"

namespace jaxnorm {
namespace {

inline constexpr int kStages =
    3;  // more were measured to be slower: the first ones are then read before any is written

// What warps, and the blocks of a cluster, tell each other of even and of odd turns: one may be ahead by a turn.
template <typename Sums>
struct NormBwdShared {
  Sums warps[2][kMaxThreads / kWarp];
  Sums blocks[2][kMaxCluster];
  uint64_t barriers[2];
};

// A barrier of the threads of one row, of which a block has at most 15 that are wider than a warp.
__device__ __forceinline__ void RowBarrier(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

// Copies the slot at element `offset` of a dense array, where the array may end, to shared memory.
template <typename T>
__device__ __forceinline__ void CopyLast(uint32_t shared, const DeviceOperand<T>& array, int64_t offset) {
  constexpr int kVec = kVecSize<T>;
  Vec<T, kVec> values;
#pragma unroll
  for (int i = 0; i < kVec; ++i) values.v[i] = offset + i < array.elements ? array.data[offset + i] : T();
  StoreShared(shared, values);
}

// Of word w of a vector, those bits that belong to elements whose bit in `elements` is set.
template <typename T>
__device__ __forceinline__ uint32_t ElementMask(unsigned elements, int w) {
  if constexpr (sizeof(T) == 2) {
    return (elements >> 2 * w & 1 ? 0xffffu : 0u) | (elements >> 2 * w & 2 ? 0xffff0000u : 0u);
  } else {
    return elements >> w * sizeof(uint32_t) / sizeof(T) & 1 ? ~0u : 0u;
  }
}

template <typename Op>
__global__ void __launch_bounds__(kMaxThreads, 1)
    NormBwdKernel(const __grid_constant__ Op op, const RowsPlan plan, typename Op::Acc* partials) {
  using Acc = typename Op::Acc;
  using V = typename Op::V;
  using Sums = typename Op::Sums;
  using T = typename Op::T;
  constexpr int kVec = Op::kVec, kSlots = Op::kSlots;
  constexpr bool kRagged = Op::kMode == Mode::kRagged, kPlain = Op::kMode == Mode::kPlain;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ NormBwdShared<Sums> shared;
  static_assert(sizeof(shared) <= kStaticSharedBytes);
  int rank = 0;
  unsigned block = blockIdx.x, param_group = 0;
  if (plan.cluster > 1) {
    ClusterStart(&shared.barriers[0], &shared.barriers[1]);
    rank = static_cast<int>(block % plan.cluster);
    block /= plan.cluster;
  }
  if (block >= plan.blocks) {
    param_group = block / plan.blocks;
    block %= plan.blocks;
  }
  const int threads = plan.threads_per_row;
  const int row_group = plan.rows_per_block > 1 ? threadIdx.x / threads : 0;
  const int thread = threadIdx.x - row_group * threads;
  const int step = plan.blocks * plan.rows_per_block;  // rows from turn to turn
  const int block_row = block * plan.rows_per_block;
  const int turns = plan.turns + (block_row < plan.rest ? 1 : 0);
  const int own_turns = plan.turns + (block_row + row_group < plan.rest ? 1 : 0);
  const auto inside = [&](int turn) { return turn < own_turns; };
  const int64_t base = param_group * op.rows_per_group + block_row + row_group;
  const auto index = [&](int turn) { return base + int64_t{turn} * step; };

  // This thread's slots, which are the same columns in all of its rows: the step is a multiple of kVec rows (kRagged).
  const int skew = op.Skew(base);
  const int first_slot = rank * plan.part_slots + thread;
  const int end = min((rank + 1) * plan.part_slots, op.Slots());
  const auto slot_of = [&](int j) { return first_slot + j * threads; };
  const auto first_of = [&](int j) { return slot_of(j) * kVec - skew; };
  const auto active = [&](int j) { return slot_of(j) < end; };
  const bool wraps = kRagged && first_slot == 0 && op.Wraps(skew);

  // In shared memory: slot j of array k of a stage, at constant distances so that addresses take few registers, and
  // after all stages what continues in a row's first slot.
  constexpr uint32_t kSlotBytes = kBlockThreads * kVecBytes;
  const uint32_t stage_bytes = kSlots * op.arrays * kSlotBytes;
  const uint32_t shared_base = SharedAddress(shared_bytes);
  const uint32_t own =
      shared_base + threadIdx.x % kBlockThreads * kVecBytes + threadIdx.x / kBlockThreads * (kStages * stage_bytes);
  const auto at = [&](int place, int j, int k) { return own + place * stage_bytes + (k * kSlots + j) * kSlotBytes; };
  const auto wrapped = [&](int place, int k) {
    const uint32_t halves = (blockDim.x + kBlockThreads - 1) / kBlockThreads;
    return shared_base + kStages * stage_bytes * halves +
           ((place * op.arrays + k) * plan.rows_per_block + row_group) * kVecBytes;
  };
  // Elements from the first one of the arrays to that of this thread's first slot: of the row to be copied next, and of
  // the one to be stored next.
  const int64_t step_elements = int64_t{step} * op.cols;
  const int slot_step = threads * kVec;
  int64_t copy_offset = base * op.cols + first_of(0), store_offset = copy_offset;
  // Only the last row of all may end in a slot that is not all in the array.
  const int cut_turn = kRagged && base + int64_t{own_turns - 1} * step + 1 == op.rows ? own_turns - 1 : -1;
  const auto copy = [&](int turn, int place) {
    if (Op::kGeneral && inside(turn)) {
      const typename Op::Row row = op.Begin(index(turn));
#pragma unroll
      for (int k = 0; k < kMaxArrays; ++k) {
        if (k == op.arrays) break;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          if (active(j)) StoreShared(at(place, j, k), row.in[k].template Load<kVec>(first_of(j)));
        }
      }
    } else if (inside(turn) && turn != cut_turn) {
#pragma unroll
      for (int k = 0; k < kMaxArrays; ++k) {
        if (k == op.arrays) break;
        const T* const from = op.Array(k).data + copy_offset;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          if (active(j)) CopyAsync(at(place, j, k), from + j * slot_step);
        }
        if (wraps) CopyAsync(wrapped(place, k), from + op.Slots() * kVec);
      }
    } else if (inside(turn)) {
#pragma unroll 1
      for (int k = 0; k < op.arrays; ++k) {
#pragma unroll 1
        for (int j = 0; j < kSlots; ++j) {
          if (active(j)) CopyLast(at(place, j, k), op.Array(k), copy_offset + j * slot_step);
        }
        if (wraps) CopyLast(wrapped(place, k), op.Array(k), copy_offset + op.Slots() * kVec);
      }
    }
    copy_offset += step_elements;
    CopyCommit();
  };
  // Which bits of a row's first and last slot are columns there, and which of what continues there.
  using Bits = WordsOf<V>;
  constexpr int kWords = sizeof(Bits) / sizeof(uint32_t);
  const auto edge = [&](int j) {
    return wrapped(kStages, 0) + (row_group * 4 + (slot_of(j) == 0 ? 0 : 2) - row_group) * kVecBytes;
  };
  if constexpr (!kPlain) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (!active(j) || op.Whole(first_of(j))) continue;
      const auto [here, beside] = op.Parts(slot_of(j), skew);
      Bits bits[2];
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        bits[0].w[w] = ElementMask<T>(here, w);
        bits[1].w[w] = ElementMask<T>(beside, w);
      }
      StoreShared(edge(j), bits[0]);
      StoreShared(edge(j) + kVecBytes, bits[1]);
    }
  }
  // Puts the columns that a slot has beside those in memory at its place, or 0.
  const auto complete = [&](int place) {
    if constexpr (!kPlain) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (!active(j) || op.Whole(first_of(j))) continue;
        const auto here = LoadShared<Bits>(edge(j)), beside = LoadShared<Bits>(edge(j) + kVecBytes);
#pragma unroll
        for (int k = 0; k < kMaxArrays; ++k) {
          if (k == op.arrays) break;
          auto words = LoadShared<Bits>(at(place, j, k));
          const Bits more = j == 0 && wraps ? LoadShared<Bits>(wrapped(place, k)) : Bits();
#pragma unroll
          for (int w = 0; w < kWords; ++w) words.w[w] = (words.w[w] & here.w[w]) | (more.w[w] & beside.w[w]);
          StoreShared(at(place, j, k), words);
        }
      }
    }
  };

  for (int place = 0; place < kStages; ++place) copy(place, place);
  auto now = op.StatisticsOf(index(0), inside(0)), next = op.StatisticsOf(index(1), inside(1));
  Acc scale[kSlots][kVec], dscale[kSlots][kVec], dbias[kSlots][kVec];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) scale[j][i] = dscale[j][i] = dbias[j][i] = 0;
    if (active(j)) op.Scale(param_group, slot_of(j), skew, scale[j]);
  }
  if (plan.cluster > 1) ClusterWait();

  const int warps = threads / kWarp, lane = threadIdx.x % kWarp, warp_of_row = lane & (warps > 8 ? 15 : 7);
  constexpr uint32_t kTurnBytes = sizeof(shared.warps[0]);  // from even to odd turns
  const uint32_t own_sums = SharedAddress(&shared.warps[0][threadIdx.x / kWarp]);
  const uint32_t row_sums = SharedAddress(&shared.warps[0][row_group * warps + warp_of_row]);
  // The sums of a row over the lanes that share it; other warps find them in shared memory after the next barrier.
  const auto reduce = [&](int turn, int place, const typename Op::Statistics& statistics) {
    auto sums = Sums::Identity();
    complete(place);
    if (inside(turn)) {
      const typename Op::Row row = op.Begin(index(turn));
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (!active(j)) continue;
        op.Reduce(row, statistics, first_of(j), LoadShared<V>(at(place, j, 0)), LoadShared<V>(at(place, j, 1)),
                  scale[j], sums, dscale[j], dbias[j]);
      }
    }
    if (!op.need_x) return sums;
    if (threads < kWarp) return Sums::MergeLanes(sums, threads);
    sums = Sums::MergeLanes(sums, kWarp);
    if (threads > kWarp && lane == 0) StoreShared(own_sums + (turn & 1) * kTurnBytes, sums);
    return sums;
  };

  int place = 0;
  CopyWait<kStages - 2>();
  Sums sums = reduce(0, 0, now);
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const int parity = turn & 1;
    if (op.need_x && threads > kWarp) {
      RowBarrier(row_group, threads);
      sums = warp_of_row < warps ? LoadShared<Sums>(row_sums + parity * kTurnBytes) : Sums::Identity();
      if (warps > 8) sums = Sums::Merge(sums, ShuffleXor(sums, 8));
      sums = Sums::MergeLanes(sums, 8);
      if (plan.cluster > 1 && threadIdx.x < plan.cluster) {
        SendToPeer(&shared.blocks[parity][rank], &shared.barriers[parity], threadIdx.x, sums);
      }
    }
    const auto upcoming = op.StatisticsOf(index(turn + 2), inside(turn + 2));
    CopyWait<kStages - 2>();
    const int next_place = place + 1 == kStages ? 0 : place + 1;
    Sums next_sums;
    if (turn + 1 < turns) next_sums = reduce(turn + 1, next_place, next);
    if (op.need_x) {
      if (plan.cluster > 1) {
        ReceiveFromPeers(&shared.barriers[parity], plan.cluster * static_cast<int>(sizeof(Sums)), turn >> 1 & 1);
        sums = Sums::MergeLanes(lane < plan.cluster ? shared.blocks[parity][lane] : Sums::Identity(), kWarp);
      }
      if (inside(turn)) {
        const typename Op::Row row = op.Begin(index(turn));
        const auto final = op.Finish(sums);
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          if (!active(j)) continue;
          Acc out[kVec];
          op.Dx(row, now, first_of(j), LoadShared<V>(at(place, j, 0)), LoadShared<V>(at(place, j, 1)), scale[j], final,
                out);
          if (op.arrays == kMaxArrays) op.Add(LoadShared<V>(at(place, j, 2)), out);
          op.Store(op.dx + (store_offset + j * slot_step), slot_of(j), skew, out);
        }
      }
    }
    store_offset += step_elements;
    copy(turn + kStages, place);
    place = next_place;
    sums = next_sums;
    now = next;
    next = upcoming;
  }
  const int outputs = op.Outputs();
  if (outputs == 0) return;

  // One row of sums for each block: [outputs][cols].
  const auto put = [&](Acc* to, int j, const Acc(&values)[kVec]) {
    if (kPlain) {
#pragma unroll
      for (int i = 0; i < kVec; i += kVecSize<Acc>) {
        Vec<Acc, kVecSize<Acc>> vector;
#pragma unroll
        for (int k = 0; k < kVecSize<Acc>; ++k) vector.v[k] = values[i + k];
        *reinterpret_cast<Vec<Acc, kVecSize<Acc>>*>(to + first_of(j) + i) = vector;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (const int column = op.Column(slot_of(j), skew, i); column < op.cols) to[column] = values[i];
      }
    }
  };
  const auto put_all = [&](Acc* to) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (!active(j)) continue;
      if (op.need_scale) put(to, j, dscale[j]);
      if (op.need_bias) put(to + (op.need_scale ? op.cols : 0), j, dbias[j]);
    }
  };
  Acc* const out = partials + (param_group * plan.blocks + block) * outputs * op.cols;
  if (plan.rows_per_block == 1) return put_all(out);
  // The rows of a block leave their sums in the memory that the stages had. Those of a warp are summed first, if their
  // slots have the same columns.
  int sets = plan.rows_per_block, set = row_group;
  bool writes = true;
  if (kPlain && threads < kWarp) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        for (int offset = threads; offset < kWarp; offset *= 2) {
          dscale[j][i] += __shfl_xor_sync(kAllLanes, dscale[j][i], offset);
          dbias[j][i] += __shfl_xor_sync(kAllLanes, dbias[j][i], offset);
        }
      }
    }
    sets = blockDim.x / kWarp;
    set = threadIdx.x / kWarp;
    writes = threadIdx.x % kWarp < threads;
  }
  CopyWait<0>();
  __syncthreads();
  auto* const total = reinterpret_cast<Acc*>(shared_bytes);
  const int width = outputs * op.cols;
  if (writes) put_all(total + set * width);
  __syncthreads();
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    Acc sum = total[c];
    for (int s = 1; s < sets; ++s) sum += total[s * width + c];
    out[c] = sum;
  }
}

// ---- Launching ----

template <typename Op>
ffi::Error LaunchNormBwd(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                         ffi::AnyBuffer scratch) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  const int slots = op.Slots(), outputs = op.Outputs();
  // What continues in first slots, and the bits of first and last ones: of a row.
  const int row_edge_bytes = Op::kMode == Mode::kPlain ? 0 : (kStages * op.arrays + 4) * kVecBytes;
  // Of a block: three arrays of float32 leave no room for all threads, and some devices have little for any.
  const int room = device.max_shared_bytes - kStaticSharedBytes;
  const int thread_bytes = kStages * Op::kSlots * op.arrays * kVecBytes;
  const int max_threads = kMaxThreads * thread_bytes + row_edge_bytes <= room ? kMaxThreads : kBlockThreads;
  const int max_part = max_threads * Op::kSlots;
  // Rows that fit no cluster; and those of which L2 can hold all, unless one block has a row for itself.
  const int64_t input_bytes = args.shape.size() * 2 * static_cast<int64_t>(sizeof(T));
  RowsPlan plan;
  int at_once = 0;
  while (plan.cluster < kMaxCluster && CeilDiv(slots, plan.cluster) > max_part) plan.cluster *= 2;
  if (plan.cluster > 1) at_once = ActiveClusters<NormBwdKernel<Op>>(device, kMaxThreads, plan.cluster);
  if (plan.cluster > 1 &&
      (CeilDiv(slots, plan.cluster) > max_part || at_once == 0 || input_bytes <= device.l2_bytes / 4 * 3)) {
    return LaunchNormBwdLong(device, stream, op, args, scratch);
  }
  plan.part_slots = static_cast<int>(CeilDiv(slots, plan.cluster));
  const int64_t wanted = CeilDiv(plan.part_slots, Op::kSlots);
  plan.threads_per_row = static_cast<int>(wanted > kWarp ? CeilDiv(wanted, kWarp) * kWarp : NextPowerOfTwo(wanted));
  plan.rows_per_block = std::max(1, kBlockThreads / plan.threads_per_row);
  const int threads = plan.threads_per_row * plan.rows_per_block;
  const int shared_bytes = static_cast<int>(CeilDiv(threads, kBlockThreads) * kBlockThreads) * thread_bytes +
                           row_edge_bytes * plan.rows_per_block;
  if constexpr (!Op::kGeneral) {  // which has fewer slots for each thread
    if (shared_bytes > room) return LaunchNormBwd(device, stream, NormBwd<T, Mode::kGeneral>(args), args, scratch);
  }
  if (plan.cluster == 1) at_once = device.sms * (threads <= kBlockThreads ? 2 : 1);
  // Rows of a thread lie alike if the step from one to the next is a multiple of kVec (kRagged).
  const int64_t unit =
      Op::kMode == Mode::kRagged ? Op::kVec / std::min(Op::kVec, plan.rows_per_block & -plan.rows_per_block) : 1;
  int64_t most = CeilDiv(op.rows_per_group, plan.rows_per_block);
  if (outputs > 0) {
    const int64_t row_bytes = args.shape.groups * outputs * args.shape.cols * int64_t{sizeof(Acc)};
    const int64_t room = static_cast<int64_t>(scratch.size_bytes()) / row_bytes;
    JAXNORM_CHECK(room > 0);
    most = std::min(most, room);
  }
  if (most < unit) return LaunchNormBwd(device, stream, NormBwd<T, Mode::kGeneral>(args), args, scratch);
  // Each block leaves a row of partial sums, so as few as run at once: or, if those are no multiple of `unit`, as many
  // as take few rounds. Weighed by the bytes of each column: of rows, and of partial sums written and read.
  int64_t blocks = std::min<int64_t>(most / unit * unit, at_once);
  int64_t least = INT64_MAX;
  for (int64_t n = unit; blocks % unit != 0 && n <= std::min<int64_t>(most, 8 * at_once); n += unit) {
    const int64_t rows = CeilDiv(op.rows_per_group, n * plan.rows_per_block) * plan.rows_per_block;
    const int64_t bytes = CeilDiv(n, at_once) * int64_t{3 * sizeof(T) * rows + 4 * sizeof(Acc)};
    if (bytes >= least) continue;
    least = bytes;
    plan.blocks = static_cast<int>(n);
  }
  if (blocks % unit == 0) plan.blocks = static_cast<int>(blocks);
  const int64_t step = int64_t{plan.blocks} * plan.rows_per_block;
  JAXNORM_CHECK(op.rows_per_group / step < INT32_MAX);
  plan.turns = static_cast<int>(op.rows_per_group / step);
  plan.rest = static_cast<int>(op.rows_per_group % step);
  Grid grid = {.blocks = args.shape.groups * plan.blocks * plan.cluster,
               .threads = threads,
               .shared_bytes = shared_bytes,
               .cluster = plan.cluster};
  auto* const partials = static_cast<Acc*>(scratch.untyped_data());
  JAXNORM_RETURN_IF_ERROR(Launch<NormBwdKernel<Op>>(device, stream, grid, "norm_bwd", op, plan, partials));
  if (outputs == 0) return ffi::Error::Success();
  return LaunchSum(device, stream, op, args, partials, plan.blocks);
}

ffi::Error NormBwdHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::RemainingArgs rest,
                          ffi::RemainingRets results, int64_t axis, int64_t groups, bool center, double scale_offset,
                          int64_t operands, int64_t need) {
  NormBwdArgs args;
  JAXNORM_RETURN_IF_ERROR(
      ParseNormBwd(x, dy, rest, results, axis, groups, center, scale_offset, operands, need, &args));
  const NormShape& shape = args.shape;
  JAXNORM_CHECK(shape.cols < INT32_MAX / 2);  // positions within a row are 32-bit; Python lowers the formula instead
  if (shape.size() == 0) {
    const size_t bytes = shape.groups * shape.cols * ffi::ByteWidth(args.gradient_dtype);
    for (void* out : {args.dscale, args.dbias}) {
      if (out == nullptr || bytes == 0) continue;
      JAXNORM_RETURN_IF_ERROR(LaunchStatus(cudaMemsetAsync(out, 0, bytes, stream), "norm_bwd"));
    }
    return ffi::Error::Success();
  }
  auto scratch = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (scratch.has_error()) return scratch.error();
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) -> ffi::Error {
    bool full = !args.mask && args.mean.elements == (args.center ? shape.rows() : 0) &&
                args.rstd.elements == shape.rows() && (args.dx == nullptr || IsVecAligned(args.dx));
    for (const Operand* a : {&args.x, &args.dy, &args.dsum}) {
      full = full && (!*a || (IsVecAligned(a->data) && a->elements == shape.size()));
    }
    if constexpr (!std::is_same_v<T, double>) {
      using Plain = NormBwd<T, Mode::kPlain>;
      using Ragged = NormBwd<T, Mode::kRagged>;
      if (full && shape.cols % kVecSize<T> == 0) return LaunchNormBwd(*device, stream, Plain(args), args, **scratch);
      if (full) return LaunchNormBwd(*device, stream, Ragged(args), args, **scratch);
    }
    return LaunchNormBwd(*device, stream, NormBwd<T, Mode::kGeneral>(args), args, **scratch);
  });
}

JAXNORM_REGISTER(norm_bwd, NormBwdHandler,
                 ffi::Ffi::Bind()
                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                     .Arg<ffi::AnyBuffer>()
                     .Arg<ffi::AnyBuffer>()
                     .RemainingArgs()
                     .RemainingRets()
                     .Attr<int64_t>("axis")
                     .Attr<int64_t>("groups")
                     .Attr<bool>("center")
                     .Attr<double>("scale_offset")
                     .Attr<int64_t>("operands")
                     .Attr<int64_t>("need"),
                 {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace jaxnorm
