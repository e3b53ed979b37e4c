"""Attention over ragged batches and paged KV caches, in even shares.

The package shares its name with its main function, so it is callable: `evenshare.attention(q, k, v)` is
`evenshare.attention.attention(q, k, v)`.
"""

import sys
from types import ModuleType
from typing import Any

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "AttentionPlan": "plan",
        "CascadeLevel": "cascade",
        "CascadePlan": "cascade",
        "MLAPlan": "mla",
        "attention": "functions",
        "cascade_attention": "cascade",
        "detect_shared_prefixes": "prefixes",
        "merge_state": "merge",
        "merge_states": "merge",
        "mla_attention": "mla",
        "paged_attention": "functions",
        "plan_attention": "plan",
        "plan_cascade": "cascade",
        "plan_mla": "mla",
    },
)


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.attention(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
