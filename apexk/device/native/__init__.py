"""Native transfer layer: the channel that copies experts, the hand-off to the CPU kernels, and a fake CUDA runtime."""
