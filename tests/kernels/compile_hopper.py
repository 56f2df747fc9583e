"""Compiles Hopper kernels for each case given; prints what came out as JSON.

Needs no GPU. A case is FINISH,C,ROWS,V.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tinyllm.kernels import hopper
from tinyllm.kernels.head_hopper import finish_exponentials
from tinyllm.kernels.linear_hopper import (
    finish_rotation,
    finish_swiglu,
    finish_swiglu_backward,
    load_gates,
    load_turns,
)


class Kind(NamedTuple):
    """What is done with a product, as its module launches it."""

    finish: Any
    extra: tuple[str, ...]  # of which those that end with :16 are multiples of it
    prepare: Any = hopper.prepare_nothing
    boxes: int = 1
    columns: int | None = None
    exchange: bool = False


KINDS = {
    "exponentials": Kind(finish_exponentials, ("*fp32:16", "fp32", "i32", "i32", "constexpr")),
    "rotation": Kind(finish_rotation, ("*fp32:16", "*fp32:16", "i32", "i32:16"), load_turns),
    "swiglu": Kind(finish_swiglu, ("i32:16",), boxes=2, columns=128),
    "swiglu_backward": Kind(
        *(finish_swiglu_backward, ("*bf16:16", "i32", "i32:16"), load_gates),
        columns=128,
        exchange=True,
    ),
}


def described(rows: int, columns: int) -> str:
    block = [1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return f"tensordesc<bf16{block},{layout!r}>"


def compiled(name: str, width: int, rows: int, vocab: int) -> Any:
    kind, kernel = KINDS[name], hopper.product_kernel
    columns = kind.columns or hopper.columns_of(width)
    stages, buffers = hopper.slices_and_buffers(width, rows, columns, kind.exchange)
    constants = {
        "PREPARE": kind.prepare,
        "FINISH": kind.finish,
        "C": width,
        "COLUMNS": columns,
        "BOXES": kind.boxes,
        "STAGES": stages,
        "BUFFERS": buffers,
    }
    # without one, compiled code of another version would be taken for this one's
    assert all(function.cache_key for function in (kernel, kind.prepare, kind.finish))
    signature = {
        "x_desc": described(hopper.ROWS, hopper.DEPTH),
        "w_desc": described(columns // kind.boxes, hopper.DEPTH),
        **dict.fromkeys(("out_desc", "other_desc"), described(hopper.ROWS, hopper.PART)),
        **dict.fromkeys(("segments", "starts"), "*i32"),
        **dict.fromkeys(("tiles_n", "piece"), "i32"),
        "extra": tuple(name.removesuffix(":16") for name in kind.extra),
        **dict.fromkeys(constants, "constexpr"),
    }
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constexprs = {places[name]: value for name, value in constants.items()}
    if name == "exponentials":
        constexprs[(*places["extra"], 4)] = vocab % columns != 0
    # as Triton finds them when these are launched
    sixteenfold = [(*places["extra"], i) for i, n in enumerate(kind.extra) if n.endswith(":16")]
    source = GluonASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constexprs,
        attrs={place: [["tt.divisibility", 16]] for place in sixteenfold},
    )
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
