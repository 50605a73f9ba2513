"""Faults of `selfdraft doctor` and `selfdraft settings`."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

_BUNDLE, _SETTINGS = "tests/doctor/test_bundle.py", "tests/cli/test_settings.py"
_REGISTRY, _MACHINE = "tests/doctor/test_registry.py", "tests/doctor/test_machine.py"
_PARITY, _AROUND = "tests/doctor/test_kernels_and_parity.py", "tests/doctor/test_surroundings.py"

FAULTS = [
    Fault(
        "a check that breaks ends the doctor",
        "doctor/registry.py",
        "except Exception as error:  # whatever breaks on somebody's machine",
        "except ZeroDivisionError as error:",
        _REGISTRY,
    ),
    Fault(
        "MLX is tried in the doctor's own process",
        "doctor/context.py",
        "if done.returncode < 0:",
        "if False:",
        _REGISTRY,
    ),
    Fault(
        "an MLX that cannot be used is taken for one that can",
        "doctor/context.py",
        "if done.returncode:",
        "if False:",
        _REGISTRY,
    ),
    Fault(
        "a version outside its bounds is fine",
        "doctor/versions.py",
        "if wanted is not None and not wanted.contains(installed, prereleases=True):",
        "if False:",
        _MACHINE,
    ),
    Fault(
        "two back ends of MLX are fine",
        "doctor/versions.py",
        "elif len(found) > 1:",
        "elif False:",
        _MACHINE + " tests/cli/test_doctor.py",
    ),
    Fault(
        "a failed finding ends with 0",
        "doctor/report.py",
        'return any(each.status == "fail" for each in self.findings)',
        "return False",
        "tests/cli/test_doctor.py",
    ),
    Fault(
        "parity is that of one row alone",
        "doctor/parity_matrix.py",
        "return [_largest(wide(width), single[:, :width]) for width in range(1, widths + 1)]",
        "return [_largest(wide(1), single[:, :1]) for width in range(1, widths + 1)]",
        _PARITY,
    ),
    Fault(
        "what is no number counts as equal",
        "doctor/parity_matrix.py",
        "if not math.isfinite(difference):",
        "if False:",
        _PARITY,
    ),
    Fault(
        "products that differ do not count",
        "doctor/parity_matrix.py",
        "largest = list(map(max, largest, found))",
        "pass",
        _PARITY,
    ),
    Fault(
        "a kernel that is wrong is called slow",
        "kernels/self_check.py",
        "return self.found_gain is not None and self.found_gain < 1",
        "return True",
        _PARITY,
    ),
    Fault(
        "files that nobody needs are not seen",
        "sessions/disk/folder.py",
        "return [path for path in there if path not in wanted]",
        "return [path for path in there if path not in wanted and path.suffix]",
        "tests/sessions/disk/test_cap.py tests/sessions/disk/test_damage.py " + _AROUND,
    ),
    Fault(
        "looking at access makes a key file",
        "doctor/settings.py",
        "count = len(settings.keys()) if file is None or file.exists() else 0",
        "count = len(settings.keys())",
        _AROUND,
    ),
    Fault(
        "looking at a model downloads it",
        "source.py",
        "local_files_only=not fetch",
        "local_files_only=False",
        _AROUND,
    ),
    Fault(
        "a bundle overwrites a file",
        "doctor/bundle.py",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL",
        "os.O_WRONLY | os.O_CREAT",
        _BUNDLE,
    ),
    Fault(
        "a bundle is for everybody",
        "doctor/bundle.py",
        "os.O_EXCL, 0o600)",
        "os.O_EXCL, 0o644)",
        _BUNDLE,
    ),
    Fault(
        "a key in a wrong line of settings.toml is quoted in a bundle",
        "doctor/bundle.py",
        "elif name not in known or (SECRET_NAME.search(name)",
        "elif (SECRET_NAME.search(name)",
        _BUNDLE,
    ),
    Fault(
        "a bundle has the name of the user",
        "doctor/redaction.py",
        'self._names += [(_word(each), "<user>") for each in _users()]',
        "pass",
        _BUNDLE,
    ),
    Fault(
        "a bundle has the host's domain",
        "doctor/redaction.py",
        "named = sorted({*_hosts(), *filter(None, hosts)}, key=len, reverse=True)",
        "named = sorted({*_hosts(), *filter(None, hosts)}, key=len)",
        _BUNDLE,
    ),
    Fault(
        "a bundle has tokens that only look like such",
        "doctor/redaction.py",
        '_EMAIL.sub("<email>", _LOOKS.sub("<secret>", text))',
        '_EMAIL.sub("<email>", text)',
        _BUNDLE,
    ),
    Fault(
        "a bundle has what users wrote",
        "doctor/redaction.py",
        'return own[0] + _QUOTED.sub("<text>", line[own.end() :])',
        "return line",
        _BUNDLE,
    ),
    Fault(
        "a bundle has lines of a log that may be anything",
        "doctor/redaction.py",
        'return f"{error[0]}: <text>" if ":" in line else error[0]\n    return None',
        'return f"{error[0]}: <text>" if ":" in line else error[0]\n    return line',
        _BUNDLE,
    ),
    Fault(
        "the settings listed hold the key",
        "settings_list.py",
        "else str(value)",
        "else getattr(value, 'get_secret_value', lambda: str(value))()",
        _SETTINGS + " " + _BUNDLE,
    ),
    Fault(
        "the environment is taken for the file",
        "settings.py",
        "sources = kind.settings_customise_sources(kind, here, environment, here, here)",
        "sources = kind.settings_customise_sources(kind, here, here, here, here)",
        _SETTINGS,
    ),
    Fault(
        "a wrong value is written to settings.toml",
        "settings_list.py",
        "value = getattr(checked(kind, {name: text}), name)",
        "value = text",
        _SETTINGS,
    ),
    Fault(
        "a new line stands behind the comments of the next table",
        "settings_file.py",
        "return placed if placed and tomllib.loads(placed) == tomllib.loads(changed) else changed",
        "return changed",
        _SETTINGS,
    ),
    Fault(
        "a new line is placed where it means something else",
        "settings_file.py",
        "return placed if placed and tomllib.loads(placed) == tomllib.loads(changed) else changed",
        "return placed or changed",
        _SETTINGS,
    ),
    Fault(
        "unset takes a whole table",
        "settings_file.py",
        "isinstance(part.get(name, {}), dict)",
        "name not in part",
        _SETTINGS,
    ),
    Fault(
        "fans that nobody watches over are fine",
        "doctor/fans.py",
        "left = claims.dead() or (claims.live() and claims.watchdog is None)",
        "left = False",
        "tests/doctor/test_machine.py",
    ),
]
