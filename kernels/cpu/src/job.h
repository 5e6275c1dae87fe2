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
  static apexk_status create(const Call &call, const Isa &isa, int threads, std::shared_ptr<const Machine> machine,
                             std::shared_ptr<Arenas> arenas, apexk_done_fn done, void *user, std::shared_ptr<Job> *job);

  // A place among the job's `threads` workers, or -1 when all are taken. Each place is held by one thread, for good.
  int enter();
  void work(int place, int node);  // computes tasks until none is left to take, those of the node first
  bool all_taken() const { return taken_.load(std::memory_order_relaxed) == tasks_; }
  bool single_file() const { return tasks_ <= 2; }  // a layer's packing and its only rows: a second thread would but wait
  bool done() const { return done_.load(std::memory_order_acquire) != 0; }
  void help();           // takes part if there is a place
  void wait();           // helps, then waits for the others

 private:
  struct alignas(64) Progress {  // of one unit
    std::atomic<int> packed{0}, gated{0}, ended{0};
  };

  Job() = default;
  struct alignas(64) Head {  // of one node's list
    std::atomic<size_t> next{0};
  };

  void lay_out();
  bool ready(const Task &task) const;
  const Task *take(int node);
  void run(const Task &task, void *scratch);
  void finish();

  const apexk_ffn_call &ffn() const { return *std::get_if<apexk_ffn_call>(&call_); }
  bool is_summed() const { return std::holds_alternative<apexk_ffn_call>(call_) && ffn().summed; }
  const apexk_linear_call &linear() const { return *std::get_if<apexk_linear_call>(&call_); }

  Call call_;
  const Kernels *kernels_;
  int threads_;
  std::shared_ptr<const Machine> machine_;
  Plan plan_;
  size_t tasks_ = 0;  // in all lists
  std::unique_ptr<Progress[]> progress_;
  std::unique_ptr<std::atomic<int>[]> summed_;  // by block of last_rows columns: units that are added up
  std::shared_ptr<Arenas> arenas_;
  Arenas::Arena arena_;
  char *scratch_ = nullptr;  // start of the arena; a late worker may read it when the arena is already given back
  size_t scratch_bytes_ = 0;
  apexk_done_fn done_fn_;
  void *user_;

  std::unique_ptr<Head[]> heads_;
  alignas(64) std::atomic<size_t> taken_{0};
  alignas(64) std::atomic<int> news_{0};  // counts what a task may have waited for
  alignas(64) std::atomic<size_t> finished_{0};
  alignas(64) std::atomic<int> places_{0};
  std::atomic<int> done_{0};
};

}  // namespace apexk
