"""FlashInfer's compiler: nothing to compile here."""

from evenshare.compat.flashinfer._missing import JIT_HINT, missing

NAMES = (
    "JitSpec",
    "build_jit_specs",
    "MissingJITCacheError",
    "env",
    "clear_cache_dir",
)

__getattr__ = missing(__name__, NAMES, JIT_HINT, ("gen_", "get_"))
