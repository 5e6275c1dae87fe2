// From a checked call to an ordered list of tasks. Pure: no threads, no weights touched.
#pragma once
#include <vector>

#include "kernels.h"
#include "machine.h"

namespace apexk {

enum class Step : uint8_t { pack, gate_up, down };

struct Task {
  int32_t unit, row, rows;
  Step step;
};

// The tasks are one sequence, of which each memory node has a list: those whose weights it holds. A thread takes the next
// task of its own node's list, or of another list where its own has none that can start. A task needs only earlier ones of
// the sequence, so the earliest that is left can always start, with any number of threads on any nodes. A unit's steps
// stand `lag` units apart, far enough that a wait is rare, and near enough that `ring` units' worth of packed activations
// suffice for any call.
struct Plan {
  std::vector<int32_t> pairs;  // grouped by expert
  std::vector<Unit> units;     // heaviest expert first, or by id where their results are summed; the job sets packed_*
  std::vector<std::vector<Task>> lists;  // by node
  int gate_up_tasks = 0, down_tasks = 0;  // of each unit
  int down_rows = 0;                      // of each task but the last
  int ring = 0;
  int largest_unit = 0;  // tokens
};

apexk_status check_call(const apexk_ffn_call &call);
apexk_status make_plan(const apexk_ffn_call &call, int threads, const Machine &machine, Plan *plan);

}  // namespace apexk
