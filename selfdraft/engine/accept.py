"""Acceptance: which drafts stay, and what is emitted after them.

Notation: p is the trunk's and q the head's distribution, after all filters. A row of depth K has drafts d_1..d_K
with d_i ~ q_i; p_1..p_{K+1} are the laws at the same positions and one beyond. Every function works on a batch
whose rows may have different depths, padded to the deepest.

Rejection rules give each draft a passing probability, independent of the others given the drafts, and say how many
drafts stay for a pattern of passes. Token emitted after n drafts: normalised (s_n p_{n+1} - q_{n+1})+ for n < K (the
correction), p_{K+1} for n = K (the bonus).

* token-wise (Leviathan et al. 2211.17192, Chen et al. 2302.01318): draft i passes with min(1, p/q); the drafts before
  the first failure stay; s_n = 1.
* block (Sun et al. 2403.10444, algorithm 2): with c_0 = 1 and c_i = min(1, c_{i-1} p_i(d_i) / q_i(d_i)), draft i < K
  passes with e_i / (e_i + 1 - c_i), where e_i = sum (c_i p_{i+1} - q_{i+1})+, and draft K with c_K; the drafts up to
  the LAST pass stay; s_n = c_n.

Coupled acceptance (Gumbel coupling, Daliri et al. 2408.07978): trunk and head choose argmax(log-probability + g) with
the same noise g; a draft stays iff the trunk chooses it too, so what is emitted is the trunk's choice, whatever was
drafted. Greedy decoding is the same with g = 0.

Dtype follows the inputs: fp32 in the engine, fp64 in the tests that enumerate the joint law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

__all__ = ["BLOCK", "RULES", "TOKENWISE", "RejectionRule", "at", "correction_weights", "coupled", "rejection"]

PassProbabilities = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class RejectionRule:
    """One way of rejection sampling.

    Attributes:
        name: as in the settings.
        pass_probabilities: p [B, K+1, V], q [B, K, V], drafts [B, K], depths [B] -> passing probability [B, K] and
            scale s [B, K+1].
        stays: passes [B, K] (bool) -> how many drafts stay [B].
    """

    name: str
    pass_probabilities: PassProbabilities
    stays: Callable[[mx.array], mx.array]


def rejection(
    rule: RejectionRule,
    p: mx.array,
    q: mx.array,
    drafts: mx.array,
    depths: mx.array,
    uniforms: mx.array,
    noise: mx.array,
) -> tuple[mx.array, mx.array]:
    """Accept or reject, then draw the token that follows.

    Args:
        p: [B, K+1, V]; q: [B, K, V]; drafts: [B, K] int; depths: [B] int, at most K.
        uniforms: [B, K] in [0, 1), one a draft.
        noise: [B, V] standard Gumbel, for the token that follows.

    Returns:
        Drafts that stay [B] and the next token [B].
    """
    probabilities, scale = rule.pass_probabilities(p, q, drafts, depths)
    # Strict: a uniform of exactly 0 must not accept a draft of probability 0.
    accepted = rule.stays(uniforms < probabilities)
    weights = correction_weights(p, q, scale, accepted, depths)
    following = mx.argmax(mx.log(weights) + noise, axis=-1)
    return accepted, following


def correction_weights(p: mx.array, q: mx.array, scale: mx.array, accepted: mx.array, depths: mx.array) -> mx.array:
    """Unnormalised law [B, V] of the token that follows the accepted drafts."""
    p_next = at(p, accepted)
    if q.shape[1] == 0:
        return p_next
    q_next = mx.where((accepted < depths)[:, None], at(q, mx.minimum(accepted, q.shape[1] - 1)), 0)
    residual = mx.maximum(at(scale, accepted)[:, None] * p_next - q_next, 0)
    # Where p and q agree to rounding nothing is left over, and p itself is the law.
    return mx.where(residual.sum(axis=-1, keepdims=True) > 0, residual, p_next)


def coupled(choices: mx.array, drafts: mx.array, depths: mx.array) -> tuple[mx.array, mx.array]:
    """Keep drafts while they equal the trunk's choices [B, K+1]; emit the trunk's choice after them."""
    positions = mx.arange(drafts.shape[1])
    agree = (drafts == choices[:, : drafts.shape[1]]) & (positions < depths[:, None])
    accepted = _before_first_failure(agree)
    return accepted, at(choices, accepted)


def at(x: mx.array, positions: mx.array) -> mx.array:
    """x[b, positions[b]] for x [B, N, ...]."""
    if x.shape[0] == 1:
        return mx.take(x.squeeze(0), positions, axis=0)  # x[0] would be a copy
    return x[mx.arange(x.shape[0]), positions]


def _tokenwise(p: mx.array, q: mx.array, drafts: mx.array, depths: mx.array) -> tuple[mx.array, mx.array]:
    drafted = mx.arange(drafts.shape[1]) < depths[:, None]
    probabilities = mx.where(drafted, mx.minimum(_ratios(p, q, drafts), 1), 0)
    return probabilities, mx.ones(p.shape[:2], dtype=p.dtype)


def _block(p: mx.array, q: mx.array, drafts: mx.array, depths: mx.array) -> tuple[mx.array, mx.array]:
    depth = drafts.shape[1]
    ratios = _ratios(p, q, drafts)
    carried = [mx.ones(p.shape[:1], dtype=p.dtype)]
    for i in range(depth):
        carried.append(mx.minimum(carried[-1] * ratios[:, i], 1))
    scale = mx.stack(carried, axis=1)
    if depth == 0:
        return ratios, scale
    reached = scale[:, 1:]  # c_1 .. c_K
    following = mx.concatenate([q[:, 1:], mx.zeros_like(q[:, :1])], axis=1)  # q_2 .. q_K, and none after d_K
    excess = mx.maximum(reached[..., None] * p[:, 1:] - following, 0).sum(axis=-1)
    denominator = excess + 1 - reached
    # 0 / 0: the laws agree and nothing is missing so far, so the draft may as well pass.
    passing = mx.where(denominator > 0, excess / mx.where(denominator > 0, denominator, 1), 1)
    positions = mx.arange(1, depth + 1)
    last = mx.where(positions == depths[:, None], reached, 0)
    return mx.where(positions < depths[:, None], passing, last), scale


def _ratios(p: mx.array, q: mx.array, drafts: mx.array) -> mx.array:
    """p_i(d_i) / q_i(d_i), [B, K]."""
    tokens = drafts[..., None]
    p_draft = mx.take_along_axis(p[:, : drafts.shape[1]], tokens, axis=-1)[..., 0]
    return p_draft / mx.take_along_axis(q, tokens, axis=-1)[..., 0]


def _before_first_failure(passes: mx.array) -> mx.array:
    return mx.cumprod(passes.astype(mx.int32), axis=1).sum(axis=1) if passes.shape[1] else _none(passes)


def _up_to_last_pass(passes: mx.array) -> mx.array:
    depth = passes.shape[1]
    return (passes * mx.arange(1, depth + 1)).max(axis=1) if depth else _none(passes)


def _none(passes: mx.array) -> mx.array:
    return mx.zeros((passes.shape[0],), dtype=mx.int32)


TOKENWISE = RejectionRule("tokenwise", _tokenwise, _before_first_failure)
BLOCK = RejectionRule("block", _block, _up_to_last_pass)
RULES = {rule.name: rule for rule in (TOKENWISE, BLOCK)}
