"""`sys.modules["flashinfer"] = evenshare.compat.flashinfer` serves whoever imports flashinfer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest

import evenshare.compat.flashinfer as flashinfer


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    yield
    for name in [name for name in sys.modules if name.startswith("flashinfer.")]:
        del sys.modules[name]


def test_every_name_imports() -> None:
    for name in flashinfer.__all__:
        assert getattr(flashinfer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        flashinfer.nonsense  # noqa: B018


@pytest.mark.usefixtures("installed")
def test_submodules_are_the_same_modules() -> None:
    for name in ("decode", "prefill", "cascade", "page", "attention", "norm", "activation", "rope", "quantization", "sparse",
                 "mla", "pod", "sampling", "gemm", "utils", "jit", "testing", "fp4_quantization", "comm", "fused_moe"):  # fmt: skip
        ours = importlib.import_module(f"evenshare.compat.flashinfer.{name}")
        assert importlib.import_module(f"flashinfer.{name}") is ours
        assert getattr(flashinfer, name) is ours
    import flashinfer.triton.cascade as cascade  # type: ignore[import-not-found]
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Top  # type: ignore[import-not-found]
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper as Sub  # type: ignore[import-not-found]

    assert Top is Sub
    assert cascade.merge_state is flashinfer.merge_state
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flashinfer.nonsense")


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_without_it_nothing_is_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flashinfer.decode")


@pytest.mark.usefixtures("installed")
def test_what_is_missing_says_so_when_used() -> None:
    from flashinfer.fp4_quantization import nvfp4_quantize  # type: ignore[import-not-found]
    from flashinfer.jit import JitSpec, build_jit_specs, gen_batch_prefill_module  # type: ignore[import-not-found]
    from flashinfer.mla import xqa_batch_decode_with_kv_cache_mla  # type: ignore[import-not-found]
    from flashinfer.testing import bench_gpu_time  # type: ignore[import-not-found]

    names = (nvfp4_quantize, JitSpec, build_jit_specs, xqa_batch_decode_with_kv_cache_mla, bench_gpu_time)
    for missing in (*names, gen_batch_prefill_module):
        with pytest.raises(NotImplementedError, match=f"{missing.__name__}: got a call, want none: "):
            missing(1, 2, three=3)
    assert not isinstance(3, JitSpec)


def test_version_and_device() -> None:
    import torch

    assert flashinfer.__version__.split("+")[0].count(".") == 2
    assert flashinfer.has_flashinfer_jit_cache()
    assert flashinfer.utils.determine_attention_backend() == "auto"
    assert not flashinfer.utils.is_sm90a_supported(torch.device("cpu"))
    assert not flashinfer.utils.is_fa3_backend_supported()
    with pytest.raises(ValueError, match="device: got cpu, want a CUDA device"):
        flashinfer.utils.get_compute_capability(torch.device("cpu"))
