// Utilities of a layer's experts, as apexk/policy/utility.py keeps them in Python: the same operations in the same order on the same
// doubles. The arrays are Python's. Both functions return 1, with nothing changed, for what they cannot read.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

namespace {

struct Utilities {  // as _STATE in utility.py
    double* value;
    int64_t* active;         // last step with a token, -1 before any
    const double* powers;    // of the decay
    const double* standing;  // null: none
    int64_t experts, known;  // sizes of the arrays
    double weight;           // of standing

    bool holds(int64_t step, const int64_t* ids, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            if (ids[i] < 0 || ids[i] >= experts || step < active[ids[i]] || step - active[ids[i]] >= known) return false;
        }
        return true;
    }
    double decayed(int64_t step, int64_t id) const { return value[id] * powers[step - active[id]]; }
};

}  // namespace

#define APEXK_EXPORT extern "C" __attribute__((visibility("default")))

// Adds a step's loads, or with `logs` log(1 + load), and stores the sums over the active experts of what was added, y, of y*y, y*u and y*standing.
APEXK_EXPORT int apexk_utility_update(const Utilities* of, int64_t step, const int64_t* ids, const int64_t* loads, int64_t count, int32_t logs, double* sums) {
    if (!of->holds(step, ids, count) || std::any_of(loads, loads + count, [](int64_t load) { return load < 0; })) return 1;
    double y_sum = 0.0, yy_sum = 0.0, yu_sum = 0.0, ys_sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t id = ids[i];
        const double y = logs ? std::log1p(double(loads[i])) : double(loads[i]), u = of->decayed(step, id);
        y_sum += y, yy_sum += y * y, yu_sum += y * u;
        if (of->standing) ys_sum += y * of->standing[id];
        of->value[id] = u + y;
        of->active[id] = step;
    }
    sums[0] = y_sum, sums[1] = yy_sum, sums[2] = yu_sum, sums[3] = ys_sum;
    return 0;
}

// The `wanted` least useful of `ids`, at most all: ties to the longest inactive, then to the lowest id.
APEXK_EXPORT int apexk_utility_lowest(const Utilities* of, int64_t step, const int64_t* ids, int64_t count, int64_t wanted, int64_t* chosen) {
    if (!of->holds(step, ids, count)) return 1;
    std::vector<std::tuple<double, int64_t, int64_t>> ranked(count);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t id = ids[i];
        const double utility = of->decayed(step, id);
        ranked[i] = {of->standing ? utility + of->weight * of->standing[id] : utility, of->active[id], id};
    }
    const int64_t kept = std::min(wanted, count);
    std::partial_sort(ranked.begin(), ranked.begin() + kept, ranked.end());
    for (int64_t i = 0; i < kept; ++i) chosen[i] = std::get<2>(ranked[i]);
    return 0;
}
