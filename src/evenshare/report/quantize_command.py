"""The command `evenshare quantize`: a 4-bit checkpoint from a 16-bit one, without data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from evenshare.quant import QuantizedWeight
from evenshare.quant.convert import quantize_checkpoint
from evenshare.quant.formats.checkpoint import open_checkpoint
from evenshare.quant.linear import find_linears
from evenshare.report.arguments import stop


def quantize_command(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder of a 16-bit model", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write, new or empty", show_default=False)],
    group_size: Annotated[int, typer.Option(help="16, 32, 64, 128 or 256 weights to a scale; -1: a whole row")] = 128,
    bits: Annotated[int, typer.Option(help="4 or 8")] = 4,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Without zero points or with integer ones")
    ] = True,
    refine: Annotated[
        bool, typer.Option("--refine/--plain", help="Scales of least squared error, or those that cover the range")
    ] = True,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Layer that stays as it is, by name or shell pattern; may be given several times [default: lm_head]"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the arithmetic runs: cpu, cuda or cuda:N")] = "cpu",
) -> None:
    """Quantise the linear layers of a model to 4 bits, without data, and write a compressed-tensors folder.

    It is for everything that loads compressed-tensors, as vLLM, SGLang and transformers do.
    """
    try:
        source = open_checkpoint(model)
        layers, kept = linear_shapes(model, ("lm_head",) if ignore is None else ignore)
        started = time.perf_counter()
        with _progress_bar() as progress:
            weights = quantize_checkpoint(
                source, out, layers, kept, group_size=group_size, bits=bits, symmetric=symmetric, refine=refine,
                device=device, progress=progress,
            )  # fmt: skip
    except ModuleNotFoundError as error:
        stop(f"{(error.name or '').split('.')[0]} is not installed: pip install evenshare[generate]", 1)
    except (ValueError, FileNotFoundError, FileExistsError, RuntimeError) as error:
        stop(str(error), 2)
    print(f"{out}: {_summary(weights)}, {time.perf_counter() - started:.1f} s")


def linear_shapes(model: Path, ignore: Iterable[str]) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """(name -> (n, k) of the nn.Linear layers of a transformers model that have a weight of their own, less those ignored;
    names of its other linears).

    Raises ValueError if transformers knows no causal language model of that architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except (OSError, KeyError) as error:
        raise ValueError(f"model: transformers cannot read {model}: {error}") from error
    own = dict(network.named_parameters())  # a tied head is named once, as the embedding
    wanted = [name for name in find_linears(network, ignore) if f"{name}.weight" in own]
    layers = {name: (own[f"{name}.weight"].shape[0], own[f"{name}.weight"].shape[1]) for name in wanted}
    return layers, [name for name in find_linears(network) if name not in layers]


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total, description=name)


def _summary(weights: dict[str, QuantizedWeight]) -> str:
    count = sum(weight.n * weight.k for weight in weights.values())
    nbytes = sum(weight.nbytes for weight in weights.values())
    return f"{len(weights)} layers, {count / 1e6:,.1f} M weights in {8 * nbytes / count:.3g} bits each"
