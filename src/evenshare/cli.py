"""The command `evenshare`. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

try:
    import typer
except ImportError:
    sys.exit("evenshare: the command line needs typer and rich: pip install evenshare[generate]")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__.splitlines()[0]
)


@app.callback()
def main() -> None:
    """Balanced attention, Stream-K GEMM and 4-bit kernels for LLM inference."""


@app.command()
def generate(
    prompts: Annotated[
        list[str], typer.Argument(help="One prompt is streamed; several are answered at once.", show_default=False)
    ],
    model: Annotated[
        str | None, typer.Option(help="GGUF file or Hugging Face folder [default: SmolLM2-135M-Instruct, 4-bit]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most")] = 128,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token")] = 0.0,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Use the chat template or not [default: if there is one]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16")] = "bfloat16",
    backend: Annotated[str | None, typer.Option(help="cpu or triton [default: by device]")] = None,
    seed: Annotated[int, typer.Option(help="Of sampling")] = 0,
) -> None:
    """Generate text; speed goes to stderr."""
    # Before torch is imported. A step is 150 parallel regions, and GNU OpenMP's threads wait for one another spinning, 16 ms by
    # default: with a busy neighbour on one of two cores a token takes 905 ms. Sleeping after 0.2 ms makes that 52, and costs
    # 2 % on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from evenshare.generate.command import Request, run

    run(Request(tuple(prompts), model, device, max_new_tokens, temperature, chat, dtype, backend, seed))


@app.command()
def doctor() -> None:
    """Say what is installed, which backend runs what, and why."""
    from evenshare.generate.doctor import run

    run()


# The arguments are declared where the command is written; reading them here would import the scheduler for every command.
@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def explain(context: typer.Context) -> None:
    """Compare how the policies deal a piece of work, as a table and a timeline."""
    from evenshare.report.explain import explain_command

    _run(explain_command, context)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def profile(context: typer.Context) -> None:
    """Time each worker of a batch's attention on a GPU, and draw it above what the simulator predicts."""
    from evenshare.report.profile_command import profile_command

    _run(profile_command, context)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def quantize(context: typer.Context) -> None:
    """Quantise a 16-bit model to 4 bits without data: a compressed-tensors folder."""
    from evenshare.report.quantize_command import quantize_command

    _run(quantize_command, context)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def inspect(context: typer.Context) -> None:
    """List the layers of a quantised checkpoint, with their errors beside the model it was made of."""
    from evenshare.report.inspect_command import inspect_command

    _run(inspect_command, context)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def calibrate(context: typer.Context) -> None:
    """Measure on a GPU what GEMM tiles and their cuts cost, for the plans to follow."""
    from evenshare.report.calibrate_command import calibrate_command

    _run(calibrate_command, context)


def _run(function: Callable[..., None], context: typer.Context) -> None:
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(function)
    command(args=context.args, prog_name=context.command_path)
