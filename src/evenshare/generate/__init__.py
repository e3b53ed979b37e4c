"""Load a model and generate text: `load_model`, `stream_tokens`, `batch_tokens`."""

from evenshare._lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        "FetchError": "errors",
        "GenerateError": "errors",
        "LoadedModel": "load",
        "MissingExtraError": "errors",
        "ModelFileError": "errors",
        "TextStream": "text",
        "batch_tokens": "decode",
        "cache_dir": "fetch",
        "encode_prompt": "text",
        "fetch_model": "fetch",
        "load_model": "load",
        "stream_tokens": "decode",
    },
)
