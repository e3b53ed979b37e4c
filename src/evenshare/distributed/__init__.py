"""Beyond one GPU, on torch.distributed: context-parallel attention, head-parallel attention, sharded linear layers."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "ColumnParallelLinear": "linear",
        "ContextPlan": "context",
        "HeadShare": "shares",
        "KeyMove": "exchange",
        "PageRanges": "placement",
        "PeerError": "ranks",
        "RingPlan": "ring",
        "RoundRobin": "placement",
        "RowParallelLinear": "linear",
        "deal_pages": "placement",
        "even_share": "shares",
        "parallelize": "linear",
        "plan_context_attention": "context",
        "plan_ring_attention": "ring",
        "share_heads": "shares",
        "take_inputs": "shares",
        "take_outputs": "shares",
    },
)
