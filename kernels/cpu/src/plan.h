// From a checked call to an ordered list of tasks. Pure: no threads, no weights touched.
#pragma once
#include <variant>
#include <vector>

#include "kernels.h"
#include "machine.h"

namespace apexk {

using Call = std::variant<apexk_ffn_call, apexk_linear_call>;

enum class Step : uint8_t { pack, gate_up, down, linear };

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
  int gate_up_tasks = 0, last_tasks = 0;  // of each unit: gate_up's, and those of its last step, down or linear
  int last_rows = 0;                      // of each of these but the last
  int x_width = 0, h_width = 0;           // of a token's packed rows; no h in a linear layer
  int ring = 0;
  int largest_unit = 0;  // tokens
};

apexk_status check_call(const Call &call);
apexk_status make_plan(const Call &call, int threads, const Machine &machine, Plan *plan);

}  // namespace apexk
