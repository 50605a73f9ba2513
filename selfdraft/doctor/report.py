"""All findings of a run, and the settings that held."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..errors import InvalidRequest
from .context import Context
from .finding import Finding
from .registry import findings

__all__ = ["SCHEMA", "Report", "examine"]

SCHEMA = 1


@dataclass(frozen=True)
class Report:
    """What a run found.

    Attributes:
        findings: in the order of the checks.
        settings: every setting, secrets masked; empty where they cannot be read.
    """

    findings: list[Finding]
    settings: list[dict[str, Any]]

    @property
    def failed(self) -> bool:
        """Whether anything keeps Selfdraft from working."""
        return any(each.status == "fail" for each in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """Findings by status."""
        found = Counter(each.status for each in self.findings)
        return {status: found[status] for status in ("ok", "warn", "fail", "skip")}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema_version": SCHEMA,
            "selfdraft": __version__,
            "counts": self.counts,
            "findings": [each.to_dict() for each in self.findings],
            "settings": self.settings,
        }


def examine(context: Context) -> Report:
    """Run all checks."""
    return Report(list(findings(context)), _settings(context))


def _settings(context: Context) -> list[dict[str, Any]]:
    """Empty where they cannot be read: a check says why."""
    try:
        from ..settings_list import list_settings

        return [each.to_dict() for each in list_settings(context.kinds())]
    except (ImportError, InvalidRequest):
        return []
