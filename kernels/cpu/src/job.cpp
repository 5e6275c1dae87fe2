#include "job.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <utility>

#include "wait.h"

namespace apexk {
namespace {

constexpr size_t kAlign = 64;

size_t up(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

bool reached(const std::atomic<int> &progress, int whole) { return progress.load(std::memory_order_acquire) == whole; }

// True for the last one.
bool advance(std::atomic<int> &progress, int whole) { return progress.fetch_add(1, std::memory_order_acq_rel) + 1 == whole; }

void clear_columns(const apexk_ffn_call &call, int column, int columns) {
  for (int64_t t = 0; t < call.tokens; t++) memset(call.out + t * call.hidden + column, 0, columns * sizeof(float));
}

}  // namespace

void Arenas::Free::operator()(char *memory) const { free(memory); }

Arenas::Arena Arenas::take(size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      Arena arena = std::move(free_.back());
      free_.pop_back();
      if (arena.bytes >= bytes) return arena;
    }
  }
  Arena arena{std::unique_ptr<char, Free>(static_cast<char *>(aligned_alloc(kAlign, up(bytes)))), up(bytes)};
  if (!arena.memory) throw std::bad_alloc();
  return arena;
}

void Arenas::give_back(Arena arena) {
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(arena));
}

apexk_status Job::create(const Call &call, const Isa &isa, int threads, std::shared_ptr<const Machine> machine,
                         std::shared_ptr<Arenas> arenas, apexk_done_fn done, void *user, std::shared_ptr<Job> *job) {
  std::shared_ptr<Job> made(new Job);
  made->call_ = call;
  made->kernels_ = isa.kernels[std::visit([](const auto &one) { return one.dtype; }, call)];
  made->threads_ = threads;
  made->machine_ = std::move(machine);
  made->arenas_ = std::move(arenas);
  made->done_fn_ = done;
  made->user_ = user;
  const apexk_status status = make_plan(call, threads, *made->machine_, &made->plan_);
  if (status != APEXK_OK) return status;
  made->lay_out();
  if (made->tasks_ == 0) {
    if (made->is_summed()) clear_columns(made->ffn(), 0, made->ffn().hidden);
    made->finish();
  }
  *job = std::move(made);
  return APEXK_OK;
}

// [threads x scratch][ring x (packed_x, packed_h)]
void Job::lay_out() {
  if (plan_.units.empty()) return;
  progress_.reset(new Progress[plan_.units.size()]);
  heads_.reset(new Head[plan_.lists.size()]);
  if (is_summed()) summed_.reset(new std::atomic<int>[plan_.last_tasks]());
  for (const std::vector<Task> &list : plan_.lists) tasks_ += list.size();
  scratch_bytes_ = up(kernels_->scratch_bytes(plan_.x_width, plan_.h_width));
  const size_t x_bytes = up(kernels_->packed_bytes(plan_.largest_unit, plan_.x_width));
  const size_t h_bytes = up(kernels_->packed_bytes(plan_.largest_unit, plan_.h_width));
  arena_ = arenas_->take(scratch_bytes_ * threads_ + (x_bytes + h_bytes) * plan_.ring);
  scratch_ = arena_.memory.get();
  char *ring = scratch_ + scratch_bytes_ * threads_;
  for (size_t i = 0; i < plan_.units.size(); i++) {
    plan_.units[i].packed_x = ring + (x_bytes + h_bytes) * (i % plan_.ring);
    plan_.units[i].packed_h = static_cast<char *>(plan_.units[i].packed_x) + x_bytes;
  }
}

int Job::enter() {
  const int place = places_.fetch_add(1, std::memory_order_relaxed);
  if (place < threads_) return place;
  places_.fetch_sub(1, std::memory_order_relaxed);
  return -1;
}

void Job::work(int place, int node) {
  void *scratch = scratch_ + scratch_bytes_ * place;
  while (const Task *task = take(node)) {
    run(*task, scratch);
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks_) finish();
  }
}

bool Job::ready(const Task &task) const {
  const Progress &progress = progress_[task.unit];
  switch (task.step) {
    case Step::pack:
      return task.unit < plan_.ring || reached(progress_[task.unit - plan_.ring].ended, plan_.last_tasks);
    case Step::gate_up:
    case Step::linear:
      return reached(progress.packed, 1);
    case Step::down:
      return reached(progress.gated, plan_.gate_up_tasks) &&
             (!summed_ || reached(summed_[task.row / plan_.last_rows], task.unit));
  }
  return false;
}

// A task that can start, once there is one; null when every task is taken.
const Task *Job::take(int node) {
  const size_t lists = plan_.lists.size();
  for (;;) {
    const int seen = news_.load(std::memory_order_acquire);
    bool any = false;
    for (size_t i = 0; i < lists; i++) {
      const size_t which = (node + i) % lists;
      const std::vector<Task> &list = plan_.lists[which];
      std::atomic<size_t> &next = heads_[which].next;
      for (size_t at = next.load(std::memory_order_relaxed); at < list.size();) {
        any = true;
        if (!ready(list[at])) break;
        if (!next.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) continue;
        taken_.fetch_add(1, std::memory_order_relaxed);
        return &list[at];
      }
    }
    if (!any) return nullptr;
    wait_until(news_, [seen](int value) { return value != seen; });
  }
}

void Job::run(const Task &task, void *scratch) {
  const Unit &unit = plan_.units[task.unit];
  Progress &progress = progress_[task.unit];
  bool news = true;
  switch (task.step) {
    case Step::pack:
      if (std::holds_alternative<apexk_linear_call>(call_)) {
        kernels_->pack_linear(linear(), unit);
      } else {
        kernels_->pack(ffn(), unit);
      }
      advance(progress.packed, 1);
      break;
    case Step::gate_up:
      kernels_->gate_up(ffn(), unit, task.row, task.rows, scratch);
      news = advance(progress.gated, plan_.gate_up_tasks);
      break;
    case Step::down:
      if (summed_ && task.unit == 0) clear_columns(ffn(), task.row, task.rows);
      kernels_->down(ffn(), unit, task.row, task.rows, scratch);
      if (summed_) summed_[task.row / plan_.last_rows].fetch_add(1, std::memory_order_acq_rel);
      news = advance(progress.ended, plan_.last_tasks) || summed_;
      break;
    case Step::linear:
      kernels_->linear(linear(), unit, task.row, task.rows, scratch);
      news = advance(progress.ended, plan_.last_tasks);
      break;
  }
  if (news) {
    news_.fetch_add(1, std::memory_order_seq_cst);
    news_.notify_all();
  }
}

void Job::finish() {
  if (arena_.memory) arenas_->give_back(std::move(arena_));
  if (done_fn_) done_fn_(user_, APEXK_OK);  // before the flag: a waiter may free `user` once it sees the flag
  // in one order with notify_all's look for sleepers: a mere release may be seen after it, and a waiter then sleeps for good
  done_.store(1, std::memory_order_seq_cst);
  done_.notify_all();
}

void Job::help() {
  if (all_taken()) return;
  const int place = enter();
  if (place >= 0) work(place, machine_->nodes.size() == 1 ? 0 : machine_->node_of(sched_getcpu()));
}

void Job::wait() {
  help();
  wait_until(done_, [](int value) { return value != 0; });
}

}  // namespace apexk
