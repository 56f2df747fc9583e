"""Compiles Hopper kernels for each case given; prints what came out as JSON.

Needs no GPU. A case is FINISH,C,V.
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

from tinyllm.kernels import hopper, swiglu_hopper
from tinyllm.kernels.head_hopper import EXPONENTIALS
from tinyllm.kernels.rope_hopper import ROTATION

KINDS = {
    "exponentials": (EXPONENTIALS, ("*fp32:16", "fp32", "i32", "i32", "constexpr")),
    "rotation": (ROTATION, ("*fp32:16", "*fp32:16", "i32", "i32:16")),
    "swiglu": (swiglu_hopper.FORWARD, ("i32:16",)),
    "swiglu_backward": (swiglu_hopper.BACKWARD, ("*bf16:16", "i32", "i32:16")),
}
"""What is done with a product, and types of what it takes beside, of which some divide by 16."""


def described(rows: int, columns: int) -> str:
    block = [1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return f"tensordesc<bf16{block},{layout!r}>"


def compiled(name: str, width: int, vocab: int) -> Any:
    (product, extra), kernel = KINDS[name], hopper.product_kernel
    constants = product.constants(width)
    columns = constants["COLUMNS"]
    # without one, compiled code of another version would be taken for this one's
    assert all(function.cache_key for function in (kernel, product.prepare, product.finish))
    signature = {
        "x_desc": described(hopper.ROWS, hopper.DEPTH),
        "w_desc": described(columns // product.boxes, hopper.DEPTH),
        **dict.fromkeys(("out_desc", "other_desc"), described(hopper.ROWS, constants["SENT"])),
        **dict.fromkeys(("segments", "starts"), "*i32"),
        **dict.fromkeys(("tiles_n", "piece"), "i32"),
        "extra": tuple(name.removesuffix(":16") for name in extra),
        **dict.fromkeys(constants, "constexpr"),
    }
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constexprs = {places[name]: value for name, value in constants.items()}
    if name == "exponentials":
        constexprs[(*places["extra"], 4)] = vocab % columns != 0
    # as Triton finds them when these are launched
    sixteenfold = [(*places["extra"], i) for i, n in enumerate(extra) if n.endswith(":16")]
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
        width, vocab = map(int, numbers)
        kernel, constants = compiled(name, width, vocab), KINDS[name][0].constants(width)
        result[case] = {
            "products_are_asynchronous": "wgmma.mma_async" in kernel.asm["ptx"],
            **{name: constants[name] for name in ("BUFFERS", "SENT")},
            "waits": [
                len(re.findall(rf"bulk\.wait_group\.read\s+{pending};", kernel.asm["ptx"]))
                for pending in (0, 1)
            ],
            "shared_bytes": kernel.metadata.shared,
            "spills": spills(machine_code(kernel.asm["cubin"])),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
