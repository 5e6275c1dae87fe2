// slot_gather: listed experts' blocks from pinned host memory into pool slots, moved by the processors instead of a copy engine.
//
//   for i < count:  pool[slots[i]] = block of experts[i];  then, once its last byte is stored, ready[slots[i]] = epoch
//
// List, count and epoch are read on the device, so a launch captured in a CUDA graph moves whatever the list holds when the
// graph is replayed. Work is cut into chunks of THREADS * UNROLL words of 16 bytes, entry after entry, and the blocks of any
// grid take them in turn: the first entries land first. Each thread has UNROLL reads under way before it stores, which is
// what keeps a link of a microsecond's latency busy. The block that stores an entry's last chunk raises the slot's flag.
//
// Entries whose expert or slot is negative are left out. `landed` is 0 before a launch and 0 again after it.

constexpr int THREADS = 256;
constexpr int UNROLL = 8;
constexpr int CHUNK = THREADS * UNROLL;  // words of 16 bytes

extern "C" __global__ void __launch_bounds__(THREADS)
slot_gather(const unsigned long long* blocks,  // [E] device-visible addresses of the experts' blocks, multiples of 16
            const int* experts,                // [n]
            const int* slots,                  // [n] each slot once
            const int* count,                  // [1] how many entries of the list are meant, at most n
            const int* epoch,                  // [1] what a raised flag holds
            unsigned char* pool,               // [S, stride_bytes]
            int* ready,                        // [S] flags
            int* landed,                       // [n] stored chunks of each entry
            long long stride_bytes,            // from slot to slot, a multiple of 16
            long long words) {                 // of a block: its bytes / 16, rounded up; stays within the stride
  const long long chunks = (words + CHUNK - 1) / CHUNK;
  const long long items = chunks * count[0];
  for (long long item = blockIdx.x; item < items; item += gridDim.x) {
    const int entry = static_cast<int>(item / chunks);
    const int expert = experts[entry], slot = slots[entry];
    if (expert < 0 || slot < 0) continue;
    const uint4* source = reinterpret_cast<const uint4*>(blocks[expert]);
    uint4* target = reinterpret_cast<uint4*>(pool + slot * stride_bytes);
    const long long first = (item % chunks) * CHUNK + threadIdx.x;
    uint4 held[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k)
      if (first + k * THREADS < words) held[k] = __ldcs(source + first + k * THREADS);  // read once: evict first
#pragma unroll
    for (int k = 0; k < UNROLL; ++k)
      if (first + k * THREADS < words) target[first + k * THREADS] = held[k];
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();  // the chunk's stores before the count
      if (atomicAdd(landed + entry, 1) == chunks - 1) {
        landed[entry] = 0;
        __threadfence_system();  // every chunk's stores before the flag
        atomicExch_system(ready + slot, epoch[0]);
      }
    }
  }
}
