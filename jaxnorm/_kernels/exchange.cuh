// Values that blocks of a launch leave in global memory for each other. All blocks of the launch must be running.
//
// A post is 16 bytes, written and read at once; 8 of them are the launch's tag. A value that is found with this tag is
// therefore a value of this launch, whatever else the memory held, and no order of stores matters. A CUDA graph repeats
// a launch with the same tag: the last reader of a post clears it. The lowest 16 bits of a tag are for counting.
constexpr u64 kTagStep = 1 << 16;

// Two sums.
struct Sums {
  float first = 0, second = 0;

  __device__ __forceinline__ Sums& operator+=(const Sums& other) {
    first += other.first;
    second += other.second;
    return *this;
  }
};

// The total over each group of `lanes` lanes, a power of two. P is Sums, or a number.
template <class P>
DEVICE P LaneSums(P sums, u32 lanes) {
#pragma unroll
  for (u32 offset = 1; offset < kWarp; offset *= 2) {
    if (offset >= lanes) break;
    sums += ShuffleXor(sums, offset);
  }
  return sums;
}

// Whether all lanes of a warp have their posts. All lanes wait for all posts: if each lane waited by itself, a warp
// whose posts arrive at different times would go on diverged, and the exchange would take 0.3 us more of about 2.
DEVICE bool AllThere(bool there) { return __all_sync(kAllLanes, there); }

struct alignas(16) Post {
  u64 tag, value;

  __device__ __forceinline__ void Write(Sums sums, u64 launch) { WriteAtOnce(this, launch, BitsAs<u64>(sums)); }
  __device__ __forceinline__ void Clear() { tag = 0; }

  // Whether the post has arrived.
  __device__ __forceinline__ bool TryRead(u64 launch, Sums& sums) const {
    u64 found, read;
    ReadAtOnce(this, found, read);
    sums = BitsAs<Sums>(read);
    return found / kTagStep == launch / kTagStep;
  }
  // Without a branch. A post that is not `wanted` counts as arrived, and `sums` stays unchanged.
  __device__ __forceinline__ bool TryRead(u64 launch, Sums& sums, bool wanted) const {
    u64 found = launch, read = BitsAs<u64>(sums);
    ReadAtOnce(this, found, read, wanted);
    sums = BitsAs<Sums>(read);
    return found / kTagStep == launch / kTagStep;
  }
  // Called by all lanes of a warp. Lanes that do not want a post get zeros.
  __device__ __forceinline__ Sums Read(u64 launch, bool wanted) const {
    Sums sums;
    while (!AllThere(!wanted || TryRead(launch, sums))) continue;
    return sums;
  }
};
