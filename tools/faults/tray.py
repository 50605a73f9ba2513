"""Faults of the icon in the menu bar, of the service, and of the server as a child."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "a server outlives the icon that was killed",
        "cli/owned.py",
        "    if last != KEEP:\n",
        "    if last == KEEP:\n",
        "tests/tray/test_process.py -k owner",
    ),
    Fault(
        "an icon that goes cuts its server's answers off",
        "tray/process.py",
        "            self.outlive(True)  # or",
        "            pass  # or",
        "tests/tray/test_process.py -k told_again",
    ),
    Fault(
        "the terminal's Ctrl-C hits the icon's server",
        "tray/process.py",
        "start_new_session=True",
        "start_new_session=False",
        "tests/tray/test_process.py -k told",
    ),
    Fault(
        "a crash is told with the words of the start",
        "tray/process.py",
        """if not line.startswith(("listening on", "\\x1b["))]""",
        "if line]",
        "tests/tray/test_process.py -k signal",
    ),
    Fault(
        "a log file grows for ever",
        "cli/serve.py",
        "maxBytes=_MOST_LOGGED",
        "maxBytes=0",
        "tests/tray/test_process.py -k small",
    ),
    Fault(
        "the icon starts a server beside one that runs",
        "tray/tray.py",
        "if self._process.pid is not None or self.poll().alive:",
        "if self._process.pid is not None:",
        "tests/tray/test_tray.py -k already",
    ),
    Fault(
        "a server that was stopped counts as crashed",
        "tray/tray.py",
        "expected = self._stopping or code == 0",
        "expected = False",
        "tests/tray/test_tray.py -k back",
    ),
    Fault(
        "another's server that crashed is thought to be stopped",
        "tray/tray.py",
        "crashed = instances.left_behind(self._known) and not self._stopping",
        "crashed = False",
        "tests/tray/test_tray.py -k anothers",
    ),
    Fault(
        "another's server that was stopped counts as crashed",
        "server/instance.py",
        "return not instance.alive and _noted() == instance",
        "return not instance.alive",
        "tests/tray/test_tray.py -k anothers",
    ),
    Fault(
        "the icon ends the server it was to keep",
        "tray/tray.py",
        "            if not self.chosen.keep_server:\n                self._process.ask_to_end()",
        "            if True:\n                self._process.ask_to_end()",
        "tests/tray/test_tray.py -k leaving",
    ),
    Fault(
        "a busy server is shown as starting",
        "tray/tray.py",
        'if status == "unreachable" and self.reading.ready:',
        "if False:",
        "tests/tray/test_tray.py -k busy",
    ),
    Fault(
        "a stop is followed by the start that was due",
        "tray/tray.py",
        "            self._again = False\n            self._end()",
        "            self._end()",
        "tests/tray/test_tray.py -k calls_off",
    ),
    Fault(
        "idle time lowers the speed in the menu",
        "tray/rates.py",
        "self._seen.clear()  # idle",
        "pass  # idle",
        "tests/tray/test_rates.py",
    ),
    Fault(
        "an icon does not come back with a new tray",
        "tray/x11_icon.py",
        "            if event.data[1][1] == self._tray:\n                self._dock()",
        "            pass",
        "tests/tray/test_desktop.py -k new_tray",
    ),
    Fault(
        "two icons for one user",
        "tray/icon.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/tray/test_desktop.py -k one_icon",
    ),
    Fault(
        "a specifier in a path changes the unit",
        "daemon/systemd.py",
        '.replace("%", "%%")',
        "",
        "tests/daemon/test_systemd.py -k written_to",
    ),
    Fault(
        "a secret of the shell goes into the service",
        "daemon/service.py",
        '    "HF_HOME",\n',
        '    "HF_HOME",\n    "HF_TOKEN",\n',
        "tests/daemon/test_systemd.py -k no_key",
    ),
    Fault(
        "a changed unit goes on running as it was",
        "daemon/systemd.py",
        '"restart" if outcome == "changed" else "start"',
        '"start"',
        "tests/daemon/test_systemd.py -k second_install",
    ),
    Fault(
        "a service is installed beside a server that runs",
        "cli/service.py",
        "if running is not None and running.pid != manager.status().pid:",
        "if False:",
        "tests/daemon/test_systemd.py -k doubled",
    ),
    Fault(
        "a dry run changes something",
        "cli/service.py",
        '        print(manager.text(service), end="")\n        return\n',
        '        print(manager.text(service), end="")\n',
        "tests/daemon/test_systemd.py -k dry_run",
    ),
    Fault(
        "launchd is given a service before it let the old one go",
        "daemon/launchd.py",
        'if loaded and outcome != "unchanged":',
        "if False:",
        "tests/daemon/test_launchd.py -k second_install",
    ),
]
