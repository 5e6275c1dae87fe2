#include "job.h"

#include <stdlib.h>

#include <new>
#include <utility>

#include "wait.h"

namespace apexk {
namespace {

constexpr size_t kAlign = 64;

size_t up(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

void advance(std::atomic<int> &progress, int whole) {
  if (progress.fetch_add(1, std::memory_order_acq_rel) + 1 == whole) progress.notify_all();
}

void await(const std::atomic<int> &progress, int whole) {
  wait_until(progress, [whole](int value) { return value == whole; });
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

apexk_status Job::create(const apexk_ffn_call &call, const Isa &isa, int threads, std::shared_ptr<Arenas> arenas,
                         apexk_done_fn done, void *user, std::shared_ptr<Job> *job) {
  std::shared_ptr<Job> made(new Job);
  made->call_ = call;
  made->kernels_ = isa.kernels[call.dtype];
  made->threads_ = threads;
  made->arenas_ = std::move(arenas);
  made->done_fn_ = done;
  made->user_ = user;
  const apexk_status status = make_plan(call, threads, &made->plan_);
  if (status != APEXK_OK) return status;
  made->lay_out();
  if (made->plan_.tasks.empty()) made->finish();
  *job = std::move(made);
  return APEXK_OK;
}

// [threads x scratch][ring x (packed_x, packed_h)]
void Job::lay_out() {
  if (plan_.units.empty()) return;
  progress_.reset(new Progress[plan_.units.size()]);
  scratch_bytes_ = up(kernels_->scratch_bytes(call_.hidden, call_.intermediate));
  const size_t x_bytes = up(kernels_->packed_bytes(plan_.largest_unit, call_.hidden));
  const size_t h_bytes = up(kernels_->packed_bytes(plan_.largest_unit, call_.intermediate));
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

void Job::work(int place) {
  void *scratch = scratch_ + scratch_bytes_ * place;
  for (;;) {
    const size_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= plan_.tasks.size()) return;
    run(plan_.tasks[index], scratch);
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == plan_.tasks.size()) finish();
  }
}

void Job::run(const Task &task, void *scratch) {
  const Unit &unit = plan_.units[task.unit];
  Progress &progress = progress_[task.unit];
  switch (task.step) {
    case Step::pack:
      if (task.unit >= plan_.ring) await(progress_[task.unit - plan_.ring].downed, plan_.down_tasks);
      kernels_->pack(call_, unit);
      advance(progress.packed, 1);
      break;
    case Step::gate_up:
      await(progress.packed, 1);
      kernels_->gate_up(call_, unit, task.row, task.rows, scratch);
      advance(progress.gated, plan_.gate_up_tasks);
      break;
    case Step::down:
      await(progress.gated, plan_.gate_up_tasks);
      kernels_->down(call_, unit, task.row, task.rows, scratch);
      advance(progress.downed, plan_.down_tasks);
      break;
  }
}

void Job::finish() {
  if (arena_.memory) arenas_->give_back(std::move(arena_));
  if (done_fn_) done_fn_(user_, APEXK_OK);  // before the flag: a waiter may free `user` once it sees the flag
  done_.store(1, std::memory_order_release);
  done_.notify_all();
}

void Job::wait() {
  if (!all_taken()) {
    const int place = enter();
    if (place >= 0) work(place);
  }
  wait_until(done_, [](int value) { return value != 0; });
}

}  // namespace apexk
