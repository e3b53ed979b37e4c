"""Install a wheel as a newcomer does, in a new environment away from the sources, and use it: python tests/try_wheel.py FILE"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_BYTES = 1_000_000

# Under -I: neither the folder nor the variables of the caller are seen.
IMPORT = """
import sys, time
begin = time.perf_counter()
import evenshare
took = time.perf_counter() - begin
assert took < 1, f"import evenshare: took {took:.2f} s, want less than 1"
assert not {"torch", "triton"} & set(sys.modules), "import evenshare: got torch or triton, want neither"
import torch
weight = evenshare.quantize(torch.randn(64, 128), group_size=64)
y = evenshare.w4a16_matmul(torch.randn(3, 128), weight)
assert y.shape == (3, 64)
q, k = torch.randn(1, 4, 8, 64), torch.randn(1, 9, 2, 64)
assert evenshare.attention(q, k, k, causal=True).isfinite().all()
assert evenshare.matmul(torch.randn(5, 6), torch.randn(6, 7)).shape == (5, 7)
assert not torch.cuda.is_initialized()
print(f"evenshare {evenshare.__version__} from {evenshare.__file__}, imported in {1000 * took:.0f} ms")
"""


def main(wheel: Path) -> None:
    """Raises if the wheel is too large, does not install or does not work."""
    size = wheel.stat().st_size
    if size >= MAX_BYTES:
        raise SystemExit(f"wheel: got {size} bytes, want less than {MAX_BYTES}")
    print(f"{wheel.name}: {size} bytes")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        binaries = Path(folder) / "bin"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

        def run(*command: str | Path) -> None:
            subprocess.run([str(part) for part in command], check=True, cwd=folder, env=environment)

        def install(what: str) -> None:
            run(binaries / "python", "-m", "pip", "install", "-q", "--constraint", ROOT / "constraints.txt", what)

        install(str(wheel))
        run(binaries / "python", "-I", "-c", IMPORT)
        bare = subprocess.run([binaries / "evenshare", "doctor"], capture_output=True, text=True, env=environment)
        assert bare.returncode == 1
        assert "pip install evenshare[" in bare.stderr, bare.stderr
        install(f"{wheel}[report]")
        run(binaries / "evenshare", "explain", "--lens", "65536,15x256", "--html", "page.html", "--out", "picture.png")
        for name in ("page.html", "picture.png"):
            assert (Path(folder) / name).stat().st_size > 10_000
        run(binaries / "evenshare", "doctor")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"arguments: got {len(sys.argv) - 1}, want the wheel's path")
    main(Path(sys.argv[1]).resolve())
