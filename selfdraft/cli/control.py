"""`selfdraft status` and `selfdraft stop`: the server that runs on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .command import command
from .flags import flag, number
from .server_client import health as health_of
from .terminal import say

__all__ = ["status", "stop"]


@command
def status(*, as_json: Annotated[bool, flag("--json", "Print one JSON object. Default: off.")] = False) -> None:
    """Say whether a server runs on this machine, and what it does.

    The exit code is 0 if one runs, 1 if none does.
    """
    from ..server.instance import find

    instance = find()
    if instance is None:
        if as_json:
            print(json.dumps({"status": "stopped"}))
        else:
            say("no server runs; `selfdraft start` or `selfdraft serve` starts one")
        raise typer.Exit(1)
    health = health_of(instance.url)
    if as_json:
        print(json.dumps({**health, "url": instance.url, "model": instance.model, "pid": instance.pid}))
        return
    print(f"{instance.model} at {instance.url}, process {instance.pid}: {health['status']}", end="")
    print(f", {health['running']} running, {health['waiting']} waiting" if "running" in health else "", end="")
    print(f", mode {health['mode']}" if "mode" in health else "")


@command
def stop(
    *,
    patience: Annotated[
        float,
        flag("--patience", "Seconds to wait for answers that run. Default: 35.", metavar="SECONDS", parser=number),
    ] = 35.0,
) -> None:
    """Stop the server that runs on this machine.

    Answers that run may finish, as long as the server's --drain allows.
    """
    from ..server import instance as instances

    instance = instances.find()
    if instance is None:
        say("no server runs")
        return
    instances.stop(instance, patience)
    say(f"stopped {instance.model} at {instance.url}")
