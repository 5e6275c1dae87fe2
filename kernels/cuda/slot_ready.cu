// slot_ready: raises the flags of listed slots, for copies that a copy engine made.
//
//   for i < count:  ready[slots[i]] = epoch
//
// Launched on the stream of the copies, behind them: what they wrote is visible to whoever sees the flag. A flag holds the
// number of the step that filled the slot, never just "yes", so nothing has to be cleared between steps and a flag of an
// earlier step lets no tile through. List, count and epoch are read on the device, as in slot_gather. One block.
// Negative slots are left out.

extern "C" __global__ void slot_ready(const int* slots,  // [n]
                                      const int* count,  // [1] how many entries of the list are meant, at most n
                                      const int* epoch,  // [1]
                                      int* ready) {      // [S]
  __threadfence_system();
  for (int i = threadIdx.x; i < count[0]; i += blockDim.x)
    if (slots[i] >= 0) atomicExch_system(ready + slots[i], epoch[0]);
}
