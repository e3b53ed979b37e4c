"""GGUF files, written and dequantised by the gguf package, read by ours: equal bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

from evenshare.quant import QuantizedWeight  # noqa: E402
from evenshare.quant.formats.gguf import GGUFError, read_gguf  # noqa: E402

Type = gguf.GGMLQuantizationType
BLOCKS = {Type.Q4_0: (32, 18), Type.Q4_1: (32, 20), Type.Q8_0: (32, 34), Type.Q4_K: (256, 144)}


def random_blocks(kind: Type, n: int, k: int) -> np.ndarray:
    """Random bytes, with scales and minima (the leading fp16 values) that are finite and of both signs."""
    block, nbytes = BLOCKS[kind]
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 256, (n, k // block, nbytes), dtype=np.uint8)
    halves = 1 if kind in (Type.Q4_0, Type.Q8_0) else 2
    scales = rng.standard_normal((n, k // block, halves)).astype(np.float16)
    raw[..., : 2 * halves] = scales.view(np.uint8)
    return raw.reshape(n, -1)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Type | None]], **metadata: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", list(BLOCKS), ids=lambda kind: kind.name)
@pytest.mark.parametrize(("n", "k"), [(5, 256), (3, 1024)])
def test_quantised_tensors_bit_for_bit(tmp_path: Path, kind: Type, n: int, k: int) -> None:
    raw = random_blocks(kind, n, k)
    weight = read_gguf(write(tmp_path / "m.gguf", {"w": (raw, kind)}))["w"]
    assert isinstance(weight, QuantizedWeight)
    assert weight.shape == (n, k)
    assert (weight.group_size, weight.bits) == (32, 8 if kind == Type.Q8_0 else 4)
    want = gguf.quants.dequantize(raw, kind)
    assert np.array_equal(weight.dequantize().numpy().view(np.uint32), want.view(np.uint32))


def test_q4_1_with_a_zero_scale_keeps_its_minimum(tmp_path: Path) -> None:
    raw = random_blocks(Type.Q4_1, 2, 64)
    raw.reshape(2, 2, 20)[:, 1, :2] = 0
    weight = read_gguf(write(tmp_path / "m.gguf", {"w": (raw, Type.Q4_1)}))["w"]
    assert isinstance(weight, QuantizedWeight)
    minimum = raw.reshape(2, 2, 20)[:, 1, 2:4].copy().view(np.float16).astype(np.float32)
    assert (minimum != 0).all()
    assert np.array_equal(weight.dequantize().numpy()[:, 32:], np.broadcast_to(minimum, (2, 32)))


def test_float_tensors(tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    bfloat16 = torch.from_numpy(values).bfloat16()
    raw_bfloat16 = bfloat16.view(torch.uint8).numpy()
    path = write(
        tmp_path / "m.gguf",
        {
            "f32": (values, None),
            "norm": (values[0], None),
            "f16": (values.astype(np.float16), None),
            "bf16": (raw_bfloat16, Type.BF16),
        },
    )
    file = read_gguf(path)
    assert list(file) == ["f32", "norm", "f16", "bf16"]
    assert torch.equal(file["f32"], torch.from_numpy(values))
    assert torch.equal(file["norm"], torch.from_numpy(values[0]))
    assert torch.equal(file["f16"], torch.from_numpy(values.astype(np.float16)))
    assert torch.equal(file["bf16"], bfloat16)


def test_metadata_and_infos(tmp_path: Path) -> None:
    tokens = ["a", "", "Ġé", "x" * 300]
    path = write(
        tmp_path / "m.gguf",
        {"w": (random_blocks(Type.Q4_0, 3, 64), Type.Q4_0)},
        tokens=tokens,
        kinds=[1, 2, 3],
        template="{{ x }}",
        count=7,
    )
    file = read_gguf(path)
    assert file.metadata["tokens"] == tokens
    assert file.metadata["kinds"] == [1, 2, 3]
    assert file.metadata["template"] == "{{ x }}"
    assert file.metadata["count"] == 7
    assert file.metadata["general.architecture"] == "llama"
    assert "absent" not in file.metadata
    assert (file.infos["w"].type_name, file.infos["w"].shape) == ("Q4_0", (3, 64))
    with pytest.raises(KeyError):
        file["absent"]


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    values = np.arange(5, dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", values)
    writer.add_tensor("b", values + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "m.gguf")
    assert torch.equal(file["b"], torch.from_numpy(values + 1))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent.gguf: got no such file, want a GGUF file"):
        read_gguf(tmp_path / "absent.gguf")


def test_every_truncation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf", {"w": (random_blocks(Type.Q4_1, 2, 32), Type.Q4_1)}, tokens=["a", "bc"], kinds=[1, 2]
    )
    whole = path.read_bytes()
    data = len(whole) - 64  # the tensor's 40 bytes are padded to a multiple of 32
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, data, 3), data, data + 39]:
        cut.write_bytes(whole[:size])
        with pytest.raises(GGUFError, match=r"cut.gguf: got"):
            read_gguf(cut)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", r"got first bytes b'GGML', want b'GGUF'"),
        (4, b"\x01\0\0\0", r"got GGUF version 1, want one of \(2, 3\)"),
        (8, b"\xff" * 8, r"m.gguf: got"),
        (16, b"\xff" * 8, r"m.gguf: got"),
        (24, b"\xff" * 8, r"m.gguf: got .* want 18446744073709551615 bytes of metadata key 0"),
    ],
)
def test_corrupt_header(tmp_path: Path, at: int, value: bytes, message: str) -> None:
    path = write(tmp_path / "m.gguf", {"w": (random_blocks(Type.Q4_0, 2, 32), Type.Q4_0)})
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message):
        read_gguf(path)


def test_tensor_type_without_a_reader(tmp_path: Path) -> None:
    raw = np.zeros((2, 210), dtype=np.uint8)
    path = write(tmp_path / "m.gguf", {"w": (raw, Type.Q6_K)})
    with pytest.raises(GGUFError, match=r"m.gguf: got tensor type 14 for 'w', want one of F32, F16, Q4_0"):
        read_gguf(path)


def test_quantised_tensor_of_three_dimensions(tmp_path: Path) -> None:
    raw = random_blocks(Type.Q4_0, 4, 32).reshape(2, 2, 18)
    path = write(tmp_path / "m.gguf", {"w": (raw, Type.Q4_0)})
    with pytest.raises(GGUFError, match=r"got Q4_0 tensor 'w' of shape \(2, 2, 32\), want two dimensions"):
        read_gguf(path)["w"]
