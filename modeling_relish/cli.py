"""The command line, `relish`: one function for every command, in the `cli_*` modules."""

from __future__ import annotations

import os

import typer
from rich.console import Console

from .cli_cache import cache
from .cli_compare import compare
from .cli_explain import explain
from .cli_hub import push
from .cli_score import evaluate, predict
from .cli_train import train

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Fine-tune a small head on a frozen language model to answer with a number.",
)
for command in (train, predict, evaluate, explain, compare, push):
    app.command()(command)
app.add_typer(cache, name="cache")
errors = Console(stderr=True)


def main() -> None:
    """Run the command line; what the user can mend is told in one line, without a traceback."""
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("RELISH_DEBUG"):
            raise
        errors.print(f"[bold red]error:[/] {type(error).__name__}: ", end="")
        line = " ".join(part.strip() for part in str(error).splitlines())  # transformers' own messages have several
        errors.print(line, markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":  # accelerate launch -m modeling_relish.cli predict ...
    main()
