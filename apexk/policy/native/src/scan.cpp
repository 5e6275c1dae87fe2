// One decision, as apexk/policy/scan.py and Apex make it in Python: the same operations in the same order on the same doubles, so that
// both give the same bits (which is why nothing here may be contracted or reordered: see the flags of build.py).

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr double TIE_MS = 1e-12;  // as in scan.py

struct Request {  // as _REQUEST in scan.py
    double cpu[3], copy[2], gpu[3];  // AffineCosts c0 a b, s0 t1, g0 g1 g2; rates: the first of each
    double wait, left, waves_keep;  // channel_wait_ms, in_flight.left, 1 - WAVES_GAIN
    int64_t rates, cpu_when_empty, resident_first;
    int64_t in_flight;  // expert, -1: none
    int64_t available, limit;  // limit -1: none
    int64_t slots, scratch;  // of waves; slots 0: no waves
    int64_t spills;
};

struct Answer {  // as _ANSWER in scan.py; behind it the experts in order (here, copied, cpu), then the estimates
    double cpu, gpu;
    int64_t here, copied, estimates;
};

struct Expert {
    int64_t load;
    int32_t id;
    bool resident, held;
};

// Heaviest first, ties by lower id: from the lowest byte of the load to the highest, in the order of the byte before where they are equal.
void by_load(std::vector<Expert>& experts) {
    const auto lower_id = [](const Expert& a, const Expert& b) { return a.id < b.id; };
    if (!std::is_sorted(experts.begin(), experts.end(), lower_id)) std::sort(experts.begin(), experts.end(), lower_id);
    int64_t bits = 0;
    for (const Expert& e : experts) bits |= e.load;
    std::vector<Expert> sorted(experts.size());
    for (int shift = 0; shift < 64 && bits >> shift; shift += 8) {
        int32_t next[257] = {};
        const auto place = [&](const Expert& e) { return 255 - (e.load >> shift & 255); };
        for (const Expert& e : experts) ++next[place(e) + 1];
        for (int i = 0; i < 256; ++i) next[i + 1] += next[i];
        for (const Expert& e : experts) sorted[next[place(e)]++] = e;
        experts.swap(sorted);
    }
}

struct Paths {
    double cpu, gpu;
    double longer() const { return gpu > cpu ? gpu : cpu; }
};

double cpu_ms(const Request& r, int64_t experts, int64_t pairs) {
    if (r.rates) return double(pairs) / r.cpu[0];
    if (!experts) return r.cpu_when_empty ? r.cpu[0] : 0.0;
    return r.cpu[0] + r.cpu[1] * double(experts) + r.cpu[2] * double(pairs);
}

double copy_ms(const Request& r, int64_t copies) {
    if (r.rates) return double(copies) / r.copy[0];
    return copies ? r.copy[0] + r.copy[1] * double(copies) : 0.0;
}

double gpu_ms(const Request& r, int64_t experts, int64_t pairs) {
    if (r.rates) return double(pairs) / r.gpu[0];
    return experts ? r.gpu[0] + r.gpu[1] * double(experts) + r.gpu[2] * double(pairs) : 0.0;
}

double transfer_ms(const Request& r, int64_t copies) {
    if (r.in_flight < 0) return r.wait + copy_ms(r, copies);
    const double one_more = copy_ms(r, 2) - copy_ms(r, 1);
    return r.wait + r.left * one_more + copy_ms(r, copies - 1);
}

// What the paths take if the first `copies` missed experts, whose load is `moved`, are copied.
struct Layer {
    const Request& r;
    int64_t here, missed, here_load, missed_load;
    double alone;

    Paths paths(int64_t copies, int64_t moved) const {
        const double landed = copies ? transfer_ms(r, copies) : 0.0;
        double gpu = gpu_ms(r, here + copies, here_load + moved);
        gpu += r.resident_first ? (landed > alone ? landed : alone) - alone : landed;
        return {cpu_ms(r, missed - copies, missed_load - moved), gpu};
    }
};

// `scan.unlimited`'s count.
int64_t unlimited(const Layer& layer, const std::vector<int64_t>& moved) {
    const auto paths = [&](int64_t copies) { return layer.paths(copies, moved[copies]); };
    int64_t low = 0, high = layer.missed;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        const Paths at = paths(middle);
        if (at.gpu >= at.cpu)
            high = middle;
        else
            low = middle + 1;
    }
    while (low && paths(low - 1).longer() <= paths(low).longer() + TIE_MS) --low;
    return low;
}

}  // namespace

// `ids` and `loads`: the active experts, `residents` may name others. Room at `experts` for `count` and at `estimates` for twice (missed + 1)
// numbers. Returns 0, or 1 for what is for Python to refuse.
extern "C" __attribute__((visibility("default"))) int apexk_scan(const Request* request, int64_t count, const int64_t* ids, const int64_t* loads,
                                                                  int64_t resident_count, const int64_t* residents, Answer* answer) {
    const Request& r = *request;
    std::vector<Expert> active(count);
    int64_t most_id = -1;
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] > 1 << 20 || loads[i] < 0) return 1;
        most_id = std::max(most_id, ids[i]);
    }
    std::vector<char> resident(most_id + 1);
    for (int64_t i = 0; i < resident_count; ++i)
        if (residents[i] >= 0 && residents[i] <= most_id) resident[residents[i]] = true;
    for (int64_t i = 0; i < count; ++i) active[i] = {loads[i], int32_t(ids[i]), bool(resident[ids[i]]), false};
    by_load(active);
    for (int64_t i = 0; i < std::min(r.slots - r.scratch, count); ++i) active[i].held = true;
    const auto first_missed = std::stable_partition(active.begin(), active.end(), [](const Expert& e) { return e.resident; });
    if (r.in_flight >= 0) {  // leads those that are missed
        const auto found = std::find_if(first_missed, active.end(), [&](const Expert& e) { return e.id == r.in_flight; });
        if (found == active.end()) return 1;
        std::rotate(first_missed, found, found + 1);
    }

    Layer layer{r, first_missed - active.begin(), active.end() - first_missed, 0, 0, 0.0};
    std::vector<int64_t> moved(layer.missed + 1);  // loads of the first so many missed
    for (int64_t i = 0; i < layer.here; ++i) layer.here_load += active[i].load;
    for (int64_t i = 0; i < layer.missed; ++i) moved[i + 1] = moved[i] + first_missed[i].load;
    layer.missed_load = moved.back();
    layer.alone = gpu_ms(r, layer.here, layer.here_load);

    int64_t* const order = reinterpret_cast<int64_t*>(answer + 1);
    Paths* const estimates = reinterpret_cast<Paths*>(order + count);
    const int64_t fit = std::min(layer.missed, r.available + (r.in_flight >= 0));
    const int64_t most = r.limit >= 0 ? std::min(fit, r.limit) : fit;
    estimates[0] = {cpu_ms(r, layer.missed, layer.missed_load), layer.alone};
    double best = estimates[0].longer();
    int64_t copied = 0, looked = 1;
    for (int64_t p = 1; p <= most; ++p) {
        const Paths at = estimates[looked++] = layer.paths(p, moved[p]);
        if (at.longer() < best - TIE_MS) best = at.longer(), copied = p;
        if (at.gpu >= best - TIE_MS) break;
    }
    Paths chosen = estimates[copied];

    if (r.slots && r.scratch && fit < layer.missed && looked > fit) {  // `Apex.in_waves`
        const int64_t more = unlimited(layer, moved), beyond = more - fit, room = std::min(r.scratch, r.slots);
        if (beyond > 0) {
            Paths at = layer.paths(more, moved[more]);
            at.gpu += double((beyond + room - 1) / room) * gpu_ms(r, 1, 0);
            if (!(at.longer() >= r.waves_keep * chosen.longer())) {
                chosen = at, copied = more;
                const auto lightest = first_missed + (r.in_flight >= 0), end = first_missed + more;
                std::reverse(lightest, end);
                std::stable_partition(lightest, end, [](const Expert& e) { return !e.held; });
            }
        }
    }

    int64_t here = layer.here;
    if (r.spills && !copied && here >= 2 && chosen.gpu > chosen.cpu) {  // `scan.spill`
        int64_t on_cpu = layer.missed, cpu_load = layer.missed_load, gpu_load = layer.here_load;
        while (here) {
            const int64_t load = active[here - 1].load;
            const Paths next = {cpu_ms(r, on_cpu + 1, cpu_load + load), gpu_ms(r, here - 1, gpu_load - load)};
            if (next.longer() >= chosen.longer() - TIE_MS) break;
            chosen = next;
            --here, ++on_cpu, cpu_load += load, gpu_load -= load;
        }
        // behind the missed ones, lightest first
        std::reverse(active.begin() + here, first_missed);
        std::rotate(active.begin() + here, first_missed, active.end());
    }
    for (int64_t i = 0; i < count; ++i) order[i] = active[i].id;
    *answer = {chosen.cpu, chosen.gpu, here, copied, looked};
    return 0;
}
