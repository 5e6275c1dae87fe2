// The vector kernels on fixed data, one line of hashes for each: the same source as a program of the host, linked with the
// emulated objects, and as the image that Bochs runs, linked with the objects of the library itself (-DBARE).
#include <stddef.h>
#include <stdint.h>

#include "../../src/kernels.h"

namespace apexk {
extern const Kernels kAvx2Bf16, kAvx2Fp16, kAvx512Bf16, kAvx512Fp16, kAvx512Fp32, kAvx512PairsBf16, kAmxTilesBf16;
}

namespace {

#ifdef BARE
void put(char c) { __asm__ volatile("outb %0, %1" ::"a"(c), "Nd"(static_cast<uint16_t>(0xe9))); }
#else
extern "C" int putchar(int);
void put(char c) { putchar(c); }
#endif

void print(const char *text) {
  while (*text) put(*text++);
}

void print(uint32_t value) {
  for (int shift = 28; shift >= 0; shift -= 4) put("0123456789abcdef"[value >> shift & 15]);
}

constexpr int kTokens = 50, kHidden = 136, kIntermediate = 104;
alignas(64) char block[4 * 3 * kHidden * kIntermediate], x[4 * kTokens * kHidden], packed_x[1 << 18], packed_h[1 << 18], scratch[1 << 20], y[4 * kTokens * kHidden];
float out[kTokens * kHidden], topk_weights[kTokens];
int32_t pairs[kTokens];

// Magnitudes from 1/16 to 4: sums stay far from where Bochs 3.0 flushes normal numbers.
void fill(char *to, int count, int width, uint32_t state) {
  for (int i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    const uint32_t bits = (state & 0x80000000u) | ((123u + (state >> 12) % 6u) << 23) | (state >> 9 & 0x7f0000u);
    const uint16_t high = static_cast<uint16_t>(bits >> 16);
    __builtin_memcpy(to + i * width, width == 2 ? static_cast<const void *>(&high) : &bits, width);
  }
}

void print_hash(const void *words, int count) {
  uint32_t hash = 2166136261u;
  for (int i = 0; i < count; i++) {
    uint32_t bits;
    __builtin_memcpy(&bits, static_cast<const char *>(words) + 4 * i, 4);
    hash = (hash ^ bits) * 16777619u;
  }
  put(' ');
  print(hash);
}

void run(const char *name, const apexk::Kernels &kernels, apexk_dtype dtype, int hidden, int intermediate) {
  const int width = dtype == APEXK_FP32 ? 4 : 2;
  fill(block, 3 * hidden * intermediate, width, 1);
  fill(x, kTokens * hidden, width, 2);
  print(name);
  constexpr int kCounts[] = {1, 2, 5, 6, 13, 17, 33, kTokens};
  for (const int tokens : kCounts) {
    apexk_ffn_call call = {};
    call.x = x;
    call.topk_weights = topk_weights;
    call.out = out;
    call.tokens = tokens;
    call.x_stride = call.hidden = hidden;
    call.intermediate = intermediate;
    call.topk = 1;
    call.dtype = dtype;
    for (int i = 0; i < tokens; i++) {
      pairs[i] = i;
      topk_weights[i] = 0.25f * static_cast<float>(i + 1);
    }
    const apexk::Unit unit = {block, pairs, tokens, packed_x, packed_h};
    kernels.pack(call, unit);
    for (int row = 0; row < intermediate; row += 64) kernels.gate_up(call, unit, row, intermediate - row < 64 ? intermediate - row : 64, scratch);
    kernels.down(call, unit, 0, hidden, scratch);
    print_hash(out, tokens * hidden);

    apexk_linear_call layer = {};
    layer.x = x;
    layer.weight = block;
    layer.bias = block + 2 * width;  // as good as any
    layer.y = y;
    layer.tokens = tokens;
    layer.x_stride = layer.inputs = hidden;
    layer.outputs = intermediate;
    layer.dtype = dtype;
    kernels.pack_linear(layer, unit);
    kernels.linear(layer, unit, 0, intermediate, scratch);
    print_hash(y, tokens * intermediate * width / 4);
  }
  put('\n');
}

void all() {
  constexpr int kSizes[][2] = {{kHidden, kIntermediate}, {100, 70}};
  for (const auto &size : kSizes) {
    run("avx2", apexk::kAvx2Bf16, APEXK_BF16, size[0], size[1]);
    run("avx2 fp16", apexk::kAvx2Fp16, APEXK_FP16, size[0], size[1]);
    run("avx512", apexk::kAvx512Bf16, APEXK_BF16, size[0], size[1]);
    run("avx512 fp16", apexk::kAvx512Fp16, APEXK_FP16, size[0], size[1]);
    run("avx512 fp32", apexk::kAvx512Fp32, APEXK_FP32, size[0], size[1]);
    run("avx512_bf16", apexk::kAvx512PairsBf16, APEXK_BF16, size[0], size[1]);
    run("amx", apexk::kAmxTilesBf16, APEXK_BF16, size[0], size[1]);
  }
  print("end\n");
}

}  // namespace

#ifdef BARE
// The compiler calls these by name. The barrier keeps it from making a loop into a call of itself.
extern "C" void *memcpy(void *to, const void *from, size_t n) {
  for (size_t i = 0; i < n; i++) {
    static_cast<char *>(to)[i] = static_cast<const char *>(from)[i];
    __asm__ volatile("" ::: "memory");
  }
  return to;
}
extern "C" void *memset(void *to, int value, size_t n) {
  for (size_t i = 0; i < n; i++) {
    static_cast<char *>(to)[i] = static_cast<char>(value);
    __asm__ volatile("" ::: "memory");
  }
  return to;
}
extern "C" __attribute__((section(".text.entry"))) void entry() { all(); }
#else
int main() { all(); }
#endif
