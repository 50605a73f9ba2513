"""Shows a verified package to others: writes its card, and uploads it to the Hugging Face Hub. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SelfdraftError
from ..files import write_atomically
from ..stamp import Stamp
from .verify import refuse_unverified

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
    """Upload a package.

    Args:
        repository: OWNER/NAME.
        dry_run: write the card, upload nothing.

    Raises:
        SelfdraftError: it is not verified, was changed since, or the answer was no; the Hub refuses.
    """
    stamp = refuse_unverified(folder)
    write_atomically(folder / _CARD, card(folder.name, stamp))
    (folder / _CARD).chmod(0o644)
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    address = "" if dry_run else _upload(folder, repository, private)
    return Published(
        repository, address, tuple(path.name for path in files), sum(path.stat().st_size for path in files)
    )


def _upload(folder: Path, repository: str, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = HfApi()
    try:
        made: Any = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Selfdraft package", ignore_patterns=[".*"]
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SelfdraftError(
            f"{repository} could not be uploaded ({first}); log in with `hf auth login`, and run this again: what is "
            "there already is not sent twice"
        ) from error
    return str(made)


def card(name: str, stamp: Stamp) -> str:
    """The package's README: what it is made of, and what was measured of it."""
    lines = [
        "---",
        "library_name: selfdraft",
        "tags: [mlx, mtp, speculative-decoding]",
        "---",
        "",
        f"# {name}",
        "",
        f"Made from `{stamp.source}` by `selfdraft forge build`, with its own MTP head. Run it with",
        "",
        "```sh",
        f'selfdraft run --model OWNER/{name} "Hello"',
        "```",
        "",
        "## Recipe",
        "",
        *(f"- {field}: {value}" for field, value in stamp.recipe.items()),
    ]
    if stamp.head:
        lines += ["", f"## Head: {stamp.head['kept']}", "", stamp.head["measured_on"], "", *_head_table(stamp.head)]
    return "\n".join([*lines, "", "## Measured", "", *_evidence(stamp), ""])


def _head_table(head: dict[str, Any]) -> list[str]:
    depths = max(len(rates) for rates in head["acceptance"].values())
    rows = [f"| stored | MB | tokens a cycle |{''.join(f' depth {depth + 1} |' for depth in range(depths))}"]
    rows.append("|---|---|---|" + "---|" * depths)
    for way, rates in head["acceptance"].items():
        shares = "".join(f" {rate:.1%} |" for rate in rates)
        rows.append(f"| {way} | {head['bytes'][way] / 1e6:.1f} | {head['tokens_per_cycle'][way]:.2f} |{shares}")
    return rows


def _evidence(stamp: Stamp) -> list[str]:
    found = stamp.evidence
    machine = ", ".join(f"{field} {value}" for field, value in found["machine"].items() if value)
    lines = [f"On {machine}, {found['when']}.", ""]
    if "exactness" in found:
        exact = found["exactness"]
        equal = ", ".join(f"{count} at depth {depth}" for depth, count in exact["equal_by_depth"].items())
        lines.append(f"- greedy answers equal to plain decoding, of {exact['prompts']}: {equal}")
        rows = ", ".join(f"{difference:.2g} at {width}" for width, difference in exact["rows"].items())
        lines.append(f"- largest difference between rows of a verify pass and rows alone: {rows}")
    for candidate in found.get("speed", {}).get("candidates", ()):
        what = f"depth {candidate['depth']}" if candidate["depth"] else "plain decoding"
        speed = candidate["tokens_per_second"]["median"]
        lines.append(f"- {what}: {speed:.1f} tokens a second, {candidate['ratio']:.2f} of plain decoding")
    if stamp.depth_limit is not None:
        lines.append(f"- depth limit: {stamp.depth_limit}")
    return lines
