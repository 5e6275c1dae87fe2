/* A CUDA runtime without a GPU: a thread for each stream, host memory for device memory, a rate limit for the link, random
 * delays, and calls that fail when told. For tests, and for the latency of the native code; it says nothing about a GPU.
 *
 * As in CUDA: streams run in order; a wait names the event's latest record; a wait for an event never recorded is none; an
 * error is also kept as its thread's last error. Functions return CUDA error codes. One runtime at a time in a process. */
#ifndef APEXK_FAKE_CUDA_H
#define APEXK_FAKE_CUDA_H

#include "apexk_transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct apexk_fake_config {
  uint64_t seed;
  double link_bytes_per_s;      /* shared by the copies of one direction; 0: as fast as memory */
  int32_t delay_us;             /* every second operation, by the seed, is delayed by up to this */
  int32_t one_callback_thread;  /* host functions of all streams run in turn on one thread, as CUDA may do */
  uint64_t memory_bytes;        /* device memory in all */
  int32_t eager;                /* an operation that finds its stream idle and has nothing to wait for runs in the call itself:
                                   for timing a caller, which then wakes no thread. No rate limit, no delay */
} apexk_fake_config;

typedef enum apexk_fake_call { /* what can be made to fail */
  APEXK_FAKE_MALLOC, APEXK_FAKE_MALLOC_HOST, APEXK_FAKE_REGISTER, APEXK_FAKE_MEMCPY, APEXK_FAKE_EVENT_CREATE,
  APEXK_FAKE_EVENT_RECORD, APEXK_FAKE_EVENT_QUERY, APEXK_FAKE_EVENT_SYNCHRONIZE, APEXK_FAKE_WAIT_EVENT,
  APEXK_FAKE_HOST_FUNC, APEXK_FAKE_WRITE_VALUE, APEXK_FAKE_WAIT_VALUE, APEXK_FAKE_LAUNCH, APEXK_FAKE_CALLS
} apexk_fake_call;

typedef enum apexk_fake_counter {
  APEXK_FAKE_STREAMS, APEXK_FAKE_EVENTS, APEXK_FAKE_ALLOCATIONS, APEXK_FAKE_REGISTRATIONS, /* live */
  APEXK_FAKE_DEVICE_BYTES,                                                               /* live */
  APEXK_FAKE_MADE,           /* streams, events, allocations and registrations ever made */
  APEXK_FAKE_PAGEABLE_COPIES, /* copies whose host side was neither pinned nor registered */
  APEXK_FAKE_COUNTERS
} apexk_fake_counter;

int apexk_fake_start(const apexk_fake_config *config); /* 4 when one is running */
void apexk_fake_stop(void);                            /* ends every thread, whatever it waits for; memory stays until it is freed */
void apexk_fake_table(apexk_cuda_api *api);
void apexk_fake_fail(apexk_fake_call call, int32_t after, int32_t code); /* once, the `after`-th next call */
int64_t apexk_fake_count(apexk_fake_counter counter);

int apexk_fake_stream_create(apexk_stream *stream);
int apexk_fake_stream_query(apexk_stream stream);
int apexk_fake_event_ns(apexk_event event, int64_t *ns);             /* when its latest record was done, CLOCK_MONOTONIC */
int apexk_fake_launch(apexk_stream stream, apexk_host_fn kernel, void *user); /* runs on the stream's own thread */
int apexk_fake_malloc(void **memory, uint64_t bytes);                /* page-aligned */
int apexk_fake_malloc_host(void **memory, uint64_t bytes);
int apexk_fake_free(void *memory);                                   /* of either kind */
int apexk_fake_host_register(void *memory, uint64_t bytes);
int apexk_fake_host_unregister(void *memory);

#ifdef __cplusplus
}
#endif
#endif
