"""The command `evenshare doctor`: what is installed, and which backend runs what, and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

import torch
from rich.console import Console
from rich.table import Table

from evenshare.device.target import interpreter_active, select_target
from evenshare.generate.fetch import SMOLLM2, cache_dir, cached_model

PACKAGES = {
    "torch": "", "triton": "", "numpy": "", "transformers": "generate", "tokenizers": "generate", "matplotlib": "report",
    "safetensors": "generate",
}  # fmt: skip
OPERATORS = ("attention, paged_attention", "matmul", "w4a16_matmul, w8a16_matmul", "append_paged_kv_cache")


def run() -> None:
    """Print the three tables."""
    console = Console(highlight=False)
    console.print(_versions())
    console.print(_backends())
    model = cached_model()
    console.print(f"cache: {cache_dir()}", soft_wrap=True)
    console.print(
        f"default model: {SMOLLM2.name}: {'fetched' if model else 'not fetched yet (evenshare generate does it)'}"
    )


def _versions() -> Table:
    table = Table("package", "version", "")
    table.add_row("evenshare", importlib.metadata.version("evenshare"), "")
    table.add_row("python", platform.python_version(), platform.platform())
    for package, extra in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            table.add_row(package, "-", f"pip install evenshare\\[{extra}]" if extra else "required")
        else:
            table.add_row(package, importlib.metadata.version(package), "")
    return table


def devices() -> list[tuple[torch.device, str]]:
    """Devices that tensors can be on here, with a description."""
    found = [(torch.device("cpu"), f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found.append(
            (
                torch.device("cuda", i),
                f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs",
            )
        )
    return found


def why(device: torch.device) -> str:
    """Why `select_target` gives that device its backend."""
    if device.type == "cuda":
        return "portable Triton kernels: compiled at first use, any GPU that Triton supports"
    if interpreter_active():
        return "plain torch; backend='triton' runs the kernels in Triton's interpreter (TRITON_INTERPRET=1), for tests"
    return (
        "plain torch with its int4 kernel in bfloat16; Triton has no CPU compiler (its interpreter: TRITON_INTERPRET=1)"
    )


def _backends() -> Table:
    table = Table("device", "operator", "backend", "why")
    for device, description in devices():
        backend = select_target(device).backend
        for i, operator in enumerate(OPERATORS):
            table.add_row(
                f"{device}\n{description}" if i == 0 else "", operator, backend, why(device) if i == 0 else ""
            )
    return table
