"""The report as a file that may be passed on: redacted, with the end of a log. Never in the place of another file."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest, SelfdraftError
from .context import Context
from .redaction import SECRET_NAME, Redactor, log_without_texts
from .report import Report

__all__ = ["write_bundle"]

_LOG_BYTES = 200_000  # of its end


def write_bundle(path: Path, report: Report, context: Context, log: Path | None = None) -> list[str]:
    """Write report.json and, if there is a log, log.txt to a zip file for its owner alone.

    Returns:
        The names of the files in it.

    Raises:
        InvalidRequest: there is a file already, or no such log. OSError: it cannot be written.
    """
    redactor = _redactor(context)
    files = {"report.json": json.dumps(redactor.tree(report.to_dict()), indent=1) + "\n"}
    if log is not None:
        files["log.txt"] = redactor.text(log_without_texts(_end(log)))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise InvalidRequest(f"{path} exists, and is left as it is: name another file", param="bundle") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.getvalue())
    return list(files)


def _end(log: Path) -> str:
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        raise InvalidRequest(f"the log {log} cannot be read: {error.strerror}", param="log") from error
    return text if size <= _LOG_BYTES else text.partition("\n")[2]


def _redactor(context: Context) -> Redactor:
    settings = context.settings
    names = (*settings.allowed_host, *(each.rpartition("/")[2] for each in settings.cors_origin))
    hosts = [name for name in names if name not in ("localhost", "127.0.0.1")]
    return Redactor(_secrets(context), hosts if settings.loopback else [*hosts, settings.host])


def _secrets(context: Context) -> Iterator[str]:
    """The API keys, the Hub's token, and what of settings.toml nobody knows, or sounds like a secret."""
    from ..settings_file import read_settings

    settings = context.settings
    if settings.api_key is not None:
        yield settings.api_key.get_secret_value()
    try:
        if settings.api_key_file is not None:
            yield from settings.api_key_file.expanduser().read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        pass
    try:
        known = {name for kind in context.kinds() for name in kind.model_fields if name not in kind.unstored}
        yield from _texts(read_settings(), known)
    except SelfdraftError:  # nothing of such a file is in the report
        pass
    from huggingface_hub import get_token

    yield get_token() or ""


def _texts(part: dict[str, Any], known: set[str]) -> Iterator[str]:
    """Values, as text, under names that are no settings, or that sound like secrets and name no file."""
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _texts(value, known)
        elif name not in known or (SECRET_NAME.search(name) and not name.endswith("_file")):
            yield from map(str, value) if isinstance(value, list) else [str(value)]
