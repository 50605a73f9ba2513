"""Host files in the format of `mlx.launch`: which machines make a group. Imports no MLX."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest, SelfdraftError

__all__ = ["Hosts", "read_hosts"]

_EXAMPLE = '[{"ssh": "127.0.0.1", "ips": ["10.0.0.1"]}, {"ssh": "second-machine", "ips": ["10.0.0.2"]}]'
_SECONDS = 10  # for a host to answer


@dataclass(frozen=True)
class Hosts:
    """The machines of a group, rank 0 first.

    Attributes:
        path: the file.
        names: how ssh knows each; 127.0.0.1 is this machine.
        backend: what the file asks for; "" for nothing.
    """

    path: Path
    names: Sequence[str]
    backend: str

    def check_reachable(self) -> None:
        """Whether every machine lets us in without a password.

        Raises:
            SelfdraftError: one does not, by name, with what ssh says.
        """
        for name in dict.fromkeys(self.names):
            if name == "127.0.0.1":
                continue
            command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SECONDS}", name, "true"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=2 * _SECONDS, check=False)
                said = done.stderr.strip().partition("\n")[0] if done.returncode else ""
            except (OSError, subprocess.TimeoutExpired) as error:
                said = str(error)
            if said:
                raise SelfdraftError(
                    f"{self.path}: {name!r} cannot be reached by ssh ({said}): check its name, that it is on, and that "
                    f"`ssh {name} true` works without a password"
                )


def read_hosts(path: Path, backend: str | None) -> Hosts:
    """Read a host file.

    Args:
        backend: what it is to be used for; None for what it says itself, or the ring.

    Raises:
        InvalidRequest: it is none, names fewer than two machines, or lacks what the back end needs.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InvalidRequest(f"the host file {path} cannot be read: {error}", param="hosts") from error
    listed = content.get("hosts") if isinstance(content, dict) else content
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "ssh" in each for each in listed):
        raise InvalidRequest(f"{path} is no list of hosts: write it as in {_EXAMPLE}", param="hosts")
    if len(listed) < 2:
        raise InvalidRequest(f"{path} names {len(listed)} hosts, and a group has two or more", param="hosts")
    asked = backend or (str(content.get("backend") or "") if isinstance(content, dict) else "") or "ring"
    if asked != "mpi":
        wanting = listed if asked == "ring" else listed[:1]
        if lacking := [str(each["ssh"]) for each in wanting if not each.get("ips")]:
            raise InvalidRequest(
                f'{path}: {lacking[0]!r} has no address in "ips", which {asked} needs: write it as in {_EXAMPLE}',
                param="hosts",
            )
    return Hosts(path, [str(each["ssh"]) for each in listed], asked)
