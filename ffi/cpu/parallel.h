// ParallelFor over XLA's own thread pool, so that jaxnorm neither adds threads nor competes with XLA's threads.
#ifndef JAXNORM_CPU_PARALLEL_H_
#define JAXNORM_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "registry.h"

namespace jaxnorm {

// Elements in one unit of work: about 5 us. Waking a thread costs about as much, so smaller arrays stay on the caller.
inline constexpr int64_t kGrainElements = 32 * 1024;
// The caller polls this long for the end of the last pieces on other threads before it sleeps. In a virtual machine,
// waking up takes 40 us.
inline constexpr std::chrono::microseconds kWatch(60);

// The most neighbouring rows in one piece of work where rows lie side by side: a line of the piece is a page of memory.
// Lines of 256 bytes took twice the time: each line costs a look-up of its page, and threads that write to one page for
// the first time wait for one another.
template <typename A>
inline constexpr int64_t kMaxWidth = 4096 / sizeof(A);

// The width of the blocks into which `inner` neighbouring rows are cut: equal, and rounded up to whole vectors.
template <typename A>
int64_t BlockWidth(int64_t inner) {
  const int64_t blocks = (inner + kMaxWidth<A> - 1) / kMaxWidth<A>;
  return std::min(inner, ((inner + blocks - 1) / blocks + 15) / 16 * 16);
}

// Calls body(begin, end) for consecutive pieces of [0, n). An item is work on `elements` elements. The pieces, and so
// the results, depend on the arguments alone, never on the number of threads.
//
// Threads take pieces from a shared counter. The caller takes part, so ParallelFor finishes even when the pool has no
// free thread (the handler itself may run on its last one) or runs tasks inline.
template <typename Body>
void ParallelFor(ffi::ThreadPool& pool, int64_t n, int64_t elements, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements));
  const int64_t pieces = (n + grain - 1) / grain;
  if (pieces <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  // All tasks share the state, since a task that starts after all the work is done still reads `next`. `body` lives
  // only until ParallelFor returns, but a task calls it only for a piece that is not done yet.
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int32_t> pending;  // 32 bits: the size that a futex waits on
  };
  auto state = std::make_shared<State>();
  state->pending = static_cast<int32_t>(pieces);
  auto run = [state, n, grain, pieces, &body] {
    for (int64_t piece; (piece = state->next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      body(piece * grain, std::min(n, (piece + 1) * grain));
      if (state->pending.fetch_sub(1, std::memory_order_acq_rel) == 1) state->pending.notify_one();
    }
  };
  const int64_t threads = std::min(pool.num_threads(), pieces);
  for (int64_t i = 1; i < threads; ++i) pool.Schedule(decltype(run)(run));  // Schedule compiles for an rvalue only
  run();
  const auto sleep = std::chrono::steady_clock::now() + kWatch;
  while (state->pending.load(std::memory_order_acquire) != 0 && std::chrono::steady_clock::now() < sleep) {
  }
  for (int32_t left; (left = state->pending.load(std::memory_order_acquire)) != 0;) state->pending.wait(left);
}

}  // namespace jaxnorm

#endif  // JAXNORM_CPU_PARALLEL_H_
