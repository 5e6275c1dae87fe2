"""Compare every Triton kernel with its reference on small layers: on the GPU if there is one, else in the interpreter.

`main` is `apexk kernels triton --check`. The test suite goes much further; this is for a machine that has only the package.
"""

import argparse
import os
import sys

import torch

from apexk.kernels.triton import reference as ref

from . import machine
from .registry import DTYPE_NAMES, TOLERANCE, relative_error

# T, topk, H, I, experts, resident: less than a tile; one token of odd sizes; a prefill tile and more for one expert
LAYERS = {"small": (7, 3, 64, 48, 10, 4), "one token": (1, 2, 72, 40, 6, 6), "crowded": (40, 4, 96, 80, 6, 5)}


def check_layer(sizes, dtype, device) -> dict:
    """Largest relative error of each kernel; integers must be equal, which counts as 0 or infinity."""
    from apexk.kernels.triton.combine import combine
    from apexk.kernels.triton.dequantise import dequantise
    from apexk.kernels.triton.grouped_gemm import gated_gemm, grouped_gemm
    from apexk.kernels.triton.moe_ffn import moe_ffn
    from apexk.kernels.triton.permute import permute, unpermute
    from apexk.kernels.triton.routing import rank, route

    T, topk, H, I, experts, resident = sizes
    torch.manual_seed(T)
    ids = torch.stack([torch.randperm(experts)[:topk] for _ in range(T)]).to(device)
    weights, x = torch.rand(T, topk).to(device), torch.randn(T, H).to(device, dtype)
    w13 = (torch.randn(resident, 2 * I, H) / H**0.5).to(device, dtype)
    w2 = (torch.randn(resident, H, I) / I**0.5).to(device, dtype)
    slot_of = torch.full((experts,), -1, dtype=torch.int32)
    slot_of[torch.randperm(experts)[:resident]] = torch.randperm(resident).int()
    slot_of = slot_of.to(device)

    want = ref.route_ref(ids, slot_of, resident)
    got, n = route(ids, slot_of, resident), want.rows.numel()
    equal = torch.equal(got.rows[:n], want.rows) and torch.equal(got.offsets, want.offsets) and torch.equal(got.loads, want.loads)
    ranks = zip(rank(ids, weights, experts), ref.rank_ref(ids, weights, experts), strict=True)
    moved = ref.permute_ref(x, want.rows, topk)
    h = ref.gated_gemm_ref(moved, w13, want.offsets)
    pairs, pairs_ref = torch.zeros(2, T * topk, H, device=device)
    moe_ffn(x, w13, w2, ids, weights, slot_of, pairs)
    ref.moe_ffn_ref(x, w13, w2, ids, weights, slot_of, pairs_ref)
    out, out_ref = torch.empty(2, T, H, dtype=dtype, device=device)
    combine(pairs, topk, out, x)
    ref.combine_ref(pairs, topk, out_ref, x)
    codes, scales = torch.randint(-128, 128, (I, -(-H // 64) * 64), dtype=torch.int8, device=device), torch.rand(I, -(-H // 64), device=device).half()
    taken, taken_ref = torch.empty(2, I, H, dtype=dtype, device=device)
    dequantise(codes, scales, taken, 8)
    ref.dequantise_ref(codes, scales, taken_ref, 8)
    return {
        "route": 0.0 if equal else float("inf"),
        "rank": 0.0 if all(torch.equal(a, b) for a, b in ranks) else float("inf"),
        "permute": relative_error(permute(x, want.rows, topk), moved),
        "unpermute": relative_error(unpermute(moved, want.rows, weights, T), ref.unpermute_ref(moved, want.rows, weights, T)),
        "gated_gemm": relative_error(gated_gemm(moved, w13, want.offsets), h),
        "grouped_gemm": relative_error(grouped_gemm(h, w2, want.offsets), ref.grouped_gemm_ref(h, w2, want.offsets)),
        "moe_ffn": relative_error(pairs, pairs_ref),
        "combine": 0.0 if torch.equal(out, out_ref) else float("inf"),
        "dequantise": 0.0 if torch.equal(taken, taken_ref) else float("inf"),
    }


def main(argv=None) -> int:
    argparse.ArgumentParser(prog="apexk kernels triton --check", description=__doc__.split("\n\n")[0]).parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    version = machine.facts()["versions"]["triton"]
    if version is None:
        print("Triton is not installed: pip install 'triton>=3.6'", file=sys.stderr)
        return 3
    where = torch.cuda.get_device_name(0) if device == "cuda" else "the interpreter, which cannot do bfloat16"
    print(f"triton {version} on {where}")
    dtypes = (torch.float32, torch.float16) + ((torch.bfloat16,) if device == "cuda" else ())
    failed = 0
    for name, sizes in LAYERS.items():
        for dtype in dtypes:
            for kernel, error in check_layer(sizes, dtype, device).items():
                bad = not error <= TOLERANCE[dtype]
                failed += bad
                print(f"{'FAILED ' if bad else 'ok     '}{kernel:13} {name:10} {DTYPE_NAMES[dtype]}  error {error:.1e}")
    print(f"{failed} failures")
    return 1 if failed else 0
