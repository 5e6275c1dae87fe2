#!/usr/bin/env bash
# Looks at the kernels of one benchmark case with Nsight Compute: all sections, sources, into OUT.ncu-rep.
#
#     profiling/ncu_kernel.sh [--dry-run] CASE [OUT]           CASE as in `apexk kernels bench --list`, on a GPU
#
# Only the case's one execution after warm-up is profiled (`apexk kernels once`). PYTHON names the interpreter (python3).
# Exit code 3: ncu is not installed.
set -euo pipefail

dry=
if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
if [ $# -lt 1 ]; then
    echo "usage: ncu_kernel.sh [--dry-run] CASE [OUT]" >&2
    exit 2
fi
case=$1
out=${2:-ncu-${case//\//-}}
command=(ncu --set full --import-source yes --profile-from-start off --target-processes all --force-overwrite --export "$out"
    "${PYTHON:-python3}" -m apexk.cli kernels once "$case")
printf '%q ' "${command[@]}"
echo
[ -z "$dry" ] || exit 0
if ! command -v ncu >/dev/null; then
    echo "ncu_kernel.sh: ncu is missing: install Nsight Compute (package nsight-compute of the CUDA repository, or part of the CUDA" >&2
    echo "toolkit) and put it on PATH; apexk kernels bench times the case without it" >&2
    exit 3
fi
[ "$(dirname "$out")" = . ] || mkdir -p "$(dirname "$out")"
if ! "${command[@]}"; then
    echo "ncu_kernel.sh: ncu failed. ERR_NVGPUCTRPERM means that this user may not read the counters: an administrator allows it with" >&2
    echo "NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module" >&2
    exit 1
fi
ncu --import "$out.ncu-rep" --page details --print-summary per-kernel | head -n 120
