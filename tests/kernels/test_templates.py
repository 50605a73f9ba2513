"""Guards how few texts are compiled: each costs time on CUDA. Self-checks run those of a model, and neither heads nor
tokens are compiled in, nor how many rows there are beyond one."""

from __future__ import annotations

from types import ModuleType

import pytest

from selfdraft.kernels import attention_inputs, few_query_attention
from tests.support.cuda_texts import MODULES, Recorded, record_texts, run_model


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return record_texts(monkeypatch)


def texts(recorded: Recorded) -> set[tuple[str, str]]:
    """Kernels with their templates and dtypes, as CUDA would compile them."""
    return {(kernel.name, f"{dict(launch.template)} {dtypes}") for kernel, launch, dtypes in recorded}


def test_a_model_at_a_depth_compiles_few_texts(recorded: Recorded) -> None:
    """Of the mixer one; of attention two for its numbers of queries, and one each for what is around, twice where rows
    have arrays of their own: for one row and for more; of products one for every form, number of simdgroups, and number
    of rows."""
    for tokens in (1, 4):
        for held in (0, 1, 4):
            for rows in (1, 2, 5, 8, 11):
                run_model(tokens, held, rows)
    names = [name for name, _ in texts(recorded)]
    assert {name: names.count(name) for name in names} == {
        "gated_delta_mixer": 1,
        "attention_inputs": 2,
        "few_query_partial_mma": 4,
        "few_query_merge": 1,
        "verify_qmv_mma": 12,
    }


@pytest.mark.parametrize("module", MODULES)
def test_self_checks_compile_what_a_model_does(module: ModuleType, recorded: Recorded) -> None:
    """But for 8 bits. What is measured for speed was compiled before."""
    for tokens in (1, 4):
        for rows in (1, 3):
            run_model(tokens, 4, rows)
    of_model = texts(recorded)
    recorded.clear()
    for each in MODULES:
        each._CALLS.clear()
    check = module.CHECK
    check.error()
    of_check = texts(recorded)
    assert of_check
    names = {name for name, _ in of_check}
    if module in (attention_inputs, few_query_attention):
        assert of_check == {text for text in of_model if text[0] in names}
    assert all("'BITS': 8" in text for _, text in of_check - of_model)
    assert len(of_check - of_model) <= 1
    if check.gain:
        check.gain()
        assert texts(recorded) == of_check
