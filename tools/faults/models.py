"""Faults in families of models."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "latent attention computes a verify pass otherwise than single tokens",
        "models/latent_attention.py",
        "FEW = RECURRENT_DEPTH + 1",
        "FEW = 1",
        "tests/models/test_latent_attention.py -k bits",
    ),
    Fault(
        "latent attention's queries see one position too many",
        "models/latent_attention.py",
        "mx.arange(end)[None] <= mx.arange(queries.offset, end)[:, None]",
        "mx.arange(end)[None] <= mx.arange(queries.offset, end)[:, None] + 1",
        "tests/models/test_families.py -k deepseek_v3",
    ),
    Fault(
        "a prompt's later pieces see what its first one sees",
        "models/latent_attention.py",
        "            self.offset + start,",
        "            self.offset,",
        "tests/models/test_latent_attention.py -k pieces",
    ),
    Fault(
        "values are split off kv_b_proj where the keys are",
        "models/latent_attention.py",
        "mx.contiguous(tensor[:, keys:])",
        "mx.contiguous(tensor[:, :-keys])",
        "tests/models/test_latent_attention.py -k quantised_projection",
    ),
    Fault(
        "an FP8 weight is divided by its scale",
        "models/fp8.py",
        "BLOCK) * scales[",
        "BLOCK) / scales[",
        "tests/models/test_fp8.py",
    ),
    Fault(
        "FP8 in other blocks is read",
        "models/fp8.py",
        'settings.get("quant_method") == METHOD and',
        "False and",
        "tests/models/test_fp8.py",
    ),
    Fault(
        "a foreign quantisation passes for one that the family reads",
        "models/checkpoint.py",
        "    if method not in family.quant_methods:",
        "    if not family.quant_methods:",
        "tests/models/test_fp8.py",
    ),
    Fault(
        "experts that no choice of groups holds are accepted",
        "models/deepseek_v3.py",
        "args.num_experts_per_tok > experts // groups * chosen",
        "args.num_experts_per_tok > experts",
        "tests/models/test_latent_attention.py -k config",
    ),
    Fault(
        "a scaled rotary embedding without a factor is accepted",
        "models/config.py",
        "    if kind in _SCALED:",
        '    if kind == "linear":',
        "tests/models/test_latent_attention.py -k config",
    ),
    Fault(
        "sparse attention takes all of equal scores",
        "models/deepseek_v32.py",
        "<= left)",
        "<= count)",
        "tests/models/test_sparse_attention.py",
    ),
    Fault(
        "sparse attention chooses positions behind a query",
        "models/deepseek_v32.py",
        "self.indexer.index_topk) & before",
        "self.indexer.index_topk)",
        "tests/models/test_latent_attention.py -k bits",
    ),
    Fault(
        "DeepSeek-V3.2's indexer rotates as GLM-5's",
        "models/deepseek_v32.py",
        '{"indexer_rope_interleave": glm,',
        '{"indexer_rope_interleave": True,',
        "tests/models/test_families.py -k deepseek_v32",
    ),
    Fault(
        "the indexer's keys are not rotated",
        "models/deepseek_v32.py",
        "self.indexer.rope(index_keys, offset).astype",
        "index_keys.astype",
        "tests/models/test_families.py -k deepseek_v32",
    ),
    Fault(
        "layers that share an indexer are loaded as if they did not",
        "models/deepseek_v32.py",
        'config.get("index_topk_freq", 1) != 1',
        "False",
        "tests/models/test_latent_attention.py -k config",
    ),
    Fault(
        "low-rank norms keep mlx-lm's epsilon",
        "models/deepseek_v32.py",
        "self.q_a_layernorm.eps = self.kv_a_layernorm.eps = args.rms_norm_eps",
        "pass",
        "tests/models/test_families.py -k dsa",
    ),
]
