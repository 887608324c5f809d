// How the blocks of batch_norm's resident kernels exchange their sums of the channels that they share.

// Calls finish(slot, total) by one thread for each slot. Several lanes together compute total = combine(sums), where
// sums(term) adds up term(post, elements) over all posts of the channel.
template <class Combine, class Finish>
DEVICE void Exchange(const Resident& block, Combine combine, Finish finish) {
  const ResidentPlan& plan = block.plan;
  ForGroups(plan.post_bits, plan.read_slots, [&](u32 slot, u32 lane, bool there) {
    if (plan.relayed) {
      slot = slot * plan.Sharers() + block.sharer;
      there = slot < plan.slots;
    }
    Post* const posts = plan.posts + (block.first_channel + slot) * plan.Sharers();
    Sums values[kChannelPosts] = {}, nothing;
    bool all;
    do {
      all = threadIdx.x > 0 || plan.counter->TryRead(plan.tag, nothing);  // the counter is for Leave
      // A block may wait only for posts that it has to read: a post that another block reads is cleared by that block.
      // All loads are under way before the first one is used. Loads beyond the last post read the last post again.
      if (there) {
#pragma unroll
        for (u32 i = 0; i < kChannelPosts; ++i) {
          all &= posts[min(lane + (i << plan.post_bits), plan.Sharers() - 1)].TryRead(plan.tag, values[i]);
        }
      }
    } while (!AllThere(all));
    const auto sums = [&](auto term) {
      decltype(term(Sums(), 0.f)) own = {};
#pragma unroll
      for (u32 i = 0; i < kChannelPosts; ++i) {
        const u32 k = lane + (i << plan.post_bits);
        if (k < plan.Sharers()) own += term(values[i], k < plan.whole ? plan.elements : plan.last_elements);
      }
      return LaneSums(own, 1u << plan.post_bits);
    };
    const Sums total = combine(sums);
    if (!there) return;
    if (!plan.relayed) {
      if (lane == 0) block.entries[slot] = total;
      return;
    }
    if (lane == 0) plan.totals[block.first_channel + slot].Write(total, plan.tag);
    for (u32 k = lane; k < plan.Sharers(); k += 1u << plan.post_bits) posts[k].Clear();  // no other block reads it
  });
  __syncthreads();
  ForGroups(0, plan.slots, [&](u32 slot, u32, bool there) {
    Sums total;
    if (plan.relayed) {
      total = plan.totals[block.first_channel + slot].Read(plan.tag, there);
    } else if (there) {
      total = block.entries[slot];
    }
    if (there) finish(slot, total);
  });
  __syncthreads();
}

// Counts this block as one that has read all posts that it needs, and returns the counter's value before that. Thread 0
// calls it, after Exchange. A graph is launched again with the same tag, so the last block to leave clears the posts
// that several blocks read.
DEVICE u64 Leave(const Resident& block) { return atomicAdd(&block.plan.counter->tag, 1ull); }
// Clears the posts if this block was the last to leave. All threads call it.
DEVICE void ClearAfterLast(const Resident& block, u64 left_before) {
  const ResidentPlan& plan = block.plan;
  if (!__syncthreads_or(threadIdx.x == 0 && left_before % kTagStep == gridDim.x - 1)) return;
#pragma unroll 1
  for (Post* post = (plan.relayed ? plan.totals : plan.posts) + threadIdx.x; post <= plan.counter; post += blockDim.x) {
    post->Clear();
  }
}
