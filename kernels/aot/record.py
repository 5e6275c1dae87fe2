"""What a wrapper would launch: the arguments of each kernel, without a GPU and without running it.

The ahead-of-time gate compiles these, so it cannot drift from what the wrappers really pass. Tensors are on the "meta"
device: they have shapes, strides and types, but no memory.
"""

from dataclasses import dataclass, field

import torch

TYPE_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.int8: "i8", torch.float64: "fp64", torch.bool: "i1",
}  # fmt: skip
ALIGNED = [["tt.divisibility", 16]]  # torch allocations, pool blocks and the rows inside them start at multiples of 16 bytes


@dataclass
class Launch:
    """One kernel with its values by name; the forms that Triton's compiler wants are derived here."""

    kernel: object  # the @triton.jit function
    values: dict
    options: dict = field(default_factory=dict)  # num_warps, num_stages

    def source(self):
        """(signature, constexprs, attributes), specialised the way Triton's own launcher specialises."""
        signature, constexprs, attrs = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.values[parameter.name]
            specialise = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and specialise):
                signature[parameter.name], constexprs[(index,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
                attrs[(index,)] = ALIGNED
            elif isinstance(value, int):
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and specialise:
                    attrs[(index,)] = ALIGNED
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                raise TypeError(f"{self.kernel.__name__}: argument {parameter.name} is a {type(value).__name__}")
        return signature, constexprs, attrs

    def variant(self) -> str:
        """Compile-time switches that are on, and what is absent: names one launch among those of one kernel and tile."""
        flags = [n for n, v in self.values.items() if v is True] + [f"{n}={v}" for n, v in self.values.items() if isinstance(v, str)]
        present = [n for n in ("bias_ptr", "weights_ptr", "ready_ptr", "slot_of_ptr", "partial_ptr", "shared_ptr") if self.values.get(n) is not None]
        sizes = [f"{n}={v}" for n, v in self.values.items() if n.isupper() and isinstance(v, int) and not isinstance(v, bool)]
        return " ".join(sorted(flags + present + [s for s in sizes if "BLOCK_" not in s or "BLOCK_H" in s]))

    def key(self):
        """Equal keys compile to equal code."""
        signature, constexprs, attrs = self.source()
        return (self.kernel.__name__, str(signature), str(constexprs), str(sorted(attrs)), str(sorted(self.options.items())))


def record(call) -> list[Launch]:
    """Run `call` with every launch written down instead of done."""
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted functions then and cannot be compiled")
    launches = []

    def run(kernel, *args, grid, warmup, **kwargs):
        names = [parameter.name for parameter in kernel.params]
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        values |= {p.name: p.default for p in kernel.params if p.name not in values and p.has_default}
        launches.append(Launch(kernel, values, {k: v for k, v in kwargs.items() if k not in names}))

    real = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.run = run
    try:
        call()
    finally:
        triton.runtime.jit.JITFunction.run = real
    return launches
