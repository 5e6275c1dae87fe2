// What the scenarios of the self-test share.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "apexk_fake_cuda.h"

#define NEED(condition, ...)                                                  \
  do {                                                                        \
    if (!(condition)) {                                                       \
      printf("FAILED at %s:%d: %s: ", __FILE__, __LINE__, #condition);        \
      printf(__VA_ARGS__);                                                    \
      printf("\n");                                                           \
      fflush(stdout);                                                         \
      _exit(1);                                                               \
    }                                                                         \
  } while (0)
#define OK(call) NEED((call) == 0, "a status that is not OK")

struct Scenario {
  const char *name;
  std::function<void()> run;
};
std::vector<Scenario> channel_scenarios();
std::vector<Scenario> hand_off_scenarios();

extern std::atomic<long> allocations;  // by operator new, in the whole program
int threads_of_process();
double idle_cpu_share();  // of one processor, while this thread sleeps
inline void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
template <class Ready>
void await(Ready ready) {  // a hang ends the program by its alarm
  while (!ready()) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

struct Random {
  uint64_t state;
  unsigned operator()(unsigned below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned>(state >> 33) % below;
  }
};

// The fake runtime while it is there, with its table.
struct Fake {
  apexk_cuda_api api;
  explicit Fake(apexk_fake_config config = {}) {
    config.memory_bytes = 1u << 30;
    OK(apexk_fake_start(&config));
    apexk_fake_table(&api);
  }
  ~Fake() { apexk_fake_stop(); }
  apexk_stream stream() {
    apexk_stream made;
    OK(apexk_fake_stream_create(&made));
    return made;
  }
  apexk_event event() {
    apexk_event made;
    OK(api.event_create(&made, 0));
    return made;
  }
  unsigned char *device(size_t bytes) {
    void *made;
    OK(apexk_fake_malloc(&made, bytes));
    return static_cast<unsigned char *>(made);
  }
  unsigned char *pinned(size_t bytes) {
    void *made;
    OK(apexk_fake_malloc_host(&made, bytes));
    return static_cast<unsigned char *>(made);
  }
};

// Work on a stream; what it names must live until it has run.
inline void launch(apexk_stream stream, std::function<void()> *kernel) {
  OK(apexk_fake_launch(stream, [](void *user) { (*static_cast<std::function<void()> *>(user))(); }, kernel));
}

// Holds a stream up until it is opened. Relaxed: it orders nothing that the code under test should order.
struct Gate {
  std::atomic<bool> reached{false}, opened{false}, left{false};
  void close(apexk_stream stream) {
    OK(apexk_fake_launch(stream, [](void *user) {
      Gate *gate = static_cast<Gate *>(user);
      gate->reached.store(true, std::memory_order_relaxed);
      while (!gate->opened.load(std::memory_order_relaxed)) sleep_ms(1);
      gate->left.store(true, std::memory_order_relaxed);
    }, this));
    await([this] { return reached.load(std::memory_order_relaxed); });
  }
  void open() { opened.store(true, std::memory_order_relaxed); }
  ~Gate() {
    open();
    if (reached) await([this] { return left.load(std::memory_order_relaxed); });
  }
};
