"Cross-compile the Triton kernels for GPUs that are not in this machine and print their resources; runs in a separate process, without the interpreter."

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from leakmel.core.errors import EngineError
from leakmel.mel import triton_kernel
from leakmel.mel.spec import MelSpec
from leakmel.mel.triton_kernel import (
    LAUNCHES,
    Launch,
    TritonChain,
    _mel_kernel,
    _moments_kernel,
    kernel_constants,
    require_products,
)

TYPES = {
    "out_ptr": "*fp16",
    "starts_ptr": "*i64",
    "places_ptr": "*i64",
    "dft_ptr": "*fp16",
    "bank_ptr": "*fp32",
    "tiles_ptr": "*i32",
    "n_rows": "i32",
}


def is_refused(ptx: str) -> bool:
    "Whether the engine would refuse to launch this machine code."
    try:
        require_products(ptx)
    except EngineError:
        return True
    return False


def compiled(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    n_warps: int,
    n_stages: int,
) -> dict[str, Any]:
    "Shared memory, registers and spilled bytes of a kernel, and the tensor core instructions in it."
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={
            (names.index(n),): [["tt.divisibility", 16]]
            for n, t in types.items()
            if t[0] == "*" and n != "x_ptr"
        },
    )
    done = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": n_warps, "num_stages": n_stages, "enable_fp_fusion": False},
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(done.asm["cubin"])
        usage = subprocess.run(
            [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    ptx = done.asm["ptx"]
    return {
        "shared": done.metadata.shared,
        "registers": int(registers),
        "stack": int(stack),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "traps": len(re.findall(r"\btrap\s*;", ptx)),
        "refused": is_refused(ptx),
        "cp_async": ptx.count("cp.async"),
    }


class NoDriver:
    "A driver that only reports a target GPU."

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by this number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class CompileOnly:
    "A kernel whose launches end with what was compiled for them."

    def __init__(self, kernel: Any):
        self.kernel, self.made = kernel, list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values, **options: self.made.append(self.kernel.warmup(*values, grid=grid, **options))


def launched(capability: int) -> dict[str, Any]:
    "How many kernels calls of many sizes come down to, and with which options."
    driver.set_active(NoDriver(capability))
    features, moments = CompileOnly(_mel_kernel), CompileOnly(_moments_kernel)
    vars(triton_kernel).update(_mel_kernel=features, _moments_kernel=moments)
    spec = MelSpec()
    chain = TritonChain(spec, torch.device("cpu"), 16, launch=LAUNCHES.get(capability // 10, Launch()))
    chain._constants["band_product"] = "bf16x3"
    for n in (1, 3, 8, 16):
        mels, sums = (
            torch.zeros((n, *spec.row_shape), dtype=torch.float16),
            torch.zeros((n, 5), dtype=torch.float64),
        )
        chain.features(torch.zeros((n, spec.n_samples), dtype=torch.int16), mels, sums)
        chain.features(
            torch.zeros(n * spec.n_samples + 1, dtype=torch.int16)[1:].view(n, -1), mels, None
        )  # at an odd address
        chain.features(torch.zeros((n, spec.n_samples), dtype=torch.float32), mels, None)
    return {
        "features": len({id(k) for k in features.made}),
        "moments": len({id(k) for k in moments.made}),
        "options": sorted(
            {
                (k.metadata.num_warps, k.metadata.num_stages, k.metadata.enable_fp_fusion)
                for k in features.made
            }
        ),
    }


def main() -> None:
    "Read a list of cases as JSON, print a list of what was found."
    found = []
    for case in json.load(sys.stdin):
        if case["samples"] == "launches":
            found.append(launched(case["capability"]))
            continue
        spec, capability = MelSpec(**case["spec"]), case["capability"]
        if case["samples"] == "moments":
            constants = {"n_samples": spec.n_samples, "full_scale": 32_767, "block": 2048}
            found.append(
                compiled(_moments_kernel, capability, {"x_ptr": "*i16", "out_ptr": "*fp64"}, constants, 4, 3)
            )
            continue
        launch = LAUNCHES.get(capability // 10, Launch())
        pointer, stages = {"int16": ("*i16", launch.stages), "float32": ("*fp32", launch.float_stages)}[
            case["samples"]
        ]
        constants = kernel_constants(spec, launch, "cuda")
        found.append(
            compiled(_mel_kernel, capability, {"x_ptr": pointer, **TYPES}, constants, launch.warps, stages)
        )
    print(json.dumps(found))


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET"), "the interpreter compiles nothing"
    main()
