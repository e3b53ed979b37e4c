"""Attention over ragged batches and paged KV caches, in even shares."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "AttentionPlan": "plan",
        "attention": "functions",
        "merge_state": "merge",
        "merge_states": "merge",
        "paged_attention": "functions",
        "plan_attention": "plan",
    },
)
