"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of latents."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "MLAPlan": "plan",
        "mla_attention": "functions",
        "plan_mla": "plan",
    },
)
