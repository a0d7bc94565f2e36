"""Prediction from decoded neighbours: what it gains when there is something to know."""

from typing import Any

import numpy as np
import pytest

from token_samples import made, of_demo, rows_of, same_bytes
from velox_pack.calibrators import prediction
from velox_pack.calibrators.affine_rounding import relative_error
from velox_pack.calibrators.neighbours import LayerTokens
from velox_pack.calibrators.rotated_code import RotatedCode, range_of
from velox_pack.manifests.errors import CalibrationError

SEED = 5


def stack(seed: int, noise: float) -> dict[int, LayerTokens]:
    """Each layer's keys and values a fixed mixture of the ones before, and noise."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(SEED)
    keys, values = [rng.standard_normal((2, 1024, 32))], [rng.standard_normal((2, 1024, 32))]
    for _ in range(3):
        both = np.concatenate([*keys[-1], *values[-1]], axis=1)  # [N, 128]
        mixed = both @ fixed.standard_normal((128, 128)) / np.sqrt(128)
        mixed = mixed + noise * rng.standard_normal(mixed.shape) + 3
        keys.append(mixed[:, :64].reshape(-1, 2, 32).transpose(1, 0, 2))
        values.append(mixed[:, 64:].reshape(-1, 2, 32).transpose(1, 0, 2))
    return made(keys, values)


def through(artifacts: Any, tokens: dict[int, LayerTokens]) -> dict[tuple[int, str], np.ndarray]:
    """All layers coded and decoded in order."""
    rows = {p: rows_of([a for a in artifacts if a.part == p]) for p in prediction.SOURCES}
    decoded: dict[tuple[int, str], np.ndarray] = {}
    for layer in sorted(tokens):
        for part in prediction.SOURCES:
            a, n = rows[part][layer]
            sources = [None if k is None else decoded[k] for k in prediction.needs(a, n)]
            codes = prediction.encode(a, n, tokens[layer].part(part), sources)
            assert all(c.dtype == np.uint8 for c in codes)
            decoded[layer, part] = prediction.decode(a, n, *codes, sources)
    return decoded


def alone(tokens: dict[int, LayerTokens], bits: int) -> dict[tuple[int, str], float]:
    """Errors of the same code without prediction, mean off."""
    found = {}
    for layer, own in tokens.items():
        for part in prediction.SOURCES:
            x = own.part(part).astype(np.float64)
            mean = x.mean(axis=1, keepdims=True)
            code = RotatedCode(x.shape[2], bits, range_of(x - mean))
            found[layer, part] = relative_error(x, mean + code.decode(*code.encode(x - mean)))
    return found


def test_planted_mixture_is_found_and_unseen_tokens_gain() -> None:
    fitted = prediction.fit(stack(0, 0.2), 3)
    fresh = stack(1, 0.2)
    decoded, plain = through(fitted, fresh), alone(fresh, 3)
    for (layer, part), x in decoded.items():
        error = relative_error(fresh[layer].part(part), x)
        assert error < (plain[layer, part] / 3 if layer else 1.1 * plain[layer, part])


def test_layers_with_nothing_in_common_lose_nothing() -> None:
    rng = np.random.default_rng(0)
    tokens = [
        made(
            list(rng.standard_normal((3, 2, 1024, 32))), list(rng.standard_normal((3, 2, 1024, 32)))
        )
        for _ in range(2)
    ]
    fitted = prediction.fit(tokens[0], 3)
    assert all(np.all(a.weights == 0) for a in fitted)
    decoded, plain = through(fitted, tokens[1]), alone(tokens[1], 3)
    for (layer, part), x in decoded.items():
        assert relative_error(tokens[1][layer].part(part), x) < 1.05 * plain[layer, part]


def test_span_cuts_the_chain() -> None:
    fitted = prediction.fit(stack(0, 0.2), 3, span=2)
    assert all(a.previous.tolist() == [-1, 0, -1, 2] for a in fitted)
    keys, values = fitted
    assert prediction.needs(keys, 0) == [None, None]
    assert prediction.needs(values, 2) == [(2, "keys"), None, None]
    assert prediction.needs(values, 3) == [(3, "keys"), (2, "keys"), (2, "values")]
    assert np.all(keys.weights[2] == 0)


def test_trained_model_gains_on_held_out_text(demo: Any) -> None:
    tokens, held, _ = of_demo(demo)
    fitted = prediction.fit(tokens, 2)
    assert same_bytes(fitted, prediction.fit(tokens, 2))
    decoded, plain = through(fitted, held), alone(held, 2)
    for part, most in (("keys", 0.7), ("values", 0.35)):
        ours = np.mean([relative_error(held[i].part(part), decoded[i, part]) for i in held])
        assert ours < most * np.mean([plain[i, part] for i in held])
    assert prediction.bits_per_element(fitted[0]) == 2 + 8 / 64


def test_keys_and_values_of_different_size_and_wrong_arguments() -> None:
    rng = np.random.default_rng(0)
    tokens = made(
        list(rng.standard_normal((3, 2, 256, 16))), list(rng.standard_normal((3, 2, 256, 32)))
    )
    for a in prediction.fit(tokens, 4):
        assert a.weights.shape[2] == {"keys": 96, "values": 128}[a.part]
    assert len(through(prediction.fit(tokens, 4), tokens)) == 6
    with pytest.raises(CalibrationError, match="span"):
        prediction.fit(tokens, 4, span=-1)
