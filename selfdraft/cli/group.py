"""`serve` as one of several ranks, or to start them: what it does beside serving alone."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..distributed.environment import BACKENDS, Backend, rank
from ..distributed.hostfile import read_hosts
from ..errors import InvalidRequest, SelfdraftError
from .flags import flag, refusal, whole
from .terminal import dim, say

if TYPE_CHECKING:
    from ..distributed.group import Group
    from ..distributed.leading import Leader
    from ..server.config import ServerSettings
    from ..settings import Settings

__all__ = ["GroupFlags", "as_rank"]

_PANEL = "Several machines: see docs/scaling.md"
_FLAGS = ("--hosts", "--ranks", "--backend")
_SECRET = "SELFDRAFT_API_KEY"  # never in a command line; rank 0 alone needs it


@dataclass(frozen=True, kw_only=True)
class GroupFlags:
    """Which ranks share the model."""

    hosts: Annotated[
        Path | None,
        flag("--hosts", "Host file of mlx.launch: one rank a machine; the first serves.", _PANEL, "FILE"),
    ] = None
    ranks: Annotated[
        int | None, flag("--ranks", "So many ranks on this machine, as for several GPUs.", _PANEL, "N", whole)
    ] = None
    backend: Annotated[
        Backend | None,
        flag(
            "--backend",
            f"What carries their messages: {', '.join(BACKENDS)}. Default: what the host file says, else ring.",
            _PANEL,
            "NAME",
        ),
    ] = None

    @property
    def asked(self) -> bool:
        """Whether ranks are to be started.

        Raises:
            typer.BadParameter: a back end is named, and no ranks.
        """
        if self.hosts is None and self.ranks is None and self.backend is not None:
            raise typer.BadParameter("there are no ranks: give --hosts or --ranks, too", param_hint="'--backend'")
        return self.hosts is not None or self.ranks is not None

    def launch(self, arguments: Sequence[str], models: Sequence[str], settings: ServerSettings) -> None:
        """Start the ranks and wait for them.

        Args:
            arguments: of this process. models: to be served. settings: of the ranks.

        Raises:
            typer.BadParameter: a flag of these that cannot be obeyed.
            InvalidRequest: this is not for a group.
            SelfdraftError: a host cannot be reached; a rank ended with an error.
        """
        from ..distributed.launch import run_here, run_on_hosts

        _refuse_alone(models, settings)
        command = [sys.executable, "-m", "selfdraft", *_without_flags(arguments)]
        try:
            if self.hosts is None:
                assert self.ranks is not None
                if not 2 <= self.ranks <= 64:
                    raise InvalidRequest(f"a group has 2 to 64 ranks, not {self.ranks}", param="ranks")
                run_here(command, self.ranks, self.backend or "ring")
                return
            if self.ranks is not None:
                raise InvalidRequest("--hosts names the ranks: leave --ranks out", param="ranks")
            hosts = read_hosts(self.hosts, self.backend)
            if hosts.backend not in BACKENDS:
                raise InvalidRequest(
                    f"{self.hosts}: no back end {hosts.backend!r}; there is {', '.join(BACKENDS)}", param="hosts"
                )
        except InvalidRequest as error:
            raise refusal(error) from error
        given = {name: value for name, value in os.environ.items() if name.startswith("SELFDRAFT_") and name != _SECRET}
        run_on_hosts(command, hosts, hosts.backend, given)


def _refuse_alone(models: Sequence[str], settings: ServerSettings) -> None:
    """Refuse what only models in one process have."""
    if len(models) > 1:
        raise InvalidRequest(
            f"ranks share one model, and {len(models)} are given: serve {models[0]} with them, and the others by a "
            "server of their own",
            param="models",
        )
    if settings.adapter_path is not None:
        raise InvalidRequest(
            f"the adapter {settings.adapter_path} cannot be shared by several ranks yet: serve it on one machine, or "
            "leave it out",
            param="adapter_path",
        )
    if settings.lazy:
        raise InvalidRequest("ranks have their part of the model from the start: leave --lazy out", param="lazy")


def _without_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments of a rank."""
    kept: list[str] = []
    given = iter(arguments)
    for argument in given:
        if argument in _FLAGS:
            next(given, None)
        elif not argument.startswith(tuple(f"{name}=" for name in _FLAGS)):
            kept.append(argument)
    return kept


def as_rank(
    backend: Backend, models: Sequence[str], settings: ServerSettings, lead: Callable[[Leader], object]
) -> None:
    """Be one rank: serve on rank 0, follow it on the others. The process ends here.

    Threads of a back end wait for ranks that are no more, so none of them is waited for.
    """
    code = 0
    try:
        _run(backend, models, settings, lead)
    except (SelfdraftError, typer.BadParameter) as error:
        say(f"rank {rank()}: {error}")
        code = 1
    except Exception:
        logging.exception("rank %d broke down", rank())
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(backend: Backend, models: Sequence[str], settings: ServerSettings, lead: Callable[[Leader], object]) -> None:
    from ..device import choose_blas
    from ..server.registry import Given

    _refuse_alone(models, settings)
    choose_blas(settings.blas)  # before MLX comes in
    if rank():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it, and ends this one
    from ..distributed.group import Group
    from ..distributed.leading import Leader

    group = Group.join(backend)
    if group.size == 1:
        raise SelfdraftError("this group has one rank: start the server without mlx.launch")
    if group.rank:
        _follow(group, Given.parse(models[0]).source, settings)
        return
    dim(f"{group.size} ranks over {group.backend}")
    leader = Leader(group)
    try:
        lead(leader)
    except Exception as error:
        leader.close(f"rank 0 could not serve: {error}")
        raise
    leader.close()


def _follow(group: Group, model: str, settings: Settings) -> None:
    from ..device import choose_dtype
    from ..distributed.facts import facts
    from ..distributed.following import follow
    from ..distributed.parts import built_part
    from ..memory import Allowance
    from ..models.checkpoint import classify
    from ..source import find_model

    checkpoint = classify(find_model(model))
    dtype: Any = choose_dtype(settings.dtype, quantised=checkpoint.quantised, dense_experts=checkpoint.dense_experts)
    granted = Allowance.of(checkpoint.weight_bytes(dtype) // group.size, settings.memory_limit)
    granted.enforce()
    follow(group, facts(checkpoint, dtype), granted, lambda: built_part(checkpoint, dtype, group))
