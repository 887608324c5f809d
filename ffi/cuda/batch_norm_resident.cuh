// batch_norm of arrays that the device can hold on chip, in one launch: what its two kernels share, forward
// (batch_norm_train.cu) and backward (batch_norm_bwd.cu).
//
// A block has the same elements from beginning to end. It copies them to shared memory, reduces them as they come, and
// posts what it has found of each channel for the blocks that share the channel; when it has read their posts, it goes
// over its elements again. So each element is read once, and there is no launch to wait for.
//
// Such a launch is short: instructions that are fetched for the first time are a large part of it, as in the last step of
// batch_norm_reduce.cuh. So there are two layouts of their own and none for the rest, everything fits 32 bits, and what is
// done twice is the same code.
#ifndef JAXNORM_CUDA_BATCH_NORM_RESIDENT_CUH_
#define JAXNORM_CUDA_BATCH_NORM_RESIDENT_CUH_

#include "cuda/batch_norm.cuh"
#include "cuda/rows.cuh"

namespace jaxnorm {

inline constexpr int kResidentThreads = 512;
inline constexpr int kCopyGroups = 7;    // what comes first is looked at while the rest is on its way
inline constexpr int kChannelPosts = 5;  // that a lane reads at once: with 9, channels first took 2 % longer
inline constexpr int kMostBlocks = kWarp * kChannelPosts;

// Of a thread's 2 * kCols sums of neighbouring channels each plane has 4 (Resident::MergePlanes).
inline constexpr int kPlaneNumbers = 4, kPlanes = 2 * kCols / kPlaneNumbers;

// Two sums of some elements of a channel.
struct Sums {
  float first = 0, second = 0;

  __device__ __forceinline__ Sums& operator+=(const Sums& other) {
    first += other.first;
    second += other.second;
    return *this;
  }
};

// Of `lanes` lanes: Sums, or a number.
template <typename P>
__device__ __forceinline__ P LaneSums(P sums, uint32_t lanes) {
#pragma unroll
  for (uint32_t offset = 1; offset < kWarp; offset *= 2) {
    if (offset >= lanes) break;
    sums += ShuffleXor(sums, offset);
  }
  return sums;
}

// Where the groups of copies end, in lines or in turns. (No block has shared memory for 2^16 of these.)
struct CopyGroups {
  uint16_t first, each;  // in the first group, and in each other one

  // Of `count` in all.
  __device__ __forceinline__ uint32_t End(uint32_t group, uint32_t count) const {
    return min(uint32_t{first} + group * each, count);
  }
};

// Division of numbers of blocks, in one number less than FastDiv: what comes before the copies is in one line of the constant
// cache so.
struct BlockDiv {
  uint32_t divisor, multiplier;

  static BlockDiv By(int64_t d) {
    static_assert(kMostBlocks * kMostBlocks < 1 << 18);  // so it is exact
    return {static_cast<uint32_t>(d), static_cast<uint32_t>((1 << 18) / d + 1)};
  }
  __device__ __forceinline__ uint32_t DivMod(uint32_t n, uint32_t* remainder) const {
    const uint32_t quotient = n * multiplier >> 18;
    *remainder = n - quotient * divisor;
    return quotient;
  }
};

// An array is `lines` lines of cols = channels * inner elements. A block has `span` of them (the last ones may have
// fewer), and of each a tile: whole channels, or a part of one. Blocks that share channels are neighbours.
struct ResidentPlan {
  // What comes before the copies.
  uint32_t cols, lines;
  uint32_t span;        // lines of a block
  uint32_t tile;        // columns of a block
  BlockDiv by_sharers;  // blocks that share a channel: sharer i has lines i / parts * span and following
  BlockDiv by_parts;    // tiles of a channel, or 1
  CopyGroups line_groups;
  uint32_t cells;         // where elements begin in shared memory, behind the numbers of each slot
  const void* arrays[2];  // that are copied
  // What comes later.
  uint32_t numbers;  // where those begin, behind the entries
  uint32_t slots;    // channels of a tile
  uint32_t rows;     // lines that a block works on at once
  CopyGroups turn_groups;
  FastDiv by_row_threads, by_rows, by_own_entries;
  FastDiv by_fold;       // sums that the numbers of a plane are first added up to (MergePlanes)
  uint32_t kept_turns;   // whose bits there is room for where entries were (KeepBits)
  uint32_t bit_word;     // bytes that WriteBits writes at once: 4, or 1
  FastDiv by_bit_words;  // such words that lie one after the other
  // Of a slot: in each row, one for each thread that has columns of it; or if columns are not alike, altogether (backward).
  uint32_t own_entries;
  uint32_t lane_bits;             // 2^lane_bits lanes of a warp merge a channel's entries
  uint32_t post_bits;             // and 2^post_bits its posts
  bool relayed;                   // each block reads the posts of some channels only, and posts what they come to
  uint32_t read_slots;            // how many those are at most; else all
  uint32_t whole;                 // sharers that have `span` lines
  float elements, last_elements;  // of a channel, that one of those has, and one of the others
  float inverse_count;            // 1 / the number of a channel's elements
  Post<Sums>* posts;
  Post<Sums>* totals;   // of each channel, if relayed
  Post<Sums>* counter;  // of blocks that have read all that they need
  uint64_t tag;

  __device__ __forceinline__ uint32_t Sharers() const { return by_sharers.divisor; }
};

// ---- Launch ----

// Whether the columns of a thread are of one channel, or else of neighbouring ones.
inline bool IsAlike(const BatchNormShape& shape) { return shape.inner % kCols == 0; }

// Cuts an array so that the blocks of one wave can hold kArrays such arrays, with a byte for each 8 elements if kBits
// (forward where entries were, as many as fit), and kNumbers of each channel. False if they cannot, or if columns lie otherwise.
template <typename T, int kArrays, int kNumbers, bool kBits>
bool PlanResident(const DeviceInfo& device, const BatchNormShape& shape, Scratch scratch, ResidentPlan* plan,
                  Grid* grid) {
  constexpr int64_t kLeastColumns = 1024;  // each copy takes time
  constexpr int64_t kMostRelayed = 128;    // channels: for more of them this takes longer than two passes
  constexpr int64_t kExchange = 1 << 15;   // takes as long as a block takes to read so many bytes
  constexpr bool kForward = kArrays == 1, kKeepsBits = kBits && kForward, kHoldsBits = kBits && !kForward;
  constexpr int64_t kCellBytes = int64_t{kArrays} * kCols * sizeof(T) + kHoldsBits;
  const int64_t shared_bytes = device.max_shared_bytes - kStaticSharedBytes, size = shape.group_size();
  const int64_t blocks = std::min(device.sms, kMostBlocks), cols = shape.channels * shape.inner;
  const bool alike = IsAlike(shape);
  const bool forward_last = kForward && !alike;  // forward, channels last
  if (!device.clusters || shape.groups != 1 || size == 0 || cols % kCols != 0 || (!alike && shape.inner != 1))
    return false;
  if (size / kCols * kCellBytes > shared_bytes * blocks) return false;
  const auto posts_room = static_cast<int64_t>(scratch.bytes / sizeof(Post<Sums>));
  int64_t best = INT64_MAX;
  const auto consider = [&](int64_t tile, int64_t spans) {
    const int64_t tiles = cols / tile, row_threads = tile / kCols;
    // There half as many threads have half as many sums to merge before blocks exchange them: 1 % less.
    const int64_t most_threads = forward_last && spans > 1 ? kResidentThreads / 2 : kResidentThreads;
    if (row_threads > most_threads || spans < 1 || (!alike && !std::has_single_bit(static_cast<uint64_t>(tile))))
      return;
    // Whole lines one after the other: each block's begin with a cache line.
    const bool whole_lines = tile == cols, contiguous = whole_lines && spans > 1;
    const int64_t step = contiguous ? kLineBytes / std::gcd(cols * int64_t{sizeof(T)}, int64_t{kLineBytes}) : 1;
    const int64_t span = AlignedPart(shape.outer, spans, step);
    spans = CeilDiv(shape.outer, span);
    const int64_t parts = std::max<int64_t>(1, shape.inner / tile), sharers = spans * parts;
    const int64_t slots = std::max<int64_t>(1, tile / shape.inner);
    const int64_t rows = std::min(most_threads / row_threads, span), turns = CeilDiv(span, rows);
    const int64_t threads = CeilDiv(rows * row_threads, kWarp) * kWarp;
    const int64_t own_entries = alike                 ? std::min(tile, shape.inner) / kCols
                                : row_threads < kWarp ? threads / kWarp
                                                      : rows;
    const int64_t plane_line = kPlaneNumbers * row_threads;  // whole lines are added up
    const int64_t fold = CeilDiv(CeilDiv(threads, kPlanes), plane_line) * plane_line;
    const int64_t entries = std::max(slots, alike ? threads : (slots + 1) * own_entries);
    const int64_t entry_bytes = forward_last ? kPlanes * (kPlaneNumbers * threads + fold) * int64_t{sizeof(float)}
                                             : CeilDiv(entries * int64_t{sizeof(Sums)}, kVecBytes) * kVecBytes;
    const int64_t number_bytes = CeilDiv(slots, 4) * 4 * kNumbers * int64_t{sizeof(float)};
    const int64_t cell_bytes = span * tile * kArrays * int64_t{sizeof(T)} + (kHoldsBits ? turns * threads : 0);
    const int64_t room = shared_bytes / kVecBytes * kVecBytes - number_bytes - cell_bytes;
    const int64_t bit_bytes = kKeepsBits ? CeilDiv(turns * threads, kVecBytes) * kVecBytes : 0;
    const int64_t first_bytes = std::max(entry_bytes, std::min(bit_bytes, room));
    const int64_t bytes = first_bytes + number_bytes + cell_bytes;
    const int64_t bit_word = (whole_lines ? size : std::gcd(tile, cols)) % (4 * kCols) == 0 ? 4 : 1;
    // The first group has one turn of 16. There, if a block has all lines, it has all: there is little to wait for, and sums
    // of distances from the mean of all lose no bit.
    const int64_t first_turns = forward_last && sharers == 1 ? turns : CeilDiv(turns, 16);
    const int64_t group_turns = CeilDiv(turns - first_turns, kCopyGroups - 1);
    uint32_t lane_bits = 0, post_bits = 0;
    const int64_t lane_entries = forward_last ? fold / plane_line / 4 : own_entries;  // a lane takes four of the first
    while (1 << lane_bits < kWarp && 1 << lane_bits < lane_entries && slots << (lane_bits + 1) <= threads) ++lane_bits;
    while (kChannelPosts << post_bits < sharers) ++post_bits;
    if (bytes > shared_bytes || 1 << post_bits > kWarp || shape.channels * (sharers + 1) + 1 > posts_room) return;
    const int64_t post_bytes = slots * sharers * int64_t{sizeof(Post<Sums>)};
    const bool relayed = post_bytes > kExchange;
    if (relayed && slots > kMostRelayed) return;
    const int64_t cost =
        turns * threads * kCellBytes + (sharers == 1 ? 0 : kExchange + (relayed ? kExchange : post_bytes));
    if (cost >= best) return;
    best = cost;
    auto* const posts = static_cast<Post<Sums>*>(scratch.data);
    const int64_t columns = std::min(tile, shape.inner);  // of a channel
    const auto narrow = [](int64_t n) { return static_cast<uint32_t>(n); };
    const auto narrow16 = [](int64_t n) { return static_cast<uint16_t>(n); };
    const auto by = [](int64_t n) { return FastDiv(static_cast<int32_t>(n)); };
    *plan = {.cols = narrow(cols),
             .lines = narrow(shape.outer),
             .span = narrow(span),
             .tile = narrow(tile),
             .by_sharers = BlockDiv::By(sharers),
             .by_parts = BlockDiv::By(parts),
             .line_groups = {narrow16(first_turns * rows), narrow16(group_turns * rows)},
             .cells = narrow(first_bytes + number_bytes),
             .arrays = {},
             .numbers = narrow(first_bytes),
             .slots = narrow(slots),
             .rows = narrow(rows),
             .turn_groups = {narrow16(first_turns), narrow16(group_turns)},
             .by_row_threads = by(row_threads),
             .by_rows = by(rows),
             .by_own_entries = by(own_entries),
             .by_fold = by(fold),
             .kept_turns = narrow(first_bytes / (rows * row_threads) / 4 * 4),  // whole words
             .bit_word = narrow(bit_word),
             .by_bit_words = by(whole_lines ? INT32_MAX : tile / kCols / bit_word),
             .own_entries = narrow(own_entries),
             .lane_bits = lane_bits,
             .post_bits = post_bits,
             .relayed = relayed,
             .read_slots = narrow(relayed ? CeilDiv(slots, sharers) : slots),
             .whole = narrow((spans - 1) * parts),
             .elements = static_cast<float>(span * columns),
             .last_elements = static_cast<float>((shape.outer - (spans - 1) * span) * columns),
             .inverse_count = static_cast<float>(1.0 / static_cast<double>(shape.reduced())),
             .posts = posts,
             .totals = posts + shape.channels * sharers,
             .counter = posts + shape.channels * (sharers + 1),
             .tag = 0};
    *grid = {.blocks = tiles * spans,
             .threads = static_cast<int>(threads),
             .shared_bytes = static_cast<int>(bytes),
             .cooperative = true};
  };
  // Tiles: parts of a channel, or whole channels.
  for (int64_t tiles = 1; tiles <= std::min(blocks, cols / kCols); ++tiles) {
    const int64_t tile = cols / tiles;
    if (cols % tiles != 0 || tile % kCols != 0 || (tiles > 1 && tile < kLeastColumns)) continue;
    if (tile % shape.inner != 0 && shape.inner % tile != 0) continue;
    consider(tile, 1);
    consider(tile, std::min(blocks / tiles, shape.outer));
  }
  if (best == INT64_MAX) return false;
  plan->tag = LaunchTag();
  return true;
}

// Calls run(std::type_identity<T>(), std::integral_constant<Bits>()) where there are kernels for such a call.
template <typename F>
Error IfResident(const BatchNormArgs& args, F&& run) {
  return DispatchFloat(args.dtype, [&]<typename T>(std::type_identity<T> type) {
    if constexpr (sizeof(T) < 8) {
      return DispatchBits<T>(args, [&](auto bits) {
        if constexpr (bits != Bits::kRagged) return run(type, bits);
        return Error::Success();
      });
    }
    return Error::Success();
  });
}

// ---- In a kernel ----

__device__ __forceinline__ void StoreSharedByte(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t LoadSharedByte(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// A number for each of a thread's columns: one for all where they are of one channel.
template <bool kAlike>
struct ColumnNumbers {
  static constexpr int kCount = kAlike ? 1 : kCols;
  float of[kCount];
  __device__ __forceinline__ float& operator[](int j) { return of[kAlike ? 0 : j]; }
  __device__ __forceinline__ float operator[](int j) const { return of[kAlike ? 0 : j]; }

  // Of sums of each column. (Each by itself, they lose less, and wait less for each other.)
  static __device__ __forceinline__ ColumnNumbers Sum(const float (&columns)[kCols]) {
    ColumnNumbers numbers;
    if constexpr (kAlike) {
      numbers[0] = TreeSum(columns);
    } else {
#pragma unroll
      for (int j = 0; j < kCols; ++j) numbers[j] = columns[j];
    }
    return numbers;
  }
};

// What a block has: lines, and of each a tile.
struct ResidentTile {
  uint32_t owner;         // of the blocks that share channels
  uint32_t sharer;        // this block, among those
  uint32_t lines, begin;  // its lines, and its first element
  uint64_t* copied;       // barriers of the groups

  __device__ __forceinline__ explicit ResidentTile(const ResidentPlan& plan) {
    uint32_t part;
    owner = plan.by_sharers.DivMod(blockIdx.x, &sharer);
    const uint32_t line = plan.by_parts.DivMod(sharer, &part) * plan.span;
    lines = min(plan.span, plan.lines - line);
    begin = line * plan.cols + (owner * plan.by_parts.divisor + part) * plan.tile;
    __shared__ uint64_t barriers[kCopyGroups];
    copied = barriers;
  }

  // Asks for all elements: by one thread, for whole lines or tiles at a time. A thread that copied its own would wait until
  // the last copy is under way, instead of looking at the first. To be followed by __syncthreads, before which no thread waits
  // for a group. So barriers are prepared one by one, and the first copy waits for one of them.
  template <typename T, int kArrays>
  __device__ __forceinline__ void Copy(const ResidentPlan& plan, uint4* shared) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0) return;
    const bool contiguous = plan.tile == plan.cols;
    const uint32_t bytes = plan.tile * sizeof(T), cells = SharedAddress(shared) + plan.cells;
    const L2Policy once = EvictFirst();
    uint32_t line = 0;
#pragma unroll 1
    for (int group = 0; group < kCopyGroups; ++group) {
      const uint32_t end = plan.line_groups.End(group, lines);
      const uint32_t at_once = contiguous ? end - line : 1, barrier = SharedAddress(&copied[group]);
      InitBarrier(&copied[group], 1);
      PublishBarriers();
      ExpectFromPeers(barrier, (end - line) * bytes * kArrays);
#pragma unroll 1
      for (; line < end; line += at_once) {
#pragma unroll
        for (int array = 0; array < kArrays; ++array) {
          CopyBulk(cells + (array * plan.span + line) * bytes,
                   static_cast<const T*>(plan.arrays[array]) + (begin + line * plan.cols), at_once * bytes, barrier,
                   once);
        }
      }
    }
    if (blockIdx.x == 0) plan.counter->Write({}, plan.tag);
#endif
  }
};

// This thread's cells of a tile, of `kArrays` arrays in shared memory, and what the block knows of its channels.
template <typename T, int kArrays, int kNumbers, bool kAlike>
class Resident {
  static constexpr int kVecs = Cells<T>::kVecs;

 public:
  const ResidentPlan& plan;
  uint32_t at, stride;  // the thread's first element, and from one of its lines to the next
  uint32_t turns;       // how many it has
  uint32_t sharer;      // this block, of those that share its channels
  uint32_t first_channel;
  uint32_t held;  // elements of a channel that the block has

  __device__ __forceinline__ Resident(const ResidentPlan& plan, const ResidentTile& tile, uint4* shared)
      : plan(plan), sharer(tile.sharer), copied_(tile.copied) {
    uint32_t column;
    const uint32_t row = plan.by_row_threads.DivMod(threadIdx.x, &column);
    first_channel = tile.owner * plan.slots;
    held = tile.lines * (kAlike ? plan.own_entries * kCols : 1);
    stride = plan.rows * plan.cols;
    at = tile.begin + row * plan.cols + column * kCols;
    turns = row < min(plan.rows, tile.lines) ? plan.by_rows.Div(tile.lines - row + plan.rows - 1) : 0;
    entries_ = reinterpret_cast<Sums*>(shared);
    numbers_ = reinterpret_cast<float*>(shared + plan.numbers / sizeof(uint4));
    slot_ = kAlike ? plan.by_own_entries.Div(column) : column * kCols;
    cells_ = SharedAddress(shared) + plan.cells;
    own_ = cells_ + (row * plan.tile + column * kCols) * sizeof(T);
    array_bytes_ = plan.span * plan.tile * static_cast<uint32_t>(sizeof(T));
    turn_bytes_ = plan.rows * plan.tile * static_cast<uint32_t>(sizeof(T));
  }

  // ---- Cells ----

  // Turns that have been copied when it returns: those of groups up to this one.
  __device__ __forceinline__ uint32_t WaitForGroup(int group) const {
    WaitForBarrier(SharedAddress(&copied_[group]), 0);
    return plan.turn_groups.End(group, turns);
  }

  // The block's first element of a slot, in array 0, when the first group is there; 0 if it is not finite.
  __device__ __forceinline__ float First(uint32_t slot) const {
    const T* const cells = reinterpret_cast<const T*>(reinterpret_cast<const char*>(entries_) + plan.cells);
    return Origin(ToAcc(cells[kAlike ? slot * plan.own_entries * kCols : slot]));
  }
  // Those of this thread's columns.
  __device__ __forceinline__ ColumnNumbers<kAlike> Firsts() const {
    ColumnNumbers<kAlike> numbers;
#pragma unroll
    for (int j = 0; j < numbers.kCount; ++j) numbers[j] = First(slot_ + j);
    return numbers;
  }

  // The cell of array `array` in line `turn`.
  __device__ __forceinline__ Cells<T> Load(int array, uint32_t turn) const {
    Cells<T> cells;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) cells.words[v] = LoadShared<uint4>(Address(array, turn) + v * kVecBytes);
    return cells;
  }
  __device__ __forceinline__ void Store(int array, uint32_t turn, const Cells<T>& cells) const {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) StoreShared(Address(array, turn) + v * kVecBytes, cells.words[v]);
  }

  // A byte for each cell, behind all cells.
  __device__ __forceinline__ uint32_t ByteAddress(uint32_t turn) const {
    return (cells_ + kArrays * array_bytes_ + threadIdx.x) + turn * blockDim.x;
  }

  // ---- Bits ----

  // Keeps a byte of bits where entries were, for WriteBits: of the turn-th of the turns that it writes together.
  __device__ __forceinline__ void KeepBits(uint32_t turn, uint32_t byte) const {
    StoreSharedByte(SharedAddress(entries_) + turn * (plan.rows * plan.by_row_threads.divisor()) + threadIdx.x, byte);
  }

  // Writes what all threads have kept of plan.kept_turns turns, from `first` on. Stores of single bytes take as many requests
  // to the L2 as a quarter of those for y.
  __device__ __forceinline__ void WriteBits(const ResidentTile& tile, uint32_t first, uint8_t* bits) const {
    const uint32_t first_line = first * plan.rows, lines = min(plan.kept_turns * plan.rows, tile.lines - first_line);
    const auto write = [&]<typename Word>(const Word* from) {
      constexpr uint32_t kElements = sizeof(Word) * kCols;
      Word* const to = reinterpret_cast<Word*>(bits) + (tile.begin + first_line * plan.cols) / kElements;
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < lines * plan.tile / kElements; i += blockDim.x) {
        uint32_t at;
        const uint32_t line = plan.by_bit_words.DivMod(i, &at);
        to[line * (plan.cols / kElements) + at] = from[i];
      }
    };
    if (plan.bit_word == sizeof(uint32_t)) {
      write(reinterpret_cast<const uint32_t*>(entries_));
    } else {
      write(reinterpret_cast<const uint8_t*>(entries_));
    }
  }

  // ---- Channels ----

  // Number i of a slot.
  __device__ __forceinline__ float& Number(int i, uint32_t slot) const { return numbers_[i * Padded() + slot]; }

  // Of this thread's columns.
  __device__ __forceinline__ ColumnNumbers<kAlike> Numbers(int i) const {
    ColumnNumbers<kAlike> numbers;
    const float* const from = &Number(i, slot_);
    if constexpr (kAlike) {
      numbers[0] = *from;
    } else {
      struct Halves {
        float4 of[2];
      };
      const auto* const halves = reinterpret_cast<const float4*>(from);
      numbers = std::bit_cast<ColumnNumbers<kAlike>>(Halves{halves[0], halves[1]});
    }
    return numbers;
  }

  // Calls write(slot, sums) by one thread for each slot, with the sums of all columns of the block.
  template <typename F>
  __device__ __forceinline__ void Merge(const ColumnNumbers<kAlike>& first, const ColumnNumbers<kAlike>& second,
                                        F write) const {
    const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, row_threads = plan.by_row_threads.divisor();
    if constexpr (kArrays == 1 && !kAlike) {
      MergePlanes(first, second, write);
    } else if constexpr (kAlike) {
      Sums sums = {first[0], second[0]};
      if (plan.slots == 1) {
        sums = LaneSums(sums, kWarp);
        if (lane == 0) entries_[warp] = sums;
        __syncthreads();
        if (warp == 0) {
          sums = LaneSums(lane < blockDim.x / kWarp ? entries_[lane] : Sums(), kWarp);
          if (lane == 0) write(0, sums);
        }
      } else {
        entries_[threadIdx.x] = sums;
        __syncthreads();
        MergeLanes(write, [&](uint32_t slot, uint32_t i) {
          Sums sums;
          for (; i < plan.rows * plan.own_entries; i += 1u << plan.lane_bits) {
            uint32_t column;
            const uint32_t row = plan.by_own_entries.DivMod(i, &column);
            sums += entries_[row * row_threads + slot * plan.own_entries + column];
          }
          return sums;
        });
      }
    } else {
      // Lanes that have the same columns halve them, as long as they have several. So those of a warp have each column once.
      Sums columns[kCols];
#pragma unroll
      for (int j = 0; j < kCols; ++j) columns[j] = {first[j], second[j]};
      uint32_t offset = kWarp / 2, own = 0, count = kCols;
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
      // Of each slot there is an entry for each warp, or each row, if a row has several warps.
      const uint32_t entry = row_threads < kWarp ? warp : threadIdx.x / row_threads;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        if (j == count) break;
        if (lane % 4 < row_threads) entries_[entry * (plan.slots + 1) + slot_ + own + j] = columns[j];
      }
      __syncthreads();
      MergeLanes(write, [&](uint32_t slot, uint32_t i) {
        Sums sums;
        for (; i < plan.own_entries; i += 1u << plan.lane_bits) sums += entries_[i * (plan.slots + 1) + slot];
        return sums;
      });
    }
    __syncthreads();
  }

  // The same forward, with fewer instructions, all of which the launch fetches for the first time: by way of shared memory, for
  // which backward has no room. (With half as much room it takes no less time than shuffles.) First the numbers of a plane are
  // added up to `fold` sums, of some lines' columns, then those to one of each column.
  template <typename F>
  __device__ __forceinline__ void MergePlanes(const ColumnNumbers<kAlike>& first, const ColumnNumbers<kAlike>& second,
                                              F write) const {
    const uint32_t fold = plan.by_fold.divisor(), numbers = kPlaneNumbers * blockDim.x;  // of a plane
    float4* const planes = reinterpret_cast<float4*>(entries_);
    float* const folded = reinterpret_cast<float*>(planes + kPlanes * blockDim.x);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      const ColumnNumbers<kAlike>& from = p < kPlanes / 2 ? first : second;
      const int j = p % (kPlanes / 2) * kPlaneNumbers;
      planes[p * blockDim.x + threadIdx.x] = {from[j], from[j + 1], from[j + 2], from[j + 3]};
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < kPlanes * fold; i += blockDim.x) {
      uint32_t at;
      const float* const plane = reinterpret_cast<const float*>(planes + plan.by_fold.DivMod(i, &at) * blockDim.x);
      float values[kPlaneNumbers * kPlanes];  // as many as are `fold` apart, or more
#pragma unroll
      for (int k = 0; k < kPlaneNumbers * kPlanes; ++k, at += fold) values[k] = at < numbers ? plane[at] : 0;
      folded[i] = TreeSum(values);
    }
    __syncthreads();
    MergeLanes(write, [&](uint32_t slot, uint32_t lane) {
      const uint32_t line = kPlaneNumbers * plan.by_row_threads.divisor();
      const uint32_t column = slot / kCols * kPlaneNumbers + slot % kPlaneNumbers;
      const float* const plane = folded + slot % kCols / kPlaneNumbers * fold + column;
      Sums sums;
#pragma unroll 4
      for (uint32_t at = lane * line; at < fold; at += line << plan.lane_bits) {
        sums += {plane[at], plane[at + kPlanes / 2 * fold]};
      }
      return sums;
    });
  }

  // ---- Posts ----

  __device__ __forceinline__ void Write(uint32_t slot, Sums sums) const {
    plan.posts[(first_channel + slot) * plan.Sharers() + sharer].Write(sums, plan.tag);
  }

  // Calls finish(slot, total) for each slot, by one thread each. total = combine(sums), by several lanes together, where
  // sums(term) adds up term(post, elements) over all posts of the channel.
  template <typename Combine, typename Finish>
  __device__ __forceinline__ void Exchange(Combine combine, Finish finish) const {
    ForGroups(plan.post_bits, plan.read_slots, [&](uint32_t slot, uint32_t lane, bool there) {
      if (plan.relayed) {
        slot = slot * plan.Sharers() + sharer;
        there = slot < plan.slots;
      }
      Post<Sums>* const posts = plan.posts + (first_channel + slot) * plan.Sharers();
      Sums values[kChannelPosts] = {}, nothing;
      bool all;
      do {
        all = threadIdx.x > 0 || plan.counter->TryRead(plan.tag, nothing);  // for Leave
        // Only what this block may wait for: posts that another one reads are gone when that has read them. All loads are
        // under way before the first one is looked at; those beyond the last post read it again.
        if (there) {
#pragma unroll
          for (uint32_t i = 0; i < kChannelPosts; ++i) {
            all &= posts[min(lane + (i << plan.post_bits), plan.Sharers() - 1)].TryRead(plan.tag, values[i]);
          }
        }
      } while (!AllThere(all));
      const auto sums = [&](auto term) {
        decltype(term(Sums(), 0.f)) own = {};
#pragma unroll
        for (uint32_t i = 0; i < kChannelPosts; ++i) {
          const uint32_t k = lane + (i << plan.post_bits);
          if (k < plan.Sharers()) own += term(values[i], k < plan.whole ? plan.elements : plan.last_elements);
        }
        return LaneSums(own, 1u << plan.post_bits);
      };
      const Sums total = combine(sums);
      if (!there) return;
      if (!plan.relayed) {
        if (lane == 0) entries_[slot] = total;
        return;
      }
      if (lane == 0) plan.totals[first_channel + slot].Write(total, plan.tag);
      for (uint32_t k = lane; k < plan.Sharers(); k += 1u << plan.post_bits)
        posts[k].Clear();  // nobody else reads them
    });
    __syncthreads();
    ForGroups(0, plan.slots, [&](uint32_t slot, uint32_t, bool there) {
      Sums total;
      if (plan.relayed) {
        total = plan.totals[first_channel + slot].Read(plan.tag, there);
      } else if (there) {
        total = entries_[slot];
      }
      if (there) finish(slot, total);
    });
    __syncthreads();
  }

  // A graph is launched again with the same tag, so the last block to have read all that it needs removes the posts
  // that several have read. By thread 0, after Exchange: how many blocks did before.
  __device__ __forceinline__ uint64_t Leave() const { return atomicAdd(&plan.counter->parts[0].x, 1ull); }
  // By all threads.
  __device__ __forceinline__ void ClearAfterLast(uint64_t left_before) const {
    if (!__syncthreads_or(threadIdx.x == 0 && left_before % kTagStep == gridDim.x - 1)) return;
#pragma unroll 1
    for (Post<Sums>* post = (plan.relayed ? plan.totals : plan.posts) + threadIdx.x; post <= plan.counter;
         post += blockDim.x) {
      post->Clear();
    }
  }

 private:
  // f(slot, lane, whether there is such a slot), by 2^bits lanes for each of `count` slots. Not by warps that have none: their
  // instructions would take turns with those of the others.
  template <typename F>
  __device__ __forceinline__ void ForGroups(uint32_t bits, uint32_t count, F f) const {
    const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (uint32_t first = (threadIdx.x - lane) >> bits; first < count; first += blockDim.x >> bits) {
      const uint32_t slot = first + (lane >> bits);
      f(slot, lane & ((1u << bits) - 1), slot < count);
    }
  }

  // Calls write(slot, sums) by one thread for each slot, with what 2^lane_bits lanes have of it: add(slot, lane).
  template <typename F, typename Add>
  __device__ __forceinline__ void MergeLanes(F write, Add add) const {
    ForGroups(plan.lane_bits, plan.slots, [&](uint32_t slot, uint32_t lane, bool there) {
      const Sums sums = LaneSums(there ? add(slot, lane) : Sums(), 1u << plan.lane_bits);
      if (there && lane == 0) write(slot, sums);
    });
  }

  __device__ __forceinline__ uint32_t Padded() const { return (plan.slots + 3) / 4 * 4; }
  __device__ __forceinline__ uint32_t Address(int array, uint32_t turn) const {
    return (own_ + array * array_bytes_) + turn * turn_bytes_;
  }

  float* numbers_;
  Sums* entries_;
  uint64_t* copied_;  // barriers of the groups
  uint32_t slot_;     // of the thread's first column
  // In shared memory: of the block, and of the thread; from one array, or turn, to the next.
  uint32_t cells_, own_, array_bytes_, turn_bytes_;
};

// f(std::integral_constant<int, n>, turn) for all turns from `turn` to `end`: n = kAtOnce of them together, or 1.
template <int kAtOnce, typename F>
__device__ __forceinline__ void ForTurns(uint32_t turn, uint32_t end, F f) {
#pragma unroll 1
  for (; turn + kAtOnce <= end; turn += kAtOnce) f(std::integral_constant<int, kAtOnce>(), turn);
#pragma unroll 1
  for (; turn < end; ++turn) f(std::integral_constant<int, 1>(), turn);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CUDA_BATCH_NORM_RESIDENT_CUH_
