"""Whether drafting changes a greedy text's bits on this machine: claim 2, measured where it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .context import Context
from .finding import Finding
from .registry import check

if TYPE_CHECKING:
    from .parity_matrix import Parity

__all__: list[str] = []

_EXPECTED = "0 at every width: rows of a verify pass are rows decoded alone, bit for bit (claim 2)"
_MEANING = (
    "nothing is broken, and sampled text follows the model's law all the same (claim 1); greedy and seeded text may "
    "differ between depths where two logits nearly tie. Where that matters: --depth 0"
)


@check("parity", needs_mlx=True)
def _parity(context: Context) -> Iterator[Finding]:
    if not context.parity:
        yield Finding("parity", "skip", "not measured; --parity does")
        return
    from ..models.transformer import RECURRENT_DEPTH
    from .parity_matrix import parity_matrix

    depth = RECURRENT_DEPTH if context.settings.max_depth is None else context.settings.max_depth
    for each in parity_matrix(depth + 1):
        yield _finding(each)


def _finding(each: Parity) -> Finding:
    from ..device import active_blas

    name, figures = f"parity {each.format}", {"product": each.product, "forward": each.forward}
    widths = len(each.product)
    if each.exact:
        return Finding(name, "ok", f"0 at every width from 1 to {widths}", _EXPECTED, figures=figures)
    observed = "; ".join(
        f"{what}: {_summary(found)}" for what, found in (("product", each.product), ("forward", each.forward))
    )
    fix = _MEANING
    if active_blas() == "openblas":
        fix += ", or SELFDRAFT_BLAS=reference, which is slower"
    return Finding(name, "warn", observed, _EXPECTED, fix, figures)


def _summary(differences: list[float]) -> str:
    """The widths at which rows differ, and by how much at the most."""
    wrong = [str(width) for width, largest in enumerate(differences, start=1) if largest != 0]
    if not wrong:
        return "0"
    return f"up to {max(differences):.2g} at width{'s' if len(wrong) > 1 else ''} {', '.join(wrong)}"
