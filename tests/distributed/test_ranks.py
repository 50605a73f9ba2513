"""Guards that several ranks answer as one process does: same tokens with MTP on, in batches, behind restored prefixes.

Sums over ranks are added in another order than in one process, so logits agree within a bound and not in every bit;
tokens are equal wherever no two logits are that close, which holds for these seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.distributed import jobs
from tests.reference.families import FAMILIES
from tests.support.checkpoints import add_text_side
from tests.support.families import changed
from tests.support.nano import SPARSE
from tests.support.ranks import SHARED, run_ranks, shared_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory.mktemp("shared") / "nano")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return jobs.answers(jobs.opened(str(folder)))


def test_two_ranks_emit_what_one_process_does(folder: Path, alone: dict[str, Any], tmp_path: Path) -> None:
    found, said, codes = run_ranks(2, "texts", folder, tmp_path)
    assert codes == [0, 0], said
    assert found["restored"] > 0
    scores, expected = found.pop("prompt scores"), dict(alone)
    assert scores == pytest.approx(expected.pop("prompt scores"), abs=0.005)
    assert found == expected


def test_four_ranks_emit_what_one_process_does(tmp_path: Path) -> None:
    """Two of them share a key/value head."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    small = shared_folder(tmp_path / "nano", **layers)
    found, said, codes = run_ranks(4, "brief", small, tmp_path)
    assert codes == [0] * 4, said
    assert found == jobs.brief(None, str(small))


VARIANTS = {
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "experts": {"model_type": "qwen3_5_moe_text", **SPARSE},
    "4 bits": {"bits": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_and_memory_is_shared(variant: str, tmp_path: Path) -> None:
    found, said, codes = run_ranks(2, "logits", shared_folder(tmp_path / "nano", **VARIANTS[variant]), tmp_path)
    assert codes == [0, 0], said
    assert found["difference"] < 2e-5 * found["scale"]
    (part, whole), (row, whole_row) = found["bytes"], found["row"]
    assert part < 0.56 * whole  # norms, fc and what chooses experts are on every rank
    assert row == whole_row / 2


def test_another_family_is_shared_too(tmp_path: Path) -> None:
    family, even = FAMILIES["glm4_moe"], 96  # tokens: their number in its fixture is odd
    weights = {name: x[:even] if len(x) == even + 1 else x for name, x in family.weights().items()}
    folder = changed(tmp_path, family, {name: mx.array(x) for name, x in weights.items()}, vocab_size=even)
    found, said, codes = run_ranks(2, "logits", add_text_side(folder), tmp_path)
    assert codes == [0, 0], said
    assert found["difference"] < 2e-5 * found["scale"]


def test_messages_are_those_that_the_docs_count(folder: Path, tmp_path: Path) -> None:
    found, said, codes = run_ranks(2, "traffic", folder, tmp_path)
    assert codes == [0, 0], said
    hidden, layers, vocabulary, size = 64, 3, SHARED["vocab_size"], 4
    assert found["forward"] == [2 * layers + 2, 3 * size * (1 + hidden * (2 * layers + 1))]
    assert found["logits"] == [1, 3 * size * vocabulary // 2]
    assert found["draft"] == [5, size * (1 + 4 * hidden)]


def test_a_rank_with_another_model_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = shared_folder(tmp_path / "other", seed=1)
    _, said, codes = run_ranks(2, "texts", folder, tmp_path, other)
    assert codes == [1, 1]
    for each in said:
        assert "rank 1 (" in each
        assert "copy the model folder" in each
