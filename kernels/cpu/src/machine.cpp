#include "machine.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <thread>

namespace apexk {
namespace {

std::string text_of(const std::string &path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// "0-2,5" as 0 1 2 5; empty where the text is no list.
std::vector<int> listed(const std::string &text) {
  std::vector<int> numbers;
  int first, used;
  for (const char *at = text.c_str(); sscanf(at, "%d%n", &first, &used) == 1; at++) {
    at += used;
    int last = first;
    if (sscanf(at, "-%d%n", &last, &used) == 1) at += used;
    for (; first <= last; first++) numbers.push_back(first);
    if (*at != ',') break;
  }
  return numbers;
}

// The calling thread's affinity mask.
std::vector<int> usable_processors(const std::string &root) {
  const std::string status = text_of(root + "/proc/thread-self/status"), key = "Cpus_allowed_list:";
  const size_t at = status.find(key);
  std::vector<int> usable = at == std::string::npos ? std::vector<int>{} : listed(status.substr(at + key.size()));
  for (int i = 0; usable.empty() && i < static_cast<int>(std::thread::hardware_concurrency()); i++) usable.push_back(i);
  return usable.empty() ? std::vector<int>{0} : usable;
}

int cores(const std::string &root, const std::vector<int> &processors) {
  std::set<int> found;  // each by the first of its processors
  for (const int processor : processors) {
    const std::string folder = root + "/sys/devices/system/cpu/cpu" + std::to_string(processor);
    const std::vector<int> siblings = listed(text_of(folder + "/topology/thread_siblings_list"));
    found.insert(siblings.empty() ? processor : siblings[0]);
  }
  return static_cast<int>(found.size());
}

std::vector<Node> nodes(const std::string &root, const std::vector<int> &usable) {
  const std::string folder = root + "/sys/devices/system/node/";
  std::vector<Node> found;
  for (const int id : listed(text_of(folder + "online"))) {
    Node node{id, {}};
    for (const int processor : listed(text_of(folder + "node" + std::to_string(id) + "/cpulist"))) {
      if (std::count(usable.begin(), usable.end(), processor)) node.processors.push_back(processor);
    }
    if (!node.processors.empty()) found.push_back(node);
  }
  if (found.empty()) found.push_back({0, usable});
  return found;
}

// Whole processors that a quota of `quota` per `period` buys; `none` where there is no quota ("max" or -1).
int bought(const std::string &quota_and_period, int none) {
  long quota, period;
  if (sscanf(quota_and_period.c_str(), "%ld %ld", &quota, &period) != 2 || quota <= 0 || period <= 0) return none;
  return static_cast<int>((quota + period - 1) / period);
}

// The least quota on the way from the process's control group up to the root of what is mounted. Inside a container its
// own group usually is that root, whatever path /proc gives.
int quota(const std::string &root, int none) {
  int least = none;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    const bool v2 = names.empty();
    if (!v2 && ("," + names + ",").find(",cpu,") == std::string::npos) continue;
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      const std::string folder = root + "/sys/fs/cgroup" + (v2 ? "" : "/cpu") + path;
      const std::string text = v2 ? text_of(folder + "/cpu.max")
                                  : text_of(folder + "/cpu.cfs_quota_us") + " " + text_of(folder + "/cpu.cfs_period_us");
      least = std::min(least, bought(text, none));
      if (path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

void ask_kernel([[maybe_unused]] const Machine &machine, size_t count, [[maybe_unused]] const void *const *address, int *index) {
  std::fill(index, index + count, -1);
#ifdef SYS_move_pages
  std::vector<int> ids(count, -1);
  if (syscall(SYS_move_pages, 0, count, address, nullptr, ids.data(), 0) != 0) return;  // no target nodes: only asks
  for (size_t i = 0; i < count; i++) {
    for (size_t n = 0; n < machine.nodes.size(); n++) {
      if (machine.nodes[n].id == ids[i]) index[i] = static_cast<int>(n);
    }
  }
#endif
}

}  // namespace

int Machine::node_of(int processor) const {
  for (size_t n = 0; n < nodes.size(); n++) {
    const std::vector<int> &here = nodes[n].processors;
    if (std::count(here.begin(), here.end(), processor)) return static_cast<int>(n);
  }
  return 0;
}

Machine read_machine(const std::string &root) {
  const std::vector<int> usable = usable_processors(root);
  const int processors = static_cast<int>(usable.size()), most = quota(root, processors);
  Machine machine;
  machine.nodes = nodes(root, usable);
  machine.limit = std::min(processors, most);
  machine.threads = std::min(cores(root, usable), most);
  machine.homes = ask_kernel;
  return machine;
}

}  // namespace apexk
