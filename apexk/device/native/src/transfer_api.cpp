// The C interface: arguments checked, exceptions turned into statuses.
#include <memory>
#include <new>
#include <system_error>

#include "channel.h"
#include "hand_off.h"

#define APEXK_EXPORT extern "C" __attribute__((visibility("default")))

struct apexk_channel {
  apexk::Channel channel;
};

struct apexk_hand_off {
  apexk::HandOff hand_off;
};

namespace {

template <class Body>
apexk_transfer_status guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return APEXK_TRANSFER_NO_MEMORY;
  } catch (const std::system_error &) {
    return APEXK_TRANSFER_NO_THREAD;
  }
}

// Events of its own: a speculative copy's.
bool fit(const apexk_copy *copies, int32_t count, bool own_events) {
  if (count < 0 || (count && !copies)) return false;
  for (const apexk_copy *copy = copies; copy != copies + count; copy++) {
    if (!copy->dst || !copy->src || !copy->bytes || (own_events && !copy->done) || copy->tag < 0) return false;
  }
  return true;
}

apexk_transfer_status cuda_status(int error) { return error ? APEXK_TRANSFER_CUDA : APEXK_TRANSFER_OK; }

}  // namespace

APEXK_EXPORT apexk_transfer_status apexk_channel_create(const apexk_cuda_api *api, int32_t device, apexk_stream stream,
                                                        uint64_t chunk_bytes, int32_t capacity, apexk_channel **channel,
                                                        int32_t *cuda_error) {
  if (!api || !chunk_bytes || capacity < 1 || !channel || !cuda_error) return APEXK_TRANSFER_BAD_ARGUMENT;
  return guarded([&] {
    *cuda_error = 0;
    std::unique_ptr<apexk_channel> made(
        new apexk_channel{{*api, device, stream, chunk_bytes, static_cast<size_t>(capacity), cuda_error}});
    if (!*cuda_error) *channel = made.release();
    return cuda_status(*cuda_error);
  });
}

APEXK_EXPORT apexk_transfer_status apexk_channel_copy(apexk_channel *channel, apexk_copy *copies, int32_t count, apexk_event start,
                                                      apexk_event done) {
  if (!channel || !done || !fit(copies, count, false)) return APEXK_TRANSFER_BAD_ARGUMENT;
  return channel->channel.copy(copies, count, start, done) ? APEXK_TRANSFER_OK : APEXK_TRANSFER_CUDA;
}

APEXK_EXPORT apexk_transfer_status apexk_channel_speculate(apexk_channel *channel, const apexk_copy *copies, int32_t count) {
  if (!channel || !fit(copies, count, true)) return APEXK_TRANSFER_BAD_ARGUMENT;
  return channel->channel.speculate(copies, count) ? APEXK_TRANSFER_OK : APEXK_TRANSFER_FULL;
}

APEXK_EXPORT apexk_transfer_status apexk_channel_stop(apexk_channel *channel, int32_t layer, int64_t *tags,
                                                      apexk_stopped *stopped) {
  if (!channel || !tags || !stopped) return APEXK_TRANSFER_BAD_ARGUMENT;
  channel->channel.stop(layer, tags, stopped);
  return APEXK_TRANSFER_OK;
}

APEXK_EXPORT apexk_transfer_status apexk_channel_keep(apexk_channel *channel, int64_t tag, int32_t *cuda_error) {
  if (!channel || !cuda_error) return APEXK_TRANSFER_BAD_ARGUMENT;
  return channel->channel.keep(tag, cuda_error) ? cuda_status(*cuda_error) : APEXK_TRANSFER_BAD_ARGUMENT;
}

APEXK_EXPORT apexk_transfer_status apexk_channel_abandon(apexk_channel *channel, int64_t tag) {
  return channel && channel->channel.abandon(tag) ? APEXK_TRANSFER_OK : APEXK_TRANSFER_BAD_ARGUMENT;
}

APEXK_EXPORT uint64_t apexk_channel_in_flight(apexk_channel *channel) { return channel->channel.in_flight(); }

APEXK_EXPORT void apexk_channel_destroy(apexk_channel *channel) { delete channel; }

APEXK_EXPORT apexk_transfer_status apexk_hand_off_create(const apexk_cuda_api *api, const apexk_cpu_queue *queue, int32_t how,
                                                         void *flags, uint64_t flags_device, int32_t depth,
                                                         int32_t max_experts, apexk_hand_off **hand_off,
                                                         int32_t *cuda_error) {
  const bool by_flags = how == APEXK_BY_FLAGS;
  if (!api || !queue || !queue->submit || !queue->release || !flags || reinterpret_cast<uintptr_t>(flags) % 64 || depth < 1 ||
      max_experts < 0 || !hand_off || !cuda_error || (!by_flags && how != APEXK_BY_HOST_FUNCTIONS) ||
      (by_flags && (!api->stream_write_value64 || !api->stream_wait_value64))) {
    return APEXK_TRANSFER_BAD_ARGUMENT;
  }
  return guarded([&] {
    *cuda_error = 0;
    std::unique_ptr<apexk_hand_off> made(
        new apexk_hand_off{{*api, *queue, by_flags, flags, flags_device, depth, max_experts, cuda_error}});
    if (!*cuda_error) *hand_off = made.release();
    return cuda_status(*cuda_error);
  });
}

APEXK_EXPORT apexk_transfer_status apexk_hand_off_submit(apexk_hand_off *hand_off, const apexk_ffn_call *call,
                                                         apexk_stream rows, int32_t layer, uint64_t *ticket, int32_t *cuda_error) {
  if (!hand_off || !call || !ticket || !cuda_error || call->expert_count < 0 ||
      call->expert_count > hand_off->hand_off.max_experts()) {
    return APEXK_TRANSFER_BAD_ARGUMENT;
  }
  return hand_off->hand_off.submit(*call, rows, layer, ticket, cuda_error);
}

APEXK_EXPORT apexk_transfer_status apexk_hand_off_join(apexk_hand_off *hand_off, uint64_t ticket, apexk_stream stream,
                                                       int32_t *cuda_error) {
  if (!hand_off || !cuda_error) return APEXK_TRANSFER_BAD_ARGUMENT;
  return hand_off->hand_off.join(ticket, stream, cuda_error);
}

APEXK_EXPORT apexk_transfer_status apexk_hand_off_wait(apexk_hand_off *hand_off, uint64_t ticket, int64_t timeout_us,
                                                       int32_t *worker, int64_t *start_ns, int64_t *end_ns) {
  if (!hand_off || !worker || !start_ns || !end_ns) return APEXK_TRANSFER_BAD_ARGUMENT;
  return hand_off->hand_off.wait(ticket, timeout_us, worker, start_ns, end_ns);
}

APEXK_EXPORT apexk_transfer_status apexk_hand_off_failure(apexk_hand_off *hand_off, uint64_t *ticket, int32_t *worker) {
  if (!hand_off || !ticket || !worker) return APEXK_TRANSFER_BAD_ARGUMENT;
  return hand_off->hand_off.failure(ticket, worker);
}

APEXK_EXPORT apexk_transfer_status apexk_hand_off_destroy(apexk_hand_off *hand_off, int64_t timeout_us) {
  if (!hand_off) return APEXK_TRANSFER_OK;
  if (hand_off->hand_off.drain(timeout_us)) {
    delete hand_off;
    return APEXK_TRANSFER_OK;
  }
  hand_off->hand_off.end_thread();
  return APEXK_TRANSFER_NOT_DONE;
}

APEXK_EXPORT const char *apexk_transfer_status_text(apexk_transfer_status status) {
  switch (status) {
    case APEXK_TRANSFER_OK: return "done";
    case APEXK_TRANSFER_BAD_ARGUMENT: return "a null pointer, a count or size out of range, or an unknown tag or ticket";
    case APEXK_TRANSFER_FULL: return "no place left for another job";
    case APEXK_TRANSFER_CUDA: return "a CUDA call failed";
    case APEXK_TRANSFER_NO_MEMORY: return "out of memory";
    case APEXK_TRANSFER_NO_THREAD: return "the system refused to start a thread";
    case APEXK_TRANSFER_NOT_DONE: return "still under way";
    case APEXK_TRANSFER_WORKER: return "the CPU kernels failed";
  }
  return "unknown status";
}
