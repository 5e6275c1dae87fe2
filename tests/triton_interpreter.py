"""Repairs to Triton's interpreter (TRITON_INTERPRET=1), so that its bfloat16 results can be believed.

Seen with Triton 3.6 and 3.9: a bfloat16 `tl.dot` multiplies raw bit patterns, casts to bfloat16 truncate, arithmetic and
reductions on bfloat16 work on raw bits, a scalar condition joined to a vector mask turns into int32 (3.9), and a loop
bound known only at run time fails with numpy 2.4 (3.6). `install()` makes the dot and the casts right, refuses bfloat16
arithmetic (a kernel ought to upcast first) and mends the last two. It also halves the time of kernels made of several
functions, since each inner call used to patch the whole language again. Still untouched: bfloat16 atomics, inline
assembly, libdevice. The interpreter runs programs one after another: it shows no race and no out-of-bounds access.
"""

import numpy as np


def install():
    """Patch the interpreter once; Triton must have been imported with TRITON_INTERPRET=1."""
    import triton
    import triton.runtime.interpreter as interpreter

    if isinstance(triton.language.zeros, triton.runtime.jit.JITFunction):
        raise RuntimeError("TRITON_INTERPRET=1 must be set before anything imports Triton (tests/conftest.py)")
    if getattr(interpreter, "_apexk_repaired", False):
        return
    interpreter._apexk_repaired = True
    _repair_builder(interpreter)
    _refuse_bf16_reduction(interpreter)
    _patch_language_once(interpreter)
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
        _repair_index(interpreter)


def _bf16_to_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _f32_to_bf16(values):
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


def _repair_builder(interpreter):
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    create_dot, cast_impl = builder.create_dot, builder.cast_impl
    binary_op, create_splat = builder.binary_op, builder.create_splat

    def is_bf16(operand):
        return operand.dtype.scalar == tl.bfloat16

    def dot(self, a, b, acc, *rest):
        a, b = (handle(_bf16_to_f32(t.data), tl.float32) if is_bf16(t) else t for t in (a, b))
        return create_dot(self, a, b, acc, *rest)

    def cast(self, source, target):
        old, new = source.dtype.scalar, target.scalar
        if new == tl.bfloat16 and old in (tl.float32, tl.float16, tl.float64):
            return handle(_f32_to_bf16(source.data.astype(np.float32)), new)
        if old == tl.bfloat16 and new in (tl.float32, tl.float16, tl.float64):
            return handle(_bf16_to_f32(source.data).astype(interpreter._get_np_dtype(new)), new)
        return cast_impl(self, source, target)

    def arithmetic(self, left, right, op):
        if is_bf16(left) or is_bf16(right):
            raise TypeError("bfloat16 arithmetic is raw bits in the interpreter: write .to(tl.float32) in the kernel")
        return binary_op(self, left, right, op)

    def splat(self, result_type, value):
        # a comparison keeps its operands' type over boolean data; splatting that would give an int32 mask
        if value.data.dtype == np.bool_:
            return handle(np.full(result_type.shape, bool(value.data.reshape(-1)[0])), tl.int1)
        return create_splat(self, result_type, value)

    builder.create_dot, builder.cast_impl = dot, cast
    builder.binary_op, builder.create_splat = arithmetic, splat


def _refuse_bf16_reduction(interpreter):
    import triton.language as tl

    apply_impl = interpreter.ReduceOps.apply_impl

    def reduce(self, operands, *rest):
        for operand in operands if isinstance(operands, (tuple, list)) else (operands,):
            if operand.handle.dtype.scalar == tl.bfloat16:
                raise TypeError("bfloat16 reduction is raw bits in the interpreter: write .to(tl.float32) in the kernel")
        return apply_impl(self, operands, *rest)

    interpreter.ReduceOps.apply_impl = reduce


def _patch_language_once(interpreter):
    """An inner function runs inside a launch, which has mostly patched what the function sees of the language."""
    import triton.language as tl

    def call(self, *args, **kwargs):
        seen = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(module.load) for module in seen):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _repair_index(interpreter):
    """Triton 3.6 calls int() on an array of one element, which numpy 2.4 refuses."""
    set_attr = interpreter._LangPatchScope.set_attr

    def patched(self, obj, name, value):
        if name == "__index__":
            value = lambda scalar: int(np.asarray(scalar.handle.data).reshape(-1)[0])  # noqa: E731
        return set_attr(self, obj, name, value)

    interpreter._LangPatchScope.set_attr = patched
