#include "channel.h"

#include "apexk_nvtx.h"

#include <algorithm>
#include <chrono>

namespace apexk {
namespace {

constexpr auto kNap = std::chrono::microseconds(50);  // between two looks at an event that nobody announces

}  // namespace

Channel::Channel(const apexk_cuda_api &api, int device, apexk_stream stream, uint64_t chunk_bytes, size_t capacity, int *error)
    : api_(api), device_(device), stream_(stream), piece_bytes_(std::max<uint64_t>(chunk_bytes / kAhead, 1)), capacity_(capacity) {
  queue_.reserve(capacity);
  landed_.reserve(capacity);
  failed_.reserve(capacity);
  for (apexk_event &pace : paces_) {
    if ((*error = checked(api_.event_create(&pace, APEXK_EVENT_BLOCKING | APEXK_EVENT_NO_TIMING)))) return;
  }
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (...) {
    destroy_paces();
    throw;
  }
}

Channel::~Channel() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  news_.notify_one();
  if (thread_.joinable()) thread_.join();
  api_.stream_synchronize(stream_);
  destroy_paces();
}

void Channel::destroy_paces() {
  for (const apexk_event pace : paces_) {
    if (pace) api_.event_destroy(pace);
  }
}

// Needs no lock: the stream puts these behind each other, wherever pieces of the other thread come between.
bool Channel::copy(apexk_copy *copies, int count, apexk_event start, apexk_event done) {
  const int begun = start ? checked(api_.event_record(start, stream_)) : 0;
  int failures = 0;
  for (apexk_copy *copy = copies; copy != copies + count; copy++) {
    copy->error = begun;
    if (!copy->error && copy->after) copy->error = checked(api_.stream_wait_event(stream_, copy->after, 0));
    if (!copy->error) copy->error = move(*copy, 0, copy->bytes);
    failures += copy->error != 0;
  }
  const int ended = failures < count ? checked(api_.event_record(done, stream_)) : 0;
  if (!ended) return !failures;
  for (apexk_copy *copy = copies; copy != copies + count; copy++) copy->error = ended;  // nobody could tell when they are there
  return false;
}

bool Channel::speculate(const apexk_copy *copies, int count) {
  {
    std::lock_guard lock(mutex_);
    if (queue_.size() + landed_.size() + failed_.size() + has_begun_ + count > capacity_) return false;
    for (int i = count; i-- > 0;) queue_.push_back(copies[i]);
  }
  news_.notify_one();
  return true;
}

void Channel::stop(int layer, int64_t *tags, apexk_stopped *stopped) {
  std::lock_guard lock(mutex_);
  if (held_) has_begun_ = held_ = false;
  std::erase_if(queue_, [layer](const apexk_copy &copy) { return copy.layer <= layer; });
  while (settled_ < issued_) {
    const int status = checked(api_.event_query(paces_[settled_ % kAhead]));
    if (status == APEXK_CUDA_NOT_READY) break;
    settle_piece(status);
  }
  held_ = has_begun_ && begun_.copy.layer <= layer;
  std::copy(failed_.begin(), failed_.end(), std::copy(landed_.begin(), landed_.end(), tags));
  *stopped = {static_cast<int32_t>(landed_.size()), static_cast<int32_t>(failed_.size()), last_error_, 0,
              held_ ? begun_.copy.tag : -1, held_ ? begun_.copy.bytes - begun_.landed : 0};
  landed_.clear();
  failed_.clear();
  last_error_ = 0;
}

bool Channel::keep(int64_t tag, int *error) {
  {
    std::lock_guard lock(mutex_);
    if (!held_ || begun_.copy.tag != tag) return false;
    const uint64_t left = begun_.copy.bytes - begun_.issued;
    *error = left ? issue(begun_.copy, begun_.issued, left) : 0;
    has_begun_ = held_ = false;
  }
  news_.notify_one();
  return true;
}

bool Channel::abandon(int64_t tag) {
  {
    std::lock_guard lock(mutex_);
    if (!held_ || begun_.copy.tag != tag) return false;
    has_begun_ = held_ = false;
  }
  news_.notify_one();
  return true;
}

uint64_t Channel::in_flight() {
  std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (uint64_t piece = settled_; piece < issued_; piece++) bytes += sizes_[piece % kAhead];
  return bytes;
}

void Channel::serve() {
  api_.set_device(device_);
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (has_begun_ && !held_) issue_pieces();
    if (settled_ < issued_) {
      await_piece(lock);
    } else if (!may_begin(lock)) {
      news_.wait(lock, [this] { return stopping_ || (!held_ && !queue_.empty()); });
    }
  }
}

// Takes the next copy if nothing holds it up; false: there is nothing to do until there is news.
bool Channel::may_begin(std::unique_lock<std::mutex> &lock) {
  if (held_ || queue_.empty()) return false;
  const apexk_copy &next = queue_.back();
  const int status = next.after ? checked(api_.event_query(next.after)) : 0;
  if (status == APEXK_CUDA_NOT_READY) {
    news_.wait_for(lock, kNap);
    return true;
  }
  begun_ = {next, issued_, 0, 0};
  has_begun_ = true;
  queue_.pop_back();
  if (status) fail(status);
  return true;
}

void Channel::issue_pieces() {
  while (has_begun_ && begun_.issued < begun_.copy.bytes && issued_ - settled_ < kAhead) {
    const apexk_nvtx::Range range(apexk_nvtx::COPY_SPEC, begun_.copy.layer, begun_.copy.expert);
    const uint64_t bytes = std::min(piece_bytes_, begun_.copy.bytes - begun_.issued);
    int status = issue(begun_.copy, begun_.issued, bytes);
    if (!status) status = checked(api_.event_record(paces_[issued_ % kAhead], stream_));
    if (status) return fail(status);
    sizes_[issued_++ % kAhead] = bytes;
    begun_.issued += bytes;
  }
}

// Only this thread issues pieces, so the event that it waits for is not recorded again meanwhile.
void Channel::await_piece(std::unique_lock<std::mutex> &lock) {
  const uint64_t piece = settled_;
  lock.unlock();
  const int status = checked(api_.event_synchronize(paces_[piece % kAhead]));
  lock.lock();
  if (settled_ == piece) settle_piece(status);
}

void Channel::settle_piece(int status) {
  const uint64_t piece = settled_++;
  if (!has_begun_ || piece < begun_.first_piece) return;  // of a copy that was kept or abandoned
  if (status && !held_) return fail(status);  // who holds the copy meets the same error when it goes on
  begun_.landed += sizes_[piece % kAhead];
  if (held_ || begun_.landed < begun_.copy.bytes) return;
  landed_.push_back(begun_.copy.tag);
  has_begun_ = false;
}

// Part of a speculative copy, with its events if the part begins or ends it.
int Channel::issue(const apexk_copy &copy, uint64_t from, uint64_t bytes) {
  int status = 0;
  if (from == 0 && copy.start) status = checked(api_.event_record(copy.start, stream_));
  if (!status) status = move(copy, from, bytes);
  if (!status && from + bytes == copy.bytes) status = checked(api_.event_record(copy.done, stream_));
  return status;
}

int Channel::move(const apexk_copy &copy, uint64_t from, uint64_t bytes) {
  return checked(api_.memcpy_async(static_cast<char *>(copy.dst) + from, static_cast<const char *>(copy.src) + from, bytes,
                                   APEXK_HOST_TO_DEVICE, stream_));
}

void Channel::fail(int status) {
  failed_.push_back(begun_.copy.tag);
  last_error_ = status;
  has_begun_ = false;
}

// CUDA keeps a thread's last error, "not ready" included; left there, the next launch check would report it as its own.
int Channel::checked(int status) {
  if (status) api_.get_last_error();
  return status;
}

}  // namespace apexk
