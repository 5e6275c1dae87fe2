// The channel and the hand-off on the fake runtime, without Python: for sanitizers and for mutants.
//
//   selftest [channel | hand_off | scenario ...]    all when none is named; exit status 1 at the first difference
#include "selftest.h"

#include <dirent.h>
#include <time.h>

#include <new>

std::atomic<long> allocations{0};

void *operator new(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void *memory = malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void *memory) noexcept { free(memory); }
void operator delete(void *memory, size_t) noexcept { free(memory); }

int threads_of_process() {
  int count = -2;  // . and ..
  DIR *folder = opendir("/proc/self/task");
  while (readdir(folder)) count++;
  closedir(folder);
  return count;
}

double idle_cpu_share() {
  timespec before, after;
  sleep_ms(20);  // past every spin
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  sleep_ms(100);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  return ((after.tv_sec - before.tv_sec) * 1e9 + (after.tv_nsec - before.tv_nsec)) / 100e6;
}

int main(int count, char **names) {
  const char *limit = getenv("APEXK_SELFTEST_SECONDS");
  struct Group {
    const char *name;
    std::vector<Scenario> scenarios;
  };
  const Group groups[] = {{"channel", channel_scenarios()}, {"hand_off", hand_off_scenarios()}};
  std::thread([] {}).join();  // the thread sanitizer adds one of its own with the first
  int ran = 0;
  for (const Group &group : groups) {
    for (const Scenario &scenario : group.scenarios) {
      bool wanted = count == 1;
      for (int i = 1; i < count; i++) wanted |= !strcmp(names[i], group.name) || !strcmp(names[i], scenario.name);
      if (!wanted) continue;
      const int threads = threads_of_process();
      alarm(limit ? atoi(limit) : 60);  // one that hangs
      scenario.run();
      await([threads] { return threads_of_process() <= threads; });  // a thread that has ended leaves the list a little later
      printf("%s %s: as expected\n", group.name, scenario.name);
      fflush(stdout);
      ran++;
    }
  }
  if (ran) return 0;
  printf("no such scenario\n");
  return 2;
}
