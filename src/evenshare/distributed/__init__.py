"""Beyond one GPU, on torch.distributed: context-parallel attention, head-parallel attention, sharded linear layers."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "ContextPlan": "context",
        "PageRanges": "placement",
        "PeerError": "ranks",
        "RingPlan": "ring",
        "RoundRobin": "placement",
        "deal_pages": "placement",
        "plan_context_attention": "context",
        "plan_ring_attention": "ring",
    },
)
