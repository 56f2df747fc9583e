"""Compiles attention's kernels for each case given; prints what came out as JSON.

Needs no GPU. A case is KERNEL,WIDTH.
"""

import json
import re
import sys
from typing import Any

import triton
from compile_hopper import described, machine_code, spills
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tinyllm.kernels import attention_backward as backward
from tinyllm.kernels import attention_backward_hopper as backward_hopper
from tinyllm.kernels import attention_forward as forward
from tinyllm.kernels import attention_forward_hopper as forward_hopper
from tinyllm.kernels import attention_hopper

HEADS = 5
TILE = 64

KERNELS = {
    "forward": forward._forward_kernel,
    "queries": backward._queries_kernel,
    "keys": backward._keys_kernel,
}
HOPPER_KERNELS = {
    "forward_hopper": (forward_hopper.kernel, forward_hopper.PROGRAMS),
    "queries_hopper": (backward_hopper.queries_kernel, backward_hopper.PROGRAMS),
    "keys_hopper": (backward_hopper.keys_kernel, backward_hopper.PROGRAMS),
}


def signature_of(kernel: Any, constants: dict[str, int], tiles: str, rows: str) -> dict[str, str]:
    """Types of a kernel's arguments, which their names tell."""
    types = {"factor": "fp32", "scale": "fp32", "lse_desc": rows, "rows_desc": rows}
    types |= dict.fromkeys(("qkv_ptr", "dy_ptr", "y_ptr", "dqkv_ptr"), "*bf16")
    types |= dict.fromkeys(constants, "constexpr")

    def type_of(name: str) -> str:
        ends = {"_desc": tiles, "_ptr": "*fp32"}
        return types.get(name) or next((t for e, t in ends.items() if name.endswith(e)), "i32")

    return {name: type_of(name) for name in kernel.arg_names}


def compiled(name: str, width: int) -> tuple[Any, int]:
    """The kernel, and how many programs are to share a multiprocessor."""
    if name in HOPPER_KERNELS:
        kernel, programs = HOPPER_KERNELS[name]
        constants = {"HEADS": HEADS, "SLOTS": attention_hopper.SLOTS}
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        tiles, rows = described(TILE, width), f"tensordesc<fp32{[1, TILE]},{layout!r}>"
        make, options = GluonASTSource, attention_hopper.options(programs)
    else:
        kernel, programs, make = KERNELS[name], 1, ASTSource
        constants = {"HEADS": HEADS, "WIDTH": width, **forward.blocks(width)}
        options = {"num_warps": constants.pop("num_warps")}
        tiles, rows = f"tensordesc<bf16{[1, TILE, width]}>", f"tensordesc<fp32{[1, TILE]}>"
    places = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    signature = signature_of(kernel, constants, tiles, rows)
    constexprs = {places[argument]: value for argument, value in constants.items()}
    aligned = {
        places[argument]: [["tt.divisibility", 16]]
        for argument in kernel.arg_names
        if argument.endswith("_ptr") or argument in ("length", "room")
    }
    source = make(kernel, signature, constexprs, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), programs


def main() -> None:
    result = {}
    for case in sys.argv[1:]:
        name, width = case.split(",")
        kernel, programs = compiled(name, int(width))
        code = machine_code(kernel.asm["cubin"])
        result[case] = {
            "products": len(re.findall(r"\bHGMMA\b", code)),
            "products_waited_for": len(re.findall(r"\bHGMMA\b.*\bgsb0\b", code)),
            "shared_bytes": kernel.metadata.shared,
            "programs": programs,
            "spills": spills(code),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
