"""One-line faults, each of which the native self-test must notice: remainders, strides, masks, pair order, tile use."""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    unit: str  # the source file to compile, without .cpp
    isa: str  # what the self-test runs
    file: str  # where the fault goes: the unit, or a header that it includes
    old: str
    new: str


MUTANTS = [
    Mutant("scalar-last-element", "ffn_scalar", "scalar", "ffn_scalar.cpp", "j < k; j++", "j < k - 1; j++"),
    Mutant("rounding-truncates", "ffn_scalar", "scalar", "numeric.h", "(u + 0x7fffu + (u >> 16 & 1u)) >> 16", "u >> 16"),
    Mutant("down-stride", "ffn_scalar", "scalar", "ffn_steps.h", "Path::products(w, width, n, width,", "Path::products(w, width + 1, n, width,"),
    Mutant("up-is-gate", "ffn_scalar", "scalar", "ffn_steps.h", "products(call.intermediate + row, n, up)", "products(row, n, up)"),
    Mutant("avx2-mask", "ffn_avx2", "avx2", "ffn_avx2.cpp", "0xffff0000u", "0xffffff00u"),
    Mutant("vector-tail", "ffn_avx2", "avx2", "vector_path.h", "w + r * stride, n * sizeof(E)", "w + r * stride, (n - 1) * sizeof(E)"),
    Mutant("vector-tail-dropped", "ffn_avx2", "avx2", "vector_path.h", "if (tail) {", "if (tail > 8) {"),
    Mutant("vector-carry", "ffn_avx2", "avx2", "vector_path.h", "*saved = carry + r * M", "*saved = carry + r"),
    Mutant("vector-last-rows", "ffn_avx2", "avx2", "vector_path.h", "stride, rows - whole, k", "stride, 0, k"),
    Mutant("group-order", "ffn_avx2", "avx2", "groups.h", "group * small + least(group, large)", "group * small + large"),
    Mutant("avx2-fp16-part", "ffn_avx2", "avx2", "ffn_avx2.cpp", "(w + p * kLanes)))", "(w)))"),
    Mutant("panel-quarter-place", "ffn_avx512", "avx512", "panel.h", "(static_cast<int64_t>(q) * chunks + chunk)", "(static_cast<int64_t>(q) * chunks + chunk % 32)"),
    Mutant("panel-carry", "ffn_avx512", "avx512", "panel.h", "first ? V::zero() : carry[i]", "V::zero()"),
    Mutant("panel-carry-place", "ffn_avx512", "avx512", "panel.h", "carry + kVectors * from", "carry + from"),
    Mutant("panel-tail-dropped", "ffn_avx512", "avx512", "panel.h", "if (whole < chunks) {", "if (false) {"),
    Mutant("panel-tail-too-long", "ffn_avx512", "avx512", "panel.h", "tail * sizeof(E)", "V::kChunk * sizeof(E)"),
    Mutant("panel-last-rows", "ffn_avx512", "avx512", "panel.h", "least(kVectors * i + r, rows - 1)", "(kVectors * i + r)"),
    Mutant("panel-quarters-not-added", "ffn_avx512", "avx512", "panel.h", "from * kTile + r, q > 0)", "from * kTile + r, q > 1)"),
    Mutant("panel-other-order", "ffn_avx512", "avx512", "avx512.h", "_mm_add_ps(_mm_add_ps(half, _mm256_castps256_ps128(upper)), _mm256_extractf128_ps(upper, 1))", "_mm_add_ps(_mm_add_ps(half, _mm256_extractf128_ps(upper, 1)), _mm256_castps256_ps128(upper))"),
    Mutant("panel-row-order", "ffn_avx512", "avx512", "avx512_widen.h", "load(c), 2), load(d), 3)", "load(d), 2), load(c), 3)"),
    Mutant("panel-quarter-of-wide-elements", "ffn_avx512_wide", "avx512", "panel.h", "__is_same(E, bf16) ? 4 * V::kParts : 4", "4 * V::kParts"),
    Mutant("panel-fp16-rows", "ffn_avx512_wide", "avx512", "avx512_widen.h", "load(c), load(d))", "load(d), load(c))"),
    Mutant("panel-fp32-part", "ffn_avx512_wide", "avx512", "avx512_widen.h", "const int at = p * kLanes;", "const int at = 0 * p;"),
    Mutant("packed-tail", "ffn_avx512_bf16", "avx512_bf16", "vector_path.h", "whole, values, n * sizeof(E)", "whole, values, (n - 1) * sizeof(E)"),
    Mutant("bf16-sum-fold", "ffn_avx512_bf16", "avx512_bf16", "avx512.h", "_mm512_unpackhi_ps(c, d)", "_mm512_unpackhi_ps(d, c)"),
    Mutant("amx-no-configuration", "ffn_amx", "amx", "ffn_amx.cpp", "_tile_loadconfig(&config);", "(void)config;"),
    Mutant("amx-pair-order", "ffn_amx", "amx", "ffn_amx.cpp", "kSide + i % 2] = ", "kSide + (i + 1) % 2] = "),
    Mutant("amx-second-rows", "ffn_amx", "amx", "ffn_amx.cpp", "_tile_dpbf16ps(3, 5, 7)", "_tile_dpbf16ps(3, 4, 7)"),
    Mutant("amx-row-stride", "ffn_amx", "amx", "ffn_amx.cpp", "_tile_loadd(4, w, bytes)", "_tile_loadd(4, w, 64)"),
    Mutant("amx-edge-rows", "ffn_amx", "amx", "ffn_amx.cpp", "r < rows && j < n", "j < n"),
    Mutant("amx-edge-depth", "ffn_amx", "amx", "ffn_amx.cpp", "rows == 2 * kSide && at + kDepth <= k", "rows == 2 * kSide"),
    Mutant("plan-last-rows", "plan", "scalar", "plan.cpp", "std::min(rows_each, rows - row)", "std::min(rows_each, rows - row - 1)"),
    Mutant("plan-second-unit", "plan", "scalar", "plan.cpp", "place++] = static_cast<int32_t>(pair)", "place++] = static_cast<int32_t>(pair / 2 * 2)"),
    Mutant("job-does-not-wait", "job", "scalar", "job.cpp", "reached(progress.gated, plan_.gate_up_tasks) &&", "reached(progress.packed, 1) &&"),
    Mutant("linear-row", "ffn_scalar", "scalar", "ffn_steps.h", "unit.pairs[i]) * call.outputs + row", "unit.pairs[i]) * call.outputs"),
    Mutant("linear-bias-row", "ffn_scalar", "scalar", "ffn_steps.h", "static_cast<const Elem *>(call.bias) + row", "static_cast<const Elem *>(call.bias)"),
    Mutant("linear-x-stride", "ffn_scalar", "scalar", "ffn_steps.h", "unit.pairs[i] * call.x_stride", "unit.pairs[i] * call.inputs"),
    Mutant("job-sums-uncleared", "job", "scalar", "job.cpp", "task.unit == 0) clear_columns", "task.unit == 1) clear_columns"),
]
