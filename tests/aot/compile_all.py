"""Compile every kernel for sm_80 and sm_90 without a GPU: registers, spills, shared memory, tensor-core instructions.

    python tests/aot/compile_all.py [--jobs N] [WORDS]    only specs whose name holds every word

Needs triton and the package's sources, no torch. Exits 1 if a kernel does not compile, spills more than is known of it, takes more
shared memory than the architecture has, or leaves the tensor cores unused.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter's functions cannot be compiled
    from specs import Spec, all_specs  # a script's folder is on the path, its package is not
else:
    from tests.aot.specs import Spec, all_specs

ARCHITECTURES = (80, 90)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}  # bytes that one block may take
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Outcome:
    """What one compilation came to."""

    name: str
    architecture: int
    seconds: float
    registers: int = 0
    stack: int = 0
    local: int = 0
    spills: int = 0  # LDL and STL instructions
    shared: int = 0
    hgmma: int = 0
    hmma: int = 0
    error: str = ""

    def faults(self, tensor_cores: bool, known_spills: int, wgmma: bool = False) -> str:
        """Why this outcome is not acceptable; "" if it is."""
        found = [self.error] if self.error else []
        if self.local or self.spills > known_spills:
            found.append(
                f"spills: {self.spills} LDL/STL ({self.stack} B stack, {self.local} B local), want at most {known_spills}"
            )
        if self.shared > SHARED_LIMIT[self.architecture]:
            found.append(f"{self.shared} B of shared memory, want at most {SHARED_LIMIT[self.architecture]}")
        if tensor_cores and not self.error and not self.hgmma + self.hmma:
            found.append("no tensor-core instruction")
        if wgmma and self.architecture >= 90 and not self.error and not self.hgmma:
            found.append("no wgmma")
        return "; ".join(found)


def parse_resources(text: str) -> tuple[int, int, int]:
    """(registers, stack, local) of `cuobjdump --dump-resource-usage`. Raises ValueError if there are none."""
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"resource usage: got {text!r}, want REG, STACK and LOCAL")
    registers, stack, local = map(int, found.groups())
    return registers, stack, local


def count_instructions(sass: str, *names: str) -> int:
    """Instructions of these names in `cuobjdump --dump-sass`."""
    return len(re.findall(rf"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?(?:{'|'.join(names)})\b", sass, re.MULTILINE))


def compile_spec(spec: Spec, architecture: int) -> Outcome:
    begin = time.monotonic()
    try:
        types, constants, attributes = spec.signature()
        source_of = GluonASTSource if spec.kernel.is_gluon() else ASTSource
        source = source_of(spec.kernel, types, constants, attributes)
        target = GPUTarget("cuda", architecture, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": spec.num_warps})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage, sass = (
                subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
                for option in ("--dump-resource-usage", "--dump-sass")
            )
        registers, stack, local = parse_resources(usage)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        return Outcome(spec.name, architecture, time.monotonic() - begin, error=text)
    return Outcome(
        spec.name,
        architecture,
        time.monotonic() - begin,
        registers,
        stack,
        local,
        count_instructions(sass, "LDL", "STL"),
        compiled.metadata.shared,
        count_instructions(sass, "HGMMA", "QGMMA"),
        count_instructions(sass, "HMMA"),
    )


def compile_number(number: int, architecture: int) -> Outcome:
    """By the spec's number: a spec itself does not travel to another process."""
    return compile_spec(all_specs()[number], architecture)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    specs = all_specs()
    chosen = [number for number, spec in enumerate(specs) if all(word in spec.name for word in options.words)]
    if not chosen:
        print(
            f"words: got {' '.join(options.words)}, want words that are all in one of {len(specs)} names, as {specs[0].name}"
        )
        return 2
    width = max(len(specs[number].name) for number in chosen)
    print(f"triton {triton.__version__}, {len(chosen)} kernels, sm_{' and sm_'.join(map(str, ARCHITECTURES))}")
    print(f"{'kernel':{width}}  arch  regs  spills  shared  hgmma  hmma  seconds")
    begin, failed = time.monotonic(), 0
    work = [(number, architecture) for number in chosen for architecture in specs[number].architectures]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        for (number, _), outcome in zip(work, pool.map(compile_number, *zip(*work, strict=True)), strict=True):
            spec = specs[number]
            faults = outcome.faults(spec.tensor_cores, spec.known_spills, spec.wgmma)
            failed += bool(faults)
            print(
                f"{outcome.name:{width}}  {outcome.architecture:4}  {outcome.registers:4}  {outcome.spills:6}  {outcome.shared:6}  "
                f"{outcome.hgmma:5}  {outcome.hmma:4}  {outcome.seconds:7.1f}"
                + (f"  FAILED: {faults}" if faults else ""),
                flush=True,
            )
    print(f"{failed} of {len(work)} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed or not work else 0


if __name__ == "__main__":
    sys.exit(main())
