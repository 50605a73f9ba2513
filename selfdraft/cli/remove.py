"""`selfdraft remove`: a model out of the Hugging Face cache. Touches nothing that lies elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ModelNotFound, SelfdraftError
from ..source import REFERENCE
from .command import command
from .flags import flag
from .found_models import gigabytes
from .terminal import say

if TYPE_CHECKING:
    from ..hub.names import ModelId

__all__ = ["remove"]


@command
def remove(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="OWNER/NAME, OWNER/NAME@REVISION for that revision alone, or a folder inside the cache.",
            show_default=False,
        ),
    ],
    *,
    yes: Annotated[bool, flag("--yes -y", "Do not ask. Default: ask.")] = False,
) -> None:
    """Delete a model from the Hugging Face cache, and its pin.

    The cache is shared: other programs that use the model lose it, too.
    """
    from ..hub.cache import cache_folder, removal
    from ..hub.pins import find_pin, forget_pin

    wanted = _wanted(model)
    found = removal(wanted.repository, wanted.revision)
    pin = find_pin(wanted.repository)
    unpins = pin is not None and (pin.commit in found.commits if found else pin.covers(wanted))
    if found is None and not unpins:
        raise ModelNotFound(f"{str(wanted)!r} is not in {cache_folder()}; `selfdraft models` lists what is there")
    if found is not None:
        for commit in found.commits:
            print(f"{wanted.repository} {commit}{', pinned' if pin and pin.commit == commit else ''}")
        _confirm(f"delete {gigabytes(found.bytes)} in {cache_folder()}?", yes)
        found.execute()
    if unpins:
        forget_pin(wanted.repository)
    freed = f"{gigabytes(found.bytes)} deleted" if found else "nothing of it was in the cache"
    print(f"{wanted}: {freed}{', its pin dropped' if unpins else ''}")


def _wanted(model: str) -> ModelId:
    """What is to go, as an id; a folder only if it lies in the cache."""
    from ..hub.cache import cache_folder, id_of
    from ..hub.names import parse

    if model == REFERENCE:
        raise SelfdraftError("'reference' is part of this package and stays; `pip uninstall selfdraft` removes both")
    path = Path(model).expanduser()
    if path.exists():
        inside = id_of(path)
        if inside is None:
            raise SelfdraftError(
                f"{path} is no model in the Hugging Face cache ({cache_folder()}), and nothing else is deleted here: "
                "delete the folder yourself if you mean it"
            )
        return inside
    wanted = parse(model)
    if wanted is None:
        raise ModelNotFound(f"{model!r} is neither a folder nor an id like OWNER/NAME; `selfdraft models` lists both")
    return wanted


def _confirm(question: str, yes: bool) -> None:
    """Raises typer.Exit unless the user agrees; who cannot be asked does not."""
    if yes:
        return
    try:
        answer = input(f"{question} [y/N]: ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        say("nothing is deleted; --yes answers the question beforehand")
        raise typer.Exit(1)
