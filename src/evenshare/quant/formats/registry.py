"""All formats of safetensors folders."""

from __future__ import annotations

from evenshare.quant.formats.awq import AWQ
from evenshare.quant.formats.compressed_tensors import COMPRESSED_TENSORS
from evenshare.quant.formats.format import Config, Format
from evenshare.quant.formats.gptq import GPTQ, GPTQ_V2
from evenshare.quant.formats.hqq import HQQ
from evenshare.quant.formats.mxfp4 import MXFP4
from evenshare.quant.formats.nf4 import NF4
from evenshare.quant.formats.nvfp4 import MODELOPT

FORMATS = (GPTQ, GPTQ_V2, AWQ, COMPRESSED_TENSORS, HQQ, NF4, MXFP4, MODELOPT)


def find_format(config: Config) -> Format:
    """The format of a model's quantization_config. Raises ValueError if no format reads it."""
    for form in FORMATS:
        if form.matches(config):
            return form
    wanted = "; ".join(form.wants for form in FORMATS)
    raise ValueError(f"quantization_config: got {dict(config)}, want one of: {wanted}")


def format_named(name: str) -> Format:
    """The format of that name that has a writer. Raises ValueError if there is none."""
    writers = {form.name: form for form in FORMATS if form.describe is not None}
    if name not in writers:
        raise ValueError(f"format: got {name!r}, want one of {', '.join(writers)}")
    return writers[name]
