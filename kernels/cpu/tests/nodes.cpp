// Memory nodes without such a machine: whose tasks a thread takes first, and that nothing else changes.
// Linked with the library's objects: the classes behind the C interface are not exported.
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "../src/dispatch.h"
#include "../src/pool.h"

namespace {

using namespace apexk;

#define NEED(condition)                                         \
  do {                                                          \
    if (!(condition)) {                                         \
      printf("FAILED at line %d: %s\n", __LINE__, #condition);  \
      exit(1);                                                  \
    }                                                           \
  } while (0)

constexpr int kExperts = 6, kTokens = 40, kTopk = 2, kHidden = 512, kIntermediate = 320;
constexpr int64_t kBlock = static_cast<int64_t>(3) * kHidden * kIntermediate;

std::vector<float> weights(kExperts *kBlock), x(kTokens *kHidden), topk_weights(kTokens *kTopk);
std::vector<int32_t> ids(kTokens *kTopk), experts(kExperts);
std::vector<uint64_t> blocks(kExperts);

void fill() {
  uint32_t state = 7;
  const auto value = [&] { return static_cast<float>(static_cast<int32_t>(state = state * 1664525u + 1013904223u)) * 1e-10f; };
  for (std::vector<float> *all : {&weights, &x, &topk_weights}) std::generate(all->begin(), all->end(), value);
  for (size_t i = 0; i < ids.size(); i++) ids[i] = static_cast<int32_t>((i * i + i / 7) % kExperts);
  for (int e = 0; e < kExperts; e++) {
    experts[e] = e;
    blocks[e] = reinterpret_cast<uint64_t>(&weights[e * kBlock]);
  }
}

int64_t element_of(const void *address) { return static_cast<const float *>(address) - weights.data(); }

int expert_of(const void *address) { return static_cast<int>(element_of(address) / kBlock); }

// Whole experts: the odd ones on node 1.
void by_expert(const Machine &, size_t count, const void *const *address, int *index) {
  for (size_t i = 0; i < count; i++) index[i] = expert_of(address[i]) % 2;
}

// Rows of each expert: the second half of each third of its block on node 1.
void by_row(const Machine &, size_t count, const void *const *address, int *index) {
  for (size_t i = 0; i < count; i++) index[i] = element_of(address[i]) % (kBlock / 3) * 2 >= kBlock / 3;
}

void unknown(const Machine &, size_t count, const void *const *, int *index) { std::fill(index, index + count, -1); }

Machine machine(decltype(Machine::homes) homes) {
  Machine two;
  two.nodes = {{0, {0}}, {1, {1}}};
  two.threads = two.limit = 2;
  two.homes = homes;
  return two;
}

apexk_ffn_call call(float *out, int summed) {
  apexk_ffn_call one = {};
  one.x = x.data();
  one.blocks = blocks.data();
  one.topk_ids = ids.data();
  one.topk_weights = topk_weights.data();
  one.experts = experts.data();
  one.out = out;
  one.tokens = kTokens;
  one.x_stride = one.hidden = kHidden;
  one.intermediate = kIntermediate;
  one.topk = kTopk;
  one.num_experts = one.expert_count = kExperts;
  one.id_bytes = 4;
  one.dtype = APEXK_FP32;
  one.summed = summed;
  return one;
}

struct Entry {
  int expert, row;
};
std::vector<Entry> gate_ups, downs;  // in the order in which they ran

const Kernels kRecording = {
    [](int, int) { return size_t{64}; },
    [](int, int) { return size_t{64}; },
    [](const apexk_ffn_call &, const Unit &) {},
    [](const apexk_ffn_call &, const Unit &unit, int row, int, void *) { gate_ups.push_back({expert_of(unit.block), row}); },
    [](const apexk_ffn_call &, const Unit &unit, int row, int, void *) { downs.push_back({expert_of(unit.block), row}); },
    [](const apexk_linear_call &, const Unit &) {},
    [](const apexk_linear_call &, const Unit &, int row, int, void *) { downs.push_back({0, row}); },
};

// One thread that belongs to `node` works through a call.
void record(const Call &one, decltype(Machine::homes) homes, int node) {
  gate_ups.clear();
  downs.clear();
  const Isa isa = {"recording", 0, {&kRecording, &kRecording, &kRecording}};
  std::shared_ptr<Job> job;
  NEED(Job::create(one, isa, 1, std::make_shared<Machine>(machine(homes)), std::make_shared<Arenas>(), nullptr, nullptr, &job) == APEXK_OK);
  job->work(job->enter(), node);
  NEED(job->done());
}

void record(decltype(Machine::homes) homes, int node) {
  std::vector<float> out(kTokens * kTopk * kHidden);
  record(call(out.data(), 0), homes, node);
}

// The first third of a block as a linear layer, whose second half of rows lies on node 1; its tokens are many units.
apexk_linear_call layer(float *y) {
  apexk_linear_call one = {};
  one.x = x.data();
  one.weight = weights.data();
  one.y = y;
  one.tokens = 4 * kTokens;
  one.x_stride = one.inputs = kHidden / 4;
  one.outputs = 4 * kIntermediate;
  one.dtype = APEXK_FP32;
  return one;
}

void check_linear_order() {
  std::vector<float> y(16 * kTokens * kIntermediate);
  for (const int node : {0, 1}) {
    record(layer(y.data()), by_row, node);
    const auto own = [=](const Entry &e) { return (e.row * 2 >= 4 * kIntermediate) == (node == 1); };
    NEED(own(downs.front()) && !own(downs.back()));
  }
}

// How many row blocks of `expert` ran.
size_t blocks_of(const std::vector<Entry> &entries, int expert) {
  return static_cast<size_t>(std::count_if(entries.begin(), entries.end(), [=](const Entry &e) { return e.expert == expert; }));
}

void check_order() {
  record(unknown, 0);
  const std::vector<Entry> all_gate_ups = gate_ups, all_downs = downs;
  for (const auto homes : {by_expert, by_row}) {
    for (const int node : {0, 1}) {
      record(homes, node);
      for (int e = 0; e < kExperts; e++) {
        NEED(blocks_of(gate_ups, e) == blocks_of(all_gate_ups, e) && blocks_of(downs, e) == blocks_of(all_downs, e));
      }
      if (homes != by_expert) continue;
      for (const std::vector<Entry> *steps : {&gate_ups, &downs}) {  // all of its own, then all of the other's
        const auto own = [=](const Entry &e) { return e.expert % 2 == node; };
        NEED(std::is_partitioned(steps->begin(), steps->end(), own) && own(steps->front()));
      }
    }
  }
  record(by_row, 1);  // before a unit's other rows its own ones
  const Entry first = gate_ups.front();
  NEED(first.row * 2 >= kIntermediate);
}

void check_values() {
  const Isa *scalar = nullptr;
  NEED(choose_isa("scalar", &scalar) == APEXK_OK);
  const auto run = [&](const Machine &here, int threads, const Call &one) {
    Pool pool(*scalar, threads, here);
    std::shared_ptr<Job> job;
    NEED(pool.submit(one, true, nullptr, nullptr, &job) == APEXK_OK);
    job->wait();
  };
  Machine one = machine(unknown);
  one.nodes.resize(1);
  std::vector<float> want_y(16 * kTokens * kIntermediate);
  run(one, 1, layer(want_y.data()));
  for (const int summed : {0, 1}) {
    const size_t floats = static_cast<size_t>(kTokens) * (summed ? 1 : kTopk) * kHidden;
    std::vector<float> want(floats);
    run(one, 1, call(want.data(), summed));
    for (const auto homes : {by_expert, by_row}) {
      for (const int threads : {2, 5}) {
        std::vector<float> out(floats);
        run(machine(homes), threads, call(out.data(), summed));
        NEED(out == want);
        std::vector<float> y(want_y.size());
        run(machine(homes), threads, layer(y.data()));
        NEED(y == want_y);
      }
    }
  }
}

}  // namespace

int main() {
  fill();
  check_order();
  check_linear_order();
  check_values();
  printf("memory nodes: as expected\n");
  return 0;
}
