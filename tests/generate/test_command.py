"""The command line as a user meets it: text on stdout, speed on stderr, and wrong input ends in one line and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenshare.generate.command import Request, run
from tests.generate.gguf_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path)
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSHARE_CACHE", str(tmp_path / "cache"))


def test_one_prompt_streams(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Request(("hello world",), model=str(model), max_new_tokens=8))
    out, err = capsys.readouterr()
    assert len(out.strip()) > 0
    assert "tokens/s" in err
    assert "first token after" in err


def test_several_prompts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Request(("hello", "hello hello"), model=str(model), max_new_tokens=4, chat=False, dtype="float32"))
    out, err = capsys.readouterr()
    assert "hello hello" in out
    assert "2 prompts, 8 tokens" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/no/such/file.gguf"}, "model: got /no/such/file.gguf, which does not exist"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, want at least 1"),
        ({"max_new_tokens": 4096}, "want at most the model's 512 positions"),
        ({"temperature": -0.5}, "temperature: got -0.5, want 0 or more"),
        ({"device": "gpu"}, "device: got 'gpu', want cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device: got 'meta'"),
        ({"dtype": "int4"}, "dtype: got 'int4', want one of bfloat16, float32, float16"),
        ({"prompts": ("",)}, "prompt: got an empty text"),
    ],
)
def test_wrong_input(model: Path, capsys: pytest.CaptureFixture[str], change: dict, message: str) -> None:
    fields = {"prompts": ("hello",), "model": str(model), "max_new_tokens": 4} | change
    with pytest.raises(SystemExit) as stop:
        run(Request(**fields))
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("damage", ["empty", "magic", "header", "weights"])
def test_damaged_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    data = model.read_bytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes({"empty": b"", "magic": b"GGML" + data[4:], "header": data[:300], "weights": data[:-5000]}[damage])
    with pytest.raises(SystemExit) as stop:
        run(Request(("hello",), model=str(bad)))
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert str(bad) in err
    assert "want" in err


def test_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(Request(("hello",), model=str(tmp_path)))
    assert "without config.json" in capsys.readouterr().err


def test_hugging_face_folder(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from evenshare.generate import load_model

    folder = tmp_path / "folder"
    write_model(tmp_path / "again.gguf").save_pretrained(folder)
    load_model(model).tokenizer.save_pretrained(folder)
    texts = []
    for source in (folder, model):
        run(Request(("hello world",), model=str(source), max_new_tokens=16, dtype="float32"))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_the_installed_program(model: Path) -> None:
    """Through a process of its own: entry point, lazy commands, exit code."""

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "from evenshare.cli import app; app()"
        environment = {**os.environ, "COLUMNS": "120"}
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
        )

    doctor = program("doctor")
    assert doctor.returncode == 0
    assert "torch" in doctor.stdout
    assert "w4a16_matmul" in doctor.stdout
    wrong = program("generate", "hello", "--model", str(model), "--max-new-tokens", "0")
    assert wrong.returncode == 2
    assert wrong.stderr.strip() == "error: max_new_tokens: got 0, want at least 1"
    assert "stream" in program("generate", "--help").stdout
