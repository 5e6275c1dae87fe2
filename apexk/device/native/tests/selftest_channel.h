// A channel under test: blocks, slots, events and what the scenarios ask of them.
#pragma once
#include <algorithm>

#include "selftest.h"

constexpr size_t kBlock = 64 << 10, kChunk = 16 << 10;
constexpr int kBlocks = 8, kTags = 256;

inline unsigned char byte_of(int block, size_t at) { return static_cast<unsigned char>(block * 31 + at * 7 + (at >> 8) + 1); }

inline void fill(unsigned char *to, int block) {
  for (size_t at = 0; at < kBlock; at++) to[at] = byte_of(block, at);
}

inline bool holds(const unsigned char *slot, int block) {
  for (size_t at = 0; at < kBlock; at++) {
    if (slot[at] != byte_of(block, at)) return false;
  }
  return true;
}

// A channel over `kBlocks` blocks in host memory and as many slots; slot s holds block s + 100 at first.
struct ChannelBench {
  Fake fake;
  apexk_stream stream = fake.stream(), compute = fake.stream();
  unsigned char *blocks = fake.pinned(kBlock * kBlocks), *slots = fake.device(kBlock * kBlocks);
  apexk_channel *channel = nullptr;
  std::vector<apexk_event> done;  // by tag
  int64_t tags[kTags];
  apexk_stopped stopped;
  int error = 0;

  explicit ChannelBench(apexk_fake_config config = {}, int capacity = kTags) : fake(config) {
    for (int i = 0; i < kBlocks; i++) fill(block(i), i), fill(slot(i), i + 100);
    for (int i = 0; i < kTags; i++) done.push_back(fake.event());
    OK(apexk_channel_create(&fake.api, 0, stream, kChunk, capacity, &channel, &error));
  }
  ~ChannelBench() { apexk_channel_destroy(channel); }
  unsigned char *block(int i) { return blocks + i * kBlock; }
  unsigned char *slot(int i) { return slots + i * kBlock; }
  apexk_copy copy(int tag, int block_of, int slot_of, int layer = 0, apexk_event after = nullptr) {
    return {slot(slot_of), block(block_of), kBlock, after, nullptr, done[tag], tag, layer, -1};
  }
  // Exact copies, which end with the event of the last one's tag.
  apexk_transfer_status exact(apexk_copy *copies, int count, apexk_event start = nullptr) {
    return apexk_channel_copy(channel, copies, count, start, copies[count - 1].done);
  }
  void speculate(std::vector<apexk_copy> copies) { OK(apexk_channel_speculate(channel, copies.data(), copies.size())); }
  void stop(int layer) { OK(apexk_channel_stop(channel, layer, tags, &stopped)); }
  void land(int count) {  // collects until so many copies have landed
    std::vector<int64_t> all;
    await([&] {
      stop(-1);
      all.insert(all.end(), tags, tags + stopped.landed);
      return static_cast<int>(all.size()) >= count;
    });
    std::copy(all.begin(), all.end(), tags);
  }
  void begin() { await([this] { return apexk_channel_in_flight(channel) > 0; }); }
  void clean() { NEED(fake.api.get_last_error() == 0, "an error was left for the next launch check"); }
};

void churn();  // a scenario of its own file
