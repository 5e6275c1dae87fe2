// One call in the course of being computed, by whichever threads come to it.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "plan.h"

namespace apexk {

// Memory for packed activations and scratch, kept from call to call: fresh pages would cost more than small calls do.
class Arenas {
 public:
  struct Free { void operator()(char *memory) const; };
  struct Arena {
    std::unique_ptr<char, Free> memory;
    size_t bytes = 0;
  };
  Arena take(size_t bytes);  // throws std::bad_alloc
  void give_back(Arena arena);

 private:
  std::mutex mutex_;
  std::vector<Arena> free_;
};

class Job {
 public:
  // `call` must have passed check_call; throws std::bad_alloc.
  static apexk_status create(const apexk_ffn_call &call, const Isa &isa, int threads, std::shared_ptr<Arenas> arenas,
                             apexk_done_fn done, void *user, std::shared_ptr<Job> *job);

  // A place among the job's `threads` workers, or -1 when all are taken. Each place is held by one thread, for good.
  int enter();
  void work(int place);  // computes tasks until none is left to take
  bool all_taken() const { return next_.load(std::memory_order_relaxed) >= plan_.tasks.size(); }
  bool done() const { return done_.load(std::memory_order_acquire) != 0; }
  void wait();           // takes part if there is a place, then waits for the others

 private:
  struct alignas(64) Progress {  // of one unit
    std::atomic<int> packed{0}, gated{0}, downed{0};
  };

  Job() = default;
  void lay_out();
  void run(const Task &task, void *scratch);
  void finish();

  apexk_ffn_call call_;
  const Kernels *kernels_;
  int threads_;
  Plan plan_;
  std::unique_ptr<Progress[]> progress_;
  std::shared_ptr<Arenas> arenas_;
  Arenas::Arena arena_;
  char *scratch_ = nullptr;  // start of the arena; a late worker may read it when the arena is already given back
  size_t scratch_bytes_ = 0;
  apexk_done_fn done_fn_;
  void *user_;

  alignas(64) std::atomic<size_t> next_{0};
  alignas(64) std::atomic<size_t> finished_{0};
  alignas(64) std::atomic<int> places_{0};
  std::atomic<int> done_{0};
};

}  // namespace apexk
