// The fake runtime's functions: checks, injected failures, memory, and the table.
#include <sys/mman.h>

#include <map>

#include "fake_streams.h"

#define APEXK_EXPORT extern "C" __attribute__((visibility("default")))

namespace apexk::fake {
namespace {

enum : int { kOk = 0, kInvalidValue = 1, kNoMemory = 2, kUnloading = 4, kInvalidDevice = 101, kInvalidHandle = 400, kRegistered = 712,
       kNotRegistered = 713, kNotReady = APEXK_CUDA_NOT_READY };

struct Memory {
  uint64_t bytes;
  bool device, owned;  // not owned: registered
};

struct Runtime {
  explicit Runtime(const apexk_fake_config &config) : shared(config) {}
  Shared shared;
  std::mutex mutex;  // of what follows; never held while a stream works
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Event>> events;
  std::map<const char *, Memory> memory;
  int64_t made = 0;
  std::atomic<int64_t> pageable{0};
};

Runtime *runtime;
std::map<const char *, Memory> left;  // of runtimes that have stopped: its owners still hold it
thread_local int last_error;
struct Injected {
  std::atomic<int> after{-1}, code{0};
} injected[APEXK_FAKE_CALLS];

int result(int status) {
  if (status) last_error = status;
  return status;
}

int injected_failure(apexk_fake_call call) {
  Injected &in = injected[call];
  return in.after.load() >= 0 && in.after.fetch_sub(1) == 0 ? in.code.load() : kOk;
}

Stream *of(apexk_stream stream) { return runtime ? reinterpret_cast<Stream *>(stream) : nullptr; }
Event *of(apexk_event handle) {
  auto *event = reinterpret_cast<Event *>(handle);
  return runtime && event && event->alive ? event : nullptr;
}

int put(apexk_fake_call call, apexk_stream stream, const Op &op) {
  if (!of(stream)) return result(kInvalidHandle);
  if (const int status = injected_failure(call)) return result(status);
  of(stream)->put(op);
  return kOk;
}

int set_device(int device) { return result(device == 0 ? kOk : kInvalidDevice); }

bool pinned(const void *address) {
  std::lock_guard lock(runtime->mutex);
  auto after = runtime->memory.upper_bound(static_cast<const char *>(address));
  if (after == runtime->memory.begin()) return false;
  const auto &[start, memory] = *--after;
  return static_cast<const char *>(address) < start + memory.bytes;
}

int memcpy_async(void *dst, const void *src, size_t bytes, int kind, apexk_stream stream) {
  if (!dst || !src || (kind != APEXK_HOST_TO_DEVICE && kind != APEXK_DEVICE_TO_HOST)) return result(kInvalidValue);
  Op op{Op::copy};
  op.dst = dst, op.src = src, op.bytes = bytes, op.direction = kind;
  const int status = put(APEXK_FAKE_MEMCPY, stream, op);
  if (!status && !pinned(kind == APEXK_HOST_TO_DEVICE ? src : dst)) runtime->pageable++;
  return status;
}

int event_create(apexk_event *event, unsigned) {
  if (!runtime) return result(kUnloading);
  if (const int status = injected_failure(APEXK_FAKE_EVENT_CREATE)) return result(status);
  std::lock_guard lock(runtime->mutex);
  runtime->events.push_back(std::make_unique<Event>());
  runtime->made++;
  *event = reinterpret_cast<apexk_event>(runtime->events.back().get());
  return kOk;
}

int event_destroy(apexk_event event) {
  if (!of(event)) return result(kInvalidHandle);
  of(event)->alive = false;  // its memory stays: a stream may still come to it
  return kOk;
}

int event_record(apexk_event event, apexk_stream stream) {
  if (!of(event)) return result(kInvalidHandle);
  Op op{Op::record};
  op.event = of(event);
  if (!of(stream)) return result(kInvalidHandle);
  if (const int status = injected_failure(APEXK_FAKE_EVENT_RECORD)) return result(status);
  {
    std::lock_guard lock(op.event->mutex);
    op.number = ++op.event->asked;
  }
  of(stream)->put(op);
  return kOk;
}

int event_query(apexk_event event) {
  if (!of(event)) return result(kInvalidHandle);
  if (const int status = injected_failure(APEXK_FAKE_EVENT_QUERY)) return result(status);
  std::lock_guard lock(of(event)->mutex);
  return result(of(event)->done == of(event)->asked ? kOk : kNotReady);
}

int event_synchronize(apexk_event handle) {
  Event *event = of(handle);
  if (!event) return result(kInvalidHandle);
  if (const int status = injected_failure(APEXK_FAKE_EVENT_SYNCHRONIZE)) return result(status);
  std::unique_lock lock(event->mutex);
  event->done_news.wait(lock, [event, number = event->asked] { return event->done >= number; });
  return kOk;
}

int stream_wait_event(apexk_stream stream, apexk_event event, unsigned) {
  if (!of(event)) return result(kInvalidHandle);
  Op op{Op::wait_event};
  op.event = of(event);
  {
    std::lock_guard lock(op.event->mutex);
    op.number = op.event->asked;
  }
  return put(APEXK_FAKE_WAIT_EVENT, stream, op);
}

int stream_synchronize(apexk_stream stream) {
  if (!of(stream)) return result(kInvalidHandle);
  of(stream)->synchronize();
  return kOk;
}

int call_op(apexk_fake_call call, Op::Kind kind, apexk_stream stream, apexk_host_fn fn, void *user) {
  if (!fn) return result(kInvalidValue);
  Op op{kind};
  op.fn = fn, op.dst = user;
  return put(call, stream, op);
}

int launch_host_func(apexk_stream stream, apexk_host_fn fn, void *user) {
  return call_op(APEXK_FAKE_HOST_FUNC, Op::call_back, stream, fn, user);
}

int value_op(apexk_fake_call call, Op::Kind kind, apexk_stream stream, uint64_t address, uint64_t value) {
  if (!address || address % 8) return result(kInvalidValue);
  Op op{kind};
  op.dst = reinterpret_cast<void *>(address), op.number = value;
  return put(call, stream, op);
}

int stream_write_value64(apexk_stream stream, uint64_t address, uint64_t value, unsigned) {
  return value_op(APEXK_FAKE_WRITE_VALUE, Op::write_value, stream, address, value);
}

int stream_wait_value64(apexk_stream stream, uint64_t address, uint64_t value, unsigned) {
  return value_op(APEXK_FAKE_WAIT_VALUE, Op::wait_value, stream, address, value);
}

int get_last_error() {
  const int error = last_error;
  last_error = kOk;
  return error;
}

int allocate(void **memory, uint64_t bytes, bool device, apexk_fake_call call) {
  if (!runtime) return result(kUnloading);
  if (const int status = injected_failure(call)) return result(status);
  if (device && apexk_fake_count(APEXK_FAKE_DEVICE_BYTES) + bytes > runtime->shared.config.memory_bytes) return result(kNoMemory);
  void *got = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return result(kNoMemory);
  std::lock_guard lock(runtime->mutex);
  runtime->memory[static_cast<char *>(got)] = {bytes ? bytes : 1, device, true};
  runtime->made++;
  *memory = got;
  return kOk;
}

}  // namespace
}  // namespace apexk::fake

using namespace apexk::fake;

APEXK_EXPORT int apexk_fake_start(const apexk_fake_config *config) {
  if (runtime) return kUnloading;
  for (Injected &in : injected) in.after = -1;
  runtime = new Runtime(*config);
  return kOk;
}

APEXK_EXPORT void apexk_fake_stop(void) {
  if (!runtime) return;
  runtime->shared.stopping = true;
  runtime->streams.clear();
  for (const auto &[start, memory] : runtime->memory) {
    if (memory.owned) left[start] = memory;
  }
  delete runtime;
  runtime = nullptr;
}

APEXK_EXPORT void apexk_fake_table(apexk_cuda_api *api) {
  *api = {set_device,        memcpy_async,       event_create,     event_destroy,        event_record,        event_query, event_synchronize,
          stream_wait_event, stream_synchronize, launch_host_func, stream_write_value64, stream_wait_value64, get_last_error};
}

APEXK_EXPORT void apexk_fake_fail(apexk_fake_call call, int32_t after, int32_t code) {
  injected[call].code = code;
  injected[call].after = after;
}

APEXK_EXPORT int64_t apexk_fake_count(apexk_fake_counter counter) {
  if (!runtime) return 0;
  std::lock_guard lock(runtime->mutex);
  int64_t count = 0;
  switch (counter) {
    case APEXK_FAKE_STREAMS: return runtime->streams.size();
    case APEXK_FAKE_EVENTS:
      for (const auto &event : runtime->events) count += event->alive;
      break;
    case APEXK_FAKE_ALLOCATIONS:
    case APEXK_FAKE_REGISTRATIONS:
      for (const auto &[start, memory] : runtime->memory) count += memory.owned == (counter == APEXK_FAKE_ALLOCATIONS);
      break;
    case APEXK_FAKE_DEVICE_BYTES:
      for (const auto &[start, memory] : runtime->memory) count += memory.device ? memory.bytes : 0;
      break;
    case APEXK_FAKE_MADE: return runtime->made;
    case APEXK_FAKE_PAGEABLE_COPIES: return runtime->pageable;
    case APEXK_FAKE_COUNTERS: break;
  }
  return count;
}

APEXK_EXPORT int apexk_fake_stream_create(apexk_stream *stream) {
  if (!runtime) return result(kUnloading);
  std::lock_guard lock(runtime->mutex);
  runtime->streams.push_back(std::make_unique<Stream>(runtime->shared, runtime->streams.size()));
  runtime->made++;
  *stream = reinterpret_cast<apexk_stream>(runtime->streams.back().get());
  return kOk;
}

APEXK_EXPORT int apexk_fake_stream_query(apexk_stream stream) {
  if (!of(stream)) return result(kInvalidHandle);
  return result(of(stream)->idle() ? kOk : kNotReady);
}

APEXK_EXPORT int apexk_fake_event_ns(apexk_event handle, int64_t *ns) {
  Event *event = of(handle);
  if (!event) return result(kInvalidHandle);
  std::lock_guard lock(event->mutex);
  if (event->done != event->asked) return result(kNotReady);
  if (!event->asked) return result(kInvalidHandle);
  *ns = event->ns;
  return kOk;
}

APEXK_EXPORT int apexk_fake_launch(apexk_stream stream, apexk_host_fn kernel, void *user) {
  return call_op(APEXK_FAKE_LAUNCH, Op::call, stream, kernel, user);
}

APEXK_EXPORT int apexk_fake_malloc(void **memory, uint64_t bytes) { return allocate(memory, bytes, true, APEXK_FAKE_MALLOC); }

APEXK_EXPORT int apexk_fake_malloc_host(void **memory, uint64_t bytes) {
  return allocate(memory, bytes, false, APEXK_FAKE_MALLOC_HOST);
}

APEXK_EXPORT int apexk_fake_free(void *memory) {
  std::unique_lock<std::mutex> lock;
  if (runtime) lock = std::unique_lock(runtime->mutex);
  for (auto *owned : {runtime ? &runtime->memory : &left, &left}) {
    const auto found = owned->find(static_cast<char *>(memory));
    if (found == owned->end() || !found->second.owned) continue;
    munmap(memory, found->second.bytes);
    owned->erase(found);
    return kOk;
  }
  return result(kInvalidValue);
}

APEXK_EXPORT int apexk_fake_host_register(void *memory, uint64_t bytes) {
  if (!runtime) return result(kUnloading);
  if (!memory || !bytes) return result(kInvalidValue);
  if (const int status = injected_failure(APEXK_FAKE_REGISTER)) return result(status);
  if (pinned(memory)) return result(kRegistered);
  std::lock_guard lock(runtime->mutex);
  runtime->memory[static_cast<char *>(memory)] = {bytes, false, false};
  runtime->made++;
  return kOk;
}

APEXK_EXPORT int apexk_fake_host_unregister(void *memory) {
  if (!runtime) return result(kUnloading);
  std::lock_guard lock(runtime->mutex);
  const auto found = runtime->memory.find(static_cast<char *>(memory));
  if (found == runtime->memory.end() || found->second.owned) return result(kNotRegistered);
  runtime->memory.erase(found);
  return kOk;
}
