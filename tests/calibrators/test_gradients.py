"""Gradients agree with the sensitivities made from the same pass, and belong before RoPE."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from velox_pack.calibrators import gradients, sensitivity
from velox_pack.kernels import apply_rope, rope_angles


def test_the_same_pass_as_the_sensitivities(demo: Any) -> None:
    tokens, window = demo.tokens[:1, :96], 16
    kept: dict[int, gradients.Gradients] = {}
    gradients.backward(
        demo.streaming(), tokens, demo.traces, lambda g: kept.update({g.layer: g}), window=window
    )
    assert list(kept) == [t.index for t in reversed(demo.traces)]
    found = sensitivity.measure(
        demo.streaming(), tokens, demo.traces, demo.statistics, window=window
    )
    for layer, g in kept.items():
        for part in ("keys", "values"):
            x, at = g.part(part)
            mean = demo.statistics[layer].part(part)[0].mean
            size = np.square(x - mean[:, None]).mean(axis=-1) * np.square(at).sum(axis=-1)
            expected = size[:, 4:].sum(axis=1) / (2 * tokens.size)
            np.testing.assert_allclose(expected, getattr(found, part)[layer], rtol=1e-3)
            assert not at[:, -window:].any()  # nobody sees the last tokens through their codes
    after: dict[int, gradients.Gradients] = {}
    plain = [replace(t, rope=None) for t in demo.traces]
    gradients.backward(
        demo.streaming(), tokens, plain, lambda g: after.update({g.layer: g}), window=window
    )
    for t in demo.traces:
        cos, sin = rope_angles(mx.array(t.rope.inv_freq), mx.arange(tokens.shape[1]))
        for field in ("keys", "at_keys"):
            before = mx.array(getattr(kept[t.index], field))[None]
            turned = np.array(apply_rope(before, cos, sin, t.rope.traditional))[0]
            wanted = getattr(after[t.index], field)
            np.testing.assert_allclose(turned, wanted, atol=1e-3 * np.abs(wanted).max())


def test_fisher_is_the_second_moment(demo: Any) -> None:
    tokens = demo.tokens[:1, :64]
    held: list[gradients.Gradients] = []
    gradients.backward(demo.streaming(), tokens, demo.traces, held.append)
    metric = gradients.fisher(demo.streaming(), tokens, demo.traces, "values")
    for g in held:
        rows = g.at_values[:, 4:].astype(np.float64)
        moment = np.einsum("hnd,hne->hde", rows, rows) / (2 * 60)
        np.testing.assert_allclose(metric[g.layer], moment, rtol=1e-6, atol=1e-12)
