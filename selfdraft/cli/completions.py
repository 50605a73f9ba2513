"""`selfdraft completions`: the script that completes commands, options and values in a shell."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from .command import command

__all__ = ["Shell", "completion_script", "completions"]

Shell = Literal["bash", "zsh", "fish"]


def completion_script(shell: Shell) -> str:
    """What a shell reads to complete this command line; it needs nothing but the shell."""
    from .app import app
    from .command_tree import command_tree
    from .shells.bash import bash
    from .shells.fish import fish
    from .shells.zsh import zsh

    return {"bash": bash, "zsh": zsh, "fish": fish}[shell](command_tree(app))


@command
def completions(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)],
) -> None:
    """Print the script that completes commands in a shell.

    For this session: source <(selfdraft completions bash). For good, write
    it to ~/.local/share/bash-completion/completions/selfdraft (bash), to a
    file _selfdraft on your $fpath (zsh), or to
    ~/.config/fish/completions/selfdraft.fish (fish).
    """
    print(completion_script(shell), end="")
