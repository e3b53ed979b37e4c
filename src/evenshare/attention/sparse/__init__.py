"""Attention over some of the keys: block masks, and pages that are selected for each query."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "BlockSparsity": "blocks",
        "BlockSparsePlan": "plan",
        "block_sparse_attention": "functions",
        "page_bounds": "pages",
        "pages_by_head": "pages",
        "plan_block_sparse_attention": "functions",
        "select_pages": "pages",
    },
)
