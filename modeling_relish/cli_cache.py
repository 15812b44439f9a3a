"""`relish cache ls | clear`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from .cli_shared import console, say

cache = typer.Typer(no_args_is_help=True, help="The feature cache: what a frozen backbone said, kept on disk.")


@cache.command("ls")
def cache_ls(
    folder: Annotated[Path | None, typer.Option(help="Feature folder; default: the library's.")] = None,
) -> None:
    """List the caches with their backbone, layers, texts and sizes."""
    from .feature_files import list_caches

    table = Table(
        Column("cache", no_wrap=True), Column("backbone", overflow="fold"), "layers", "dtype", "texts", "tokens", "MB"
    )
    for entry in list_caches(folder):
        table.add_row(
            entry.name, escape(entry.backbone), entry.layers, entry.dtype, f"{entry.texts}", f"{entry.tokens}",
            f"{entry.size / 1e6:.1f}",
        )  # fmt: skip
    console.print(table)


@cache.command("clear")
def cache_clear(
    names: Annotated[list[str] | None, typer.Argument(help="Caches to remove, by name; none = all.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Feature folder; default: the library's.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove caches; they are computed anew when they are needed."""
    from .feature_files import list_caches

    entries = [e for e in list_caches(folder) if not names or e.name in names]
    if unknown := set(names or []) - {e.name for e in entries}:
        raise ValueError(f"no cache named {sorted(unknown)}; see `relish cache ls`.")
    size = sum(e.size for e in entries)
    if not yes:
        typer.confirm(f"Remove {len(entries)} cache(s), {size / 1e6:.1f} MB?", abort=True)
    for entry in entries:
        shutil.rmtree(entry.folder)
    say(f"{len(entries)} cache(s) removed, {size / 1e6:.1f} MB")
