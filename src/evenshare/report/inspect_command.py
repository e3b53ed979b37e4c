"""The command `evenshare inspect`: what a quantised checkpoint holds, and how far it is from the model it was made of."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from evenshare.quant import QuantizedWeight
from evenshare.quant.formats.checkpoint import Checkpoint, open_checkpoint
from evenshare.report.arguments import stop

PIPE_WIDTH = 140


@dataclass(frozen=True)
class Layer:
    """A row of the table. error: relative error of the weight, |W' - W| / |W|, or None."""

    name: str
    shape: tuple[int, int]
    codes: str
    group_size: int
    zero_points: str
    nbytes: int
    error: float | None


def inspect_command(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a quantised model, or a GGUF file", show_default=False)],
    against: Annotated[
        Path | None, typer.Option(help="Folder of the 16-bit model it was made of: adds errors", show_default=False)
    ] = None,
) -> None:
    """List the quantised layers of a checkpoint: shape, codes, groups, bytes, and with --against the relative error."""
    try:
        opened = open_checkpoint(checkpoint)
        original = None if against is None else open_checkpoint(against)
        layers = [describe(opened, name, original) for name in sorted(opened.layers(), key=_natural)]
    except ModuleNotFoundError as error:
        stop(f"{(error.name or '').split('.')[0]} is not installed: pip install evenshare[generate]", 1)
    except (ValueError, FileNotFoundError) as error:
        stop(str(error), 2)
    if layers:
        _print_table(opened, layers)
    else:
        print(f"{checkpoint}: no quantised layers, {len(opened.plain())} tensors")


def describe(checkpoint: Checkpoint, name: str, original: Checkpoint | None = None) -> Layer:
    """Read a layer. Raises ValueError if `original` has no weight of its name and shape."""
    weight = checkpoint.weight(name)
    assert isinstance(weight, QuantizedWeight)
    codes = f"int{weight.bits}" if weight.encoding == "integer" else weight.encoding
    zero_points = "float" if weight.offsets is not None else "integer" if weight.zeros is not None else "-"
    if weight.permutation is not None:
        codes += ", act-order"
    error = None if original is None else relative_error(weight, original, name)
    return Layer(name, weight.shape, codes, weight.group_size, zero_points, weight.nbytes, error)


def relative_error(weight: QuantizedWeight, original: Checkpoint, name: str) -> float:
    """|W' - W| / |W| in the Frobenius norm; 0 for a weight of zeros."""
    try:
        dense = original.weight(f"{name}.weight")
    except KeyError as error:
        raise ValueError(f"against: got no tensor {name}.weight in {original.path}, want the same layers") from error
    if not isinstance(dense, torch.Tensor) or tuple(dense.shape) != weight.shape:
        raise ValueError(f"against: got another shape than {weight.shape} of {name}.weight in {original.path}")
    norm = float(dense.float().norm())
    return float((weight.dequantize() - dense.float()).norm()) / norm if norm else 0.0


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def _print_table(checkpoint: Checkpoint, layers: list[Layer]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    count = sum(layer.shape[0] * layer.shape[1] for layer in layers)
    nbytes = sum(layer.nbytes for layer in layers)
    errors = [layer.error for layer in layers if layer.error is not None]
    table = Table(
        box=SIMPLE,
        caption=f"{count / 1e6:,.1f} M weights in {nbytes:,} bytes, {8 * nbytes / count:.3g} bits each; "
        f"{len(checkpoint.plain())} other tensors" + (f"; largest error {max(errors):.4f}" if errors else ""),
        caption_justify="left",
    )
    table.add_column("layer", overflow="fold")
    for heading in ("shape", "codes", "group", "zero points", "bytes", *(("error",) if errors else ())):
        table.add_column(heading, justify="right")
    for layer in layers:
        cells = [f"{layer.shape[0]} x {layer.shape[1]}", layer.codes, str(layer.group_size), layer.zero_points]
        cells.append(f"{layer.nbytes:,}")
        table.add_row(layer.name, *cells, *(() if layer.error is None else (f"{layer.error:.4f}",)))
    print(f"{checkpoint.path}: {checkpoint.format}, {len(layers)} quantised layers")
    # A pipe has no width, and names should stay whole there.
    Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
