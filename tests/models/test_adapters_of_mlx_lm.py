"""Guards that an adapter which mlx-lm's tuner makes and saves is what mlx-lm itself makes of the model with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from selfdraft.models.adapters import read_adapter
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.source import REFERENCE, find_model
from tests.support.reference import cosine, largest_difference

TOKENS = mx.array([[3, 141, 59, 26, 535, 897, 932, 384, 626, 4338]])
PARAMETERS = {"rank": 4, "scale": 10.0, "dropout": 0.0}


def stock(folder: Path) -> Any:
    """mlx-lm's model, in float32."""
    model: Any = load_model(folder)[0]
    model.set_dtype(mx.float32)
    return model


@pytest.fixture(scope="module", params=[None, 4], ids=["dense", "4-bit"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint, or a build of it as mlx-lm makes one."""
    reference = find_model(REFERENCE)
    if request.param is None:
        return reference
    made = tmp_path_factory.mktemp("build")
    config = json.loads((reference / "config.json").read_text())
    model, config = quantize_model(stock(reference), config, group_size=64, bits=request.param)
    save_model(made, model)
    save_config(config, made / "config.json")
    return made


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_logits_are_those_of_mlx_lm(folder: Path, kind: str, tmp_path: Path) -> None:
    """With all that its tuner adapts, in the last five layers."""
    model = stock(folder)
    before = model(TOKENS)
    mx.eval(before)
    model.freeze()
    linear_to_lora_layers(model, 5, PARAMETERS, use_dora=kind == "dora")
    key = mx.random.key(4)

    def noise(path: str, tensor: mx.array) -> mx.array:
        """What training would leave: mlx-lm begins with zeros."""
        if not path.endswith("lora_b"):
            return tensor
        return 0.01 * mx.random.normal(tensor.shape, key=key)

    model.update(tree_map_with_path(noise, model.trainable_parameters()))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
    config = {"fine_tune_type": kind, "num_layers": 5, "lora_parameters": PARAMETERS}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    expected = load_adapters(stock(folder), str(tmp_path))(TOKENS)

    checkpoint = classify(folder)
    adapter = read_adapter(tmp_path, checkpoint)
    ours = build_model(checkpoint, with_head=False, dtype=mx.float32, adapter=adapter).model
    hidden, _ = ours.forward(TOKENS, [ours.new_state()], keep_steps=False)
    found = ours.logits(hidden)
    assert largest_difference(expected, before) > 0.5
    assert largest_difference(found, expected) < 2e-3
    assert cosine(found, expected) > 0.999999
