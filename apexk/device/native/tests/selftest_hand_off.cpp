#include <condition_variable>
#include <mutex>

#include "selftest.h"

namespace {

constexpr int kRows = 256, kDepth = 4;

// In place of the CPU kernels: a thread that computes out[i] = 2 x[i] + topk_ids[i].
class Worker {
 public:
  apexk_cpu_queue queue() { return {reinterpret_cast<apexk_pool *>(this), submit, release}; }
  std::atomic<int> refuse{0}, submitted{0}, released{0}, computed{0};  // refuse: the status of the next call
  Worker() {
    thread_ = std::thread([this] { serve(); });
  }
  ~Worker() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    news_.notify_one();
    thread_.join();
  }

 private:
  struct Asked {
    apexk_ffn_call call;
    int experts;  // what the list added up to when it was submitted
    apexk_done_fn done;
    void *user;
  };

  static apexk_status submit(apexk_pool *pool, const apexk_ffn_call *call, apexk_done_fn done, void *user, apexk_job **job) {
    Worker &worker = *reinterpret_cast<Worker *>(pool);
    if (const int status = worker.refuse.exchange(0)) return static_cast<apexk_status>(status);
    worker.submitted++;
    *job = reinterpret_cast<apexk_job *>(&worker);
    int sum = 0;
    for (int i = 0; i < call->expert_count; i++) sum += call->experts[i];
    if (call->tokens == 0) {
      done(user, APEXK_OK);
      return APEXK_OK;
    }
    {
      std::lock_guard lock(worker.mutex_);
      worker.asked_[worker.put_++ % 16] = {*call, sum, done, user};
    }
    worker.news_.notify_one();
    return APEXK_OK;
  }

  static void release(apexk_job *job) { reinterpret_cast<Worker *>(job)->released++; }

  void serve() {
    Random random{7};
    std::unique_lock lock(mutex_);
    for (;;) {
      news_.wait(lock, [this] { return ending_ || done_ < put_; });
      if (done_ == put_) return;
      const Asked asked = asked_[done_ % 16];
      lock.unlock();
      if (random(2)) std::this_thread::sleep_for(std::chrono::microseconds(random(300)));
      auto *x = static_cast<const float *>(asked.call.x);
      auto *ids = static_cast<const int32_t *>(asked.call.topk_ids);
      for (int64_t i = 0; i < asked.call.tokens; i++) asked.call.out[i] = 2 * x[i] + ids[i] + asked.experts;
      asked.done(asked.user, APEXK_OK);
      computed++;
      lock.lock();
      done_++;
    }
  }

  std::mutex mutex_;
  std::condition_variable news_;
  Asked asked_[16];
  uint64_t put_ = 0, done_ = 0;
  bool ending_ = false;
  std::thread thread_;
};

struct Bench {
  Fake fake;
  Worker worker;
  int how;
  apexk_stream down = fake.stream(), back = fake.stream();
  unsigned char *flags = fake.pinned(128 * kDepth);
  float *x = floats(fake.device(kRows * 4)), *result = floats(fake.device(kRows * 4));  // on the device
  float *x_host = floats(fake.pinned(kRows * 4)), *out_host = floats(fake.pinned(kRows * 4));
  int32_t *ids = reinterpret_cast<int32_t *>(fake.pinned(kRows * 4));
  apexk_event copied_back = fake.event();
  apexk_hand_off *hand_off = nullptr;
  int error = 0, status = 0;
  int64_t start_ns = 0, end_ns = 0;

  explicit Bench(int how_, apexk_fake_config config = {}) : fake(config), how(how_) {
    const apexk_cpu_queue queue = worker.queue();
    OK(apexk_hand_off_create(&fake.api, &queue, how, flags, reinterpret_cast<uint64_t>(flags), kDepth, 8, &hand_off, &error));
  }
  ~Bench() {
    if (hand_off) OK(apexk_hand_off_destroy(hand_off, 10'000'000));
  }
  static float *floats(void *memory) { return static_cast<float *>(memory); }

  apexk_ffn_call call(const int32_t *experts, int count) {
    apexk_ffn_call made = {};
    made.x = x_host, made.topk_ids = ids, made.out = out_host, made.experts = experts;
    made.tokens = kRows, made.expert_count = count;
    return made;
  }
  apexk_transfer_status submit(uint64_t *ticket, int first = 3) {
    const int32_t experts[] = {first, 4};  // gone when this returns
    const apexk_ffn_call made = call(experts, 2);
    return apexk_hand_off_submit(hand_off, &made, down, 0, ticket, &error);
  }
  apexk_transfer_status wait(uint64_t ticket, int64_t us = 10'000'000) {
    return apexk_hand_off_wait(hand_off, ticket, us, &status, &start_ns, &end_ns);
  }
  // A layer: rows down, CPU, rows back, and what came of it on the device.
  void layer(int n) {
    uint64_t ticket;
    for (int i = 0; i < kRows; i++) x[i] = n + i, ids[i] = n * i;
    OK(fake.api.memcpy_async(x_host, x, kRows * 4, APEXK_DEVICE_TO_HOST, down));
    OK(submit(&ticket, n));
    OK(apexk_hand_off_join(hand_off, ticket, back, &error));
    OK(fake.api.memcpy_async(result, out_host, kRows * 4, APEXK_HOST_TO_DEVICE, back));
    OK(fake.api.event_record(copied_back, back));
    OK(fake.api.event_synchronize(copied_back));
    for (int i = 0; i < kRows; i++) NEED(result[i] == 2.0f * (n + i) + n * i + n + 4, "layer %d row %d: %f", n, i, result[i]);
    OK(wait(ticket, 0));
    NEED(start_ns > 0 && start_ns <= end_ns, "times");
  }
};

constexpr int kWays[] = {APEXK_BY_FLAGS, APEXK_BY_HOST_FUNCTIONS};

void layers() {
  for (const int how : kWays) {
    for (const int32_t one_thread : {0, 1}) {
      Bench bench(how, {.seed = 1, .link_bytes_per_s = 20e6, .delay_us = 100, .one_callback_thread = one_thread});
      for (int n = 0; n < 3 * kDepth; n++) bench.layer(n);
      NEED(bench.worker.submitted == 3 * kDepth, "%d jobs", bench.worker.submitted.load());
      await([&] { return bench.worker.released == bench.worker.submitted; });
      NEED(bench.fake.api.get_last_error() == 0, "an error was left");
    }
  }
}

// The joining stream comes first, and CUDA may run host functions of all streams on one thread.
void join_before_rows() {
  for (const int how : kWays) {
    Bench bench(how, {.one_callback_thread = 1});
    Gate gate;
    uint64_t ticket;
    bool done = false;
    std::function<void()> after = [&] { done = true; };
    gate.close(bench.down);
    OK(bench.submit(&ticket));
    OK(apexk_hand_off_join(bench.hand_off, ticket, bench.back, &bench.error));
    launch(bench.back, &after);
    sleep_ms(3);
    NEED(bench.wait(ticket, 1000) == APEXK_TRANSFER_NOT_DONE, "a job is done before its rows are there");
    NEED(bench.worker.submitted == 0, "a job began before its rows were there");
    NEED(apexk_fake_stream_query(bench.back) == APEXK_CUDA_NOT_READY, "the joining stream went on");
    bench.fake.api.get_last_error();
    gate.open();
    OK(bench.fake.api.stream_synchronize(bench.back));
    NEED(done, "the joining stream hangs");
  }
}

void jobs_in_a_row() {
  for (const int how : kWays) {
    Bench bench(how);
    Gate gate;
    uint64_t tickets[kDepth], more;
    gate.close(bench.down);
    for (uint64_t &ticket : tickets) OK(bench.submit(&ticket));
    NEED(bench.submit(&more) == APEXK_TRANSFER_FULL, "more jobs than places");
    OK(apexk_hand_off_join(bench.hand_off, tickets[0], bench.back, &bench.error));
    gate.open();
    for (const uint64_t ticket : tickets) OK(bench.wait(ticket));
    OK(bench.fake.api.stream_synchronize(bench.back));
    if (how == APEXK_BY_HOST_FUNCTIONS) {  // a place is taken until the stream has come past its join
      Gate second;
      OK(bench.submit(&more));
      second.close(bench.back);
      OK(apexk_hand_off_join(bench.hand_off, more, bench.back, &bench.error));
      OK(bench.wait(more));
      for (int i = 1; i < kDepth; i++) {
        OK(bench.submit(&more));
        OK(bench.wait(more));
      }
      NEED(bench.submit(&more) == APEXK_TRANSFER_FULL, "the place of a job that is still being joined was used");
      second.open();
    }
    await([&] { return bench.submit(&more) == APEXK_TRANSFER_OK; });
    OK(bench.wait(more));
    NEED(bench.wait(tickets[0], 0) == (more - tickets[0] < kDepth ? APEXK_TRANSFER_OK : APEXK_TRANSFER_BAD_ARGUMENT), "an old ticket");
    NEED(bench.wait(more + 1, 0) == APEXK_TRANSFER_BAD_ARGUMENT && bench.wait(0, 0) == APEXK_TRANSFER_BAD_ARGUMENT, "no such ticket");
  }
}

void worker_failures() {
  for (const int how : kWays) {
    Bench bench(how);
    uint64_t first, second, told;
    bench.worker.refuse = APEXK_BAD_EXPERT_ID;
    OK(bench.submit(&first));
    OK(apexk_hand_off_join(bench.hand_off, first, bench.back, &bench.error));
    OK(bench.fake.api.stream_synchronize(bench.back));  // no stream hangs
    NEED(bench.wait(first) == APEXK_TRANSFER_WORKER && bench.status == APEXK_BAD_EXPERT_ID, "status %d", bench.status);
    bench.worker.refuse = APEXK_NO_MEMORY;
    OK(bench.submit(&second));
    bench.wait(second);
    NEED(apexk_hand_off_failure(bench.hand_off, &told, &bench.status) == APEXK_TRANSFER_WORKER && told == first &&
             bench.status == APEXK_BAD_EXPERT_ID, "told of job %lu: %d", (unsigned long)told, bench.status);
    OK(apexk_hand_off_failure(bench.hand_off, &told, &bench.status));
    bench.layer(5);
  }
}

// Failures of two jobs that end at once, on the worker's thread and on the one that starts jobs, while another asks.
void failures_at_once() {
  Bench bench(APEXK_BY_HOST_FUNCTIONS);
  const apexk_stream other = bench.fake.stream();
  for (int round = 0; round < 20; round++) {
    uint64_t tickets[2], told;
    for (int i = 0; i < 2; i++) {
      bench.worker.refuse = APEXK_NO_MEMORY;
      const apexk_ffn_call call = bench.call(nullptr, 0);
      OK(apexk_hand_off_submit(bench.hand_off, &call, i ? other : bench.down, 0, &tickets[i], &bench.error));
    }
    await([&] { return apexk_hand_off_failure(bench.hand_off, &told, &bench.status) == APEXK_TRANSFER_WORKER; });
    for (const uint64_t ticket : tickets) bench.wait(ticket);
    while (apexk_hand_off_failure(bench.hand_off, &told, &bench.status)) continue;
    bench.worker.refuse = 0;
  }
}

void cuda_failures() {
  for (const int how : kWays) {
    Bench bench(how);
    uint64_t ticket = 0;
    apexk_fake_fail(how == APEXK_BY_FLAGS ? APEXK_FAKE_WRITE_VALUE : APEXK_FAKE_HOST_FUNC, 0, 719);
    NEED(bench.submit(&ticket) == APEXK_TRANSFER_CUDA && bench.error == 719, "submit fails: %d", bench.error);
    NEED(bench.fake.api.get_last_error() == 0, "an error was left");
    bench.layer(1);
    OK(bench.submit(&ticket));
    apexk_fake_fail(how == APEXK_BY_FLAGS ? APEXK_FAKE_WAIT_VALUE : APEXK_FAKE_HOST_FUNC, 0, 719);
    bench.wait(ticket);
    NEED(apexk_hand_off_join(bench.hand_off, ticket, bench.back, &bench.error) == APEXK_TRANSFER_CUDA && bench.error == 719, "join fails");
    NEED(bench.fake.api.get_last_error() == 0, "an error was left");
    if (how == APEXK_BY_HOST_FUNCTIONS) {  // the job is started, but cannot be joined
      apexk_fake_fail(APEXK_FAKE_EVENT_RECORD, 0, 719);
      NEED(bench.submit(&ticket) == APEXK_TRANSFER_CUDA && bench.error == 719, "submit fails: %d", bench.error);
      await([&] { return bench.worker.submitted == 3 && bench.worker.computed == 3; });
      apexk_hand_off *none = nullptr;
      const apexk_cpu_queue queue = bench.worker.queue();
      apexk_fake_fail(APEXK_FAKE_EVENT_CREATE, 1, 2);
      NEED(apexk_hand_off_create(&bench.fake.api, &queue, how, bench.fake.pinned(256), 0, 2, 1, &none, &bench.error) == APEXK_TRANSFER_CUDA && !none,
           "no event");
      NEED(bench.fake.api.get_last_error() == 0, "an error was left");
    }
    for (int n = 0; n < 2 * kDepth; n++) bench.layer(n);
  }
}

void empty_call() {
  for (const int how : kWays) {
    Bench bench(how);
    for (int i = 0; i < 3 * kDepth; i++) {
      uint64_t ticket;
      apexk_ffn_call call = bench.call(nullptr, 0);
      call.tokens = 0;
      OK(apexk_hand_off_submit(bench.hand_off, &call, bench.down, 0, &ticket, &bench.error));
      OK(apexk_hand_off_join(bench.hand_off, ticket, bench.back, &bench.error));
      OK(bench.wait(ticket));
      OK(bench.fake.api.stream_synchronize(bench.back));
    }
  }
}

// A stream that never says that its rows are there: closing gives up, lets the joining stream go and ends the thread.
void closed_with_a_job_outstanding() {
  for (const int how : kWays) {
    Bench bench(how);
    Gate gate;
    uint64_t ticket;
    const int threads = threads_of_process();
    gate.close(bench.down);
    OK(bench.submit(&ticket));
    if (how == APEXK_BY_FLAGS) OK(apexk_hand_off_join(bench.hand_off, ticket, bench.back, &bench.error));
    static auto &kept = *new std::vector<apexk_hand_off *>;  // the leak that is meant
    apexk_hand_off *left = kept.emplace_back(bench.hand_off);
    bench.hand_off = nullptr;
    NEED(apexk_hand_off_destroy(left, 20'000) == APEXK_TRANSFER_NOT_DONE, "a job is outstanding");
    OK(bench.fake.api.stream_synchronize(bench.back));
    if (how == APEXK_BY_FLAGS) await([&] { return threads_of_process() < threads; });
    gate.open();
    OK(bench.fake.api.stream_synchronize(bench.down));  // a host function that comes late finds what it needs
    if (how == APEXK_BY_HOST_FUNCTIONS) await([&] { return bench.worker.released == 1; });
  }
}

// Nothing but the hand-off itself tells when the streams' functions are done with it.
void closed_at_once() {
  for (const int how : kWays) {
    for (int n = 0; n < 4; n++) {
      Bench bench(how, {.seed = static_cast<uint64_t>(n), .delay_us = 200});
      uint64_t ticket;
      OK(bench.submit(&ticket));
      if (n % 2) OK(apexk_hand_off_join(bench.hand_off, ticket, bench.back, &bench.error));
      OK(apexk_hand_off_destroy(bench.hand_off, 10'000'000));
      bench.hand_off = nullptr;
    }
  }
}

void sleeps_when_idle() {
  for (const int how : kWays) {
    Bench bench(how);
    bench.layer(1);
    NEED(idle_cpu_share() < 0.1, "the thread does not sleep with nothing to do");
  }
}

void allocates_nothing() {
  for (const int how : kWays) {
    Bench bench(how);
    for (int n = 0; n < kDepth; n++) bench.layer(n);
    const long before = allocations, made = apexk_fake_count(APEXK_FAKE_MADE);
    for (int n = 0; n < 20; n++) bench.layer(n);
    NEED(allocations == before && apexk_fake_count(APEXK_FAKE_MADE) == made, "%ld allocations", allocations - before);
  }
}

}  // namespace

std::vector<Scenario> hand_off_scenarios() {
  return {
      {"layers", layers},
      {"join_before_rows", join_before_rows},
      {"jobs_in_a_row", jobs_in_a_row},
      {"worker_failures", worker_failures},
      {"failures_at_once", failures_at_once},
      {"cuda_failures", cuda_failures},
      {"empty_call", empty_call},
      {"outstanding", closed_with_a_job_outstanding},
      {"closed_at_once", closed_at_once},
      {"hand_off_idle", sleeps_when_idle},
      {"no_allocation", allocates_nothing},
  };
}
