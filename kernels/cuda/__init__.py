"""CUDA C++ kernels for what Triton cannot say: host memory read by the processors, and per-slot flags at system scope."""
