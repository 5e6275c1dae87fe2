// From a checked call to an ordered list of tasks. Pure: no threads, no weights touched.
#pragma once
#include <vector>

#include "kernels.h"

namespace apexk {

enum class Step : uint8_t { pack, gate_up, down };

struct Task {
  int32_t unit, row, rows;
  Step step;
};

// The task list is one sequence for all threads: each takes the next task, and a task waits only for earlier ones. So
// some thread can always go on, with any number of threads. In the list a unit's steps stand `lag` units apart, far
// enough that a wait is rare, and near enough that `ring` units' worth of packed activations suffice for any call.
struct Plan {
  std::vector<int32_t> pairs;  // grouped by expert
  std::vector<Unit> units;     // heaviest expert first; packed_x and packed_h are set by the job
  std::vector<Task> tasks;
  int gate_up_tasks = 0, down_tasks = 0;  // of each unit
  int ring = 0;
  int largest_unit = 0;  // tokens
};

apexk_status check_call(const apexk_ffn_call &call);
apexk_status make_plan(const apexk_ffn_call &call, int threads, Plan *plan);

}  // namespace apexk
