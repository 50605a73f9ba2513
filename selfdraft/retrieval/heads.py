"""Heads on an encoder: from hidden states to the logits of a row. Knows formulas and names of tensors; no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from .pooling import pool

__all__ = ["HeadKind", "OutputHead", "head_of"]


class PooledHead(nn.Module):
    """BERT: the first token through the pooler, then a linear layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.pooler = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def __call__(self, states: mx.array, mask: mx.array) -> mx.array:
        """Logits [rows] of states [rows, length, width]."""
        logits: mx.array = self.out(mx.tanh(self.pooler(states[:, 0])))
        return logits[:, 0]


class DenseHead(nn.Module):
    """RoBERTa: the first token through a dense layer of its own, then a linear layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.dense = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def __call__(self, states: mx.array, mask: mx.array) -> mx.array:
        """Logits [rows] of states [rows, length, width]."""
        logits: mx.array = self.out(mx.tanh(self.dense(states[:, 0])))
        return logits[:, 0]


class NormedHead(nn.Module):
    """ModernBERT: the first token or the mean through a dense layer, GELU and a norm, then a linear layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self._pooling = config.get("classifier_pooling", "cls")
        if self._pooling not in ("cls", "mean"):
            raise CheckpointError(f"config.json: classifier_pooling {self._pooling!r} is not supported")
        if config.get("classifier_activation", "gelu") != "gelu":
            raise CheckpointError("config.json: only the classifier_activation 'gelu' is supported")
        self.dense = nn.Linear(width, width, bias=bool(config.get("classifier_bias", False)))
        self.norm = nn.LayerNorm(width, eps=config.get("norm_eps", 1e-5), bias=bool(config.get("norm_bias", False)))
        self.out = nn.Linear(width, 1)

    def __call__(self, states: mx.array, mask: mx.array) -> mx.array:
        """Logits [rows] of states [rows, length, width]."""
        pooled = pool(states, mask, [self._pooling]).astype(states.dtype)
        logits: mx.array = self.out(self.norm(nn.gelu(self.dense(pooled))))
        return logits[:, 0]


class OutputHead(nn.Module):
    """A decoder's output projection."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, vocabulary, bias=False)

    def __call__(self, states: mx.array) -> mx.array:
        """Logits [rows, vocabulary] of states [rows, width]."""
        logits: mx.array = self.out(states)
        return logits


@dataclass(frozen=True)
class HeadKind:
    """A kind of head.

    Attributes:
        module: makes it from config.json.
        names: layers in the files, and those of the module.
    """

    module: Callable[[Mapping[str, Any]], nn.Module]
    names: Mapping[str, str]

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """The head, with random weights.

        Raises:
            CheckpointError: config.json does not describe one.
        """
        try:
            return self.module(config)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"config.json does not describe a head: {error}") from error

    def parameters(self) -> dict[str, str]:
        """Names of its parameters, quantised or not, as in the files, and as in the module."""
        kinds = ("weight", "bias", "scales", "biases")
        return {f"{file}.{kind}": f"{own}.{kind}" for file, own in self.names.items() for kind in kinds}


_KINDS = {
    "BertForSequenceClassification": HeadKind(PooledHead, {"bert.pooler.dense": "pooler", "classifier": "out"}),
    "XLMRobertaForSequenceClassification": HeadKind(
        DenseHead, {"classifier.dense": "dense", "classifier.out_proj": "out"}
    ),
    "ModernBertForSequenceClassification": HeadKind(
        NormedHead, {"head.dense": "dense", "head.norm": "norm", "classifier": "out"}
    ),
}


def head_of(architecture: str, config: Mapping[str, Any]) -> HeadKind | None:
    """The head of an architecture; None if that is none with a head which is read here.

    Raises:
        CheckpointError: it has more than one label, and which of them means relevance is not said.
    """
    kind = _KINDS.get(architecture)
    if kind is None:
        return None
    labels = config.get("num_labels", len(config.get("id2label") or ()) or 2)
    if labels != 1:
        raise CheckpointError(
            f"config.json: {labels} labels; a reranker has one, the relevance: this is a classifier of another kind"
        )
    return kind
