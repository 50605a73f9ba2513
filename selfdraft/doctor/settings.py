"""The one configuration: whether settings.toml and the environment can be used, and who may call the server."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import InvalidRequest
from .context import Context
from .finding import Finding
from .registry import check

__all__: list[str] = []


@check("settings")
def _settings(context: Context) -> Iterator[Finding]:
    from ..settings import settings_path
    from ..settings_list import list_settings

    path, changed, problems = settings_path(), [], []
    for kind in context.kinds():
        try:
            changed += [each for each in list_settings([kind]) if each.origin != "default"]
        except InvalidRequest as error:
            problems.append(str(error))
    if problems:
        said = "; ".join(dict.fromkeys(problems))
        fix = (
            f"correct {path}, by `selfdraft settings set NAME VALUE` or `unset NAME` if it can be read at all, "
            "or the variable in the environment"
        )
        yield Finding("settings", "fail", said, "values that are allowed", fix)
        return
    there = f"{path}" if path.exists() else f"no {path}"
    shown = ", ".join(f"{each.path} = {each.text} ({each.origin})" for each in changed)
    yield Finding("settings", "ok", f"{there}; {shown or 'all are defaults'}")


@check("environment")
def _environment(context: Context) -> Iterator[Finding]:
    from ..settings_list import unknown_variables

    unknown = unknown_variables(context.kinds())
    if not unknown:
        yield Finding("environment", "ok", "every SELFDRAFT_ variable is a setting")
        return
    meant = [f"{near} may be meant" for near in unknown.values() if near]
    fix = "; ".join([f"unset {' '.join(unknown)}", *meant])
    yield Finding("environment", "warn", f"no settings: {', '.join(unknown)}", "names of settings alone", fix)


@check("access")
def _access(context: Context) -> Iterator[Finding]:
    settings = context.settings
    expected = "a key for whatever is not loopback, in a file that its owner alone reads"
    has_key = settings.api_key is not None or settings.api_key_file is not None
    if not settings.loopback and not has_key:
        fix = "set SELFDRAFT_API_KEY, or `selfdraft settings set api_key_file FILE`; serve makes that, with a new key"
        observed = f"host {settings.host} can be reached from other machines, and there is no key"
        yield Finding("access", "fail", observed, expected, fix)
        return
    file = settings.api_key_file.expanduser() if settings.api_key_file else None
    try:
        count = len(settings.keys()) if file is None or file.exists() else 0
    except InvalidRequest as error:
        yield Finding("access", "fail", str(error), expected, "correct the file or the variable")
        return
    keys = f"{count} API key{'s' if count != 1 else ''}" if count or file is None else f"{file} is made by serve"
    yield Finding("access", "ok", f"{'this machine alone' if settings.loopback else 'other machines'}, {keys}")
