"""Guards that the parts of all ranks are the whole model, each number once; what cannot be divided is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.models.block_part import qwen3_5_part
from selfdraft.models.checkpoint import Checkpoint, classify
from selfdraft.models.loader import build_model
from selfdraft.models.sharding import part_of
from tests.reference.families import FAMILIES
from tests.support.families import changed
from tests.support.nano import NANO_CONFIG, SPARSE, nano_model, write_checkpoint
from tests.support.ranks import SHARED


class Alone:
    """One of several ranks, none of which is there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, x: mx.array) -> mx.array:
        return x

    def gather(self, x: mx.array) -> mx.array:
        return mx.concatenate([x] * self.size, axis=-1)


def checkpoint(folder: Path, **config: Any) -> Checkpoint:
    fields = {**SHARED, **config}
    bits = fields.pop("bits", None)
    return classify(write_checkpoint(folder / "nano", nano_model(bits=bits, **fields), config=fields))


def parts(found: Checkpoint, size: int) -> list[dict[str, mx.array]]:
    cuts = [qwen3_5_part(found.text_config, rank, size).cut for rank in range(size)]
    return [{name: part_of(name, x, cut(name)) for name, x in found.tensors.items()} for cut in cuts]


@pytest.mark.parametrize("config", [{}, SPARSE | {"model_type": "qwen3_5_moe_text"}, {"bits": 8}], ids=str)
def test_every_number_is_on_one_rank(config: Mapping[str, Any], tmp_path: Path) -> None:
    found = checkpoint(tmp_path, **config)
    for name, whole in found.tensors.items():
        pieces = [part[name] for part in parts(found, 2)]
        numbers = sorted(float(x) for piece in pieces for x in piece.astype(mx.float32).reshape(-1).tolist())
        expected = sorted(float(x) for x in whole.astype(mx.float32).reshape(-1).tolist())
        whole_on_each = pieces[0].shape == whole.shape
        assert numbers == (sorted(expected * 2) if whole_on_each else expected), name
        everywhere = r".*(norm|fc|pre_fc_norm_\w+|mlp\.gate|shared_expert_gate)\.(weight|scales|biases)"
        assert whole_on_each == bool(re.fullmatch(everywhere, name)), name


def test_ranks_beyond_the_key_value_heads_have_that_of_their_queries(tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    half = found.tensors[name].shape[0] // 2
    for rank, part in enumerate(parts(found, 4)):
        mine = found.tensors[name][half * (rank // 2) : half * (rank // 2 + 1)]
        assert mx.array_equal(part[name], mine), rank


@pytest.mark.parametrize("size", [2, 4])
def test_a_part_is_a_model_of_that_share(size: int, tmp_path: Path) -> None:
    found = checkpoint(tmp_path)
    whole = build_model(found, with_head=True)
    part = build_model(found, with_head=True, ranks=Alone(1, size))
    assert part.model.vocab_size == whole.model.vocab_size
    assert part.model.new_state().shape.memory[0] == whole.model.new_state().shape.memory[0] // size
    assert part.nbytes < (1 / size + 0.06) * whole.nbytes


@pytest.mark.parametrize(
    ("name", "value"), [("num_attention_heads", 5), ("linear_num_key_heads", 1), ("intermediate_size", 129)]
)
def test_what_ranks_do_not_divide_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(CheckpointError, match=rf"2 ranks cannot share this model: its {name} is {value}"):
        qwen3_5_part({**NANO_CONFIG, **SHARED, name: value}, 0, 2)


def test_key_value_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    with pytest.raises(CheckpointError, match="num_key_value_heads is 3"):
        qwen3_5_part({**NANO_CONFIG, **SHARED, "num_key_value_heads": 3}, 0, 2)


def test_quantisation_groups_stay_whole(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, bits=4, intermediate_size=32)
    with pytest.raises(CheckpointError, match="quantisation groups stay whole"):
        build_model(found, with_head=True, ranks=Alone(0, 2))


def test_other_families_are_refused(tmp_path: Path) -> None:
    found = classify(changed(tmp_path, FAMILIES["mimo"]))
    with pytest.raises(CheckpointError, match="mimo cannot be shared by several ranks"):
        build_model(found, with_head=False, ranks=Alone(0, 2))
