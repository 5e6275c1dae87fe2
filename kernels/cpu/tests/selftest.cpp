// The library against plain double arithmetic, without Python: for sanitizers, emulated instruction sets and mutants.
//
//   selftest [isa ...]    all that are available when none is named; exit status 1 at the first difference
//
// Blocks and activations end where an inaccessible page begins, so reading past them ends the program.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "apexk_cpu.h"

namespace {

#define NEED(condition, ...)                                     \
  do {                                                           \
    if (!(condition)) {                                          \
      printf("FAILED at line %d: %s: ", __LINE__, #condition);   \
      printf(__VA_ARGS__);                                       \
      printf("\n");                                              \
      exit(1);                                                   \
    }                                                            \
  } while (0)

// Memory whose last byte is followed by a page that must not be touched.
struct Guarded {
  char *base, *data;
  size_t whole;
  explicit Guarded(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), body = (bytes + page - 1) / page * page;
    whole = body + page;
    base = static_cast<char *>(mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    NEED(base != MAP_FAILED && mprotect(base + body, page, PROT_NONE) == 0, "no memory");
    data = base + body - bytes;
  }
  Guarded(const Guarded &) = delete;
  ~Guarded() { munmap(base, whole); }
};

uint32_t state;
double random_value() {
  state = state * 1664525u + 1013904223u;
  return static_cast<int32_t>(state) / 2147483648.0;
}

// To nearest, ties to even: `digits` binary digits, no finer than 2^-`finest`.
double rounded(double value, int digits, int finest) {
  int exponent;
  frexp(value, &exponent);
  const double unit = ldexp(1.0, exponent - digits < -finest ? -finest : exponent - digits);
  return nearbyint(value / unit) * unit;
}

double as(apexk_dtype dtype, double value) {
  return dtype == APEXK_BF16 ? rounded(value, 8, 133) : dtype == APEXK_FP16 ? rounded(value, 11, 24) : static_cast<float>(value);
}

// The bits of a value that `as` gave.
uint32_t bits_of(apexk_dtype dtype, double value) {
  if (dtype == APEXK_FP16) {
    int exponent;
    const double magnitude = fabs(value), fraction = frexp(magnitude, &exponent);
    const double bits = magnitude >= ldexp(1.0, -14) ? (exponent + 14) * 1024 + (fraction * 2048 - 1024) : ldexp(magnitude, 24);
    return static_cast<uint32_t>(bits) | (signbit(value) ? 0x8000u : 0u);
  }
  const float f = static_cast<float>(value);
  uint32_t u;
  memcpy(&u, &f, 4);
  return dtype == APEXK_BF16 ? u >> 16 : u;
}

constexpr const char *kNames[] = {"bf16", "fp16", "fp32"};

struct Case {
  int tokens, hidden, intermediate;
  apexk_dtype dtype;
};
constexpr int kExperts = 3, kTopk = 2;

struct Data {
  Case c;
  size_t block_elements, width;
  Guarded weights, x;
  std::vector<double> weight_values, x_values;
  std::vector<int32_t> ids, experts{0, 1, 2};
  std::vector<float> topk_weights;
  std::vector<uint64_t> blocks;

  void store(char *to, size_t index, double value) const {
    const uint32_t u = bits_of(c.dtype, value);
    memcpy(to + index * width, &u, width);  // little-endian: the lower half is the first
  }

  explicit Data(const Case &one)
      : c(one),
        block_elements(static_cast<size_t>(3) * c.hidden * c.intermediate),
        width(c.dtype == APEXK_FP32 ? 4 : 2),
        weights(kExperts * block_elements * width),
        x(static_cast<size_t>(c.tokens) * c.hidden * width) {
    state = 77u + c.tokens * 31 + c.hidden;
    const auto value = [&] { return as(c.dtype, random_value()); };
    for (size_t i = 0; i < kExperts * block_elements; i++) {
      weight_values.push_back(as(c.dtype, 0.3 * value()));
      store(weights.data, i, weight_values[i]);
    }
    for (size_t i = 0; i < static_cast<size_t>(c.tokens) * c.hidden; i++) {
      x_values.push_back(value());
      store(x.data, i, x_values[i]);
    }
    for (int e = 0; e < kExperts; e++) {
      blocks.push_back(reinterpret_cast<uint64_t>(weights.data + e * block_elements * width));
    }
    for (int i = 0; i < c.tokens * kTopk; i++) {
      ids.push_back(static_cast<int32_t>((random_value() + 1.0) * 0.5 * kExperts) % kExperts);
      topk_weights.push_back(static_cast<float>(random_value()));
    }
  }

  apexk_ffn_call call(float *out) const {
    apexk_ffn_call call = {};
    call.x = x.data;
    call.blocks = blocks.data();
    call.topk_ids = ids.data();
    call.topk_weights = topk_weights.data();
    call.experts = experts.data();
    call.out = out;
    call.tokens = c.tokens;
    call.x_stride = call.hidden = c.hidden;
    call.intermediate = c.intermediate;
    call.topk = kTopk;
    call.num_experts = call.expert_count = kExperts;
    call.id_bytes = 4;
    call.dtype = c.dtype;
    return call;
  }

  std::vector<double> expected() const {
    const int H = c.hidden, I = c.intermediate;
    std::vector<double> out, h(I);
    for (size_t p = 0; p < ids.size(); p++) {
      const double *w = weight_values.data() + ids[p] * block_elements, *row = x_values.data() + p / kTopk * H;
      for (int i = 0; i < I; i++) {
        double gate = 0, up = 0;
        for (int k = 0; k < H; k++) {
          gate += w[static_cast<size_t>(i) * H + k] * row[k];
          up += w[static_cast<size_t>(I + i) * H + k] * row[k];
        }
        h[i] = as(c.dtype, gate / (1 + exp(-gate)) * up);
      }
      for (int r = 0; r < H; r++) {
        double y = 0;
        for (int i = 0; i < I; i++) y += w[static_cast<size_t>(2 * I) * H + static_cast<size_t>(r) * I + i] * h[i];
        out.push_back(topk_weights[p] * y);
      }
    }
    return out;
  }
};

// A linear layer of `hidden` inputs and `intermediate` outputs: the first expert's gate rows, its first down row as the bias.
struct Layer {
  const Data &data;
  std::vector<double> want;
  std::vector<char> y;

  explicit Layer(const Data &one) : data(one), y(static_cast<size_t>(one.c.tokens) * one.c.intermediate * one.width) {
    const size_t K = data.c.hidden, N = data.c.intermediate;
    for (size_t i = 0; i < data.c.tokens * N; i++) {
      const double *w = data.weight_values.data() + i % N * K, *row = data.x_values.data() + i / N * K;
      double sum = data.weight_values[2 * N * K + i % N];
      for (size_t k = 0; k < K; k++) sum += w[k] * row[k];
      want.push_back(sum);
    }
  }

  apexk_linear_call call() {
    std::fill(y.begin(), y.end(), static_cast<char>(0xff));  // NaN in every dtype
    apexk_linear_call call = {};
    call.x = data.x.data;
    call.weight = data.weights.data;
    call.bias = data.weights.data + static_cast<size_t>(2) * data.c.hidden * data.c.intermediate * data.width;
    call.y = y.data();
    call.tokens = data.c.tokens;
    call.x_stride = call.inputs = data.c.hidden;
    call.outputs = data.c.intermediate;
    call.dtype = data.c.dtype;
    return call;
  }

  double value(size_t index) const {
    uint32_t u = 0;
    memcpy(&u, y.data() + index * data.width, data.width);
    if (data.c.dtype != APEXK_FP16) {
      float f;
      u = data.c.dtype == APEXK_BF16 ? u << 16 : u;
      memcpy(&f, &u, 4);
      return f;
    }
    const int exponent = u >> 10 & 31, digits = u & 1023;
    if (exponent == 31) return digits ? NAN : INFINITY;
    const double magnitude = exponent ? ldexp(1024 + digits, exponent - 25) : ldexp(digits, -24);
    return u & 0x8000u ? -magnitude : magnitude;
  }
};

void check_linear(apexk_pool *pool, const Data &data) {
  const Case &c = data.c;
  Layer layer(data);
  apexk_linear_call call = layer.call();
  NEED(apexk_linear_run(pool, &call, nullptr) == APEXK_OK, "run");
  double largest = 0;
  for (const double want : layer.want) largest = fmax(largest, fabs(want));
  for (size_t i = 0; i < layer.want.size(); i++) {
    // half a step of rounding, and what float sums lose
    const double half = c.dtype == APEXK_BF16 ? ldexp(1, -8) : c.dtype == APEXK_FP16 ? ldexp(1, -11) : 0;
    NEED(fabs(layer.value(i) - layer.want[i]) <= half * fabs(layer.want[i]) + 1e-5 * largest, "T %d K %d N %d %s: output %zu is %g, not %g",
         c.tokens, c.hidden, c.intermediate, kNames[c.dtype], i, layer.value(i), layer.want[i]);
  }
}

void check_linear_rules(apexk_pool *pool, apexk_team_fn team) {
  const Data data({230, 40, 72, APEXK_BF16});
  Layer layer(data);
  const size_t row = static_cast<size_t>(72) * 2;
  apexk_linear_call call = layer.call();
  NEED(apexk_linear_run(pool, &call, nullptr) == APEXK_OK, "run");
  const std::vector<char> want = layer.y;
  call = layer.call();
  NEED(apexk_linear_run(pool, &call, team) == APEXK_OK && layer.y == want, "a team gives other bits");
  call = layer.call();
  call.x_stride = 80;  // every second token
  call.tokens = 115;
  NEED(apexk_linear_run(pool, &call, nullptr) == APEXK_OK, "strided");
  for (size_t t = 0; t < 115; t++) NEED(memcmp(&layer.y[t * row], &want[2 * t * row], row) == 0, "row %zu depends on others", t);

  for (int broken = 0; broken < 9; broken++) {
    call = layer.call();
    const std::vector<char> before = layer.y;
    apexk_status status = APEXK_BAD_ARGUMENT;
    switch (broken) {
      case 0: call.tokens = -1; break;
      case 1: call.inputs = 0; break;
      case 2: call.outputs = 0; break;
      case 3: call.x_stride = 39; break;
      case 4: call.weight = nullptr; break;
      case 5: call.y = nullptr; break;
      case 6: call.dtype = 3; break;
      case 7: call.bias = static_cast<const char *>(call.bias) + 1, status = APEXK_MISALIGNED; break;
      case 8: call.tokens = int64_t{1} << 31; break;
    }
    NEED(apexk_linear_run(pool, &call, nullptr) == status && layer.y == before, "refusal %d", broken);
  }
  call = layer.call();
  call.tokens = 0;
  call.x = call.y = nullptr;
  NEED(apexk_linear_run(pool, &call, team) == APEXK_OK, "no token");
}

void check_values(apexk_pool *pool, const Case &c) {
  const Data data(c);
  std::vector<float> out(static_cast<size_t>(c.tokens) * kTopk * c.hidden, NAN), again = out;
  apexk_ffn_call call = data.call(out.data());
  NEED(apexk_ffn_run(pool, &call) == APEXK_OK, "run");
  const std::vector<double> want = data.expected();
  double largest = 0, error = 0, squares = 0, all = 0;
  for (size_t i = 0; i < want.size(); i++) {
    NEED(!isnan(out[i]), "element %zu was not written", i);
    largest = fmax(largest, fabs(want[i]));
    error = fmax(error, fabs(out[i] - want[i]));
    squares += (out[i] - want[i]) * (out[i] - want[i]);
    all += want[i] * want[i];
  }
  // A value between two roundings of the activated row may fall either way: rarely, so the mean stays small.
  const bool wide = c.dtype == APEXK_FP32;
  const double most = wide ? 1e-5 : 1e-3, mean = wide ? 1e-5 : 2e-4;
  NEED(error <= most * largest && squares <= mean * mean * all, "T %d H %d I %d %s: off by %.1e of the largest, mean %.1e",
       c.tokens, c.hidden, c.intermediate, kNames[c.dtype], error / largest, sqrt(squares / all));

  std::vector<float> sums(static_cast<size_t>(c.tokens) * c.hidden, NAN);
  apexk_ffn_call summed = data.call(sums.data());
  summed.summed = 1;
  NEED(apexk_ffn_run(pool, &summed) == APEXK_OK, "run");
  for (size_t i = 0; i < sums.size(); i++) {
    const size_t token = i / c.hidden, first = token * kTopk * c.hidden + i % c.hidden;
    NEED(sums[i] == out[first] + out[first + c.hidden], "T %d H %d I %d: sum of token %zu", c.tokens, c.hidden, c.intermediate, token);
  }

  for (int token = 0; token < c.tokens; token += 5) {  // alone, a token gets the same bits
    apexk_ffn_call alone = data.call(again.data());
    alone.x = data.x.data + static_cast<size_t>(token) * c.hidden * data.width;
    alone.topk_ids = data.ids.data() + token * kTopk;
    alone.topk_weights = data.topk_weights.data() + token * kTopk;
    alone.tokens = 1;
    NEED(apexk_ffn_run(pool, &alone) == APEXK_OK, "run");
    const size_t row = static_cast<size_t>(c.hidden) * kTopk;
    NEED(memcmp(again.data(), out.data() + token * row, row * sizeof(float)) == 0, "token %d depends on others", token);
  }
  check_linear(pool, data);
}

// As GOMP_parallel, but with fewer threads than asked for where `kMost` says so.
template <unsigned kMost>
void team_of(void (*body)(void *), void *data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < std::min(threads, kMost); i++) others.emplace_back(body, data);
  body(data);
  for (std::thread &other : others) other.join();
}

// On the caller's threads, as many as asked for, more, or fewer: the same bits.
void check_teams(apexk_pool *pool) {
  for (const int tokens : {0, 1, 230}) {
    const Data data({tokens, 40, 72, APEXK_BF16});
    std::vector<float> want(static_cast<size_t>(tokens) * kTopk * 40, NAN);
    apexk_ffn_call call = data.call(want.data());
    NEED(apexk_ffn_run(pool, &call) == APEXK_OK, "run");
    for (const apexk_team_fn team : {team_of<64>, team_of<2>, team_of<1>}) {
      std::vector<float> out(want.size(), NAN);
      call.out = out.data();
      NEED(apexk_ffn_run_in(pool, &call, team) == APEXK_OK, "run in a team");
      NEED(want.empty() || memcmp(out.data(), want.data(), want.size() * sizeof(float)) == 0, "a team of others gives other bits");
    }
    NEED(apexk_ffn_run_in(pool, &call, nullptr) == APEXK_BAD_ARGUMENT, "no team");
    call.topk = 0;
    NEED(apexk_ffn_run_in(pool, &call, team_of<64>) == APEXK_BAD_ARGUMENT, "refused as ever");
  }
}

// Two threads submit to one pool; jobs are waited for, or given back at once.
void check_jobs(apexk_pool *pool) {
  const Data data({5, 40, 72, APEXK_BF16});
  const size_t floats = static_cast<size_t>(5) * kTopk * 40;
  std::vector<float> want(floats);
  apexk_ffn_call call = data.call(want.data());
  NEED(apexk_ffn_run(pool, &call) == APEXK_OK, "run");
  std::atomic<int> called{0};
  const auto submit = [&] {
    for (int round = 0; round < 50; round++) {
      std::vector<float> outs[4];
      apexk_job *jobs[4];
      for (int i = 0; i < 4; i++) {
        outs[i].assign(floats, NAN);
        apexk_ffn_call mine = data.call(outs[i].data());
        const auto count = [](void *user, apexk_status) { static_cast<std::atomic<int> *>(user)->fetch_add(1); };
        NEED(apexk_ffn_submit(pool, &mine, count, &called, &jobs[i]) == APEXK_OK, "submit");
      }
      for (int i = 3; i >= 0; i--) {
        NEED(apexk_job_wait(jobs[i]) == APEXK_OK && apexk_job_done(jobs[i]), "wait");
        apexk_job_release(jobs[i]);
        NEED(memcmp(outs[i].data(), want.data(), floats * sizeof(float)) == 0, "job %d of round %d", i, round);
      }
    }
  };
  std::thread other(submit);
  submit();
  other.join();
  NEED(called.load() == 400, "%d completions were reported", called.load());
}

void check_isa(const char *name) {
  apexk_pool *pool = nullptr;
  NEED(apexk_pool_create(2, name, &pool) == APEXK_OK, "%s", name);
  // Sizes below, between and beyond the chunks of 16 and 32 and the blocks of 16, 32 and 64 rows; k beyond one cache block.
  // 100 tokens: about 67 of an expert, enough for panels.
  const int sizes[][2] = {{8, 40}, {40, 8}, {100, 70}, {31, 97}, {64, 70}, {1100, 33}};
  for (const auto &size : sizes) {
    for (const int tokens : {1, 2, 5, 6, 13, 17, 35, 100}) check_values(pool, {tokens, size[0], size[1], APEXK_BF16});
    for (const apexk_dtype dtype : {APEXK_FP16, APEXK_FP32}) {
      for (const int tokens : {7, 100}) check_values(pool, {tokens, size[0], size[1], dtype});
    }
  }
  check_jobs(pool);
  check_teams(pool);
  check_linear_rules(pool, team_of<64>);
  apexk_pool_destroy(pool);
  printf("%s: as expected\n", name);
  fflush(stdout);
}

}  // namespace

int main(int count, char **names) {
  for (int i = 1; i < count; i++) check_isa(names[i]);
  for (int i = 0; count == 1 && i < apexk_isa_count(); i++) {
    if (apexk_isa_available(i)) check_isa(apexk_isa_name(i));
  }
  return 0;
}
