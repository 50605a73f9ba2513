"""Shows a verified package to others: writes its card, and uploads it to the Hugging Face Hub. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SelfdraftError
from ..files import write_atomically
from ..stamp import STAMP, Stamp, changed_files, digests, read_stamp

__all__ = ["Published", "card", "publish"]

_CARD = "README.md"


@dataclass(frozen=True)
class Published:
    """Where a package is now.

    Attributes:
        repository: on the Hub.
        address: of its page; "" if nothing was uploaded.
        files: what was, or would be, uploaded, and how many bytes that is.
    """

    repository: str
    address: str
    files: tuple[str, ...]
    nbytes: int


def publish(folder: Path, repository: str, *, private: bool = True, dry_run: bool = False) -> Published:
    """Upload a package: the files that were verified, the stamp, licences and a card; nothing else that lies there.

    Args:
        repository: OWNER/NAME.
        dry_run: write the card, upload nothing.

    Raises:
        SelfdraftError: it is not verified, was changed since, or the answer was no; the Hub refuses.
    """
    if repository.count("/") != 1:
        raise SelfdraftError(f"{repository!r} is no id on the Hugging Face Hub; give OWNER/NAME")
    stamp = _verified(folder)
    try:
        text = card(repository, stamp)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SelfdraftError(
            f"{folder / STAMP} holds no evidence that could be shown ({error!r}): run `selfdraft forge verify` again"
        ) from error
    write_atomically(folder / _CARD, text)
    (folder / _CARD).chmod(0o644)
    licences = (path.name for path in folder.glob("LICENSE*") if path.is_file())
    files = sorted({*stamp.files, STAMP, _CARD, *licences})
    address = "" if dry_run else _upload(folder, files, repository, private)
    return Published(repository, address, tuple(files), sum((folder / name).stat().st_size for name in files))


def _verified(folder: Path) -> Stamp:
    """The stamp of a package that may be shown to others.

    Raises:
        SelfdraftError: why there is none.
    """
    stamp = read_stamp(folder)
    if stamp is None or not stamp.recipe:
        raise SelfdraftError(f"{folder} was not made by `selfdraft forge build`: only such packages are published")
    if not stamp.verdict:
        raise SelfdraftError(f"{folder} is not verified: run `selfdraft forge verify {folder}` first")
    if stamp.verdict != "yes":
        raise SelfdraftError(f"{folder} is not worth publishing: {'; '.join(stamp.reasons)}")
    if changed := changed_files(digests(folder), stamp):
        raise SelfdraftError(f"{changed[0]} changed since {folder} was verified: run `selfdraft forge verify` again")
    return stamp


def _upload(folder: Path, files: list[str], repository: str, private: bool) -> str:
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        made: Any = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Selfdraft package", allow_patterns=files
        )
    except Exception as error:  # the Hub client raises many kinds, from its own and from its HTTP library's tree
        raise SelfdraftError(f"{repository} was not published: {_explained(error)}") from error
    return str(made)


def _explained(error: Exception) -> str:
    """What the Hub's client raised, with a remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "that is no id on the Hugging Face Hub; give OWNER/NAME"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "nothing is sent while HF_HUB_OFFLINE is set; unset it, and try again"
    response = getattr(error, "response", None)
    status = response.status_code if response is not None else None
    if status == 401:
        return "the Hugging Face Hub does not know you; run `hf auth login` with a token that may write"
    if status == 403:
        return "your token may not write there; choose an OWNER that you may write to, or a token with write access"
    if status == 404:
        return "the Hugging Face Hub has no such owner, or shows it to others only; check OWNER"
    again = "run this again: what is there already is not sent twice"
    if status is not None:
        return f"the Hugging Face Hub answered {status}; {again}"
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"the Hugging Face Hub cannot be reached ({said}); {again}"


def card(repository: str, stamp: Stamp) -> str:
    """The package's README: what it is made of, and what was measured of it.

    Raises:
        KeyError, TypeError: the stamp holds no such thing.
    """
    name = repository.rpartition("/")[2]
    base = [f"base_model: {stamp.source}"] if stamp.source.count("/") == 1 else []
    lines = [
        "---",
        "library_name: selfdraft",
        *base,
        "tags:",
        *(f"- {tag}" for tag in ("mlx", "mtp", "speculative-decoding")),
        "---",
        "",
        f"# {name}",
        "",
        f"Made from `{stamp.source}` by `selfdraft forge build`, with its own MTP head. Run it with",
        "",
        "```sh",
        f'selfdraft run --model {repository} "Hello"',
        "```",
        "",
        "## Recipe",
        "",
        *(f"- {field}: {_shown(value)}" for field, value in stamp.recipe.items()),
        "",
    ]
    if stamp.head:
        lines += [f"## Head: {stamp.head['kept']}", "", f"Measured on {stamp.head['measured_on']}.", ""]
        lines += [*_head_table(stamp.head["ways"]), ""]
    return "\n".join([*lines, "## Measured", "", *_evidence(stamp), ""])


def _shown(value: Any) -> str:
    return ", ".join(f"`{each}`" for each in value) or "none" if isinstance(value, list) else str(value)


def _head_table(ways: dict[str, Any]) -> list[str]:
    depths = max(len(found["acceptance"]) for found in ways.values())
    columns = ["stored", "MB", "tokens a cycle", "over calibrated", *(f"depth {k + 1}" for k in range(depths))]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for way, found in ways.items():
        over = found["over_calibrated"]
        cells = [
            way,
            f"{found['bytes'] / 1e6:.1f}",
            f"{found['tokens_per_cycle']:.2f}",
            f"{over['tokens_per_cycle']:+.3f} (error {over['standard_error']:.3f})",
            *(f"{rate:.1%}" for rate in found["acceptance"]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _evidence(stamp: Stamp) -> list[str]:
    found = stamp.evidence
    machine = ", ".join(f"{field} {value}" for field, value in found["machine"].items() if value)
    exact = found["exactness"]
    equal = ", ".join(f"{count} at depth {depth}" for depth, count in exact["equal_by_depth"].items())
    rows = ", ".join(f"{difference:.2g} at {width}" for width, difference in exact["rows"].items())
    wiring = ", ".join(f"{share:.0%} {name}" for name, share in found["wiring"].items())
    lines = [
        f"On {machine}, {found['when']}.",
        "",
        "- all weights and logits are finite",
        f"- greedy answers equal to plain decoding, of {exact['prompts']}: {equal}",
        f"- largest difference between rows of a verify pass and rows alone: {rows}",
        f"- the head's first draft is the trunk's own token: {wiring}",
    ]
    for candidate in found.get("speed", {}).get("candidates", ()):
        what = f"depth {candidate['depth']}" if candidate["depth"] else "plain decoding"
        speed = candidate["tokens_per_second"]["median"]
        lines.append(f"- {what}: {speed:.1f} tokens a second, {candidate['ratio']:.2f} of plain decoding")
    if "speed" not in found:
        lines.append("- speed: not measured")
    if stamp.depth_limit is not None:
        lines.append(f"- depth limit: {stamp.depth_limit}")
    return lines
