"""Compiles Hopper kernels for each case given; prints what came out as JSON.

Needs no GPU. A case is FINISH,C,ROWS,V.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tinyllm.kernels import hopper
from tinyllm.kernels.head_hopper import finish_exponentials
from tinyllm.kernels.linear_hopper import finish_rotation, finish_swiglu

FINISH = {
    "exponentials": (finish_exponentials, 1, ("*fp32", "fp32", "i32", "i32", "constexpr")),
    "rotation": (finish_rotation, 1, ("*fp32", "*fp32", "i32", "i32")),
    "swiglu": (finish_swiglu, 2, ("i32",)),
}


def described(rows: int, columns: int) -> str:
    block = [1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return f"tensordesc<bf16{block},{layout!r}>"


def compiled(name: str, width: int, rows: int, vocab: int) -> Any:
    finish, boxes, extra = FINISH[name]
    kernel, columns = hopper.product_kernel, hopper.columns_of(width)
    stages, buffers = hopper.slices_and_buffers(width, rows)
    constants = {
        "FINISH": finish,
        "C": width,
        "COLUMNS": columns,
        "BOXES": boxes,
        "STAGES": stages,
        "BUFFERS": buffers,
    }
    signature = {
        "x_desc": described(hopper.ROWS, hopper.DEPTH),
        "w_desc": described(columns // boxes, hopper.DEPTH),
        "out_desc": described(hopper.ROWS, hopper.PART),
        "other_desc": described(hopper.ROWS, hopper.PART),
        "segments": "*i32",
        "starts": "*i32",
        "tiles_n": "i32",
        "piece": "i32",
        "extra": extra,
        **dict.fromkeys(constants, "constexpr"),
    }
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constexprs = {places[name]: value for name, value in constants.items()}
    if name == "exponentials":
        constexprs[(*places["extra"], 4)] = vocab % columns != 0
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def machine_code(cubin: bytes) -> str:
    """What a multiprocessor is given, in words."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "cuobjdump"), "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def spills(code: str) -> int:
    """Loads from and stores to local memory."""
    return len(re.findall(r"\b(?:LDL|STL)\b", code))


def main() -> None:
    result = {}
    for case in sys.argv[1:]:
        name, *numbers = case.split(",")
        kernel = compiled(name, *map(int, numbers))
        result[case] = {
            "products_are_asynchronous": "wgmma.mma_async" in kernel.asm["ptx"],
            "full_waits": len(re.findall(r"bulk\.wait_group\.read\s+0;", kernel.asm["ptx"])),
            "shared_bytes": kernel.metadata.shared,
            "spills": spills(machine_code(kernel.asm["cubin"])),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
