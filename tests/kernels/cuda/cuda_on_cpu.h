// The few CUDA words that our kernels use, for a C++ compiler: every CUDA thread is a thread, all blocks run at once.
// A kernel's own source, included after this file, then runs as it is. Says nothing about speed.
#pragma once
#include <atomic>
#include <barrier>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __launch_bounds__(threads)

struct Place { int x; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

inline thread_local Place blockIdx, threadIdx, blockDim, gridDim;
inline thread_local std::barrier<>* block_barrier;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { __threadfence(); }
inline uint4 __ldcs(const uint4* p) { return *p; }
inline int atomicAdd(int* p, int value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
inline int atomicExch_system(int* p, int value) { return __atomic_exchange_n(p, value, __ATOMIC_RELAXED); }

template <class T>
T argument(unsigned long long raw) {
  if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(raw);
  else return static_cast<T>(raw);
}

template <class... A, std::size_t... I>
void call(void (*kernel)(A...), const unsigned long long* raw, std::index_sequence<I...>) {
  kernel(argument<A>(raw[I])...);
}

template <class... A>
void launch_on_cpu(void (*kernel)(A...), int grid, int block, const unsigned long long* raw) {
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  for (int b = 0; b < grid; ++b) {
    barriers.push_back(std::make_unique<std::barrier<>>(block));
    for (int t = 0; t < block; ++t)
      threads.emplace_back([=, barrier = barriers.back().get()] {
        blockIdx = {b}, threadIdx = {t}, blockDim = {block}, gridDim = {grid}, block_barrier = barrier;
        call(kernel, raw, std::index_sequence_for<A...>{});
      });
  }
  for (auto& thread : threads) thread.join();
}
