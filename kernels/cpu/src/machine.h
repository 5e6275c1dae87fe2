// What this process may use: processors, their cores and memory nodes, the quota of its control group.
#pragma once
#include <stddef.h>

#include <string>
#include <vector>

namespace apexk {

struct Node {
  int id;
  std::vector<int> processors;  // those that this process may use
};

struct Machine {
  std::vector<Node> nodes;  // at least one; those that hold no usable processor are left out
  int limit = 1;            // threads beyond this only take turns: min(usable processors, quota)
  int threads = 1;          // the default: min(cores of the usable processors, quota)

  int node_of(int processor) const;  // index into `nodes`, 0 where it is not known
  // `index[i]` = index of the node that holds the page at `address[i]`, or -1 where that is not known.
  void (*homes)(const Machine &machine, size_t count, const void *const *address, int *index);
};

// Reads /proc and /sys below `root`: "" is this machine, anything else a copy of such files for tests.
Machine read_machine(const std::string &root);

}  // namespace apexk
