"""Faults of model families."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "FP8 scales that do not fit end in a traceback",
        "models/checkpoint.py",
        """        except ValueError as error:
            raise CheckpointError(
                f"{folder}: the weights do not fit config.json: {error}; fetch the checkpoint again"
            ) from error
    stored = change(stored)""",
        """        except BufferError as error:
            raise CheckpointError(
                f"{folder}: the weights do not fit config.json: {error}; fetch the checkpoint again"
            ) from error
    stored = change(stored)""",
        "tests/models/test_foreign.py",
    ),
    Fault(
        "AWQ's columns in the order of the words",
        "models/foreign.py",
        "_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]",
        "_AWQ_ORDER = [0, 1, 2, 3, 4, 5, 6, 7]",
        "tests/models/test_foreign.py",
    ),
    Fault(
        "an assistant's configuration that lies ends in a traceback",
        "models/checkpoint.py",
        "    except _UNBUILDABLE as error:",
        "    except BufferError as error:",
        "tests/models/test_family_configs.py",
    ),
    Fault(
        "groups of a single expert",
        "models/config.py",
        " or alone:",
        ":",
        "tests/models/test_family_configs.py",
    ),
    Fault(
        "Qwen3-Next's fused projections cut as if they were not interleaved",
        "models/qwen3_next.py",
        "mx.split(tensor.reshape(heads, sum(rows), *rest), list(accumulate(rows))[:-1], axis=1)",
        "mx.split(tensor[None], [heads * end for end in accumulate(rows)][:-1], axis=1)",
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3-Next's betas and decays swapped",
        "models/qwen3_next.py",
        'found[name.replace("_ba.", "_b.")], found[name.replace("_ba.", "_a.")] =',
        'found[name.replace("_ba.", "_a.")], found[name.replace("_ba.", "_b.")] =',
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3-Next's weights of experts always made to sum to 1",
        "models/qwen3_next.py",
        'bool(config.get("norm_topk_prob", True))',
        "True",
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3-Next's list of dense layers ignored",
        "models/qwen3_next.py",
        "if layer in listed or (layer + 1) % step",
        "if (layer + 1) % step",
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3-Next's head dense like the first layer",
        "models/qwen3_5.py",
        'DecoderLayer(args, "full_attention", None)',
        'DecoderLayer(args, "full_attention", 0)',
        "tests/models/test_families.py -k qwen3_next",
    ),
    Fault(
        "Qwen3.5's weights of experts not made to sum to 1",
        "models/qwen3_5_moe.py",
        "sparse_mlp(config, norm_topk_prob=True)",
        "sparse_mlp(config, norm_topk_prob=False)",
        "tests/models/test_families.py -k qwen3_5_moe",
    ),
    Fault(
        "more experts chosen than there are",
        "models/qwen3_5_moe.py",
        "if chosen > experts:",
        "if chosen > experts + 1:",
        "tests/models/test_qwen3_5_moe.py",
    ),
    Fault(
        "gate and up of experts that are stored together swapped",
        "models/experts.py",
        'kept[f"{before}.gate_proj.weight"], kept[f"{before}.up_proj.weight"] = mx.split',
        'kept[f"{before}.up_proj.weight"], kept[f"{before}.gate_proj.weight"] = mx.split',
        "tests/models/test_families.py -k qwen3_5_moe",
    ),
    Fault(
        "experts taken for a dense MLP where projections are put together",
        "models/qwen3_5.py",
        "if not isinstance(self.mlp, Qwen3NextMLP):",
        "if False:",
        "tests/engine/test_on_kernels.py -k experts",
    ),
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
        "models/foreign.py",
        'return "" if blocks == [fp8.BLOCK, fp8.BLOCK] else',
        'return "" if blocks else',
        "tests/models/test_fp8.py",
    ),
    Fault(
        "a foreign quantisation passes for one that is read",
        "models/foreign.py",
        '    return f"weights quantised by {method!r}"',
        '    return ""',
        "tests/models/test_loading.py -k foreign",
    ),
    Fault(
        "experts that no choice of groups holds are accepted",
        "models/config.py",
        "chosen > experts // groups * best",
        "chosen > experts",
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
    Fault(
        "layers of the head are counted as the trunk's",
        "cli/inspect.py",
        '[: config["num_hidden_layers"]]',
        "[:]",
        "tests/cli/test_inspect.py -k kinds",
    ),
    Fault(
        "names of files drive the terminal",
        "cli/terminal.py",
        'if unicodedata.category(each) == "Cc" else each',
        "if not each else each",
        "tests/cli/test_models.py -k terminal",
    ),
    Fault(
        "a head that cannot be put together refuses its trunk",
        "models/checkpoint.py",
        "trunk = {name: tensor for name, tensor in stored.items() if not name.startswith(HEAD)}",
        "trunk = stored",
        "tests/models/test_qwen3_5_moe.py -k missing",
    ),
]
