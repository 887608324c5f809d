// Posts (exchange.cuh) of two sums.
constexpr u64 kTagStep = 1 << 16;  // the lowest 16 bits of a tag are for counting

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

  __device__ __forceinline__ void Write(Sums sums, u64 launch) { post_write((char*)this, BitsAs<u64>(sums), launch); }
  __device__ __forceinline__ void Clear() { tag = 0; }

  // Whether the post has arrived.
  __device__ __forceinline__ bool TryRead(u64 launch, Sums& sums) const {
    u64 read = 0;
    const u64 found = post_load((const char*)this, true, read, launch);
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
