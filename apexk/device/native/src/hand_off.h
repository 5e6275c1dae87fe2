// Jobs for the CPU kernels that begin and end on streams. See apexk_transfer.h.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "apexk_transfer.h"

namespace apexk {

// In mapped pinned memory: a job's number once its rows, its results, are there. They only grow. One cache line each.
struct Flags {
  alignas(64) std::atomic<uint64_t> rows{0};
  alignas(64) std::atomic<uint64_t> results{0};
};
static_assert(sizeof(Flags) == 128 && std::atomic<uint64_t>::is_always_lock_free);

class HandOff {
 public:
  // Throws std::bad_alloc, std::system_error; `error` gets the code of a failed CUDA call, and the object is then unusable.
  HandOff(const apexk_cuda_api &api, const apexk_cpu_queue &queue, bool by_flags, void *flags, uint64_t flags_device, int depth,
          int max_experts, int *error);
  ~HandOff();  // no job is outstanding

  apexk_transfer_status submit(const apexk_ffn_call &call, apexk_stream rows, int32_t layer, uint64_t *ticket, int *error);
  apexk_transfer_status join(uint64_t ticket, apexk_stream stream, int *error);
  apexk_transfer_status wait(uint64_t ticket, int64_t timeout_us, int *worker, int64_t *start_ns, int64_t *end_ns);
  apexk_transfer_status failure(uint64_t *ticket, int *worker);
  bool drain(int64_t timeout_us);  // false: jobs are outstanding still; their streams are let go
  void end_thread();
  int max_experts() const { return max_experts_; }

 private:
  struct Job {
    HandOff *owner;
    Flags *flags;
    uint64_t flags_device;
    std::unique_ptr<int32_t[]> experts;
    apexk_ffn_call call;
    int32_t layer = 0;
    uint64_t ticket = 0;  // of its latest use; 0: none that anybody will finish
    std::atomic<bool> joining{false};  // a host function will look at this job
    apexk_event started = nullptr;     // by host functions: recorded behind the one that starts the job
    apexk_status status = APEXK_OK;
    int64_t start_ns = 0, end_ns = 0;

    bool finished() const;
  };

  Job *find(uint64_t ticket);
  void serve();
  static void start(void *job);                      // the rows are there
  static void finish(void *job, apexk_status status);  // the results are
  static void block(void *job);                      // until they are

  const apexk_cuda_api api_;
  const apexk_cpu_queue queue_;
  const bool by_flags_;
  const int max_experts_;
  std::vector<Job> jobs_;  // ticket n uses the one at n % depth
  std::atomic<uint64_t> tickets_{0};  // given out; submissions come from one thread at a time
  std::atomic<int> starts_{0};        // asked for and not returned from
  std::atomic<bool> stopping_{false};
  std::mutex failure_mutex_;
  uint64_t failed_ticket_ = 0;
  apexk_status failed_status_ = APEXK_OK;
  std::thread thread_;
};

}  // namespace apexk
