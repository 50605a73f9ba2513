"""Speculative decoding of a Qwen3.5 checkpoint with its MTP head, in plain float32 torch.

Knows one dense checkpoint with tied embeddings and one row; knows nothing of Selfdraft, text, batches or
speed tricks.  It is what the engine is measured against.  T is the number of tokens in a block, H the hidden
size, V the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file
from torch import Tensor


@dataclass
class AttentionState:
    """Keys and values of every position so far, each [positions, key-value heads, head_dim]."""

    keys: Tensor
    values: Tensor

    def truncate(self, length: int) -> None:
        self.keys, self.values = self.keys[:length], self.values[:length]

    def copy(self) -> AttentionState:
        return AttentionState(self.keys, self.values)


@dataclass
class RecurrentState:
    """State of a gated delta-net layer, and what a rollback inside the newest block needs.

    window: inputs of the convolution before the block, [kernel - 1, channels].
    memory: [value heads, key dim, value dim].
    block_inputs: window and the block's convolution inputs, [kernel - 1 + T, channels].
    block_memories: the memory after each token of the block, when these were asked for.
    """

    window: Tensor
    memory: Tensor
    block_inputs: Tensor | None = None
    block_memories: list[Tensor] = field(default_factory=list)

    def keep(self, tokens: int) -> None:
        """Go back to the state after the first `tokens` >= 1 tokens of the newest block."""
        assert self.block_inputs is not None
        self.window = self.block_inputs[tokens : tokens + self.window.shape[0]]
        self.memory = self.block_memories[tokens - 1]

    def copy(self) -> RecurrentState:
        return RecurrentState(self.window, self.memory)


@dataclass
class TrunkState:
    """What the trunk remembers of `length` committed tokens."""

    length: int
    layers: list[AttentionState | RecurrentState]

    def keep(self, tokens: int, block: int) -> None:
        """Of the newest block of `block` tokens keep the first `tokens`."""
        self.length += tokens - block
        for layer in self.layers:
            if isinstance(layer, RecurrentState):
                layer.keep(tokens)
            else:
                layer.truncate(self.length)

    def copy(self) -> TrunkState:
        return TrunkState(self.length, [layer.copy() for layer in self.layers])


class ReferenceModel:
    """Trunk and head of the checkpoint in `folder`, computed in float32."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.config: dict[str, Any] = config.get("text_config", config)
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: value.float() for name, value in stored.items()}
        self.embedding = self.weights["model.embed_tokens.weight"]
        rope = self.config["rope_parameters"]
        rotary_dim = int(self.config["head_dim"] * rope["partial_rotary_factor"])
        exponents = torch.arange(0, rotary_dim, 2).float() / rotary_dim
        self.inverse_frequencies = rope["rope_theta"] ** -exponents

    # ---- layers

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[name + ".weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm over the last axis with a zero-centred weight."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (1.0 + self.weights[name + ".weight"])

    def feed_forward(self, x: Tensor, layer: str) -> Tensor:
        gate = functional.silu(self.linear(x, layer + "mlp.gate_proj"))
        return self.linear(gate * self.linear(x, layer + "mlp.up_proj"), layer + "mlp.down_proj")

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Partial rotary embedding of x [T, heads, head_dim] at positions start..start+T-1."""
        half = self.inverse_frequencies.shape[0]
        angles = torch.arange(start, start + x.shape[0]).float()[:, None, None] * self.inverse_frequencies
        cosine, sine = angles.cos(), angles.sin()
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)

    def attention(self, x: Tensor, layer: str, state: AttentionState) -> Tensor:
        """Gated attention of x [T, H] over the state's positions and the block, which joins the state."""
        length, start = x.shape[0], state.keys.shape[0]
        head_dim = self.config["head_dim"]
        query_gate = self.linear(x, layer + "self_attn.q_proj").view(length, -1, 2 * head_dim)
        query, gate = query_gate.chunk(2, dim=-1)
        key = self.linear(x, layer + "self_attn.k_proj").view(length, -1, head_dim)
        value = self.linear(x, layer + "self_attn.v_proj").view(length, -1, head_dim)
        query = self.rotate(self.norm(query, layer + "self_attn.q_norm"), start)
        key = self.rotate(self.norm(key, layer + "self_attn.k_norm"), start)
        state.keys, state.values = torch.cat([state.keys, key]), torch.cat([state.values, value])
        groups = query.shape[1] // key.shape[1]
        keys = state.keys.repeat_interleave(groups, dim=1).transpose(0, 1)
        values = state.values.repeat_interleave(groups, dim=1).transpose(0, 1)
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) / head_dim**0.5
        future = torch.arange(start + length) > torch.arange(start, start + length)[:, None]
        output = (scores.masked_fill(future, float("-inf")).softmax(-1) @ values).transpose(0, 1)
        return self.linear((output * gate.sigmoid()).reshape(length, -1), layer + "self_attn.o_proj")

    def delta_net(self, x: Tensor, layer: str, state: RecurrentState, keep_steps: bool) -> Tensor:
        """Gated delta net of x [T, H], token by token; `keep_steps` makes a later rollback possible."""
        config, prefix, length = self.config, layer + "linear_attn.", x.shape[0]
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]

        inputs = torch.cat([state.window, self.linear(x, prefix + "in_proj_qkv")])
        kernel = self.weights[prefix + "conv1d.weight"]
        mixed = functional.conv1d(inputs.T[None], kernel, groups=kernel.shape[0])[0].T
        widths = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
        query, key, value = functional.silu(mixed).split(widths, dim=-1)

        def unit(vectors: Tensor) -> Tensor:
            heads = vectors.reshape(length, key_heads, key_dim)
            heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
            return heads.repeat_interleave(value_heads // key_heads, dim=1)

        query, key, value = (
            unit(query) / key_dim**0.5,
            unit(key),
            value.reshape(length, value_heads, value_dim),
        )
        beta = self.linear(x, prefix + "in_proj_b").sigmoid()[..., None]
        step = functional.softplus(self.linear(x, prefix + "in_proj_a") + self.weights[prefix + "dt_bias"])
        decay = (-self.weights[prefix + "A_log"].exp() * step).exp()[..., None, None]

        memory, memories, outputs = state.memory, [], []
        for t in range(length):
            memory = memory * decay[t]
            innovation = beta[t] * (value[t] - (key[t][:, None] @ memory)[:, 0])
            memory = memory + key[t][:, :, None] * innovation[:, None]
            outputs.append((query[t][:, None] @ memory)[:, 0])
            if keep_steps:
                memories.append(memory)
        state.window, state.memory = inputs[length:], memory
        state.block_inputs, state.block_memories = inputs, memories

        output = torch.stack(outputs)
        output = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + config["rms_norm_eps"])
        gate = functional.silu(self.linear(x, prefix + "in_proj_z")).view_as(output)
        output = output * self.weights[prefix + "norm.weight"] * gate
        return self.linear(output.reshape(length, -1), prefix + "out_proj")

    # ---- trunk and head

    def new_attention_state(self) -> AttentionState:
        empty = torch.zeros(0, self.config["num_key_value_heads"], self.config["head_dim"])
        return AttentionState(empty, empty)

    def new_trunk_state(self) -> TrunkState:
        config = self.config
        key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        value_heads = config["linear_num_value_heads"]
        channels = 2 * config["linear_num_key_heads"] * key_dim + value_heads * value_dim
        layers: list[AttentionState | RecurrentState] = []
        for kind in config["layer_types"]:
            if kind == "linear_attention":
                window = torch.zeros(config["linear_conv_kernel_dim"] - 1, channels)
                layers.append(RecurrentState(window, torch.zeros(value_heads, key_dim, value_dim)))
            else:
                layers.append(self.new_attention_state())
        return TrunkState(0, layers)

    def trunk(self, ids: Sequence[int], state: TrunkState, keep_steps: bool = False) -> Tensor:
        """Advances `state` by a block and returns its hiddens after the final norm, [T, H]."""
        x = self.embedding[torch.tensor(ids)]
        for index, layer_state in enumerate(state.layers):
            layer = f"model.layers.{index}."
            normed = self.norm(x, layer + "input_layernorm")
            if isinstance(layer_state, RecurrentState):
                x = x + self.delta_net(normed, layer, layer_state, keep_steps)
            else:
                x = x + self.attention(normed, layer, layer_state)
            x = x + self.feed_forward(self.norm(x, layer + "post_attention_layernorm"), layer)
        state.length += len(ids)
        return self.norm(x, "model.norm")

    def head(self, tokens: Sequence[int], hiddens: Tensor, state: AttentionState) -> Tensor:
        """Adds the entries (tokens[i], hiddens[i]) to the head's history; its normed hiddens, [T, H]."""
        embedded = self.norm(self.embedding[torch.tensor(tokens)], "mtp.pre_fc_norm_embedding")
        x = self.linear(torch.cat([embedded, self.norm(hiddens, "mtp.pre_fc_norm_hidden")], dim=-1), "mtp.fc")
        layer = "mtp.layers.0."
        x = x + self.attention(self.norm(x, layer + "input_layernorm"), layer, state)
        x = x + self.feed_forward(self.norm(x, layer + "post_attention_layernorm"), layer)
        return self.norm(x, "mtp.norm")

    def logits(self, hiddens: Tensor) -> Tensor:
        """[T, H] -> [T, V], with the tied embedding as output projection."""
        return hiddens @ self.embedding.T


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 keeps everything."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def distribution(self, logits: Tensor) -> Tensor:
        """Logits [..., V] -> probabilities after temperature, then top-k, then top-p."""
        if self.temperature == 0:
            return functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        logits = logits / self.temperature
        if self.top_k:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], float("-inf"))
        sorted_probabilities, order = logits.softmax(-1).sort(descending=True)
        before = sorted_probabilities.cumsum(-1) - sorted_probabilities
        sorted_probabilities = sorted_probabilities.masked_fill(before > self.top_p, 0.0)
        sorted_probabilities = sorted_probabilities / sorted_probabilities.sum(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(-1, order, sorted_probabilities)


@dataclass
class Prefill:
    """A prompt that has gone through the trunk: reused for every way of continuing it.

    state: the trunk's state after all n prompt tokens.
    hiddens: [n, H], after the final norm.
    """

    ids: list[int]
    state: TrunkState
    hiddens: Tensor


@dataclass
class Continuation:
    """What one prompt was continued with.

    tokens: at most the tokens asked for; an end token is the last one.
    tried, accepted: per draft position 1..depth.
    accepted_by_cycle: how many drafts each cycle accepted.
    accepted_end: whether the last cycle accepted an end token as a draft, perhaps past `max_tokens`.
    trunk_margin, head_margin: the smallest difference between the two largest logits at any position that
        decided a token or a tried draft.
    """

    tokens: list[int]
    tried: list[int]
    accepted: list[int]
    accepted_by_cycle: list[int]
    accepted_end: bool
    trunk_margin: float
    head_margin: float


def margin(logits: Tensor) -> float:
    """Difference between the two largest of logits [V]."""
    first, second = logits.topk(2).values.tolist()
    return first - second


def prefill(model: ReferenceModel, ids: Sequence[int]) -> Prefill:
    """Runs the prompt through the trunk once."""
    state = model.new_trunk_state()
    return Prefill(list(ids), state, model.trunk(ids, state))


@dataclass
class Drafts:
    """What the head proposed in a cycle: tokens, and the logits and distributions [V] they were drawn from."""

    tokens: list[int]
    logits: list[Tensor]
    probabilities: list[Tensor]


class Noise:
    """The random numbers of one continuation, in the order they are asked for."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def token(self, probabilities: Tensor) -> int:
        """A token drawn with probabilities [V], which need not sum to 1."""
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return float(torch.rand((), generator=self.generator))


def draft_from(
    model: ReferenceModel, hidden: Tensor, head_state: AttentionState, depth: int, sampling: Sampling, noise: Noise
) -> Drafts:
    """Drafts from the head's output at the newest true pair, then from its own outputs; its state stays as it was."""
    true_entries = head_state.keys.shape[0]
    drafts = Drafts([], [], [])
    for position in range(depth):
        if position:
            hidden = model.head(drafts.tokens[-1:], hidden, head_state)
        drafts.logits.append(model.logits(hidden)[0])
        drafts.probabilities.append(sampling.distribution(drafts.logits[-1]))
        drafts.tokens.append(noise.token(drafts.probabilities[-1]))
    head_state.truncate(true_entries)
    return drafts


def accept(
    run: Continuation, drafts: Drafts, logits: Tensor, target: Tensor, stop: Collection[int], noise: Noise
) -> int:
    """Compares drafts with the trunk, one by one, until one is rejected or ends the text; `run` counts them.

    Args:
        logits, target: the trunk's logits and distributions at the drafts and behind them, [depth + 1, V].

    Returns:
        How many drafts stay.
    """
    kept = 0
    for position, draft in enumerate(drafts.tokens):
        run.tried[position] += 1
        run.trunk_margin = min(run.trunk_margin, margin(logits[position]))
        run.head_margin = min(run.head_margin, margin(drafts.logits[position]))
        ratio = float(target[position, draft] / drafts.probabilities[position][draft])
        if noise.uniform() >= ratio:
            break
        run.accepted[position] += 1
        kept += 1
        if draft in stop:
            run.accepted_end = True  # the drafts after it would never be emitted
            break
    else:
        run.trunk_margin = min(run.trunk_margin, margin(logits[kept]))
    run.accepted_by_cycle.append(kept)
    return kept


def law_behind(drafts: Drafts, kept: int, target: Tensor) -> Tensor:
    """The law of the token behind the kept drafts: what a rejection leaves of the trunk's, or all of it."""
    if kept < len(drafts.tokens):
        residual = (target[kept] - drafts.probabilities[kept]).clamp(min=0)
        if float(residual.sum()) > 0:
            return residual
    return target[kept]


def generate(
    model: ReferenceModel,
    prompt: Prefill,
    max_tokens: int,
    depth: int,
    sampling: Sampling,
    stop: Collection[int],
    seed: int = 0,
) -> Continuation:
    """Decodes with `depth` drafts a cycle and exact rejection sampling (arXiv 2211.17192, algorithm 1).

    Cycles run while fewer than `max_tokens` tokens are out and no end token is; the last cycle has the full
    depth too and counts in full, even where it goes past `max_tokens`.
    """
    noise = Noise(seed)
    state, head_state = prompt.state.copy(), model.new_attention_state()
    first_logits = model.logits(prompt.hiddens[-1])
    last = noise.token(sampling.distribution(first_logits))
    run = Continuation([last], [0] * depth, [0] * depth, [], False, margin(first_logits), float("inf"))
    # The true pairs (trunk hidden, token after it) that the head has not seen yet.
    pair_tokens, pair_hiddens = [*prompt.ids[1:], last], prompt.hiddens

    while len(run.tokens) < max_tokens and last not in stop:
        hidden = model.head(pair_tokens, pair_hiddens, head_state)[-1:]
        drafts = draft_from(model, hidden, head_state, depth, sampling, noise)

        hiddens = model.trunk([last, *drafts.tokens], state, keep_steps=True)
        logits = model.logits(hiddens)
        target = sampling.distribution(logits)
        kept = accept(run, drafts, logits, target, stop, noise)
        if run.accepted_end:
            run.tokens += drafts.tokens[:kept]
            break
        last = noise.token(law_behind(drafts, kept, target))

        # Commit.
        state.keep(kept + 1, block=depth + 1)
        pair_tokens, pair_hiddens = [*drafts.tokens[:kept], last], hiddens[: kept + 1]
        run.tokens += pair_tokens

    run.tokens = run.tokens[:max_tokens]
    return run
