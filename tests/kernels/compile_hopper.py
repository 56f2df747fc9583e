"""Compiles the head's Hopper kernel for each case given; prints what came out as JSON.

Needs no GPU. A case is C,COLUMNS,STAGES,BUFFERS,V.
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

from tinyllm.kernels.head_hopper import DEPTH, ROWS, exponentials_kernel


def described(rows: int, columns: int) -> str:
    block = [1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return f"tensordesc<bf16{block},{layout!r}>"


def compiled(width: int, columns: int, stages: int, buffers: int, vocab: int) -> Any:
    constants = {
        "OFFSET_LOG2": 7.0,
        "C": width,
        "COLUMNS": columns,
        "STAGES": stages,
        "BUFFERS": buffers,
        "MASKED": vocab % columns != 0,
    }
    signature = {
        "h_desc": described(ROWS, DEPTH),
        "e_desc": described(columns, DEPTH),
        "exps_desc": described(ROWS, columns // 4),
        "sums": "*fp32",
        "segments": "*i32",
        "starts": "*i32",
        **dict.fromkeys(("rows", "vocab", "tiles_n"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    places = {name: (i,) for i, name in enumerate(exponentials_kernel.arg_names)}
    source = GluonASTSource(
        fn=exponentials_kernel,
        signature=signature,
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in ("sums", "rows")},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def spills(cubin: bytes) -> int:
    """Loads from and stores to local memory."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "cuobjdump"), "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"\b(?:LDL|STL)\b", sass))


def main() -> None:
    result = {}
    for case in sys.argv[1:]:
        kernel = compiled(*map(int, case.split(",")))
        result[case] = {
            "products_are_asynchronous": "wgmma.mma_async" in kernel.asm["ptx"],
            "shared_bytes": kernel.metadata.shared,
            "spills": spills(kernel.asm["cubin"]),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
