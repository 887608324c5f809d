// The functions of jaxnorm/_kernels/memory.cuh for a C++ compiler, beside those of cuda_on_cpu.h.
#ifndef KERNELS_ON_CPU_H
#define KERNELS_ON_CPU_H
#include "cuda_on_cpu.h"
#define __noinline__ __attribute__((noinline))

typedef unsigned char u8;
typedef unsigned short u16;
typedef long long i64;

template <class V>
static V Kept(V value) {
  return value;
}
DEVICE u32 SignsOfHalves(u32 word) { return (word & 0x8000u ? 0xffffu : 0) | (word & 0x80000000u ? ~0xffffu : 0); }
DEVICE u32 PositiveHalvesFloat16(u32 word) {
  return (low_float16(word) > 0 ? 0xffffu : 0) | (high_float16(word) > 0 ? ~0xffffu : 0);
}
DEVICE u32 PositiveHalvesBfloat16(u32 word) {
  return (__uint_as_float(word << 16) > 0 ? 0xffffu : 0) | (__uint_as_float(word & 0xffff0000u) > 0 ? ~0xffffu : 0);
}
DEVICE u32 PackReluFloat16(float low, float high) { return max_nan_float16(pack_float16(low, high), 0); }
DEVICE u32 PackReluBfloat16(float low, float high) { return max_nan_bfloat16(pack_bfloat16(low, high), 0); }

// ---- global memory ----

enum L2Policy : u64 {};
DEVICE L2Policy EvictFirst() { return {}; }
DEVICE L2Policy EvictLast() { return {}; }
DEVICE uint4 LoadWords(const void* p, L2Policy) { return __ldg((const uint4*)p); }
DEVICE void StoreWords(void* p, uint4 words) {
  emulator::check_read(p, 16, 16, "StoreWords");
  *(uint4*)p = words;
}
DEVICE void PrefetchToL2(const void*) {}  // also of lines that are not there
DEVICE u64 atomicAdd(u64* p, u64 value) {
  const u64 before = *p;
  *p += value;
  return before;
}

// ---- shared memory ----

DEVICE u32 SharedAddress(const void* p) { return (u32)((const char*)p - dynamic_shared()); }
template <class V>
static V& shared_at(u32 address) {
  if (address % sizeof(V) || address + sizeof(V) > emulator::launch->shared_bytes) {
    emulator::fail("%d bytes at shared address %u", (int)sizeof(V), address);
  }
  return *(V*)(dynamic_shared() + address);
}
DEVICE uint4 LoadShared(u32 address) { return shared_at<uint4>(address); }
DEVICE void StoreShared(u32 address, uint4 words) { shared_at<uint4>(address) = words; }
DEVICE u32 LoadSharedByte(u32 address) { return shared_at<u8>(address); }
DEVICE void StoreSharedByte(u32 address, u32 value) { shared_at<u8>(address) = (u8)value; }
#if __CUDA_ARCH__ >= 900
DEVICE void BulkLoadOnce(char* to, const char* from, u32 bytes, u64* barrier, L2Policy) {
  bulk_load(to, from, bytes, barrier);
}
#endif

// ---- threads and launches ----

DEVICE int __syncthreads_or(int predicate) {
  static int any[16];  // of the blocks of a cluster
  const u32 rank = emulator::current->block->rank;
  if (threadIdx.x == 0) any[rank] = 0;
  __syncthreads();
  any[rank] |= predicate != 0;
  __syncthreads();
  const int result = any[rank];
  __syncthreads();
  return result;
}
template <class Index>
static Index WaitForLaunchBefore(Index index) {
  return index;
}
DEVICE float rsqrt(float x) { return rsqrtf(x); }
#endif
