#include "fake_streams.h"

#include <string.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>

namespace apexk::fake {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr auto kLook = std::chrono::milliseconds(5);  // how soon a waiting stream notices that everything stops
constexpr int kParts = 8;                             // a rate-limited copy moves its bytes in so many steps

void sleep_until_ns(int64_t ns) {
  const int64_t left = ns - now_ns();
  if (left > 0) std::this_thread::sleep_for(nanoseconds(left));
}

}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

CallbackThread::CallbackThread() {
  thread_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    for (;;) {
      news_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Call *call = queue_.front();
      queue_.pop_front();
      lock.unlock();
      call->fn(call->user);
      call->done.store(true, std::memory_order_release);
      call->done.notify_one();
      lock.lock();
    }
  });
}

CallbackThread::~CallbackThread() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  news_.notify_one();
  thread_.join();
}

void CallbackThread::run(apexk_host_fn fn, void *user) {
  Call call{fn, user};
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(&call);
  }
  news_.notify_one();
  call.done.wait(false, std::memory_order_acquire);
}

Shared::Shared(const apexk_fake_config &c) : config(c) {
  if (c.one_callback_thread) callbacks = std::make_unique<CallbackThread>();
}

Stream::Stream(Shared &shared, uint64_t number)
    : shared_(shared), random_(shared.config.seed * 0x9e3779b97f4a7c15u + number), thread_([this] { serve(); }) {}

Stream::~Stream() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  news_.notify_one();
  thread_.join();
}

void Stream::put(const Op &op) {
  {
    std::unique_lock lock(mutex_);
    if (shared_.config.eager && put_ == done_ && ready(op)) {
      run(op);
      put_++;
      done_++;
      return;
    }
    progress_.wait(lock, [this] { return put_ - done_ < kRing; });
    ring_[put_++ % kRing] = op;
  }
  news_.notify_one();
}

bool Stream::idle() {
  std::lock_guard lock(mutex_);
  return put_ == done_;
}

void Stream::synchronize() {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [this, until = put_] { return done_ >= until; });
}

void Stream::serve() {
  prctl(PR_SET_TIMERSLACK, 1000);  // ns
  std::unique_lock lock(mutex_);
  for (;;) {
    news_.wait(lock, [this] { return ending_ || done_ < put_; });
    if (done_ == put_) return;
    const Op op = ring_[done_ % kRing];
    lock.unlock();
    if (!shared_.stopping.load(std::memory_order_relaxed)) {
      delay();
      run(op);
    }
    lock.lock();
    done_++;
    progress_.notify_all();
  }
}

void Stream::delay() {
  if (shared_.config.delay_us <= 0) return;
  random_ = random_ * 6364136223846793005u + 1442695040888963407u;
  const uint64_t drawn = random_ >> 33;
  if (drawn & 1) std::this_thread::sleep_for(microseconds((drawn >> 1) % shared_.config.delay_us));
}

bool Stream::ready(const Op &op) {
  if (op.kind == Op::wait_value) return __atomic_load_n(static_cast<uint64_t *>(op.dst), __ATOMIC_ACQUIRE) >= op.number;
  if (op.kind != Op::wait_event) return true;
  std::lock_guard lock(op.event->mutex);
  return op.event->done >= op.number;
}

void Stream::run(const Op &op) {
  auto *flag = static_cast<uint64_t *>(op.dst);
  switch (op.kind) {
    case Op::copy:
      return copy(op);
    case Op::record: {
      std::lock_guard lock(op.event->mutex);
      op.event->done = std::max(op.event->done, op.number);
      op.event->ns = now_ns();
      op.event->done_news.notify_all();
      return;
    }
    case Op::wait_event: {
      std::unique_lock lock(op.event->mutex);
      while (op.event->done < op.number && !shared_.stopping.load(std::memory_order_relaxed)) {
        op.event->done_news.wait_for(lock, kLook);
      }
      return;
    }
    case Op::call:
      return op.fn(op.dst);
    case Op::call_back:
      return shared_.callbacks ? shared_.callbacks->run(op.fn, op.dst) : op.fn(op.dst);
    case Op::write_value:
      return __atomic_store_n(flag, op.number, __ATOMIC_RELEASE);
    case Op::wait_value:
      while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) < op.number && !shared_.stopping.load(std::memory_order_relaxed)) {
        std::this_thread::sleep_for(microseconds(2));
      }
      return;
  }
}

// The bytes move throughout the time that the copy has on the link: who looks too early sees some of them.
void Stream::copy(const Op &op) {
  auto *dst = static_cast<char *>(op.dst);
  auto *src = static_cast<const char *>(op.src);
  if (shared_.config.link_bytes_per_s <= 0) {
    memcpy(dst, src, op.bytes);
    return;
  }
  std::atomic<int64_t> &link = shared_.link_free_ns[op.direction == APEXK_HOST_TO_DEVICE];
  const auto takes = static_cast<int64_t>(op.bytes / shared_.config.link_bytes_per_s * 1e9);
  int64_t free = link.load(std::memory_order_relaxed), start;
  do {
    start = std::max(free, now_ns());
  } while (!link.compare_exchange_weak(free, start + takes, std::memory_order_relaxed));
  for (int part = 0; part < kParts; part++) {
    const size_t from = op.bytes * part / kParts, to = op.bytes * (part + 1) / kParts;
    sleep_until_ns(start + takes * (part + 1) / kParts);
    memcpy(dst + from, src + from, to - from);
  }
}

}  // namespace apexk::fake
