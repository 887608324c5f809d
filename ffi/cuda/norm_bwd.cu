// layer_norm and rms_norm, backward: the formulas are in norm_args.h.
//
// x and dy are read once, dx is written once. Gradients of the parameters are sums over rows, so blocks stay for many
// rows: a thread owns the same columns of each of its rows and keeps their scale and their sums in registers. A block
// then leaves one row of partial sums in float32, and a second, small launch adds those up; or if they are few and L2 holds the
// arrays, blocks tell each other theirs, and each adds up some columns. Nothing depends on the order in which blocks run, so
// results are the same bits every time.
//
// Rows are on their way to shared memory several turns before they are needed. Each thread copies and reads its own
// slots only, which takes no barrier. A turn has two passes: the first one reduces a row, the second one writes a row that
// was reduced one or two turns ago, whose sums have travelled between warps and between the blocks of a cluster meanwhile.
// So no warp waits for another one in each turn: the slowest warp would set the pace.
//
// Rows that do not fill their slots (kRagged) are seen as whole slots of the dense arrays, of which all are alike, and up
// to 2 * kVec - 2 columns beside them, each of which one lane works on by itself: what a lane does for a slot that is not
// whole was measured to take its warp, and with it a cluster, a third of the time of a turn.
#include <algorithm>
#include <cmath>

#include "norm_bwd.cuh"

namespace jaxnorm {
namespace {

// Rows are written that many turns after they were reduced. Clusters take longer to exchange their sums; but a turn of
// wider types takes twice the time, and the memory.
template <typename Op, bool kCluster>
inline constexpr int kLag = kCluster && sizeof(typename Op::T) == 2 ? 2 : 1;
// Rows in shared memory, at least.
template <typename Op, bool kCluster>
inline constexpr int kStages = kLag<Op, kCluster> + 2;
// Whether there may be one more: of clusters, which stay for longer, and of whole slots in a block that has a multiprocessor
// for itself. Two blocks were measured to be slower with one more: the first rows are then read before any is written. Blocks
// with rows of odd length were slower by 5 % where the number was not known to the compiler.
template <typename Op, bool kCluster>
inline constexpr bool kMayHaveOneMore = kCluster || Op::kMode == Mode::kPlain;

// Clusters with rows of odd length are limited by instructions. There the slots of a warp lie side by side, at distances that the
// compiler knows, and a lane loads the statistics of one of the next 32 rows for its warp: both together take 3 to 5 % less time.
// Of equal rows 8192 x 128256 elements took 2.5 % less, but 49152 x 32768 took 9 % more, 49152 x 8192 and 16384 1.3 %.
template <typename Op, bool kCluster>
inline constexpr bool kByWarps = kCluster && Op::kMode == Mode::kRagged;

// Whether blocks that are all running may add up each other's partial sums, instead of a second launch.
template <typename Op, bool kCluster>
inline constexpr bool kMayMeet = Op::kMode == Mode::kPlain && !kCluster;

struct NormBwdPlan : RowsPlan {
  // Rows of a thread lie alike if the step from one to the next is a multiple of kVec (kRagged). Where the rows that all
  // blocks have at once are such a multiple, blocks take sets of rows_per_block rows in turns, as they do with rows that
  // fill their slots: what is read at the same time lies together, which was measured to be up to 7% faster. Otherwise sets
  // are put in order of how they lie, in as many segments as there are ways, and this order is cut into a part for each
  // block: it may have the end of a segment and the begin of the next. A segment has segment_sets sets, and one more if it
  // is before segment_rest.
  int segments = 1, segment_sets = 0, segment_rest = 0;
  int stages = 0;  // rows in shared memory

  // Rows of partial sums of each group.
  __host__ __device__ __forceinline__ int Parts() const { return blocks + segments - 1; }
};

// Columns beside the whole slots of a row (kRagged), fewer than 2 * kVec: some before and some behind them. Each belongs to
// one of the row's last threads, which have the fewest slots. In shared memory it has a word of each array and stage.
template <typename Op>
inline constexpr int kEdges = Op::kMode == Mode::kRagged ? 2 * Op::kVec : 0;
template <typename Op>
__host__ __device__ __forceinline__ int EdgeRowBytes(int stages, int arrays) {
  return kEdges<Op> * static_cast<int>(sizeof(uint32_t)) * stages * arrays;
}

template <typename Op, bool kCluster>
__global__ void __launch_bounds__(kMaxThreads, 1)
    NormBwdKernel(const __grid_constant__ Op op, const NormBwdPlan plan, const NormBwdParts<typename Op::Acc> parts,
                  const NormBwdGradients gradients) {
  using Acc = typename Op::Acc;
  using V = typename Op::V;
  using Sums = typename Op::Sums;
  using T = typename Op::T;
  constexpr int kVec = Op::kVec, kSlots = Op::kSlots;
  constexpr bool kRagged = Op::kMode == Mode::kRagged, kPlain = Op::kMode == Mode::kPlain;
  constexpr bool kMayMeet = jaxnorm::kMayMeet<Op, kCluster>;
  constexpr int kLag = jaxnorm::kLag<Op, kCluster>, kStages = jaxnorm::kStages<Op, kCluster>;
  using Exchange = std::conditional_t<kCluster, ClusterExchange<Sums, kLag>, BlockExchange<Sums, kLag>>;
  extern __shared__ __align__(kLineBytes) uint4 shared_bytes[];
  __shared__ typename Exchange::Shared shared;
  static_assert(sizeof(shared) <= kStaticSharedBytes);
  int rank = 0;
  unsigned block = blockIdx.x, param_group = 0;
  Exchange::Start(shared, plan);
  if constexpr (kCluster) {
    rank = static_cast<int>(block % plan.cluster);
    block /= plan.cluster;
  }
  if (block >= plan.blocks) {
    param_group = block / plan.blocks;
    block %= plan.blocks;
  }
  const int threads = plan.threads_per_row, set_rows = kCluster ? 1 : plan.rows_per_block;
  const int block_thread = Kept(static_cast<int>(threadIdx.x));
  const int row_group = set_rows > 1 ? block_thread / threads : 0;
  const int thread = block_thread - row_group * threads;
  constexpr bool kByWarps = jaxnorm::kByWarps<Op, kCluster>;
  const int apart = kByWarps ? kWarp : threads;  // from one slot of a thread to the next
  const int first_slot = rank * plan.part_slots + thread / apart * (apart * kSlots) + thread % apart;
  const auto slot_of = [&](int j) { return first_slot + j * apart; };
  const int slot_step = apart * kVec;

  // In shared memory a warp has its stages, in each of them slot j of array k, at constant distances so that addresses take
  // few registers. After those of all warps are the columns beside whole slots.
  constexpr uint32_t kSlotBytes = kWarp * kVecBytes;
  const int stages = kMayHaveOneMore<Op, kCluster> ? plan.stages : kStages;
  const uint32_t stage_bytes = Kept(kSlots * op.arrays * kSlotBytes);
  const uint32_t shared_base = SharedAddress(shared_bytes);
  const uint32_t own =
      Kept(shared_base + block_thread / kWarp * (stages * stage_bytes) + block_thread % kWarp * kVecBytes);
  const auto at = [&](int place, int j, int k) { return own + place * stage_bytes + (k * kSlots + j) * kSlotBytes; };
  const int edge = rank == plan.cluster - 1 ? threads - 1 - thread : kEdges<Op>;  // this thread's, if there are as many
  const uint32_t own_edge = shared_base + stages * stage_bytes * (blockDim.x / kWarp) +
                            row_group * EdgeRowBytes<Op>(stages, op.arrays) + edge * static_cast<int>(sizeof(uint32_t));
  const auto edge_word = [&](int place, int k) {
    return own_edge + (place * op.arrays + k) * (kEdges<Op> * static_cast<int>(sizeof(uint32_t)));
  };

  Exchange exchange(shared, plan, rank, row_group, block_thread);
  int before = 0;  // rows of earlier segments

#pragma unroll 1
  for (int segment = 0; segment < (kRagged ? plan.segments : 1); ++segment) {
    // Sets of rows_per_block rows, one in each turn: `first`, first + step, ...
    int first = block, step = plan.blocks, turns = plan.turns + (block < plan.rest ? 1 : 0);
    if (kRagged && plan.segments > 1) {
      const auto segment_begin = [&](int n) { return n * plan.segment_sets + min(n, plan.segment_rest); };
      const int begin = block * plan.turns + min(static_cast<int>(block), plan.rest), stop = begin + turns;
      const int here = segment_begin(segment), next = segment_begin(segment + 1);
      if (here > stop || next <= begin) continue;
      step = plan.segments;
      turns = min(stop, next) - max(begin, here);
      first = segment + (max(begin, here) - here) * step;
    }
    const int64_t base = param_group * op.rows_per_group + int64_t{first} * set_rows + row_group;
    const int step_rows = step * set_rows;
    const auto index = [&](int turn) { return base + int64_t{turn} * step_rows; };
    const bool cut = set_rows > 1 && turns > 0 && index(turns - 1) >= (param_group + 1) * op.rows_per_group;
    const int own_turns = cut ? turns - 1 : turns;
    const auto inside = [&](int turn) { return turn < own_turns; };
    // This thread's slots, which are the same columns in all rows of a segment.
    const int head = op.Head(base);
    const int slots = kRagged ? (op.cols - head) / kVec : op.Slots();
    const int end = min((rank + 1) * plan.part_slots, slots);
    const auto active = [&](int j) { return slot_of(j) < end; };
    const auto first_of = [&](int j) { return slot_of(j) * kVec + head; };
    // A column beside whole slots, which may share its word with another one.
    const bool has_edge = kRagged && edge < op.cols - slots * kVec;
    const int edge_column = edge < head ? edge : slots * kVec + edge;
    constexpr int kPerWord = sizeof(T) < sizeof(uint32_t) ? sizeof(uint32_t) / sizeof(T) : 1;
    const int edge_odd = static_cast<unsigned>(head + edge_column) % kPerWord;  // `head` is odd if the row's start is
    const auto load_edge = [&](int place, int k) {
      auto word = LoadShared<WordsOf<Vec<T, kPerWord>>>(edge_word(place, k));
      if constexpr (kPerWord == 2) word.w[0] >>= edge_odd * 16;
      return ToAcc(std::bit_cast<Vec<T, kPerWord>>(word).v[0]);
    };
    // This thread's first slot in the row to be copied next, of x, and in the one to be written next.
    const int64_t step_elements = int64_t{step_rows} * op.cols;
    const T* from = op.x.data + (base * op.cols + first_of(0));
    T* to = op.dx + (base * op.cols + first_of(0));
    const auto copy = [&](int turn, int place) {
      if (Op::kGeneral && inside(turn)) {
        const typename Op::Row row = op.Begin(index(turn));
#pragma unroll
        for (int k = 0; k < kMaxArrays; ++k) {
          if (!op.Has(k)) break;
#pragma unroll
          for (int j = 0; j < kSlots; ++j) {
            if (active(j)) StoreShared(at(place, j, k), op.Columns(row.in[k], first_of(j)));
          }
        }
      } else if (inside(turn)) {
#pragma unroll
        for (int k = 0; k < kMaxArrays; ++k) {
          if (!op.Has(k)) break;
#pragma unroll
          for (int j = 0; j < kSlots; ++j) {
            if (active(j)) CopyAsync</*kCached=*/true>(at(place, j, k), op.Beside(from, k) + j * slot_step);
          }
        }
        if (has_edge) {
          // The word that has it, unless that is half beyond the arrays.
          const bool cut = edge_column + 1 == op.cols && edge_odd + 1 < kPerWord && index(turn) + 1 == op.rows;
#pragma unroll
          for (int k = 0; k < kMaxArrays; ++k) {
            if (!op.Has(k)) break;
            const T* const element = op.Beside(from, k) + (edge_column - first_of(0));
            if (!cut) {
              CopyWordAsync(edge_word(place, k), element - edge_odd);
            } else if constexpr (kPerWord == 2) {
              StoreShared(edge_word(place, k), uint32_t{std::bit_cast<uint16_t>(*element)});
            }
          }
        }
      }
      from += step_elements;
      CopyCommit();
    };
    // Until a row is there. As many have been copied by then as there are stages, and one more for each written row.
    const auto wait = [&](int turn) {
      if (turn == 0) {
        CopyWait<kStages - 1>();
      } else if (stages > kStages) {
        CopyWait<kStages - kLag>();
      } else {
        CopyWait<kStages - kLag - 1>();
      }
    };

    // Parameters first: behind rows they would take longer than those.
    Acc scale[kSlots][kVec], dscale[kSlots][kVec], dbias[kSlots][kVec];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) scale[j][i] = dscale[j][i] = dbias[j][i] = 0;
      if (active(j)) op.Scale(param_group, first_of(j), scale[j]);
    }
    // Of row turn - kLag and the next ones.
    constexpr int kKnown = 3;
    typename Op::Statistics statistics[kKnown];
#pragma unroll
    for (int n = 0; n < kKnown; ++n) statistics[n] = op.StatisticsOf(index(n - kLag), n >= kLag && inside(n - kLag));
    int64_t later = index(kKnown - kLag);
    const auto of_lane = [&](int turn) {
      const int own = turn + block_thread % kWarp;
      return op.StatisticsOf(index(own), inside(own));
    };
    typename Op::Statistics of_lanes, next_of_lanes;
    if constexpr (kByWarps) {
      of_lanes = of_lane(0);
      next_of_lanes = of_lane(kWarp);
    }
    const auto statistics_of_later = [&](int turn) {
      if constexpr (kByWarps) {
        if (turn % kWarp == 0) {
          of_lanes = next_of_lanes;
          next_of_lanes = of_lane(turn + kWarp);
        }
        return of_lanes.FromLane(turn % kWarp);
      } else {
        const auto loaded = op.StatisticsOf(later, inside(turn));
        later += step_rows;
        return loaded;
      }
    };
    for (int place = 0; place < stages; ++place) copy(place, place);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) op.Offset(scale[j]);
    Acc edge_scale = 0, edge_dscale = 0, edge_dbias = 0;
    if (has_edge) {
      edge_scale = op.Scale(param_group, edge_column);
      op.Offset(edge_scale);
    }
    if (before == 0) exchange.Meet();

    // A turn reduces row `turn`, and writes the one that was reduced kLag turns ago.
    int place = 0, written_place = 0;
    Sums sums = Sums::Identity();
#pragma unroll 1
    for (int turn = 0; turn < turns + kLag; ++turn) {
      const auto upcoming = statistics_of_later(turn - kLag + kKnown);
      Sums own_sums = Sums::Identity();
      if (turn < turns) {
        wait(turn);
        if (inside(turn)) {
          const typename Op::Row row = op.Begin(index(turn));
#pragma unroll
          for (int j = 0; j < kSlots; ++j) {
            if (!active(j)) continue;
            op.Reduce(row, statistics[kLag], first_of(j), LoadShared<V>(at(place, j, 0)),
                      LoadShared<V>(at(place, j, 1)), scale[j], own_sums, dscale[j], dbias[j]);
          }
          if (has_edge) {
            op.Reduce(statistics[kLag], load_edge(place, 0), load_edge(place, 1), edge_scale, own_sums, edge_dscale,
                      edge_dbias);
          }
        }
        if (op.need_x) own_sums = exchange.Put(own_sums, before + turn);
        place = place + 1 == stages ? 0 : place + 1;
      }
      const int written = turn - kLag;
      if (written >= 0) {
        if (op.need_x) {
          const auto final = op.Finish(exchange.End(sums, before + written));
          if (inside(written)) {
            const typename Op::Row row = op.Begin(index(written));
#pragma unroll
            for (int j = 0; j < kSlots; ++j) {
              if (!active(j)) continue;
              Acc out[kVec];
              op.Dx(row, statistics[0], first_of(j), LoadShared<V>(at(written_place, j, 0)),
                    LoadShared<V>(at(written_place, j, 1)), scale[j], final, out);
              if (op.Has(2)) op.Add(LoadShared<V>(at(written_place, j, 2)), out);
              if constexpr (Op::kGeneral) {
                op.Store(to + j * slot_step, first_of(j), out);
              } else {
                jaxnorm::Store(to + j * slot_step, RoundVec<T>(out));
              }
            }
            if (has_edge) {
              Acc out = op.Dx(statistics[0], load_edge(written_place, 0), load_edge(written_place, 1), edge_scale,
                              final, true);
              if (op.Has(2)) out += load_edge(written_place, 2);
              to[edge_column - first_of(0)] = FromAcc<T>(out);
            }
          }
        }
        to += step_elements;
        copy(written + stages, written_place);
        written_place = written_place + 1 == stages ? 0 : written_place + 1;
      }
      if (op.need_x && turn < turns) exchange.Begin(before + turn);
      sums = own_sums;
#pragma unroll
      for (int n = 0; n < kKnown - 1; ++n) statistics[n] = statistics[n + 1];
      statistics[kKnown - 1] = upcoming;
    }
    before += turns;
    const int outputs = op.Outputs();
    if (outputs == 0) continue;
    LetNextBegin();

    // One row of sums for each block and segment: [outputs][cols].
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
          if (first_of(j) + i < op.cols) to[first_of(j) + i] = values[i];
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
      if (!has_edge) return;
      if (op.need_scale) to[edge_column] = edge_dscale;
      if (op.need_bias) to[edge_column + (op.need_scale ? op.cols : 0)] = edge_dbias;
    };
    const int width = outputs * op.cols;
    const int64_t part = int64_t{param_group} * plan.Parts() + block + segment;
    Acc* const out = parts.partials + part * width;
    if (set_rows == 1 && (!kMayMeet || parts.posts == nullptr)) {
      put_all(out);
      continue;
    }
    // The rows of a block leave their sums in the memory that the stages had. Those of a warp are summed first, if
    // their slots have the same columns.
    int sets = set_rows, set = row_group;
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
    if (writes) put_all(total + set * width);
    __syncthreads();
    if constexpr (kPlain) {
      LeaveSums(parts, part, total, sets, width);
    } else {
      for (int c = threadIdx.x; c < width; c += blockDim.x) {
        Acc sum = total[c];
        for (int s = 1; s < sets; ++s) sum += total[s * width + c];
        out[c] = sum;
      }
    }
    __syncthreads();  // the next segment's rows are copied there, or sums of posts
    if constexpr (kMayMeet) {
      if (parts.posts != nullptr) {
        AddUpPosts<T>(parts, plan.blocks, width, reinterpret_cast<ColumnPair<Acc>*>(shared_bytes), gradients);
      }
    }
  }
}

// ---- Launching ----

// How many of `most` rows, a multiple of `step`, a multiprocessor is to have at once, if each is in one block. A turn takes some
// time however many there are, in which sums travel between warps. Where memory takes much longer for so many rows,
// multiprocessors that it happens to serve better run ahead of others and have nothing to do in the end. So there are only as many
// as keep memory busy: of 49152 x 1024 elements of 16 bits an H100 takes 7 % less time with 5 rows than with 8. An H200, with the
// same multiprocessors and faster memory, has 8. It stays at `most` for wider types and with a residual's cotangent, whose turns
// take longer (an H200 took 7 to 13 % more with fewer), and for smaller arrays, of which L2 holds a part.
template <typename Op>
int RowsThatMemoryFeeds(const DeviceInfo& device, const Op& op, int most, int step) {
  constexpr double kTurnCycles = 2100;  // 2400, and 0.88 of memory's peak
  constexpr double kTooMany = 1.4;
  const double row_bytes = (op.need_x ? 3.0 : 2.0) * op.cols * sizeof(typename Op::T);
  const double enough = kTurnCycles * device.cycle_bytes / row_bytes;
  if (sizeof(typename Op::T) != 2 || op.arrays != 2 || row_bytes * op.rows < 3.0 * device.l2_bytes || enough == 0 ||
      most < kTooMany * enough) {
    return most;
  }
  return std::min(most, static_cast<int>(CeilDiv(static_cast<int64_t>(std::ceil(enough)), step)) * step);
}

template <typename Op>
Error LaunchNormBwd(const DeviceInfo& device, cudaStream_t stream, const Op& op, const NormBwdArgs& args,
                    Scratch scratch) {
  using T = typename Op::T;
  using Acc = typename Op::Acc;
  const int slots = Op::kMode == Mode::kRagged ? op.cols / Op::kVec : op.Slots(), outputs = op.Outputs();
  const auto row_bytes = [&](int threads, int stages) {  // of a block's shared memory
    return threads * stages * Op::kSlots * op.arrays * kVecBytes + EdgeRowBytes<Op>(stages, op.arrays);
  };
  // What a row in `cluster` blocks has in each of them, and how many rows a multiprocessor then has at once.
  struct Fit {
    int part_slots, threads, rows;
  };
  const int room = device.max_shared_bytes - kStaticSharedBytes;  // of a block
  const auto fit = [&](int cluster) -> Fit {
    const auto part_slots = static_cast<int>(CeilDiv(slots, cluster));
    const int wanted = std::max(static_cast<int>(CeilDiv(part_slots, Op::kSlots)), kEdges<Op>);
    const int threads = wanted > kWarp ? static_cast<int>(CeilDiv(wanted, kWarp)) * kWarp : NextPowerOfTwo(wanted);
    if (threads > kMaxThreads) return {};
    const int bytes = cluster > 1 ? row_bytes(threads, kStages<Op, true>) + kStaticSharedBytes
                                  : row_bytes(threads, kStages<Op, false>);
    const int together = std::max(2 * kWarp / threads, 1);  // in two blocks of whole warps
    return {part_slots, threads, std::min(kMaxThreads / threads, room / bytes) / together * together};
  };
  const auto rows_at_once = [&](int cluster) {
    const int clusters =
        cluster == 1 ? device.sms : ActiveClusters<NormBwdKernel<Op, true>>(device, kMaxThreads, cluster);
    return clusters * fit(cluster).rows;
  };
  int cluster = 1;
  while (cluster <= kMaxCluster && fit(cluster).rows == 0) ++cluster;
  const int at_least = cluster <= kMaxCluster ? rows_at_once(cluster) : 0;
  if constexpr (!Op::kGeneral) {  // which has fewer slots for each thread: some devices have little shared memory
    if (at_least == 0 && fit(1).threads > 0) {
      return LaunchNormBwd(device, stream, NormBwd<T, Mode::kGeneral>(args), args, scratch);
    }
  }
  // Few rows: by all multiprocessors together. Clusters, whose blocks come and go unevenly and each of which leaves a row of
  // partial sums, do better only if they have more to do: five times what they have at once. Large clusters leave many
  // multiprocessors idle, and few rows for each cluster: seven or, with two gradients of parameters, ten times.
  if constexpr (Op::kMode == Mode::kPlain) {
    const bool large = cluster > 4 && op.arrays == 2;
    const bool few = cluster > 1 && op.rows < (large ? 4 + 3 * outputs : 5) * at_least;
    auto status = Error::Success();
    if ((at_least == 0 || few) && LaunchNormBwdFew(device, stream, op, args, scratch, &status)) return status;
  }
  if (at_least == 0 || (cluster > 1 && op.rows < 2 * at_least)) {
    return LaunchNormBwdLong(device, stream, op, args, scratch);
  }
  // More blocks for a row than it needs may leave fewer threads of a multiprocessor unused. A row in one block that shares its
  // multiprocessor with no other one was slower than in a cluster of two, with as many rows at once, unless all threads were
  // in use. Larger clusters instead of small ones were faster where they have a tenth more rows at once; a quarter more, if
  // rows do not fill their slots, or as many, each in more multiprocessors.
  const int smallest = cluster;
  int rows = at_least;  // at once
  if (smallest > 1) {
    constexpr bool kRagged = Op::kMode == Mode::kRagged;
    for (int more = smallest + 1; more <= kMaxPortableCluster; ++more) {
      const int rows_of_more = rows_at_once(more);
      if (100 * rows_of_more <= (kRagged ? 125 : 110) * rows && !(kRagged && rows_of_more == rows)) continue;
      cluster = more;
      rows = rows_of_more;
    }
  } else if (fit(1).rows == 1 && fit(1).threads < kMaxThreads) {
    if (const int rows_of_two = rows_at_once(2); rows_of_two >= rows) {
      cluster = 2;
      rows = rows_of_two;
    }
  }
  if (args.shape.groups > 1 || op.rows < 4 * rows) {
    cluster = smallest;
    rows = at_least;
  }
  Fit best = fit(cluster);
  if (!Op::kGeneral && cluster == 1 && args.shape.groups == 1) {
    // Rows of odd length are slower in one block that has a multiprocessor for itself.
    const int step = std::max(2 * kWarp / best.threads, Op::kMode == Mode::kRagged ? 2 : 1);
    best.rows = RowsThatMemoryFeeds(device, op, best.rows, step);
    rows = device.sms * best.rows;
  }
  NormBwdPlan plan;
  plan.cluster = cluster;
  plan.part_slots = best.part_slots;
  plan.threads_per_row = best.threads;
  // A multiprocessor's rows are in as many clusters, or in two blocks, or in one if they are odd in number.
  const bool alone = cluster == 1 && best.rows % 2 != 0;
  const int blocks_at_once = cluster > 1 ? best.rows : alone ? 1 : 2;  // of a multiprocessor
  plan.rows_per_block = best.rows / blocks_at_once;
  const int threads = plan.threads_per_row * plan.rows_per_block;
  const int at_once = rows / plan.rows_per_block;
  const auto block_bytes = [&](int stages) { return plan.rows_per_block * row_bytes(plan.threads_per_row, stages); };
  const auto all_fit = [&](int stages) {
    return blocks_at_once * (block_bytes(stages) + kStaticSharedBytes) <= device.max_shared_bytes;
  };
  plan.stages = cluster > 1 ? kStages<Op, true> : kStages<Op, false>;
  if ((cluster > 1 ? kMayHaveOneMore<Op, true> : kMayHaveOneMore<Op, false> && alone) && all_fit(plan.stages + 1)) {
    ++plan.stages;
  }
  // Each block leaves a row of partial sums for each segment that it has rows of, so as few as run at once.
  const int64_t sets = CeilDiv(op.rows_per_group, plan.rows_per_block);
  JAXNORM_CHECK(sets < INT32_MAX);
  // In which sets may lie.
  const int ways =
      Op::kMode == Mode::kRagged ? Op::kVec / std::min(Op::kVec, plan.rows_per_block & -plan.rows_per_block) : 1;
  int64_t most = std::min<int64_t>(sets, at_once);
  const bool meet = kMayMeet<Op, false> && cluster == 1 && args.shape.groups == 1 && all_fit(plan.stages) &&
                    MayMeet(device, op, most, scratch);
  int64_t most_parts = INT32_MAX;
  if (outputs > 0 && !meet) {
    most_parts = static_cast<int64_t>(scratch.bytes) / (args.shape.groups * PartBytes<Acc>(outputs * op.cols, false));
    JAXNORM_CHECK(most_parts > 0);
  }
  if (at_once % ways != 0 || std::min(most, most_parts) < ways) plan.segments = ways;
  most = std::min(most, most_parts - plan.segments + 1);
  if (most < 1 || op.cols < kEdges<Op>) {  // no room for so many partial sums, or rows that would be nothing but edges
    return LaunchNormBwd(device, stream, NormBwd<T, Mode::kGeneral>(args), args, scratch);
  }
  plan.blocks = static_cast<int>(most);
  if (plan.segments == 1) plan.blocks -= plan.blocks % ways;
  plan.turns = static_cast<int>(sets / plan.blocks);
  plan.rest = static_cast<int>(sets % plan.blocks);
  plan.segment_sets = static_cast<int>(sets / plan.segments);
  plan.segment_rest = static_cast<int>(sets % plan.segments);

  const Grid grid = {.blocks = args.shape.groups * plan.blocks * cluster,
                     .threads = threads,
                     .shared_bytes = block_bytes(plan.stages),
                     .cluster = cluster,
                     .cooperative = meet};
  const NormBwdParts<Acc> parts(scratch.data, outputs * op.cols, plan.blocks, meet);
  const auto launch = [&]<bool kCluster>(std::bool_constant<kCluster>) {
    return Launch<NormBwdKernel<Op, kCluster>>(device, stream, grid, "norm_bwd", op, plan, parts, Gradients<Op>(args));
  };
  const Error status = cluster > 1 ? launch(std::true_type()) : launch(std::false_type());
  if (status.failure() || outputs == 0 || meet) return status;
  return LaunchSum(device, stream, op, args, parts.partials, plan.Parts());
}

}  // namespace

Error RunNormBwd(cudaStream_t stream, const NormBwdArgs& args, Scratch scratch) {
  const NormShape& shape = args.shape;
  JAXNORM_CHECK(shape.cols < INT32_MAX / 2);  // positions within a row are 32-bit; Python lowers the formula instead
  if (shape.size() == 0) {
    const size_t bytes = shape.groups * shape.cols * ByteWidth(args.gradient_dtype);
    for (void* out : {args.dscale, args.dbias}) {
      if (out == nullptr || bytes == 0) continue;
      JAXNORM_RETURN_IF_ERROR(LaunchStatus(cudaMemsetAsync(out, 0, bytes, stream), "norm_bwd"));
    }
    return Error::Success();
  }
  const DeviceInfo* device;
  JAXNORM_RETURN_IF_ERROR(CurrentDevice(&device));
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T>) -> Error {
    bool full = !args.mask && args.mean.elements == (args.center ? shape.rows() : 0) &&
                args.rstd.elements == shape.rows() && (args.dx == nullptr || IsVecAligned(args.dx));
    for (const Operand* a : {&args.x, &args.dy, &args.dsum}) {
      full = full && (!*a || (IsVecAligned(a->data) && a->elements == shape.size()));
    }
    if constexpr (!std::is_same_v<T, double>) {
      using Plain = NormBwd<T, Mode::kPlain>;
      using Ragged = NormBwd<T, Mode::kRagged>;
      if (full && shape.cols % kVecSize<T> == 0) {
        const Plain plain(args);
        auto status = Error::Success();
        if (LaunchNormBwdShort(*device, stream, plain, args, scratch, &status)) return status;
        return LaunchNormBwd(*device, stream, plain, args, scratch);
      }
      if (full) return LaunchNormBwd(*device, stream, Ragged(args), args, scratch);
    }
    return LaunchNormBwd(*device, stream, NormBwd<T, Mode::kGeneral>(args), args, scratch);
  });
}

}  // namespace jaxnorm
