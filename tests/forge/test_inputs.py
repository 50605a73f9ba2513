"""Guards that what a head is fed is added up rightly, chained drafts included, and that the head is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU

from selfdraft.engine import Engine, Request
from selfdraft.forge import inputs
from selfdraft.forge.inputs import recorded
from selfdraft.params import SamplingParams
from tests.support.nano import SPARSE, nano_model


def every(path: str) -> bool:
    return True


def draft(model: Any, tokens: int = 12, depth: int = 3) -> Any:
    engine = Engine(model)
    row = engine.add(Request([1, 2, 3, 4, 5], SamplingParams(depth=depth, max_tokens=tokens, seed=3).resolved({})))
    for _ in engine.run(row):
        pass
    return row


def test_sums_are_those_of_all_inputs() -> None:
    linear = nn.Linear(8, 4, bias=True)
    whole = nn.Sequential(linear)
    x = [mx.random.normal((2, 3, 8)), mx.random.normal((1, 5, 8))]
    with recorded(whole, every) as seen:
        out = [whole(each) for each in x]
    rows = np.concatenate([np.array(each).reshape(-1, 8) for each in x])
    (found,) = seen.values()
    assert np.allclose(np.array(found.gram), rows.T @ rows, rtol=1e-5)
    assert found.count == 11
    assert all(mx.array_equal(whole(each), before).item() for each, before in zip(x, out, strict=True))


@pytest.mark.parametrize("tokens", [3, 40])  # from 64 choices on they are sorted by expert
@pytest.mark.parametrize("at_once", [1, 2048])
def test_experts_have_their_own_sums_where_inputs_are_theirs(
    tokens: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_AT_ONCE", at_once)
    layer = SwitchGLU(16, 8, 4)
    x, chosen = mx.random.normal((1, tokens, 16)), mx.random.randint(0, 4, (1, tokens, 2))
    with recorded(layer, every) as seen:
        layer(x, chosen)
    down, up = seen["down_proj"], seen["up_proj"]
    assert (down.gram.shape, up.gram.shape) == ((4, 8, 8), (16, 16))
    experts = np.array(chosen)[0]
    assert down.count.tolist() == [int((experts == expert).sum()) for expert in range(4)]
    rows = np.array(x)[0]
    for expert in range(4):
        mine = np.repeat(rows, (experts == expert).sum(axis=1), axis=0)
        gate, raised = (mx.array(mine) @ part.weight[expert].T for part in (layer.gate_proj, layer.up_proj))
        inner = np.array(nn.silu(gate) * raised)
        assert np.allclose(np.array(down.gram[expert]), inner.T @ inner, atol=1e-4)


def test_chained_drafts_are_seen() -> None:
    """A head that drafts deeper is fed its own output; codes that never saw it would serve first drafts alone."""
    model: Any = nano_model()
    counts = {}
    for depth in (1, 3):
        with recorded(model.mtp, every) as seen:
            row = draft(model, depth=depth)
        counts[depth] = int(seen["fc"].count)
    assert counts[1] <= 4 + 12  # true pairs: of the prompt and of the answer
    assert counts[3] > 4 + 12 + row.statistics.cycles


@pytest.mark.parametrize("fields", [{}, SPARSE])
def test_the_head_is_left_as_it_was(fields: dict[str, Any]) -> None:
    model: Any = nano_model(**fields)
    before = dict(model.mtp.named_modules())
    arrays = dict(tree_flatten(model.mtp.parameters()))
    plain = draft(model).emitted
    with recorded(model.mtp, every) as seen:
        assert draft(model).emitted == plain
        assert any("layer" in path for path in dict(tree_flatten(model.mtp.parameters())))
    assert seen
    assert dict(model.mtp.named_modules()).keys() == before.keys()
    assert all(layer is before[path] for path, layer in model.mtp.named_modules())
    after = dict(tree_flatten(model.mtp.parameters()))
    assert all(after[name] is array for name, array in arrays.items())


@pytest.mark.parametrize("raising", [ValueError, KeyboardInterrupt])
def test_and_so_it_is_when_something_fails(raising: Callable[[], BaseException]) -> None:
    model: Any = nano_model()
    before = dict(model.mtp.named_modules())
    with pytest.raises(raising), recorded(model.mtp, every):  # type: ignore[arg-type]
        raise raising()
    assert all(layer is before[path] for path, layer in model.mtp.named_modules())


def test_only_what_is_wanted() -> None:
    model: Any = nano_model()
    with recorded(model.mtp, lambda path: path.endswith("o_proj")) as seen:
        draft(model)
    assert list(seen) == ["layers.0.self_attn.o_proj"]
