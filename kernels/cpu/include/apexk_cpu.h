/* C interface of the CPU kernels: the grouped expert FFN, and a linear layer.
 *
 *   out[p] = weight[p] * W2_e ( act(W1_e x_t) * (W3_e x_t) ),   p = t*topk + k,  e = topk_ids[p]
 *
 * for every pair p whose expert is in `experts`; other rows of `out` are not touched. An expert is one block of memory:
 * w13 [2I, H] (gate rows, then up rows), then w2 [H, I], row-major, then, with `biases`, b13 [2I] and b2 [H], all in the
 * dtype of x. Sums are in fp32; the activated row is rounded to the dtype of x before W2. With `weight_on_input` the
 * weight multiplies x_t instead, rounded to its dtype. With `summed` a token has one row, the sum of its pairs in
 * ascending order of expert id and then of k, 0 where it has none; every row of `out` is written.
 *
 * Every function returns a status; nothing has been written to `out` when it is not APEXK_OK. Nothing here throws. */
#ifndef APEXK_CPU_H
#define APEXK_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum apexk_status {
  APEXK_OK = 0,
  APEXK_BAD_ARGUMENT = 1,    /* a null pointer, a size below its minimum, an unknown enum value */
  APEXK_BAD_EXPERT_ID = 2,   /* an id in topk_ids or experts lies outside [0, num_experts), or is asked for twice */
  APEXK_NO_BLOCK = 3,        /* an expert in `experts` has address 0: its weights are not on this host */
  APEXK_MISALIGNED = 4,      /* a pointer is not a multiple of its element's size */
  APEXK_UNKNOWN_ISA = 5,     /* no implementation has this name */
  APEXK_UNAVAILABLE_ISA = 6, /* built, but this machine or its kernel does not offer it */
  APEXK_NO_MEMORY = 7,
  APEXK_NO_THREAD = 8,       /* the system refused to start a thread */
} apexk_status;

typedef enum apexk_dtype { APEXK_BF16 = 0, APEXK_FP16 = 1, APEXK_FP32 = 2 } apexk_dtype;

typedef enum apexk_activation {
  APEXK_SILU = 0,
  APEXK_GELU = 1,       /* by the error function */
  APEXK_GELU_TANH = 2,
  APEXK_SWIGLU_OSS = 3, /* gpt-oss: clamped at 7, sigmoid(1.702 gate), up + 1 */
} apexk_activation;

typedef struct apexk_ffn_call {
  const void *x;             /* [tokens, hidden] of dtype, rows x_stride elements apart */
  const uint64_t *blocks;    /* [num_experts] addresses of expert blocks, 0 = not here */
  const void *topk_ids;      /* [tokens, topk] int64 or int32 */
  const float *topk_weights; /* [tokens, topk] */
  const int32_t *experts;    /* [expert_count] ids to compute, each once */
  float *out;                /* [tokens*topk, hidden]; summed: [tokens, hidden] */
  int64_t tokens, x_stride;
  int32_t hidden, intermediate, topk, num_experts, expert_count;
  int32_t id_bytes;          /* 4 or 8: the width of topk_ids */
  int32_t dtype, activation; /* apexk_dtype, apexk_activation */
  int32_t biases, weight_on_input; /* 0 or 1 */
  int32_t summed;            /* 0 or 1 */
} apexk_ffn_call;

/* A linear layer, y[t] = W x_t + b: sums in fp32, rounded once, to the dtype of all four. */
typedef struct apexk_linear_call {
  const void *x;             /* [tokens, inputs], rows x_stride elements apart */
  const void *weight;        /* [outputs, inputs] */
  const void *bias;          /* [outputs], or null */
  void *y;                   /* [tokens, outputs] */
  int64_t tokens, x_stride;
  int32_t inputs, outputs;   /* at least 1 */
  int32_t dtype;             /* apexk_dtype */
} apexk_linear_call;

/* Threads and scratch memory, with one owner. A job's scratch holds packed activations for a few slices of at most 144
 * tokens, (hidden + intermediate) * 4 bytes a token (4 slices with few threads and one node, more with many), and 124 KiB for each
 * thread. It does not grow with the tokens; the next job uses it again. */
typedef struct apexk_pool apexk_pool;
typedef struct apexk_job apexk_job; /* one submitted call */
typedef void (*apexk_done_fn)(void *user, apexk_status status);

/* Starts `threads` threads (0: the default). `isa` NULL or empty: the best that this machine runs. */
apexk_status apexk_pool_create(int32_t threads, const char *isa, apexk_pool **pool);
/* Finishes what is queued, then ends the threads. */
void apexk_pool_destroy(apexk_pool *pool);
/* As apexk_pool_create, reading what there is of processors, memory nodes and quotas below `root`/proc and `root`/sys:
 * for tests of machines that are not at hand. NULL or empty: this machine. */
apexk_status apexk_pool_create_at(const char *root, int32_t threads, const char *isa, apexk_pool **pool);
int32_t apexk_pool_threads(const apexk_pool *pool);
const char *apexk_pool_isa(const apexk_pool *pool);

/* Computes and returns; the calling thread works too, as one of the pool's `threads`. */
apexk_status apexk_ffn_run(apexk_pool *pool, const apexk_ffn_call *call);
/* As apexk_ffn_run, on the caller's own threads instead of the pool's: `team` runs `body(data)` on up to `threads` threads at
 * once, the calling one among them, and returns when all have returned. It has the type of GOMP_parallel, which is the team
 * of the caller's OpenMP code. */
typedef void (*apexk_team_fn)(void (*body)(void *data), void *data, unsigned threads, unsigned flags);
apexk_status apexk_ffn_run_in(apexk_pool *pool, const apexk_ffn_call *call, apexk_team_fn team);
/* Computes and returns, on the threads of `team` as apexk_ffn_run_in, or, where it is null, as apexk_ffn_run. */
apexk_status apexk_linear_run(apexk_pool *pool, const apexk_linear_call *call, apexk_team_fn team);
/* Checks, queues and returns. Buffers must outlive the job; the call struct, `blocks`, `experts` and `topk_ids` need
 * not. `done` may be null; otherwise the thread that finishes the last row calls it, once. */
apexk_status apexk_ffn_submit(apexk_pool *pool, const apexk_ffn_call *call, apexk_done_fn done, void *user,
                              apexk_job **job);
int32_t apexk_job_done(const apexk_job *job);    /* 1 once every row is written */
apexk_status apexk_job_wait(apexk_job *job);     /* helps where a place is free, then sleeps until done */
void apexk_job_release(apexk_job *job);          /* gives the handle back; the work itself goes on */

int32_t apexk_default_threads(void);             /* min(cores in the affinity mask, cgroup quota) */
/* The default, the number of threads beyond which they only take turns, and the memory nodes; `root` as above. */
apexk_status apexk_machine_at(const char *root, int32_t *threads, int32_t *limit, int32_t *nodes);
int32_t apexk_isa_count(void);
const char *apexk_isa_name(int32_t index);       /* best first */
int32_t apexk_isa_available(int32_t index);
const char *apexk_status_text(apexk_status status);

#ifdef __cplusplus
}
#endif
#endif
