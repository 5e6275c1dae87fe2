"""Ahead-of-time compilation of the Triton kernels for named GPUs, with no GPU present, and the gate built on its report."""
