// batch_norm in one launch, of arrays that the device can hold on chip. Shared by its two kernels, forward
// (batch_norm_train.cuh) and backward (batch_norm_bwd.cuh).
//
// A block has the same elements from beginning to end. It copies them to shared memory, reduces them as they arrive,
// and posts its sums of each channel for the blocks that share the channel. When it has read the posts of these blocks,
// it goes over its elements again. So each element is read from global memory once, and there is no launch to wait for.
//
// Such a launch is short, and a large part of its time is spent on fetching instructions for the first time. So there
// is code for two layouts only, all numbers fit 32 bits, and work that is done twice uses the same code.
//
// RESIDENT_ARRAYS: the number of arrays in shared memory. RESIDENT_ALIKE: all columns of a thread are of one channel;
// otherwise they are of neighbouring channels.

constexpr bool kAlike = RESIDENT_ALIKE;
constexpr int kResidentThreads = 512;
constexpr int kHeaderBytes = 128;  // of shared memory, for barriers
constexpr int kCopyGroups = 7;     // the first group is reduced while the other groups are on their way
constexpr int kChannelPosts = 5;   // posts that a lane reads at once: with 9, channels first took 2 % longer

// Where the groups of copies end, in lines or in turns. (No block has shared memory for 2^16 of these.)
struct CopyGroups {
  u16 first, each;  // lines or turns of the first group, and of each other group

  // The end of a group, of `count` lines or turns in all.
  __device__ __forceinline__ u32 End(u32 group, u32 count) const { return min(u32{first} + group * each, count); }
};

// Division of numbers of blocks. It has one number less than FastDiv, so that all members that are read before the
// copies lie in one line of the constant cache. Exact, as there are fewer than 2^9 blocks.
struct BlockDiv {
  u32 divisor, multiplier;
  __device__ __forceinline__ u32 DivMod(u32 n, u32* remainder) const {
    const u32 quotient = n * multiplier >> 18;
    *remainder = n - quotient * divisor;
    return quotient;
  }
};

// An array is `lines` lines of cols = channels * inner elements. A block has `span` lines (the last blocks may have
// fewer), and a tile of each line: whole channels, or a part of one. Blocks that share channels are neighbours.
struct ResidentPlan {
  // Read before the copies.
  u32 cols, lines;
  u32 span;             // lines of a block
  u32 tile;             // columns of a block
  BlockDiv by_sharers;  // by the blocks that share a channel: sharer i has lines i / parts * span and following
  BlockDiv by_parts;    // by the tiles of a channel, or by 1
  CopyGroups line_groups;
  u32 cells;              // where elements begin in shared memory, behind the numbers of each slot
  const void* arrays[2];  // arrays to copy
  // Read later.
  u32 numbers;  // where the numbers of each slot begin, behind the entries
  u32 slots;    // channels of a tile
  u32 rows;     // lines that a block works on at once
  CopyGroups turn_groups;
  FastDiv by_row_threads, by_rows, by_own_entries;
  FastDiv by_fold;       // by the sums that MergePlanes first adds up the numbers of a plane to
  u32 kept_turns;        // turns whose bits fit where entries were (KeepBits)
  u32 bit_word;          // bytes that WriteBits writes at once: 4, or 1
  FastDiv by_bit_words;  // by the number of such words that lie one after the other
  // Entries of a slot: in each row, one for each thread that has columns of the slot; if columns are not alike, in all
  // rows together (backward).
  u32 own_entries;
  u32 lane_bits;                  // 2^lane_bits lanes of a warp merge a channel's entries
  u32 post_bits;                  // 2^post_bits lanes of a warp read a channel's posts
  bool relayed;                   // each block reads the posts of some channels only, and posts their totals
  u32 read_slots;                 // the most channels whose posts a block reads, if relayed; else all
  u32 whole;                      // sharers that have `span` lines
  float elements, last_elements;  // elements of a channel in a sharer with `span` lines; in another sharer
  float inverse_count;            // 1 / the number of a channel's elements
  Post* posts;
  Post* totals;   // of each channel, if relayed
  Post* counter;  // counts blocks that have read all posts that they need
  u64 tag;

  __device__ __forceinline__ u32 Sharers() const { return by_sharers.divisor; }
};

// A number for each of a thread's columns: one for all where they are of one channel.
struct ColumnNumbers {
  static constexpr int kCount = kAlike ? 1 : kCols;
  float values[kCount];
  __device__ __forceinline__ float& operator[](int j) { return values[kAlike ? 0 : j]; }
  __device__ __forceinline__ float operator[](int j) const { return values[kAlike ? 0 : j]; }

  // The sums of the columns. (Columns are summed separately: fewer bits are lost, and additions wait less for each
  // other.)
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

// The part of a block: lines, and a tile of each line.
struct ResidentTile {
  u32 owner;         // number of the group of blocks that share channels
  u32 sharer;        // number of this block in its group
  u32 lines, begin;  // its lines, and its first element
  u64* copied;       // barriers of the groups of copies

  __device__ __forceinline__ ResidentTile(const ResidentPlan& plan, uint4* shared) : copied((u64*)shared) {
    u32 part;
    owner = plan.by_sharers.DivMod(blockIdx.x, &sharer);
    const u32 line = plan.by_parts.DivMod(sharer, &part) * plan.span;
    lines = min(plan.span, plan.lines - line);
    begin = line * plan.cols + (owner * plan.by_parts.divisor + part) * plan.tile;
  }

  // Starts the copies of all elements, by one thread, for whole lines or tiles at a time. A thread that copied its own
  // elements would have to start its last copy before it could use the first. __syncthreads must follow before any
  // thread waits for a group. Barriers are prepared one by one, so that the first copy waits for one of them only.
  __device__ __forceinline__ void Copy(const ResidentPlan& plan, uint4* shared) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0) return;
    const bool contiguous = plan.tile == plan.cols;
    const u32 bytes = plan.tile * sizeof(T);
    char* const cells = (char*)shared + plan.cells;
    const L2Policy once = EvictFirst();
    u32 line = 0;
#pragma unroll 1
    for (int group = 0; group < kCopyGroups; ++group) {
      const u32 end = plan.line_groups.End(group, lines);
      const u32 at_once = contiguous ? end - line : 1;
      barrier_init(&copied[group], 1);
      barriers_ready();
      barrier_expect(&copied[group], (end - line) * bytes * RESIDENT_ARRAYS);
#pragma unroll 1
      for (; line < end; line += at_once) {
#pragma unroll
        for (int array = 0; array < RESIDENT_ARRAYS; ++array) {
          const T* const from = static_cast<const T*>(plan.arrays[array]) + (begin + line * plan.cols);
          BulkLoadOnce(cells + (array * plan.span + line) * bytes, (const char*)from, at_once * bytes, &copied[group],
                       once);
        }
      }
    }
    if (blockIdx.x == 0) plan.counter->Write({}, plan.tag);
#endif
  }
};

// This thread's cells of the tile in shared memory, and the block's numbers of its channels.
struct Resident {
  const ResidentPlan& plan;
  u32 at, stride;  // the thread's first element; distance from one of its lines to the next
  u32 turns;       // number of the thread's lines
  u32 sharer;      // number of this block among the blocks that share its channels
  u32 first_channel;
  u32 held;              // elements of a channel that the block has
  const T* first_cells;  // the elements of array 0
  float* numbers;
  Sums* entries;
  u64* copied;   // barriers of the groups of copies
  u32 own_slot;  // slot of the thread's first column

  __device__ __forceinline__ Resident(const ResidentPlan& plan, const ResidentTile& tile, uint4* shared)
      : plan(plan), sharer(tile.sharer), copied(tile.copied) {
    u32 column;
    const u32 row = plan.by_row_threads.DivMod(threadIdx.x, &column);
    first_channel = tile.owner * plan.slots;
    held = tile.lines * (kAlike ? plan.own_entries * kCols : 1);
    stride = plan.rows * plan.cols;
    at = tile.begin + row * plan.cols + column * kCols;
    turns = row < min(plan.rows, tile.lines) ? plan.by_rows.Div(tile.lines - row + plan.rows - 1) : 0;
    first_cells = reinterpret_cast<const T*>((const char*)shared + plan.cells);
    entries = reinterpret_cast<Sums*>(shared + kHeaderBytes / sizeof(uint4));
    numbers = reinterpret_cast<float*>(shared + plan.numbers / sizeof(uint4));
    own_slot = kAlike ? plan.by_own_entries.Div(column) : column * kCols;
    cells_ = SharedAddress(shared) + plan.cells;
    own_ = cells_ + (row * plan.tile + column * kCols) * sizeof(T);
    array_bytes_ = plan.span * plan.tile * static_cast<u32>(sizeof(T));
    turn_bytes_ = plan.rows * plan.tile * static_cast<u32>(sizeof(T));
  }

  // ---- Cells ----

  // Waits for a group, and returns the end of the turns that have then been copied.
  __device__ __forceinline__ u32 WaitForGroup(int group) const {
    barrier_wait(&copied[group], 0);
    __syncwarp();
    return plan.turn_groups.End(group, turns);
  }

  // The block's first element of a slot in array 0, or 0 if it is not finite. The first group must have been copied.
  __device__ __forceinline__ float First(u32 slot) const {
    return Origin(ToAcc(first_cells[kAlike ? slot * plan.own_entries * kCols : slot]));
  }
  // First of the slot of each of this thread's columns.
  __device__ __forceinline__ ColumnNumbers Firsts() const {
    ColumnNumbers numbers;
#pragma unroll
    for (int j = 0; j < numbers.kCount; ++j) numbers[j] = First(own_slot + j);
    return numbers;
  }

  // The cell of array `array` in line `turn`.
  __device__ __forceinline__ Cells Load(int array, u32 turn) const {
    Cells cells;
#pragma unroll
    for (int v = 0; v < Cells::kVecs; ++v) cells.words[v] = LoadShared(Address(array, turn) + v * kVecBytes);
    return cells;
  }
  __device__ __forceinline__ void Store(int array, u32 turn, const Cells& cells) const {
#pragma unroll
    for (int v = 0; v < Cells::kVecs; ++v) StoreShared(Address(array, turn) + v * kVecBytes, cells.words[v]);
  }

  // A byte for each cell, behind all cells.
  __device__ __forceinline__ u32 ByteAddress(u32 turn) const {
    return (cells_ + RESIDENT_ARRAYS * array_bytes_ + threadIdx.x) + turn * blockDim.x;
  }

  // ---- Channels ----

  // Number i of a slot.
  __device__ __forceinline__ float& Number(int i, u32 slot) const {
    return numbers[i * ((plan.slots + 3) / 4 * 4) + slot];
  }

  // Number i of the slot of each of this thread's columns.
  __device__ __forceinline__ ColumnNumbers Numbers(int i) const {
    ColumnNumbers of_columns;
    const float* const from = &Number(i, own_slot);
    if constexpr (kAlike) {
      of_columns[0] = *from;
    } else {
      struct Halves {
        float4 parts[2];
      };
      const auto* const halves = reinterpret_cast<const float4*>(from);
      of_columns = BitsAs<ColumnNumbers>(Halves{halves[0], halves[1]});
    }
    return of_columns;
  }

  __device__ __forceinline__ void Write(u32 slot, Sums sums) const {
    plan.posts[(first_channel + slot) * plan.Sharers() + sharer].Write(sums, plan.tag);
  }

 private:
  __device__ __forceinline__ u32 Address(int array, u32 turn) const {
    return (own_ + array * array_bytes_) + turn * turn_bytes_;
  }

  // Addresses in shared memory: the cells of the block, and of the thread. Distances: from one array, and from one
  // turn, to the next.
  u32 cells_, own_, array_bytes_, turn_bytes_;
};

// ---- Bits ----

// Keeps a byte of bits for WriteBits, where entries were. `turn` counts the turns that WriteBits writes together.
DEVICE void KeepBits(const Resident& block, u32 turn, u32 byte) {
  const ResidentPlan& plan = block.plan;
  StoreSharedByte(SharedAddress(block.entries) + turn * (plan.rows * plan.by_row_threads.divisor) + threadIdx.x, byte);
}

// Writes the bits that all threads have kept of plan.kept_turns turns, from `first` on. Stores of single bytes would
// take a quarter as many requests to L2 as the stores of y.
DEVICE void WriteBits(const Resident& block, const ResidentTile& tile, u32 first, u8* bits) {
  const ResidentPlan& plan = block.plan;
  const u32 first_line = first * plan.rows, lines = min(plan.kept_turns * plan.rows, tile.lines - first_line);
  const auto write = [&](auto* from) {
    constexpr u32 kElements = sizeof(*from) * kCols;
    auto* const to = reinterpret_cast<decltype(from)>(bits) + (tile.begin + first_line * plan.cols) / kElements;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < lines * plan.tile / kElements; i += blockDim.x) {
      u32 at;
      const u32 line = plan.by_bit_words.DivMod(i, &at);
      to[line * (plan.cols / kElements) + at] = from[i];
    }
  };
  if (plan.bit_word == sizeof(u32)) {
    write(reinterpret_cast<u32*>(block.entries));
  } else {
    write(reinterpret_cast<u8*>(block.entries));
  }
}

// ---- Turns ----

// Calls f(Number<n>, turn) for all turns in [turn, end): n = kAtOnce turns together, then n = 1.
template <int kAtOnce, class F>
__device__ __forceinline__ void ForTurns(u32 turn, u32 end, F f) {
#pragma unroll 1
  for (; turn + kAtOnce <= end; turn += kAtOnce) f(Number<kAtOnce>(), turn);
#pragma unroll 1
  for (; turn < end; ++turn) f(Number<1>(), turn);
}
