#include "selftest_channel.h"

namespace {

// What a slot must hold, and the copies and kernels that see to it.
struct Churn {
  ChannelBench bench;
  Random random;
  int block_of[kBlocks], asked[kTags] = {}, slot_of[kTags] = {}, tag = 0;  // block -1: nothing usable
  apexk_event read[kBlocks];
  std::vector<std::function<void()>> kernels{kTags};
  std::atomic<int> wrong{0};

  Churn(uint64_t seed, double link) : bench({.seed = seed, .link_bytes_per_s = link, .delay_us = 100}), random{seed} {
    for (int i = 0; i < kBlocks; i++) block_of[i] = i + 100, read[i] = bench.fake.event();
  }

  // A kernel that needs the block, behind the event of the copy, which may be that of another tag's.
  void run(int tag, int shared = -1) {
    const int slot = slot_of[tag], block = block_of[slot] = asked[tag];
    kernels[tag] = [this, slot, block] { wrong += !holds(bench.slot(slot), block); };
    OK(bench.fake.api.stream_wait_event(bench.compute, bench.done[shared < 0 ? tag : shared], 0));
    launch(bench.compute, &kernels[tag]);
    OK(bench.fake.api.event_record(read[slot], bench.compute));
  }

  void layer(int layer) {
    std::vector<apexk_copy> exact, queue;
    for (int slot = 0; slot < kBlocks; slot++) {
      const unsigned draw = random(4);
      if (draw > 1) continue;
      slot_of[tag] = slot, asked[tag] = random(kBlocks);
      (draw ? exact : queue).push_back(bench.copy(tag, asked[tag], slot, layer, read[slot]));
      tag++;
    }
    if (random(2)) bench.speculate(queue), queue.clear();
    if (random(4) == 0) apexk_fake_fail(APEXK_FAKE_MEMCPY, random(4), 700);
    if (!exact.empty()) bench.exact(exact.data(), exact.size());
    for (const apexk_copy &copy : exact) {
      copy.error ? static_cast<void>(block_of[slot_of[copy.tag]] = -1) : run(copy.tag, exact.back().tag);
    }
    bench.speculate(queue);
    if (random(2)) std::this_thread::sleep_for(std::chrono::microseconds(random(1000)));
    bench.stop(layer);
    for (int i = 0; i < bench.stopped.landed + bench.stopped.failed; i++) {
      block_of[slot_of[bench.tags[i]]] = i < bench.stopped.landed ? asked[bench.tags[i]] : -1;
    }
    if (bench.stopped.running < 0) return;
    const int running = bench.stopped.running;
    if (random(2) && apexk_channel_keep(bench.channel, running, &bench.error) == APEXK_TRANSFER_OK) return run(running);
    apexk_channel_abandon(bench.channel, running);  // refused after a keep that failed
    block_of[slot_of[running]] = -1;
  }

  void check(int layer) {
    OK(bench.fake.api.stream_synchronize(bench.compute));
    NEED(wrong == 0, "layer %d: a kernel read a wrong slot", layer);
    for (int slot = 0; slot < kBlocks; slot++) {
      NEED(block_of[slot] < 0 || holds(bench.slot(slot), block_of[slot]), "layer %d: slot %d", layer, slot);
    }
  }
};

}  // namespace

// Random queues, stops, exact copies, failures and readers.
void churn() {
  for (uint64_t seed = 0; seed < 4; seed++) {
    Churn churn(seed, seed % 2 ? 1e9 : 0);
    for (int layer = 0; churn.tag + kBlocks < kTags; layer++) {
      churn.layer(layer);
      if (churn.random(3) == 0) churn.check(layer);
    }
    churn.check(-1);
    churn.bench.clean();
  }
}
