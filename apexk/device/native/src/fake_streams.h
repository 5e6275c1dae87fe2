// Streams and events of the fake runtime.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "apexk_fake_cuda.h"

namespace apexk::fake {

// Each event and stream has a mutex of its own: a common one would order what nothing else orders, and hide it from the
// thread sanitizer.
struct Event {
  std::mutex mutex;
  std::condition_variable done_news;
  uint64_t asked = 0, done = 0;  // records, by number
  int64_t ns = 0;                // of the last one done
  std::atomic<bool> alive{true};
};

struct Op {
  enum Kind { copy, record, wait_event, call, call_back, write_value, wait_value } kind;
  void *dst = nullptr;
  const void *src = nullptr;
  size_t bytes = 0;
  int direction = 0;
  Event *event = nullptr;
  uint64_t number = 0;  // an event's record, or a value
  apexk_host_fn fn = nullptr;
};

// Runs host functions of all streams in turn.
class CallbackThread {
 public:
  CallbackThread();
  ~CallbackThread();
  void run(apexk_host_fn fn, void *user);  // returns when it has run

 private:
  struct Call {
    apexk_host_fn fn;
    void *user;
    std::atomic<bool> done{false};
  };
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<Call *> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

// What the streams share. The link's time is handed out by relaxed atomics: taking turns on it orders nothing else.
struct Shared {
  explicit Shared(const apexk_fake_config &config);
  const apexk_fake_config config;
  std::atomic<int64_t> link_free_ns[2] = {};
  std::atomic<bool> stopping{false};
  std::unique_ptr<CallbackThread> callbacks;
};

class Stream {
 public:
  Stream(Shared &shared, uint64_t number);
  ~Stream();                // after its work, or at once when everything stops
  void put(const Op &op);   // waits for a place in the ring
  bool idle();
  void synchronize();

 private:
  static constexpr size_t kRing = 1024;
  void serve();
  bool ready(const Op &op);  // it would not wait
  void run(const Op &op);
  void copy(const Op &op);
  void delay();

  Shared &shared_;
  uint64_t random_;
  std::mutex mutex_;
  std::condition_variable news_, progress_;
  std::vector<Op> ring_{kRing};
  uint64_t put_ = 0, done_ = 0;
  bool ending_ = false;
  std::thread thread_;
};

int64_t now_ns();

}  // namespace apexk::fake
