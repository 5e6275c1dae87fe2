"""Unit benchmarks of the kernels: one registry of cases, one runner."""
