"""Packers of quantised weights by the layouts of AutoAWQ, GPTQModel and compressed-tensors. Knows numpy alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Coded", "as_awq", "as_compressed", "as_gptq", "random_codes"]

Parts = dict[str, np.ndarray]

_AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight columns the i-th code of a word is


@dataclass(frozen=True)
class Coded:
    """A weight (out, in): codes from 0, and a zero point and a scale (out, groups) for each group of inputs."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    bits: int
    groups: np.ndarray  # of each input

    def weight(self) -> np.ndarray:
        """(code - zero) scale, exactly."""
        return (self.codes - self.zeros[:, self.groups]) * self.scales.astype(np.float64)[:, self.groups]


def random_codes(
    shape: tuple[int, int], bits: int, group: int, seed: int, *, symmetric: bool = False, mixed: bool = False
) -> Coded:
    """Any codes and zero points; scales in fp16 whose products with zero points fp16 holds.

    Args:
        group: inputs in a group, -1 for all.
        mixed: whether inputs of a group stand apart.
    """
    random = np.random.RandomState(seed)
    outputs, inputs = shape
    group = inputs if group == -1 else group
    count = inputs // group
    zeros = random.randint(1, 1 << bits, (outputs, count))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = random.randint(4, 8, (outputs, count)) * 2.0 ** -(bits + 4)
    groups = np.arange(inputs) // group
    return Coded(
        codes=random.randint(0, 1 << bits, shape),
        zeros=zeros,
        scales=scales.astype(np.float16),
        bits=bits,
        groups=random.permutation(groups) if mixed else groups,
    )


def as_awq(coded: Coded) -> Parts:
    """AutoAWQ, version gemm: packed along the outputs, in an order of its own."""
    return {
        "qweight": _awq_words(coded.codes.T),
        "qzeros": _awq_words(coded.zeros.T),
        "scales": np.ascontiguousarray(coded.scales.T),
    }


def as_gptq(coded: Coded, *, version: int = 1) -> Parts:
    """GPTQModel: codes packed along the inputs, zero points along the outputs; version 1 stores them less one."""
    zeros = coded.zeros - (1 if version == 1 else 0)
    return {
        "qweight": _packed(coded.codes, coded.bits).T.copy(),
        "qzeros": _packed(zeros.T, coded.bits),
        "scales": np.ascontiguousarray(coded.scales.T),
        "g_idx": coded.groups.astype(np.int32),
    }


def as_compressed(coded: Coded, *, symmetric: bool, mixed: bool = False) -> Parts:
    """compressed-tensors, pack-quantized: values from -half to half - 1, stored plus half."""
    half = 1 << (coded.bits - 1)
    values, zeros = coded.codes - half, coded.zeros - half
    parts = {
        "weight_packed": _packed(values + half, coded.bits),
        "weight_scale": coded.scales,
        "weight_shape": np.array(coded.codes.shape, dtype=np.int64),
    }
    if not symmetric:
        parts["weight_zero_point"] = _packed((zeros + half).T, coded.bits).T.copy()
    if mixed:
        parts["weight_g_idx"] = coded.groups.astype(np.int32)
    return parts


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """(rows, n) codes -> (rows, words) of 32 bits, the first code lowest; the last word may be filled up with zeros."""
    each = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // each)), dtype=np.uint32)
    for place in range(codes.shape[1]):
        words[:, place // each] |= codes[:, place].astype(np.uint32) << np.uint32(bits * (place % each))
    return words.view(np.int32)


def _awq_words(codes: np.ndarray) -> np.ndarray:
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(_AWQ_PLACES):
            words[:, word] |= codes[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)
