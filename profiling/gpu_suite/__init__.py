"""What to run on the day a GPU is there: checks and first timings, from a source tree, with nothing installed but torch.

    python3 -m profiling.gpu_suite --part all --json OUT

With `--virtual` the same pieces run without a GPU, as far as they can: kernels in Triton's interpreter, the engine on a
modelled clock.
"""
