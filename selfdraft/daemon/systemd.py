"""A systemd unit of the user's own manager. Sources: systemd.unit(5), systemd.service(5), systemd.exec(5)."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from ..errors import ServiceError
from .service import Manager, Outcome, Service, Status, call

__all__ = ["Systemd"]

_UNIT = "selfdraft.service"
_MISSING = (
    "there is no systemd here (systemctl was not found): run `selfdraft serve` under what starts programs on this "
    "machine; `selfdraft service install --dry-run` prints the unit"
)
_TEMPLATE = """\
# Written by `selfdraft service install`, which writes it anew; a drop-in (systemctl --user edit) stays.
[Unit]
Description=Selfdraft, a server for language models
# Five failures within ten minutes, and it is left alone until it is started by hand.
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
ExecStart={command}
{environment}WorkingDirectory=%h
Restart=on-failure
RestartSec=10
# A wrong setting does not get better by itself.
RestartPreventExitStatus=2
# Answers that run may finish.
TimeoutStopSec=45
KillMode=mixed
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native
ProtectSystem=strict
ProtectControlGroups=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
PrivateTmp=yes
{writable}
[Install]
WantedBy=default.target
"""


class Systemd(Manager):
    """See `Manager`."""

    name = "systemd"
    has_journal = True

    def __init__(self) -> None:
        self.path = _config_home() / "systemd" / "user" / _UNIT

    def text(self, service: Service) -> str:
        environment = [f"Environment={_quoted(f'{name}={value}')}\n" for name, value in service.environment.items()]
        writable = [f"ReadWritePaths={_quoted(f'-{folder}')}\n" for folder in service.writable]
        return _TEMPLATE.format(
            command=" ".join(_quoted(word).replace("$", "$$") for word in service.command),
            environment="".join(environment),
            writable="".join(writable),
        )

    def install(self, service: Service) -> Outcome:
        self._call("show-environment")  # before anything is written: is there a manager?
        outcome = self._write(service)
        if outcome != "unchanged":
            self._call("daemon-reload")
        self._call("enable", _UNIT)
        self._call("restart" if outcome == "changed" else "start", _UNIT)
        return outcome

    def uninstall(self) -> bool:
        if not self.path.exists():
            return False
        self._call("disable", "--now", _UNIT)
        self.path.unlink()
        self._call("daemon-reload")
        return True

    def start(self) -> None:
        self._check_installed()
        self._call("reset-failed", _UNIT)  # one that failed too often may start again
        self._call("start", _UNIT)

    def stop(self) -> None:
        self._check_installed()
        self._call("stop", _UNIT)

    def status(self) -> Status:
        wanted = "ActiveState,SubState,MainPID,NRestarts,ExecMainStatus,UnitFileState"
        lines = self._call("show", _UNIT, f"--property={wanted}").splitlines()
        found = dict(line.split("=", 1) for line in lines if "=" in line)
        pid = int(found.get("MainPID") or 0)
        detail = f"{found.get('ActiveState', 'unknown')} ({found.get('SubState', 'unknown')})"
        if restarts := int(found.get("NRestarts") or 0):
            detail += f", restarted {restarts} times, last exit code {found.get('ExecMainStatus', 'unknown')}"
        if found.get("UnitFileState") == "disabled":
            detail += ", not started at login"
        return Status(self.path.exists(), found.get("ActiveState") == "active", pid or None, detail)

    def log_command(self, service_log: Path, lines: int, *, follow: bool) -> list[str]:
        command = ["journalctl", "--user", "--user-unit", _UNIT, "--lines", str(lines), "--no-pager"]
        return [*command, "--follow"] if follow else command

    def _call(self, *arguments: str) -> str:
        try:
            return call(["systemctl", "--user", "--no-pager", *arguments], _MISSING)
        except ServiceError as error:
            if "Failed to connect" in str(error):
                raise ServiceError(
                    f"your systemd does not answer ({error}): log in as this user, not by su or sudo; on a machine "
                    "without a login, an administrator allows it once with `loginctl enable-linger`"
                ) from error
            raise


def _config_home() -> Path:
    """Where systemd looks for units of a user."""
    given = os.environ.get("XDG_CONFIG_HOME")
    return Path(given) if given else platformdirs.user_config_path().parent / ".config"


def _quoted(text: str) -> str:
    """A word of a unit: quoted, so that spaces stay, and no part of it is taken for a specifier."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
