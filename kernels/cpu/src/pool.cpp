#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "wait.h"

namespace apexk {
namespace {

// A refusal is no failure: the thread then runs where it may, and works all the same.
void stay_on(const Node &node) {
  const int most = *std::max_element(node.processors.begin(), node.processors.end()) + 1;
  cpu_set_t *mask = CPU_ALLOC(most);
  if (mask == nullptr) return;
  CPU_ZERO_S(CPU_ALLOC_SIZE(most), mask);
  for (const int processor : node.processors) CPU_SET_S(processor, CPU_ALLOC_SIZE(most), mask);
  sched_setaffinity(0, CPU_ALLOC_SIZE(most), mask);
  CPU_FREE(mask);
}

// The nodes of `threads` threads: in turns, as long as a node has more processors than threads.
std::vector<int> spread(const Machine &machine, int threads) {
  std::vector<int> nodes;
  for (size_t round = 0; static_cast<int>(nodes.size()) < threads; round++) {
    const size_t before = nodes.size();
    for (size_t n = 0; n < machine.nodes.size(); n++) {
      if (round < machine.nodes[n].processors.size()) nodes.push_back(static_cast<int>(n));
    }
    if (nodes.size() == before) round = static_cast<size_t>(-1);  // more threads than processors: from the start
  }
  nodes.resize(threads);
  return nodes;
}

}  // namespace

Pool::Pool(const Isa &isa, int threads, const Machine &machine)
    : isa_(isa), machine_(std::make_shared<Machine>(machine)) {
  const std::vector<int> nodes = spread(machine, threads == 0 ? machine.threads : threads);
  threads_.reserve(nodes.size());
  try {
    for (const int node : nodes) threads_.emplace_back([this, node] { serve(node); });
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

apexk_status Pool::submit(const Call &call, int helpers, apexk_done_fn done, void *user,
                          std::shared_ptr<Job> *job) {
  const apexk_status status = check_call(call);
  if (status != APEXK_OK) return status;
  const apexk_status made = Job::create(call, isa_, threads(), machine_, arenas_, done, user, job);
  if (made != APEXK_OK || (*job)->all_taken()) return made;

  const int wanted = helpers > 0 && (*job)->single_file() ? 0 : threads() - helpers;
  if (wanted == 0) return APEXK_OK;
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

void Pool::serve(int node) {
  if (machine_->nodes.size() > 1) stay_on(machine_->nodes[node]);
  for (;;) {
    const int seen = news_.load(std::memory_order_acquire);
    int place;
    if (const std::shared_ptr<Job> job = find_work(&place)) {
      job->work(place, node);
    } else if (stopping_.load(std::memory_order_acquire)) {
      return;
    } else {
      wait_until(news_, [seen](int value) { return value != seen; });
    }
  }
}

}  // namespace apexk
