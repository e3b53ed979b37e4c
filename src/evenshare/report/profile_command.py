"""The command `evenshare profile`: one attention call over random keys, timed worker by worker."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from evenshare.attention.plan import plan_attention
from evenshare.report.arguments import check_at_least, describe_lengths, parse_integer, parse_lengths, stop, writing
from evenshare.report.explain import profile_page
from evenshare.report.page import check_page, save_page
from evenshare.report.profile import Profile, profile
from evenshare.report.timeline import check_picture, format_time

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def profile_command(
    lens: Annotated[
        str,
        typer.Option(help="Keys of each request, by commas; 15x256 stands for 15 requests of 256", show_default=False),
    ],
    qo_lens: Annotated[
        str, typer.Option(help="Query tokens of each request, in the same form; one number stands for all")
    ] = "1",
    heads: Annotated[str, typer.Option(help="Query heads and KV heads")] = "32,8",
    head_dim: Annotated[int, typer.Option(help="Of q, k and v")] = 128,
    page_size: Annotated[int, typer.Option(help="Keys of a page; 0: contiguous keys")] = 16,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    policy: Annotated[
        str | None, typer.Option(help="How work is dealt, as in `evenshare explain` [default: level_fill]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Draw the timelines into this .png, .svg or .pdf", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Draw them into this .html, beside the other policies", show_default=False)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the segments and their times into this .json", show_default=False)
    ] = None,
) -> None:
    """Time each worker of a batch's attention on a GPU, and draw it above what the simulator predicts.

    Causal attention over random keys, none of which are in the L2, after a warm-up.
    """
    try:
        if out is not None:
            check_picture(out)
        if html is not None:
            check_page(html)
        kv_lens, q_lens = parse_lengths("lens", lens), parse_lengths("qo_lens", qo_lens)
        if len(q_lens) == 1:
            q_lens *= len(kv_lens)
        if len(q_lens) != len(kv_lens):
            raise ValueError(f"qo_lens: got {len(q_lens)} requests, want one number or the {len(kv_lens)} of lens")
        counts = [parse_integer("heads", part.strip(), heads) for part in heads.split(",")]
        if len(counts) != 2:
            raise ValueError(f"heads: got {heads!r}, want query heads and KV heads by a comma")
        check_at_least(0, "page_size", page_size)
        if dtype not in DTYPES:
            raise ValueError(f"dtype: got {dtype!r}, want one of {', '.join(DTYPES)}")
        if not torch.cuda.is_available():
            stop("no CUDA GPU here, whose clock the kernels could read; `evenshare explain` simulates", 1)
        recorded = run_batch(kv_lens, q_lens, (counts[0], counts[1]), head_dim, page_size, DTYPES[dtype], policy)
    except ValueError as error:
        stop(str(error), 2)
    except torch.OutOfMemoryError:
        stop("lens: got more keys than the GPU's memory holds", 1)
    _print_table(recorded)
    if save is not None:
        with writing("save", save):
            recorded.save(save)
    if out is not None:
        with writing("out", out):
            recorded.draw(out)
    if html is not None:
        with writing("html", html):
            save_page(profile_page(recorded), html)


def run_batch(
    kv_lens: list[int],
    qo_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    policy: str | None = None,
) -> Profile:
    """Profile a random batch on the current GPU; its pages lie in random order."""
    device = torch.device("cuda", torch.cuda.current_device())
    metadata: dict[str, Any] = {"qo_indptr": _indptr(qo_lens)}
    if page_size:
        pages = [-(-n // page_size) for n in kv_lens]
        metadata |= {"kv_indptr": _indptr(pages), "kv_indices": torch.randperm(sum(pages), dtype=torch.int32)}
        last = [n - max(count - 1, 0) * page_size for n, count in zip(kv_lens, pages, strict=True)]
        metadata["last_page_len"] = torch.tensor(last, dtype=torch.int32)
    else:
        metadata["kv_indptr"] = _indptr(kv_lens)
    plan = plan_attention(
        **metadata,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size or None,
        dtype=dtype,
        policy=policy,
        device=device,
    )
    rows = (sum(pages), page_size) if page_size else (sum(kv_lens),)
    q = torch.randn(sum(qo_lens), heads[0], head_dim, dtype=dtype, device=device)
    k, v = (torch.randn(*rows, heads[1], head_dim, dtype=dtype, device=device) for _ in range(2))
    profile(plan, q, k, v)
    torch.zeros(256 << 20, dtype=torch.uint8, device=device)  # several times the L2
    recorded = profile(plan, q, k, v, warmup=0)
    if set(qo_lens) == {1}:
        work = f"Decode of {len(kv_lens)} requests: {describe_lengths(kv_lens)} keys"
    else:
        work = f"{describe_lengths(qo_lens)} query tokens over {describe_lengths(kv_lens)} keys"
    place = f"{heads[0]}/{heads[1]} heads of {head_dim}, {recorded.title}, {torch.cuda.get_device_name(device)}"
    return replace(recorded, title=f"{work}\n{place}")


def _indptr(lens: list[int]) -> torch.Tensor:
    return torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)


def _print_table(recorded: Profile) -> None:
    from rich.console import Console
    from rich.table import Table

    numbers = recorded.summary
    waiting = "" if numbers.first_keys is None else f"Waiting for a segment's first keys: {numbers.first_keys:.1%}. "
    table = Table(
        title=recorded.title,
        caption=f"{waiting}Worker {numbers.longest_worker} has the most work: {format_time(numbers.longest_worker_ns / 1e3)} us. "
        f"The clock ticks every {numbers.resolution_ns} ns. The prediction ends with the run: "
        f"{numbers.predicted_iteration_ns / 1e3:.3g} us an iteration.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    for heading in ("makespan, us", "idle", "merging"):
        table.add_column(heading, justify="right")
    makespan = format_time(numbers.makespan_ns / 1e3)
    table.add_row("measured", makespan, f"{numbers.idle:.1%}", f"{numbers.merging:.1%}")
    table.add_row("predicted", makespan, f"{numbers.predicted_idle:.1%}", f"{numbers.predicted_merging:.1%}")
    Console(highlight=False).print(table)
