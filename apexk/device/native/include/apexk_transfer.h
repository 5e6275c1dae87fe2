/* C interface of the native transfer layer: the channel (host-to-device copies of experts) and the hand-off (CPU experts
 * started by a stream and waited for by a stream), with no Python between.
 *
 * CUDA is reached through a table of function pointers, never linked: on a GPU they are libcudart's and libcuda's own
 * functions, looked up at run time; in tests and latency measurements they are the fake runtime's (apexk_fake_cuda.h).
 *
 * Functions return an apexk_transfer_status. Nothing here throws, and nothing but create and destroy allocates. */
#ifndef APEXK_TRANSFER_H
#define APEXK_TRANSFER_H

#include <stddef.h>
#include <stdint.h>

#include "apexk_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct apexk_stream_t *apexk_stream; /* cudaStream_t, CUstream */
typedef struct apexk_event_t *apexk_event;   /* cudaEvent_t, CUevent */
typedef void (*apexk_host_fn)(void *user);

enum { APEXK_CUDA_OK = 0, APEXK_CUDA_NOT_READY = 600 };             /* what cudaEventQuery answers */
enum { APEXK_HOST_TO_DEVICE = 1, APEXK_DEVICE_TO_HOST = 2 };        /* cudaMemcpyKind */
enum { APEXK_EVENT_BLOCKING = 1, APEXK_EVENT_NO_TIMING = 2 };       /* cudaEventBlockingSync, cudaEventDisableTiming */

/* Each field has the type of the CUDA function named beside it, so an address found by dlsym goes in as it is. */
typedef struct apexk_cuda_api {
  int (*set_device)(int device);                                                 /* cudaSetDevice */
  int (*memcpy_async)(void *dst, const void *src, size_t bytes, int kind, apexk_stream stream); /* cudaMemcpyAsync */
  int (*event_create)(apexk_event *event, unsigned flags);                       /* cudaEventCreateWithFlags */
  int (*event_destroy)(apexk_event event);                                       /* cudaEventDestroy */
  int (*event_record)(apexk_event event, apexk_stream stream);                   /* cudaEventRecord */
  int (*event_query)(apexk_event event);                                         /* cudaEventQuery */
  int (*event_synchronize)(apexk_event event);                                   /* cudaEventSynchronize */
  int (*stream_wait_event)(apexk_stream stream, apexk_event event, unsigned flags); /* cudaStreamWaitEvent */
  int (*stream_synchronize)(apexk_stream stream);                                /* cudaStreamSynchronize */
  int (*launch_host_func)(apexk_stream stream, apexk_host_fn fn, void *user);    /* cudaLaunchHostFunc */
  int (*stream_write_value64)(apexk_stream stream, uint64_t address, uint64_t value, unsigned flags); /* cuStreamWriteValue64_v2, or null */
  int (*stream_wait_value64)(apexk_stream stream, uint64_t address, uint64_t value, unsigned flags);  /* cuStreamWaitValue64_v2, or null; flags 0: >= */
  int (*get_last_error)(void); /* cudaGetLastError: called after a failure, else the next launch check on this thread would find it */
} apexk_cuda_api;

typedef enum apexk_transfer_status {
  APEXK_TRANSFER_OK = 0,
  APEXK_TRANSFER_BAD_ARGUMENT = 1, /* a null pointer, a count or size out of range, an unknown tag or ticket */
  APEXK_TRANSFER_FULL = 2,         /* the speculative queue, or the ring of hand-offs, has no place left */
  APEXK_TRANSFER_CUDA = 3,         /* a CUDA call failed; its code was stored where the function says */
  APEXK_TRANSFER_NO_MEMORY = 4,
  APEXK_TRANSFER_NO_THREAD = 5,    /* the system refused to start a thread */
  APEXK_TRANSFER_NOT_DONE = 6,     /* still under way (after the time given to a wait) */
  APEXK_TRANSFER_WORKER = 7,       /* the CPU kernels refused or failed; their apexk_status was stored */
} apexk_transfer_status;

const char *apexk_transfer_status_text(apexk_transfer_status status);

/* ---- Channel ----------------------------------------------------------------------------------------------------
 *
 * One CUDA stream, hence one order: a copy never runs beside or before one that was issued ahead of it, so two copies
 * into one slot need no event. Exact copies are issued by the calling thread, whole, before `apexk_channel_copy` returns:
 * their events are recorded before anybody can wait for them. Speculative copies are issued by the channel's thread in
 * pieces of half a chunk, two at a time: an exact copy finds at most one chunk ahead of it. A speculative copy begins when
 * the one before it has landed, so that a stop finds at most one slot half written. */
typedef struct apexk_channel apexk_channel;

typedef struct apexk_copy {
  void *dst;
  const void *src;   /* pinned, or the copy is slow and synchronous */
  uint64_t bytes;
  apexk_event after; /* write-after-read: the copy starts after it; null: at once. Recorded already; valid until the copy is reported */
  apexk_event start; /* of a speculative one: recorded ahead of the first byte; null: nobody asks */
  apexk_event done;  /* of a speculative one: recorded behind the last byte */
  int64_t tag;       /* the caller's name of it, >= 0 */
  int32_t layer;
  int32_t error;     /* out, of exact copies: 0, or the CUDA error; dst holds nothing usable */
  int32_t expert;    /* for the NVTX range of the thread that issues it */
  int32_t reserved;
} apexk_copy;

typedef struct apexk_stopped { /* what apexk_channel_stop found */
  int32_t landed;  /* how many tags of landed copies were stored */
  int32_t failed;  /* how many of failed ones, behind them; their dst holds nothing usable */
  int32_t error;   /* the CUDA error of the last failed one */
  int32_t reserved;
  int64_t running; /* tag, or -1 */
  uint64_t left;   /* bytes of the running copy that were not seen to be done */
} apexk_stopped;

/* `capacity`: how many speculative copies may be queued, or landed or failed and not yet reported. `cuda_error` gets the code of a
 * failed CUDA call. The thread starts here and sleeps while it has nothing to issue. `stream` stays the caller's. */
apexk_transfer_status apexk_channel_create(const apexk_cuda_api *api, int32_t device, apexk_stream stream, uint64_t chunk_bytes,
                                           int32_t capacity, apexk_channel **channel, int32_t *cuda_error);
/* Issues exact copies in order, each after its `after` on the stream, between `start` (null: nobody asks) and `done`, which all
 * of them share: an event for each would cost the host, and the link between two copies, more than anybody has of it.
 * APEXK_TRANSFER_CUDA when any failed; the others have been issued all the same, and each copy's `error` says which. Where all
 * have failed, `done` was not recorded. */
apexk_transfer_status apexk_channel_copy(apexk_channel *channel, apexk_copy *copies, int32_t count, apexk_event start, apexk_event done);
/* Queues speculative copies ahead of those queued before; the one under way is finished first. `after` is waited for by the
 * channel's thread, not on the stream, so that it holds up no exact copy. All or nothing: FULL queues none. */
apexk_transfer_status apexk_channel_speculate(apexk_channel *channel, const apexk_copy *copies, int32_t count);
/* Drops what is queued for `layer` and below; none of that has begun. The one that has, if it is of these layers, goes to
 * `stopped->running`, and the channel's thread waits until the caller has answered with `keep` or `abandon` (the next stop
 * abandons what nobody answered for). Tags of the copies of every layer that have landed since the last stop, then of
 * those that failed, go to `tags [capacity]`. Copies for later layers go on. Never waits for a copy. */
apexk_transfer_status apexk_channel_stop(apexk_channel *channel, int32_t layer, int64_t *tags, apexk_stopped *stopped);
/* Issues the rest of the running copy and records its `done`. */
apexk_transfer_status apexk_channel_keep(apexk_channel *channel, int64_t tag, int32_t *cuda_error);
/* Issues nothing more of it. What is under way still lands in dst, but before any later copy. */
apexk_transfer_status apexk_channel_abandon(apexk_channel *channel, int64_t tag);
/* Speculative bytes issued and not seen to be done: what an exact copy asked for now would wait for. */
uint64_t apexk_channel_in_flight(apexk_channel *channel);
/* Drops the queue, ends the thread, waits for the stream: afterwards nothing writes to a dst. */
void apexk_channel_destroy(apexk_channel *channel);

/* ---- Hand-off -----------------------------------------------------------------------------------------------------
 *
 *   rows stream:  [the caller's copies of x, ids and weights to pinned memory] -> rows are there
 *   CPU:                                                           rows are there -> apexk_ffn_submit -> rows of `out` are there
 *   join stream:                                                                 rows of `out` are there -> [the caller's copy back, merge]
 *
 * "There" is a flag in mapped pinned memory: written by the stream (stream_write_value64) and polled by the hand-off's thread,
 * which sleeps while no job is outstanding; written by the CPU worker and waited for by the stream (stream_wait_value64).
 * Without stream memory operations host functions take their place: the first starts the job, the second blocks its stream. */
typedef struct apexk_hand_off apexk_hand_off;

typedef struct apexk_cpu_queue { /* functions of the CPU kernels' library, and a pool that outlives the hand-off */
  apexk_pool *pool;
  apexk_status (*submit)(apexk_pool *pool, const apexk_ffn_call *call, apexk_done_fn done, void *user, apexk_job **job);
  void (*release)(apexk_job *job);
} apexk_cpu_queue;

enum { APEXK_BY_FLAGS = 0, APEXK_BY_HOST_FUNCTIONS = 1 };

/* `flags`: 128 * depth bytes of mapped pinned memory, 64-byte aligned, zero; `flags_device`: its address on the device.
 * `depth`: how many jobs may be outstanding. `max_experts`: the longest `experts` list. */
apexk_transfer_status apexk_hand_off_create(const apexk_cuda_api *api, const apexk_cpu_queue *queue, int32_t how, void *flags,
                                            uint64_t flags_device, int32_t depth, int32_t max_experts,
                                            apexk_hand_off **hand_off, int32_t *cuda_error);
/* Asks for `call` once everything now on `rows` is done; `layer` is for the NVTX range of the thread that starts it. The struct
 * and its `experts` are copied; what the other pointers name must stay until the job is done. FULL when `depth` jobs are
 * outstanding. */
apexk_transfer_status apexk_hand_off_submit(apexk_hand_off *hand_off, const apexk_ffn_call *call, apexk_stream rows, int32_t layer,
                                            uint64_t *ticket, int32_t *cuda_error);
/* What is put on `stream` afterwards runs once the job is done. A ticket is joined at most once. */
apexk_transfer_status apexk_hand_off_join(apexk_hand_off *hand_off, uint64_t ticket, apexk_stream stream, int32_t *cuda_error);
/* Sleeps until the job is done, `timeout_us` at most: OK, NOT_DONE, or WORKER with the kernels' status in `worker`. The times are
 * CLOCK_MONOTONIC: when the rows were seen to be there, when the last row of `out` was. Known for the last `depth` tickets. */
apexk_transfer_status apexk_hand_off_wait(apexk_hand_off *hand_off, uint64_t ticket, int64_t timeout_us, int32_t *worker,
                                          int64_t *start_ns, int64_t *end_ns);
/* The first failed job since the last call of this: WORKER and its ticket and status, or OK. Never waits. A failed job has set
 * its flag, so that no stream hangs, and has not written `out`. */
apexk_transfer_status apexk_hand_off_failure(apexk_hand_off *hand_off, uint64_t *ticket, int32_t *worker);
/* Waits for outstanding jobs, `timeout_us` at most (a stream that failed never says that its rows are there), then ends the
 * thread. NOT_DONE: some were outstanding; their streams must not run on, and the memory they know stays allocated. */
apexk_transfer_status apexk_hand_off_destroy(apexk_hand_off *hand_off, int64_t timeout_us);

#ifdef __cplusplus
}
#endif
#endif
