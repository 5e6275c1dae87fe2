// The C interface: handles, and exceptions turned into statuses.
#include "apexk_cpu.h"

#include <memory>
#include <new>
#include <system_error>

#include "dispatch.h"
#include "pool.h"

#define APEXK_EXPORT extern "C" __attribute__((visibility("default")))

struct apexk_pool {
  apexk::Pool pool;
};

struct apexk_job {
  std::shared_ptr<apexk::Job> job;
};

namespace {

template <class Body>
apexk_status guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return APEXK_NO_MEMORY;
  } catch (const std::system_error &) {
    return APEXK_NO_THREAD;
  }
}

// On the threads of `team`, or, where it is null, of the pool and the calling one.
template <class One>
apexk_status run(apexk_pool *pool, const One *call, apexk_team_fn team) noexcept {
  if (pool == nullptr || call == nullptr) return APEXK_BAD_ARGUMENT;
  return guarded([&] {
    std::shared_ptr<apexk::Job> job;
    const int threads = pool->pool.threads();
    const apexk_status status = pool->pool.submit(*call, team == nullptr ? 1 : threads, nullptr, nullptr, &job);
    if (status != APEXK_OK) return status;
    if (team != nullptr && !job->single_file()) {
      team([](void *one) { static_cast<apexk::Job *>(one)->help(); }, job.get(), static_cast<unsigned>(threads), 0);
    }
    job->wait();
    return status;
  });
}

}  // namespace

APEXK_EXPORT apexk_status apexk_pool_create(int32_t threads, const char *isa, apexk_pool **pool) {
  return apexk_pool_create_at(nullptr, threads, isa, pool);
}

APEXK_EXPORT apexk_status apexk_pool_create_at(const char *root, int32_t threads, const char *isa, apexk_pool **pool) {
  if (threads < 0 || pool == nullptr) return APEXK_BAD_ARGUMENT;
  return guarded([&] {
    const apexk::Isa *chosen = nullptr;
    const apexk_status status = apexk::choose_isa(isa, &chosen);
    if (status != APEXK_OK) return status;
    *pool = new apexk_pool{{*chosen, threads, apexk::read_machine(root == nullptr ? "" : root)}};
    return APEXK_OK;
  });
}

APEXK_EXPORT void apexk_pool_destroy(apexk_pool *pool) { delete pool; }

APEXK_EXPORT int32_t apexk_pool_threads(const apexk_pool *pool) { return pool->pool.threads(); }

APEXK_EXPORT const char *apexk_pool_isa(const apexk_pool *pool) { return pool->pool.isa().name; }

APEXK_EXPORT apexk_status apexk_ffn_run(apexk_pool *pool, const apexk_ffn_call *call) { return run(pool, call, nullptr); }

APEXK_EXPORT apexk_status apexk_ffn_run_in(apexk_pool *pool, const apexk_ffn_call *call, apexk_team_fn team) {
  return team == nullptr ? APEXK_BAD_ARGUMENT : run(pool, call, team);
}

APEXK_EXPORT apexk_status apexk_linear_run(apexk_pool *pool, const apexk_linear_call *call, apexk_team_fn team) {
  return run(pool, call, team);
}

APEXK_EXPORT apexk_status apexk_ffn_submit(apexk_pool *pool, const apexk_ffn_call *call, apexk_done_fn done, void *user,
                                           apexk_job **job) {
  if (pool == nullptr || call == nullptr || job == nullptr) return APEXK_BAD_ARGUMENT;
  return guarded([&] {
    auto handle = std::make_unique<apexk_job>();
    const apexk_status status = pool->pool.submit(*call, 0, done, user, &handle->job);
    if (status == APEXK_OK) *job = handle.release();
    return status;
  });
}

APEXK_EXPORT int32_t apexk_job_done(const apexk_job *job) { return job->job->done(); }

APEXK_EXPORT apexk_status apexk_job_wait(apexk_job *job) {
  job->job->wait();
  return APEXK_OK;
}

APEXK_EXPORT void apexk_job_release(apexk_job *job) { delete job; }

APEXK_EXPORT int32_t apexk_default_threads(void) { return apexk::read_machine("").threads; }

APEXK_EXPORT apexk_status apexk_machine_at(const char *root, int32_t *threads, int32_t *limit, int32_t *nodes) {
  if (threads == nullptr || limit == nullptr || nodes == nullptr) return APEXK_BAD_ARGUMENT;
  return guarded([&] {
    const apexk::Machine machine = apexk::read_machine(root == nullptr ? "" : root);
    *threads = machine.threads;
    *limit = machine.limit;
    *nodes = static_cast<int32_t>(machine.nodes.size());
    return APEXK_OK;
  });
}

APEXK_EXPORT int32_t apexk_isa_count(void) { return apexk::isa_count(); }

APEXK_EXPORT const char *apexk_isa_name(int32_t index) { return apexk::isa_at(index).name; }

APEXK_EXPORT int32_t apexk_isa_available(int32_t index) { return apexk::isa_available(apexk::isa_at(index)); }

APEXK_EXPORT const char *apexk_status_text(apexk_status status) {
  switch (status) {
    case APEXK_OK: return "done";
    case APEXK_BAD_ARGUMENT: return "a null pointer, a size below its minimum or an unknown enum value";
    case APEXK_BAD_EXPERT_ID: return "an expert id is outside [0, number of blocks) or is asked for twice";
    case APEXK_NO_BLOCK: return "an expert to compute has no block on this host (address 0)";
    case APEXK_MISALIGNED: return "an address is not a multiple of its element's size";
    case APEXK_UNKNOWN_ISA: return "no implementation has this name";
    case APEXK_UNAVAILABLE_ISA: return "this machine does not offer the instruction set";
    case APEXK_NO_MEMORY: return "out of memory";
    case APEXK_NO_THREAD: return "the system refused to start a thread";
  }
  return "unknown status";
}
