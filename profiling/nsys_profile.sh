#!/usr/bin/env bash
# Captures a command with Nsight Systems as apexk's reader wants it, exports it and runs the standard reports.
#
#     profiling/nsys_profile.sh [--dry-run] OUT COMMAND...      e.g. OUT=out/run, COMMAND=python my_script.py
#
# The capture lies between cudaProfilerStart and cudaProfilerStop (torch.cuda.profiler.start/stop), so that warm-up stays
# outside; a command that never calls them gives no report. Kernels of CUDA graphs are traced one by one. No sampling: it
# costs time and answers nothing here. Results: OUT.nsys-rep, OUT.sqlite, OUT_*.csv; read them with `apexk report OUT.sqlite`.
# Exit code 3: nsys is not installed.
set -euo pipefail

dry=
if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
if [ $# -lt 2 ]; then
    echo "usage: nsys_profile.sh [--dry-run] OUT COMMAND..." >&2
    exit 2
fi
out=$1
shift
reports=nvtx_sum,cuda_gpu_kern_sum,cuda_gpu_mem_time_sum,cuda_gpu_mem_size_sum,cuda_api_sum,osrt_sum

run() {
    printf '%q ' "$@"
    echo
    [ -n "$dry" ] || "$@"
}

if [ -z "$dry" ] && ! command -v nsys >/dev/null; then
    echo "nsys_profile.sh: nsys is missing: install Nsight Systems (package nsight-systems of the CUDA repository, or part of the" >&2
    echo "CUDA toolkit) and put it on PATH; without it, apexk profile --tool torch writes a torch.profiler trace" >&2
    exit 3
fi
[ -n "$dry" ] || mkdir -p "$(dirname "$out")"
run nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi --capture-range-end=stop --cuda-graph-trace=node \
    --sample=none --cpuctxsw=none --force-overwrite=true --output="$out" "$@"
run nsys export --type=sqlite --force-overwrite=true --output="$out.sqlite" "$out.nsys-rep"
run nsys stats --report="$reports" --format=csv --force-overwrite=true --output="$out" "$out.sqlite"
