#include "plan.h"

#include <algorithm>
#include <numeric>

namespace apexk {
namespace {

constexpr int64_t kTaskBytes = 256 << 10;  // weights of a task: tens of microseconds when they come from memory

template <class One>
int64_t element_bytes(const One &call) { return call.dtype == APEXK_FP32 ? 4 : 2; }

bool aligned(const void *pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

int64_t id_at(const apexk_ffn_call &call, int64_t pair) {
  return call.id_bytes == 8 ? static_cast<const int64_t *>(call.topk_ids)[pair]
                            : static_cast<const int32_t *>(call.topk_ids)[pair];
}

int up_to_multiple(int64_t value, int unit) { return static_cast<int>((value + unit - 1) / unit) * unit; }

// Rows of a task whose rows hold `row_bytes` of weights each.
int rows_per_task(int rows, int64_t row_bytes, int64_t units, int threads) {
  const int by_size = up_to_multiple(std::max<int64_t>(1, kTaskBytes / row_bytes), kRowAlign);
  // Few units on many threads: smaller tasks, so that each thread has some.
  const int by_share = up_to_multiple(rows * units / (4 * threads) + 1, kRowAlign);
  return std::min(by_size, by_share);
}

void append(std::vector<Task> &tasks, Step step, int unit, int rows, int rows_each) {
  for (int row = 0; row < rows; row += rows_each) tasks.push_back({unit, row, std::min(rows_each, rows - row), step});
}

// The first element of a task's weights within the unit's block. Packing goes where the first rows are.
int64_t first_weight(const apexk_ffn_call &call, const Task &task) {
  const int64_t row = task.row;
  return task.step == Step::down ? (2 * call.hidden + row) * call.intermediate : row * call.hidden;
}

int64_t first_weight(const apexk_linear_call &call, const Task &task) { return static_cast<int64_t>(task.row) * call.inputs; }

// One list where there is one node.
template <class One>
std::vector<std::vector<Task>> by_node(const One &call, const Machine &machine, const Plan &plan, const std::vector<Task> &tasks) {
  std::vector<std::vector<Task>> lists(machine.nodes.size());
  if (lists.size() == 1) return {tasks};
  std::vector<const void *> weights;
  for (const Task &task : tasks) {
    weights.push_back(static_cast<const char *>(plan.units[task.unit].block) + first_weight(call, task) * element_bytes(call));
  }
  std::vector<int> homes(tasks.size());
  machine.homes(machine, weights.size(), weights.data(), homes.data());
  for (size_t i = 0; i < tasks.size(); i++) {
    lists[homes[i] < 0 ? tasks[i].unit % lists.size() : static_cast<size_t>(homes[i])].push_back(tasks[i]);
  }
  return lists;
}

void order_tasks(const apexk_ffn_call &call, int threads, const Machine &machine, Plan &plan) {
  const int units = static_cast<int>(plan.units.size());
  const int64_t bytes = element_bytes(call);
  const int gate_rows = rows_per_task(call.intermediate, 2 * call.hidden * bytes, units, threads);
  const int down_rows = plan.last_rows = rows_per_task(call.hidden, call.intermediate * bytes, units, threads);
  plan.gate_up_tasks = (call.intermediate + gate_rows - 1) / gate_rows;
  plan.last_tasks = (call.hidden + down_rows - 1) / down_rows;

  // A step may stand after the one it needs once every thread has had a task in between.
  const int lag = 1 + threads / std::min(plan.gate_up_tasks, plan.last_tasks);
  const int nodes = static_cast<int>(machine.nodes.size());  // their lists do not advance together
  plan.ring = std::min((3 * lag + 1) * nodes, units);
  std::vector<Task> tasks;
  for (int turn = -lag; turn < units + lag; turn++) {
    const auto in_range = [&](int unit) { return 0 <= unit && unit < units; };
    if (in_range(turn + lag)) tasks.push_back({turn + lag, 0, 0, Step::pack});
    if (in_range(turn)) append(tasks, Step::gate_up, turn, call.intermediate, gate_rows);
    if (in_range(turn - lag)) append(tasks, Step::down, turn - lag, call.hidden, down_rows);
  }
  plan.lists = by_node(call, machine, plan, tasks);
}

void order_tasks(const apexk_linear_call &call, int threads, const Machine &machine, Plan &plan) {
  const int units = static_cast<int>(plan.units.size());
  const int rows = plan.last_rows = rows_per_task(call.outputs, call.inputs * element_bytes(call), units, threads);
  plan.last_tasks = (call.outputs + rows - 1) / rows;
  const int lag = 1 + threads / plan.last_tasks;
  plan.ring = std::min((2 * lag + 1) * static_cast<int>(machine.nodes.size()), units);
  std::vector<Task> tasks;
  for (int turn = -lag; turn < units; turn++) {
    if (turn + lag < units) tasks.push_back({turn + lag, 0, 0, Step::pack});
    if (turn >= 0) append(tasks, Step::linear, turn, call.outputs, rows);
  }
  plan.lists = by_node(call, machine, plan, tasks);
}

// As few units as there can be, of sizes that differ by one at most.
void append_units(Plan &plan, const void *block, const int32_t *first, int64_t tokens) {
  const int64_t count = (tokens + kUnitTokens - 1) / kUnitTokens, small = tokens / count, large = tokens % count;
  for (int64_t i = 0; i < count; i++, first += plan.units.back().tokens) {
    const int own = static_cast<int>(small + (i < large ? 1 : 0));
    plan.units.push_back({block, first, own, nullptr, nullptr});
    plan.largest_unit = std::max(plan.largest_unit, own);
  }
}

apexk_status check(const apexk_ffn_call &call) {
  if (call.tokens < 0 || call.hidden < 1 || call.intermediate < 1 || call.topk < 1 || call.num_experts < 0 ||
      call.expert_count < 0 || call.x_stride < call.hidden || (call.id_bytes != 4 && call.id_bytes != 8) ||
      call.dtype < APEXK_BF16 || call.dtype > APEXK_FP32 || call.activation < APEXK_SILU ||
      call.activation > APEXK_SWIGLU_OSS) {
    return APEXK_BAD_ARGUMENT;
  }
  if (call.tokens > INT32_MAX / call.topk) return APEXK_BAD_ARGUMENT;
  if (call.expert_count > 0 && (!call.experts || !call.blocks)) return APEXK_BAD_ARGUMENT;
  if (call.tokens > 0 && (!call.x || !call.topk_ids || !call.topk_weights || !call.out)) return APEXK_BAD_ARGUMENT;
  if (!aligned(call.x, element_bytes(call)) || !aligned(call.topk_ids, call.id_bytes) ||
      !aligned(call.topk_weights, sizeof(float)) || !aligned(call.out, sizeof(float))) {
    return APEXK_MISALIGNED;
  }
  return APEXK_OK;
}

apexk_status check(const apexk_linear_call &call) {
  if (call.tokens < 0 || call.tokens > INT32_MAX || call.inputs < 1 || call.outputs < 1 || call.x_stride < call.inputs ||
      call.dtype < APEXK_BF16 || call.dtype > APEXK_FP32 || !call.weight || (call.tokens > 0 && (!call.x || !call.y))) {
    return APEXK_BAD_ARGUMENT;
  }
  for (const void *pointer : {call.x, call.weight, call.bias, static_cast<const void *>(call.y)}) {
    if (!aligned(pointer, element_bytes(call))) return APEXK_MISALIGNED;
  }
  return APEXK_OK;
}

apexk_status plan_of(const apexk_ffn_call &call, int threads, const Machine &machine, Plan *plan) {
  plan->x_width = call.hidden;
  plan->h_width = call.intermediate;
  // `loads[e]`: pairs of expert e, or -1 where e is not asked for.
  std::vector<int64_t> loads(call.num_experts, -1);
  for (int i = 0; i < call.expert_count; i++) {
    const int32_t expert = call.experts[i];
    if (expert < 0 || expert >= call.num_experts || loads[expert] == 0) return APEXK_BAD_EXPERT_ID;
    if (call.blocks[expert] == 0) return APEXK_NO_BLOCK;
    if (!aligned(reinterpret_cast<const void *>(call.blocks[expert]), element_bytes(call))) return APEXK_MISALIGNED;
    loads[expert] = 0;
  }
  const int64_t pairs = call.tokens * call.topk;
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t expert = id_at(call, pair);
    if (expert < 0 || expert >= call.num_experts) return APEXK_BAD_EXPERT_ID;
    if (loads[expert] >= 0) loads[expert]++;
  }

  std::vector<int32_t> order;
  for (int i = 0; i < call.expert_count; i++) {
    if (loads[call.experts[i]] > 0) order.push_back(call.experts[i]);
  }
  // Sums are added up expert by expert: in an order that does not depend on the loads.
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return call.summed ? a < b : loads[a] > loads[b]; });

  std::vector<int64_t> next(call.num_experts, -1);  // where the expert's next pair goes
  int64_t total = 0;
  for (const int32_t expert : order) {
    next[expert] = total;
    total += loads[expert];
  }
  plan->pairs.resize(total);
  for (int64_t pair = 0; pair < pairs; pair++) {
    int64_t &place = next[id_at(call, pair)];
    if (place >= 0) plan->pairs[place++] = static_cast<int32_t>(pair);
  }

  for (const int32_t expert : order) {
    append_units(*plan, reinterpret_cast<const void *>(call.blocks[expert]), plan->pairs.data() + next[expert] - loads[expert], loads[expert]);
  }
  if (!plan->units.empty()) order_tasks(call, threads, machine, *plan);
  return APEXK_OK;
}

apexk_status plan_of(const apexk_linear_call &call, int threads, const Machine &machine, Plan *plan) {
  if (call.tokens == 0) return APEXK_OK;
  plan->x_width = call.inputs;
  plan->pairs.resize(call.tokens);
  std::iota(plan->pairs.begin(), plan->pairs.end(), 0);
  append_units(*plan, call.weight, plan->pairs.data(), call.tokens);
  order_tasks(call, threads, machine, *plan);
  return APEXK_OK;
}

}  // namespace

apexk_status check_call(const Call &call) {
  return std::visit([](const auto &one) { return check(one); }, call);
}

apexk_status make_plan(const Call &call, int threads, const Machine &machine, Plan *plan) {
  return std::visit([&](const auto &one) { return plan_of(one, threads, machine, plan); }, call);
}

}  // namespace apexk
