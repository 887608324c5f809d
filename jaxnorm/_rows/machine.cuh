// Instructions that only PTX has, for row programs. NVRTC compiles this text in front of each kernel, without any other
// header. tests/cuda_on_cpu.h offers the same functions to a C++ compiler.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;
#define DEVICE static __device__ __forceinline__

// ---- conversions: two 16-bit or 8-bit floats in the low bits of a word, the first one lowest ----

DEVICE u32 pack_bfloat16(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
DEVICE u32 pack_float16(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
DEVICE float low_float16(u32 word) {
  float value;
  asm("{ .reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a; }" : "=f"(value) : "r"(word));
  return value;
}
DEVICE float high_float16(u32 word) {
  float value;
  asm("{ .reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b; }" : "=f"(value) : "r"(word));
  return value;
}

#if __CUDA_ARCH__ >= 890
// Numbers that are too large become the largest finite number.
DEVICE u32 saturate_float8_e4m3fn(float low, float high) {
  u16 bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
  return bytes;
}
DEVICE u32 saturate_float8_e5m2(float low, float high) {
  u16 bytes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
  return bytes;
}
#endif

// ---- arithmetic ----

DEVICE float exp2_fast(float x) {  // 2 ulp; subnormal results are 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal_fast(float x) {  // 1 ulp; subnormal operands and results are 0
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
DEVICE float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
DEVICE u32 max_nan_bfloat16(u32 a, u32 b) {  // of both halves
  u32 y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
DEVICE u32 max_nan_float16(u32 a, u32 b) {
  u32 y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
// The compiler must take this word for a new one: what was computed from it earlier is not kept but computed again.
DEVICE void forget(u32& word) { asm volatile("" : "+r"(word)); }
// forget() for everything in memory.
DEVICE void forget_memory() { asm volatile("" ::: "memory"); }

// ---- shared memory, and bulk copies into it that a barrier counts (sm_90 and later) ----

DEVICE char* dynamic_shared() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}
#if __CUDA_ARCH__ >= 900
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// To be called after the last barrier_init, before any thread uses a barrier.
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
DEVICE void barrier_wait(u64* barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!done);
}
DEVICE void barrier_arrive(u64* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}
// Arrives at a barrier. Returns whether this thread was the last to arrive: data that all threads read before they
// arrived may then be overwritten.
DEVICE bool arrives_last(u64* barrier) {
  u64 state;
  u32 pending, done = 0;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(shared_address(barrier)) : "memory");
  asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
  if (pending == 1) {
    asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "l"(state)
                 : "memory");
  }
  return done;
}
// Addresses and the number of bytes are multiples of 16.
DEVICE void bulk_load(char* to, const char* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// ---- clusters (sm_90 and later) ----

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Writes `value` to `place` in the shared memory of block `rank` of the cluster. That block's `barrier` counts 4 bytes.
// The store does not wait for earlier stores, as a release would.
DEVICE void cluster_send(u32* place, int rank, u32 value, u64* barrier) {
  u32 to, counting;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(place)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counting) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(value),
               "r"(counting)
               : "memory");
}

// ---- posts: 16 bytes of global memory, through which blocks exchange a value; all blocks of the grid run at once ----

// A random number whose low 16 bits are for counting.
#define POST_TAG 0x9d3b5c71e86f0000ull
DEVICE void post_write(char* post, u64 value) {
  asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.gpu.global.b128 [%0], v; }" ::"l"(
                   __cvta_generic_to_global(post)),
               "l"(POST_TAG), "l"(value)
               : "memory");
}
// Whether the value has arrived. A post that is not wanted is not read, and counts as arrived. Without a branch, which
// would wait for an earlier post.
DEVICE bool post_read(const char* post, bool wanted, u64& value) {
  u64 tag = POST_TAG;
  asm volatile(
      "{ .reg .b128 v; .reg .pred p; setp.ne.u32 p, %3, 0; mov.b128 v, {%0, %1};\n"
      "@p ld.relaxed.gpu.global.b128 v, [%2];\nmov.b128 {%0, %1}, v; }"
      : "+l"(tag), "+l"(value)
      : "l"(__cvta_generic_to_global(post)), "r"((u32)wanted)
      : "memory");
  return tag >> 16 == POST_TAG >> 16;
}
// Counts a block that has read its posts, and returns how many blocks were counted before.
DEVICE int post_count(char* post) { return (int)(atomicAdd((u64*)post, 1ull) & 0xffffu); }
DEVICE void post_clear(char* post) { *(volatile u64*)post = 0; }
#endif
