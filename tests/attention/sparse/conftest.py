from __future__ import annotations

from pathlib import Path

import pytest
from torch.nn.attention import flex_attention


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated files go to a folder of the test's own; FlexAttention runs operator by operator."""
    monkeypatch.setenv("EVENSHARE_CACHE", str(tmp_path))
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
