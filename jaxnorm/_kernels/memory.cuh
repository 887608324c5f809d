// Instructions that only PTX has, for kernels written by hand: an addition to machine.cuh, whose text NVRTC compiles in
// front of this one. tests/kernels_on_cpu.h offers the same functions to a C++ compiler.
typedef long long i64;

// ---- values ----

// Keeps a value in a register from here on. Otherwise the compiler may compute it again for every use.
DEVICE float Kept(float value) {
  asm volatile("" : "+f"(value));
  return value;
}
DEVICE u32 Kept(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
DEVICE i64 Kept(i64 value) {
  asm volatile("" : "+l"(value));
  return value;
}

// Fills each half of a word with the half's sign bit.
DEVICE u32 SignsOfHalves(u32 word) {
  u32 signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(word));
  return signs;
}

// Fills each half with ones where the float in it is above 0, else with zeros.
DEVICE u32 PositiveHalvesFloat16(u32 word) {
  u32 mask;
  asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(word), "r"(0u));
  return mask;
}
DEVICE u32 PositiveHalvesBfloat16(u32 word) {
#if __CUDA_ARCH__ >= 900
  u32 mask;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(word), "r"(0u));
  return mask;
#else
  const u32 low = __uint_as_float(word << 16) > 0 ? 0xffffu : 0,
            high = __uint_as_float(word & 0xffff0000u) > 0 ? ~0xffffu : 0;
  return low | high;
#endif
}

// max(x, 0) of two floats, as 16-bit floats in a word; NaN stays NaN.
DEVICE u32 PackReluFloat16(float low, float high) {
  u32 word;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
DEVICE u32 PackReluBfloat16(float low, float high) {
  u32 word;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// ---- global memory ----

// How long the L2 cache keeps the data of a load.
enum L2Policy : u64 {};

DEVICE L2Policy EvictFirst() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return (L2Policy)policy;
}
DEVICE L2Policy EvictLast() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return (L2Policy)policy;
}

// Loads 16 bytes that the kernel does not write.
DEVICE uint4 LoadWords(const void* p, L2Policy policy) {
  uint4 words;
  asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(__cvta_generic_to_global(p)), "l"((u64)policy));
  return words;
}

// Stores 16 bytes. Not `*p = words`, which the compiler merges with scalar stores of another branch and so splits into
// narrower stores. Not __stwb, which compiles to a store with memory ordering.
DEVICE void StoreWords(void* p, uint4 words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

// Asks L2 for the line of an address.
DEVICE void PrefetchToL2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p))); }

// ---- shared memory, by its address: from a pointer, the compiler computes it again for every access ----

DEVICE u32 SharedAddress(const void* p) { return Kept((u32)__cvta_generic_to_shared(p)); }
DEVICE uint4 LoadShared(u32 address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}
DEVICE void StoreShared(u32 address, uint4 words) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}
DEVICE u32 LoadSharedByte(u32 address) {
  u32 value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
DEVICE void StoreSharedByte(u32 address, u32 value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

#if __CUDA_ARCH__ >= 900
// bulk_load of data that is read once.
DEVICE void BulkLoadOnce(char* to, const char* from, u32 bytes, u64* barrier, L2Policy once) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier)), "l"((u64)once)
      : "memory");
}
#endif

// ---- launches that follow each other ----

// wait_for_launch_before(). Returns `index`, from which addresses must be computed: otherwise the compiler might move loads
// of data that it takes for constant to before the wait. Before the wait, a kernel may prefetch lines to L2. It may load
// operands of the call if the launch before is the call's first one and not early.
template <class Index>
DEVICE Index WaitForLaunchBefore(Index index) {
  wait_for_launch_before();
  return Kept(index);
}
