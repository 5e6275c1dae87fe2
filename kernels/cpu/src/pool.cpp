#include "pool.h"

#include <utility>

#include "wait.h"

namespace apexk {

Pool::Pool(const Isa &isa, int threads) : isa_(isa) {
  threads_.reserve(threads);
  try {
    for (int i = 0; i < threads; i++) threads_.emplace_back([this] { serve(); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_.store(true, std::memory_order_release);
  news_.fetch_add(1, std::memory_order_release);
  news_.notify_all();
  for (std::thread &thread : threads_) thread.join();
}

apexk_status Pool::submit(const apexk_ffn_call &call, bool helped, apexk_done_fn done, void *user,
                          std::shared_ptr<Job> *job) {
  const apexk_status status = check_call(call);
  if (status != APEXK_OK) return status;
  const apexk_status made = Job::create(call, isa_, threads(), arenas_, done, user, job);
  if (made != APEXK_OK || (*job)->all_taken()) return made;

  const int wanted = threads() - (helped ? 1 : 0);
  if (wanted == 0) return APEXK_OK;  // the caller is the only worker
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(*job);
  }
  news_.fetch_add(1, std::memory_order_release);
  if (wanted == threads()) {
    news_.notify_all();
  } else {
    for (int i = 0; i < wanted; i++) news_.notify_one();
  }
  return APEXK_OK;
}

// The first queued job that has both tasks and a place left.
std::shared_ptr<Job> Pool::find_work(int *place) {
  std::lock_guard lock(mutex_);
  while (!queue_.empty() && queue_.front()->all_taken()) queue_.pop_front();
  for (const std::shared_ptr<Job> &job : queue_) {
    if (job->all_taken()) continue;
    *place = job->enter();
    if (*place >= 0) return job;
  }
  return nullptr;
}

void Pool::serve() {
  for (;;) {
    const int seen = news_.load(std::memory_order_acquire);
    int place;
    if (const std::shared_ptr<Job> job = find_work(&place)) {
      job->work(place);
    } else if (stopping_.load(std::memory_order_acquire)) {
      return;
    } else {
      wait_until(news_, [seen](int value) { return value != seen; });
    }
  }
}

}  // namespace apexk
