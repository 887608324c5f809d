// How threads hand values to each other. NVRTC compiles this file behind machine.cuh. tests/cuda_on_cpu.h offers
// the same functions to a C++ compiler.
//
//            put                     begin            end
//   lanes    __shfl_xor_sync         (is all three)
//   block    store to shared memory  barrier_arrive   barrier_wait, then load      or __syncthreads for begin and end
//   cluster  cluster_send            barrier_expect   barrier_wait, then load
//   grid     post_write                               post_read, until the value has arrived
//
// Two rules hold for every exchange, and no other order of memory accesses is relied on.
//
// 1. A value is used only behind the event that brings it.
//    block    An arrival releases, and a wait acquires: stores before an arrival are visible behind the wait. A warp's
//             first lane stores and arrives for the warp, behind the shuffles in which the lanes' values came to it.
//    cluster  The barrier counts the bytes that are sent, after they have been written. The sender's other stores are
//             not ordered, and nobody reads them.
//    grid     A post is 16 bytes, written at once and read at once: a value and a tag, a number that memory has
//             nowhere else. What is read with the tag is a value of this launch, whatever the memory held before.
// 2. A place is written again only after all readers of its value have read it.
//    block, cluster  There are several sets of places, used in turn. A thread that comes to a set again has ended a later
//             exchange, in which every warp took part after its loads from the set had returned values.
//    grid     A place is written once in a launch. The next launch may get the same memory and have the same tag: the last
//             block that reads a post clears it. Blocks count themselves, each after its loads have returned values.

#if __CUDA_ARCH__ >= 900
// ---- barriers in shared memory (sm_90 and later) ----

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
#endif

// ---- posts: all blocks of the grid run at once ----

// The tag of row programs: a random number, whose low 16 bits are for counting.
#define POST_TAG 0x9d3b5c71e86f0000ull
DEVICE void post_write(char* post, u64 value, u64 tag = POST_TAG) {
  asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.gpu.global.b128 [%0], v; }" ::"l"(
                   __cvta_generic_to_global(post)),
               "l"(tag), "l"(value)
               : "memory");
}
// Loads a post: `value`, and its tag, which is returned. A post that is not wanted is not read, and `tag` is returned.
// Without a branch, which would wait for an earlier post.
DEVICE u64 post_load(const char* post, bool wanted, u64& value, u64 tag) {
  asm volatile(
      "{ .reg .b128 v; .reg .pred p; setp.ne.u32 p, %3, 0; mov.b128 v, {%0, %1};\n"
      "@p ld.relaxed.gpu.global.b128 v, [%2];\nmov.b128 {%0, %1}, v; }"
      : "+l"(tag), "+l"(value)
      : "l"(__cvta_generic_to_global(post)), "r"((u32)wanted)
      : "memory");
  return tag;
}
// Whether the value has arrived, or is not wanted.
DEVICE bool post_read(const char* post, bool wanted, u64& value) {
  return post_load(post, wanted, value, POST_TAG) >> 16 == POST_TAG >> 16;
}
// Counts a block that has read its posts, and returns how many blocks were counted before.
DEVICE int post_count(char* post) { return (int)(atomicAdd((u64*)post, 1ull) & 0xffffu); }
DEVICE void post_clear(char* post) { *(volatile u64*)post = 0; }
