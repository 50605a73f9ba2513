"""Faults of completions, of the man page, and of what is published."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

_COMPLETIONS = "tests/cli/test_completions.py"
_RELEASE = "../tools/release"

FAULTS = [
    Fault(
        "switches take a value in completions",
        "cli/command_tree.py",
        "None if found.is_flag or found.count else _value(found)",
        "_value(found)",
        _COMPLETIONS,
    ),
    Fault(
        "folders are offered for names on the Hub",
        "cli/command_tree.py",
        "if found.name in _MODELS and name != _HUB:",
        "if found.name in _MODELS:",
        _COMPLETIONS,
    ),
    Fault(
        "values behind = are not completed in bash",
        "cli/shells/bash.py",
        """    elif [ "$before" = = ]; then""",
        """    elif [ "$before" = never ]; then""",
        _COMPLETIONS,
    ),
    Fault(
        "values behind = are not completed in zsh",
        "cli/shells/zsh.py",
        """return f"{name}=" if name.startswith("--") else f"{name}+\"""",
        """return f"{name}+\"""",
        _COMPLETIONS,
    ),
    Fault(
        "a model stands in for the models command in zsh",
        "cli/shells/zsh.py",
        "__selfdraft_model() {",
        "_selfdraft_models() {",
        _COMPLETIONS,
    ),
    Fault(
        "fish offers files for any value",
        "cli/shells/fish.py",
        """"--require-parameter" if option.value.kind == "file" else "--exclusive\"""",
        """"--require-parameter\"""",
        _COMPLETIONS,
    ),
    Fault(
        "help loads what settings need",
        "cli/found_models.py",
        "if TYPE_CHECKING:\n    from ..settings import Settings\n",
        "if True:\n    from ..settings import Settings\n",
        "tests/cli/test_help.py",
    ),
    Fault(
        "an archive may hold anything beside the package",
        f"{_RELEASE}/archives.py",
        "for name in sorted(names - expected)",
        "for name in ()",
        "tests/release/test_archives.py",
    ),
    Fault(
        "an archive may have any size",
        f"{_RELEASE}/archives.py",
        "if archive.stat().st_size > LARGEST:",
        "if False:",
        "tests/release/test_archives.py",
    ),
    Fault(
        "a pin may be older than what is asked for",
        f"{_RELEASE}/check.py",
        "if pin is None or not requirement.specifier.contains(pin.version):",
        "if pin is None:",
        "tests/release/test_locks.py",
    ),
    Fault(
        "the formula may have other digests than the lock",
        f"{_RELEASE}/check.py",
        "if name not in locked or found.get(name) not in locked[name].hashes:",
        "if name not in locked:",
        "tests/release/test_locks.py",
    ),
    Fault(
        "the formula installs wheels under the names of a cache",
        "../packaging/homebrew/selfdraft.rb",
        "buildpath/File.basename(wheel.url)",
        "buildpath/wheel.cached_download.basename",
        "tests/release/test_formula.py",
    ),
    Fault(
        "a version may be released twice",
        f"{_RELEASE}/check.py",
        'elif first[2] == "unreleased":',
        "elif False:",
        "tests/release/test_locks.py",
    ),
    Fault(
        "the man page gets a new date each day",
        f"{_RELEASE}/share.py",
        'return before if _DATE.sub("", text) == _DATE.sub("", before) else text',
        'return text.replace(str(datetime.date.today()), "2001-01-01")',
        "tests/release/test_share.py",
    ),
    Fault(
        "dashes of the man page are hyphens",
        f"{_RELEASE}/man_page.py",
        '("-", r"\\-"), ',
        "",
        "tests/release/test_share.py",
    ),
]
