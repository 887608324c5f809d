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
// a + b as a * 1 + b. The compiler does not know that blocks have a depth of 1, so the FMA pipe adds, not the ALU pipe.
DEVICE u32 add_by_fma_pipe(u32 a, u32 b) {
  u32 y;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(blockDim.z), "r"(b));
  return y;
}
// The compiler must take this word for a new one: what was computed from it earlier is not kept but computed again.
DEVICE void forget(u32& word) { asm volatile("" : "+r"(word)); }
// forget() for everything in memory.
DEVICE void forget_memory() { asm volatile("" ::: "memory"); }

// ---- shared memory, and bulk copies into it that a barrier of exchange.cuh counts (sm_90 and later) ----

DEVICE char* dynamic_shared() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}
#if __CUDA_ARCH__ >= 900
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Addresses and the number of bytes are multiples of 16.
DEVICE void bulk_load(char* to, const char* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
#endif

// ---- launches that follow each other (sm_90 and later) ----
//
// When the last blocks of the launch before end, blocks of an early launch have begun, have loaded their first
// instructions and have asked L2 for the data that they will read. This saves one to three microseconds of each launch.

// Lets the next launch begin, if it is an early one, as soon as all blocks have called this function or have ended. If
// much work is left after the call, waiting blocks take room that working blocks need: 1% slower for large arrays.
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until all writes of the launches before are visible. All threads of an early launch call this function: otherwise
// the launch might end before the launch before has ended.
DEVICE void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
