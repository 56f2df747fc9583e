"""Compiles attention's kernels for each head size given; prints what came out as JSON.

Needs no GPU.
"""

import json
import sys
from typing import Any

import triton
from compile_hopper import spills
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tinyllm.kernels import attention_backward as backward
from tinyllm.kernels import attention_forward as forward

KERNELS = {
    "forward": (forward._forward_kernel, {}),
    "queries": (backward._queries_kernel, {}),
    "keys": (backward._keys_kernel, {"maxnreg": 168}),
}


def compiled(name: str, width: int) -> Any:
    kernel, options = KERNELS[name]
    stages = 3 if width <= 64 else 2
    constants = {"HEADS": 5, "WIDTH": width, "BLOCK_Q": 64, "BLOCK_K": 64, "STAGES": stages}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("log_desc", "delta_desc"):
            signature[argument] = "tensordesc<fp32[1,64]>"
        elif argument.endswith("_desc"):
            signature[argument] = f"tensordesc<bf16[1,64,{width}]>"
        elif argument in ("y_ptr", "dqkv_ptr"):
            signature[argument] = "*bf16"
        elif argument.endswith("_ptr"):
            signature[argument] = "*fp32"
        else:
            signature[argument] = "i32" if argument in ("length", "room") else "fp32"
    places = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    constexprs = {places[argument]: value for argument, value in constants.items()}
    aligned = {
        places[argument]: [["tt.divisibility", 16]]
        for argument in kernel.arg_names
        if argument.endswith("_ptr") or argument in ("length", "room")
    }
    source = ASTSource(kernel, signature, constexprs, aligned)
    limits = options if width <= 64 else {}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=limits)


def main() -> None:
    result = {}
    for case in sys.argv[1:]:
        name, width = case.split(",")
        kernel = compiled(name, int(width))
        result[case] = {
            "products_are_asynchronous": "wgmma.mma_async" in kernel.asm["ptx"],
            "shared_bytes": kernel.metadata.shared,
            "spills": spills(kernel.asm["cubin"]),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
