// Threads with one owner, and the queue of jobs that they serve in order.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "job.h"

namespace apexk {

class Pool {
 public:
  // `threads` 0: the machine's default. Throws std::system_error when a thread cannot start.
  Pool(const Isa &isa, int threads, const Machine &machine);
  ~Pool();                            // after the queued jobs are done

  // Checks and plans the call, then queues it for all threads but as many as there will be `helpers`, who take their places.
  apexk_status submit(const Call &call, int helpers, apexk_done_fn done, void *user,
                      std::shared_ptr<Job> *job);

  const Isa &isa() const { return isa_; }
  int threads() const { return static_cast<int>(threads_.size()); }

 private:
  void serve(int node);
  void stop();
  std::shared_ptr<Job> find_work(int *place);

  const Isa &isa_;
  std::shared_ptr<const Machine> machine_;
  std::shared_ptr<Arenas> arenas_ = std::make_shared<Arenas>();
  std::mutex mutex_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<int> news_{0};  // counts submissions; idle threads wait for it to change
  std::vector<std::thread> threads_;
};

}  // namespace apexk
