#include "hand_off.h"

#include "apexk_nvtx.h"

#include <stddef.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <new>

#include "wait.h"

namespace apexk {
namespace {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC
using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr auto kEager = microseconds(200);  // rows and results usually come within it
constexpr auto kNap = microseconds(20);

int64_t now_ns() { return std::chrono::duration_cast<nanoseconds>(Clock::now().time_since_epoch()).count(); }

// Looks again and again, at first as often as nobody else wants the processor, then with naps; false when `until` has passed.
template <class Ready>
bool poll(Clock::time_point until, Ready ready) {
  const auto eager = Clock::now() + kEager;
  while (!ready()) {
    const auto now = Clock::now();
    if (now >= until) return false;
    if (now < eager) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  return true;
}

}  // namespace

bool HandOff::Job::finished() const { return flags->results.load(std::memory_order_acquire) >= ticket; }

HandOff::HandOff(const apexk_cuda_api &api, const apexk_cpu_queue &queue, bool by_flags, void *flags, uint64_t flags_device,
                 int depth, int max_experts, int *error)
    : api_(api), queue_(queue), by_flags_(by_flags), max_experts_(max_experts), jobs_(depth) {
  for (int i = 0; i < depth; i++) {
    Job &job = jobs_[i];
    job.owner = this;
    job.flags = new (static_cast<char *>(flags) + i * sizeof(Flags)) Flags;
    job.flags_device = flags_device + i * sizeof(Flags);
    job.experts = std::make_unique<int32_t[]>(std::max(max_experts, 1));
  }
  if (by_flags) {
    thread_ = std::thread([this] { serve(); });
    return;
  }
  for (Job &job : jobs_) {
    if ((*error = api_.event_create(&job.started, APEXK_EVENT_NO_TIMING))) {
      api_.get_last_error();
      return;
    }
  }
}

HandOff::~HandOff() {
  end_thread();
  for (Job &job : jobs_) {
    if (job.started) api_.event_destroy(job.started);
  }
}

void HandOff::end_thread() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_relaxed);
  tickets_.store(UINT64_MAX, std::memory_order_relaxed);
  tickets_.notify_one();
  thread_.join();
}

apexk_transfer_status HandOff::submit(const apexk_ffn_call &call, apexk_stream rows, int32_t layer, uint64_t *ticket, int *error) {
  const uint64_t number = tickets_.load(std::memory_order_relaxed) + 1;
  Job &job = jobs_[number % jobs_.size()];
  if (!job.finished() || job.joining.load(std::memory_order_acquire)) return APEXK_TRANSFER_FULL;
  job.call = call;
  std::copy_n(call.experts, call.expert_count, job.experts.get());
  job.call.experts = job.experts.get();
  job.layer = layer;
  job.ticket = number;
  starts_.fetch_add(1, std::memory_order_relaxed);
  *error = by_flags_ ? api_.stream_write_value64(rows, job.flags_device + offsetof(Flags, rows), number, 0)
                     : api_.launch_host_func(rows, &HandOff::start, &job);
  if (*error) {
    job.ticket = 0;
    starts_.fetch_sub(1, std::memory_order_relaxed);
  } else {
    tickets_.store(number, std::memory_order_relaxed);  // the rows' flag orders what the thread reads of the job
    tickets_.notify_one();
    if (!by_flags_) *error = api_.event_record(job.started, rows);  // failed: the job runs, but nobody can join it
  }
  if (*error) {
    api_.get_last_error();
    return APEXK_TRANSFER_CUDA;
  }
  *ticket = number;
  return APEXK_TRANSFER_OK;
}

apexk_transfer_status HandOff::join(uint64_t ticket, apexk_stream stream, int *error) {
  Job *job = find(ticket);
  if (!job) return APEXK_TRANSFER_BAD_ARGUMENT;
  if (by_flags_) {
    *error = api_.stream_wait_value64(stream, job->flags_device + offsetof(Flags, results), ticket, 0);
  } else {
    // CUDA may run all host functions on one thread: the one that blocks must not come before the one that starts the job
    *error = api_.stream_wait_event(stream, job->started, 0);
    job->joining.store(true, std::memory_order_relaxed);
    if (!*error) *error = api_.launch_host_func(stream, &HandOff::block, job);
    if (*error) job->joining.store(false, std::memory_order_relaxed);
  }
  if (!*error) return APEXK_TRANSFER_OK;
  api_.get_last_error();
  return APEXK_TRANSFER_CUDA;
}

apexk_transfer_status HandOff::wait(uint64_t ticket, int64_t timeout_us, int *worker, int64_t *start_ns, int64_t *end_ns) {
  const Job *job = find(ticket);
  if (!job) return APEXK_TRANSFER_BAD_ARGUMENT;
  if (!poll(Clock::now() + microseconds(timeout_us), [job] { return job->finished(); })) return APEXK_TRANSFER_NOT_DONE;
  *worker = job->status;
  *start_ns = job->start_ns;
  *end_ns = job->end_ns;
  return job->status == APEXK_OK ? APEXK_TRANSFER_OK : APEXK_TRANSFER_WORKER;
}

apexk_transfer_status HandOff::failure(uint64_t *ticket, int *worker) {
  std::lock_guard lock(failure_mutex_);
  if (!failed_ticket_) return APEXK_TRANSFER_OK;
  *ticket = failed_ticket_;
  *worker = failed_status_;
  failed_ticket_ = 0;
  return APEXK_TRANSFER_WORKER;
}

bool HandOff::drain(int64_t timeout_us) {
  const auto until = Clock::now() + microseconds(timeout_us);
  bool all = true;
  for (Job &job : jobs_) {
    const bool done = poll(until, [&job] { return job.finished() && !job.joining.load(std::memory_order_acquire); });
    if (done) continue;
    all = false;
    job.flags->results.store(job.ticket, std::memory_order_relaxed);
  }
  // a job may be done while the function that started it is still on its way out of the pool
  return poll(until, [this] { return starts_.load(std::memory_order_acquire) == 0; }) && all;
}

HandOff::Job *HandOff::find(uint64_t ticket) {
  Job &job = jobs_[ticket % jobs_.size()];
  return ticket && job.ticket == ticket ? &job : nullptr;
}

// In the order of the tickets, which is that of their stream.
void HandOff::serve() {
  prctl(PR_SET_TIMERSLACK, 1000);  // ns: naps end when they should
  for (uint64_t ticket = 1;; ticket++) {
    wait_until(tickets_, [ticket](uint64_t given) { return given >= ticket; });
    Job &job = jobs_[ticket % jobs_.size()];
    poll(Clock::time_point::max(), [this, &job, ticket] {
      return stopping_.load(std::memory_order_relaxed) || job.flags->rows.load(std::memory_order_acquire) >= ticket;
    });
    if (stopping_.load(std::memory_order_relaxed)) return;
    start(&job);
  }
}

void HandOff::start(void *user) {
  Job &job = *static_cast<Job *>(user);
  HandOff &owner = *job.owner;
  job.start_ns = now_ns();
  apexk_job *handle;
  const apexk_nvtx::Range range(apexk_nvtx::HOST_FFN, job.layer, job.call.expert_count);
  const apexk_status status = owner.queue_.submit(owner.queue_.pool, &job.call, &HandOff::finish, &job, &handle);
  if (status == APEXK_OK) {  // and perhaps done by now, and `job` in use for another
    owner.queue_.release(handle);
  } else {
    finish(&job, status);
  }
  owner.starts_.fetch_sub(1, std::memory_order_release);
}

void HandOff::finish(void *user, apexk_status status) {
  Job &job = *static_cast<Job *>(user);
  job.status = status;
  job.end_ns = now_ns();
  if (status != APEXK_OK) {
    HandOff &owner = *job.owner;
    std::lock_guard lock(owner.failure_mutex_);
    if (!owner.failed_ticket_) {
      owner.failed_ticket_ = job.ticket;
      owner.failed_status_ = status;
    }
  }
  Flags &flags = *job.flags;
  flags.results.store(job.ticket, std::memory_order_release);
  flags.results.notify_all();
}

void HandOff::block(void *user) {
  Job &job = *static_cast<Job *>(user);
  wait_until(job.flags->results, [&job](uint64_t value) { return value >= job.ticket; });
  job.joining.store(false, std::memory_order_release);
}

}  // namespace apexk
