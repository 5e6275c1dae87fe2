// How many threads this process may really use.
#include <sched.h>
#include <stdio.h>

#include <algorithm>

#include "pool.h"

namespace apexk {
namespace {

// Whole processors that a quota of `quota` per `period` buys; 0 where there is no quota.
int processors(long quota, long period) {
  return quota > 0 && period > 0 ? static_cast<int>(std::max(1L, (quota + period - 1) / period)) : 0;
}

long number_in(const char *path) {
  long value = -1;
  if (FILE *file = fopen(path, "r")) {
    if (fscanf(file, "%ld", &value) != 1) value = -1;
    fclose(file);
  }
  return value;
}

// Inside a container the process's own group is mounted at these places.
int cgroup_v2() {
  long quota = -1, period = -1;
  if (FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r")) {
    if (fscanf(file, "%ld %ld", &quota, &period) != 2) quota = -1;  // "max 100000": no quota
    fclose(file);
  }
  return processors(quota, period);
}

int cgroup_v1() {
  return processors(number_in("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), number_in("/sys/fs/cgroup/cpu/cpu.cfs_period_us"));
}

}  // namespace

int default_threads() {
  cpu_set_t mask;
  int threads = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
  for (const int limit : {cgroup_v2(), cgroup_v1()}) {
    if (limit > 0) threads = std::min(threads, limit);
  }
  return std::max(threads, 1);
}

}  // namespace apexk
