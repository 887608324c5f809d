// Values that blocks of a launch leave in global memory for each other. All blocks of the launch must be running.
//
// A post is 16 bytes, written and read at once; 8 of them are the launch's tag. What a reader finds with that tag is
// therefore the value of this launch, whatever else the memory held, and no order of stores matters. A CUDA graph
// repeats a launch with the same tag: whoever reads a post last clears it. The lowest 16 bits of a tag are for
// counting.
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

// Of 2^n lanes: Sums, or a number.
template <class P>
DEVICE P LaneSums(P sums, u32 lanes) {
#pragma unroll
  for (u32 offset = 1; offset < kWarp; offset *= 2) {
    if (offset >= lanes) break;
    sums += ShuffleXor(sums, offset);
  }
  return sums;
}

// Whether no lane of a warp misses a post. All wait until all are there: where lanes wait by themselves, a warp that
// has found its posts at different times goes on as several, and the exchange takes 0.3 us more of about 2.
DEVICE bool AllThere(bool there) { return __all_sync(kAllLanes, there); }

struct alignas(16) Post {
  u64 tag, value;

  __device__ __forceinline__ void Write(Sums sums, u64 launch) { WriteAtOnce(this, launch, BitsAs<u64>(sums)); }
  __device__ __forceinline__ void Clear() { tag = 0; }

  // Whether it is there yet.
  __device__ __forceinline__ bool TryRead(u64 launch, Sums& sums) const {
    u64 found, read;
    ReadAtOnce(this, found, read);
    sums = BitsAs<Sums>(read);
    return found / kTagStep == launch / kTagStep;
  }
  // Without a branch: if it is not `wanted`, `sums` stays what it is, and is there.
  __device__ __forceinline__ bool TryRead(u64 launch, Sums& sums, bool wanted) const {
    u64 found = launch, read = BitsAs<u64>(sums);
    ReadAtOnce(this, found, read, wanted);
    sums = BitsAs<Sums>(read);
    return found / kTagStep == launch / kTagStep;
  }
  // By all lanes of a warp, of which those get a value that want one.
  __device__ __forceinline__ Sums Read(u64 launch, bool wanted) const {
    Sums sums;
    while (!AllThere(!wanted || TryRead(launch, sums))) continue;
    return sums;
  }
};
