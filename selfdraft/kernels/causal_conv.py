"""Depthwise causal convolution over a window of past inputs."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["causal_conv"]

# mlx's depthwise conv1d on a CPU takes 15 ms for 512 tokens of 1024 channels; four multiply-adds take 2.5 ms.
# At a few tokens both cost the same, and on a GPU the single operation is cheaper.
_CPU_CONV_TOKENS = 16


def causal_conv(x: mx.array, weight: mx.array) -> mx.array:
    """Convolve each channel with its own kernel, without padding.

    Args:
        x: inputs [B, k - 1 + T, C]: the k - 1 inputs before the first position, then T new ones.
        weight: [C, k, 1] (MLX layout).

    Returns:
        [B, T, C] in the dtype of x, accumulated in fp32.
    """
    channels, taps, _ = weight.shape
    tokens = x.shape[1] - taps + 1
    if tokens <= _CPU_CONV_TOKENS or mx.default_device() == mx.gpu:
        return mx.conv1d(x, weight, groups=channels)
    wide = x.astype(mx.float32)
    total = wide[:, :tokens] * weight[:, 0, 0]
    for tap in range(1, taps):
        total = total + wide[:, tap : tap + tokens] * weight[:, tap, 0]
    return total.astype(x.dtype)
