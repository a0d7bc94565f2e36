"""Sensitivities predict what perturbing one head of one layer at a time really costs."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy.stats import spearmanr

from velox_pack.calibrators import gradients, sensitivity
from velox_pack.calibrators.capture import capture
from velox_pack.calibrators.head import head
from velox_pack.calibrators.hooks import AttentionCall
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.trace import trace
from velox_pack.manifests.errors import CalibrationError
from velox_pack.source import resolve
from zoo import VOCABULARY, build, draw

SIZE = 0.02  # relative noise


def test_predicts_the_cost_of_noise_on_the_demo_model(demo: Any) -> None:
    tokens = demo.tokens[:1]
    streaming = demo.streaming()
    found = sensitivity.measure(streaming, tokens, demo.traces, demo.statistics)
    assert found.tokens == tokens.size
    exact = _log_probabilities(streaming, tokens, None)
    rng = np.random.default_rng(0)
    predicted, true, sizes = [], [], []
    for part in ("keys", "values"):
        for index in found.keys:
            layer = demo.statistics[index]
            mean = layer.part(part)[0].mean

            def noisy(i: int, call: AttentionCall) -> tuple[mx.array, mx.array] | None:
                if i != index:  # noqa: B023
                    return None
                assert call.rope is not None
                x = np.array(call.rope.before if part == "keys" else call.values)  # noqa: B023
                spread = np.square(x - mean[:, None]).mean(axis=-1, keepdims=True)  # noqa: B023
                noise = np.sqrt(SIZE * spread) * rng.standard_normal(x.shape)
                noise[:, :, :4] = 0
                # Isotropic noise is the same before and after RoPE.
                change = mx.array(noise.astype(np.float32))
                if part == "keys":  # noqa: B023
                    return call.keys + change, call.values
                return call.keys, call.values + change

            other = _log_probabilities(streaming, tokens, noisy)
            true.append(mx.sum(mx.exp(exact) * (exact - other), axis=-1).mean().item())
            predicted.append(SIZE * getattr(found, part)[index].sum())
            sizes.append(np.trace(layer.part(part)[0].covariance, axis1=1, axis2=2).sum())
    assert spearmanr(predicted, true).statistic > 0.85
    assert spearmanr(sizes, true).statistic < spearmanr(predicted, true).statistic
    ratios = np.array(predicted) / np.array(true)
    assert np.all((ratios > 0.6) & (ratios < 1.7))  # not only the order: nats


def test_predicts_the_cost_of_shrinking_on_the_demo_model(demo: Any) -> None:
    """Of all values of a layer towards their mean; few sequences, so within a factor of 3."""
    tokens, part = demo.tokens, 0.2
    streaming = demo.streaming()
    found = sensitivity.measure(streaming, tokens, demo.traces, demo.statistics)
    exact = _log_probabilities(streaming, tokens, None)
    true = {}
    for index in (0, 3, 5):
        mean = mx.array(demo.statistics[index].values.mean.astype(np.float32))[:, None]

        def shrunk(i: int, call: AttentionCall) -> tuple[mx.array, mx.array] | None:
            if i != index:  # noqa: B023
                return None
            change = part * (mean - call.values)  # noqa: B023
            change[:, :, :4] = 0
            return call.keys, call.values + change

        other = _log_probabilities(streaming, tokens, shrunk)
        true[index] = mx.sum(mx.exp(exact) * (exact - other), axis=-1).mean().item()
    predicted = {i: part**2 * found.shrink_values[i] for i in true}
    noise = sum(part**2 * found.values[i].sum() for i in true)
    assert sum(true.values()) > 2 * noise  # which is why it has a term of its own
    assert 1 / 3 < sum(predicted.values()) / sum(true.values()) < 3


def _log_probabilities(streaming: StreamingForward, tokens: np.ndarray, replace: Any) -> mx.array:
    hidden = streaming.run(tokens, replace=replace)
    logits = head(streaming, tokens, hidden)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gemma3_text", {}),
        ("mixtral", {}),
        ("cohere2", {}),
        ("lfm2", {}),
        ("llama", {"quantize": (4, 64), "tie_word_embeddings": False}),
    ],
)
def test_layer_by_layer_equals_one_backward_pass_of_the_whole_model(
    tiny_model: Any, architecture: str, options: dict[str, Any]
) -> None:
    source = resolve(str(tiny_model(architecture, **options)))
    tokens = np.random.default_rng(1).integers(0, 256, (1, 40)).astype(np.int32)
    streaming = StreamingForward(source.skeleton(), source.weights)
    traces = trace(source.skeleton())
    statistics = capture(streaming, tokens, traces)
    found = sensitivity.measure(streaming, tokens, traces, statistics, seed=5)
    again = sensitivity.measure(streaming, tokens, traces, statistics, seed=5)
    first = min(found.values)
    assert found.values[first].tobytes() == again.values[first].tobytes()

    # All of it at once, with the same labels, for the values of the first covered layer.
    model = source.skeleton()
    model.load_weights(list(source.weights().items()))
    model.set_dtype(mx.float32)
    from velox_pack.calibrators.hooks import watch_attention

    seen: list[mx.array] = []

    def loss(change: mx.array) -> mx.array:
        calls: list[int] = []

        def add(call: AttentionCall) -> tuple[mx.array, mx.array] | None:
            calls.append(0)
            if len(calls) > 1:
                return None
            seen.append(call.values)
            return call.keys, call.values + change

        with watch_attention(model) as watch:
            watch.replace = add
            logits = model(mx.array(tokens)).astype(mx.float32)
        own = mx.random.split(mx.random.key(5))[1]
        drawn = mx.random.categorical(mx.stop_gradient(logits), key=own)
        picked = mx.take_along_axis(logits, drawn[..., None], axis=-1)
        return mx.sum(mx.logsumexp(logits, axis=-1, keepdims=True) - picked)

    t = traces[first]
    gradient = np.array(mx.grad(loss)(mx.zeros((1, t.kv_heads, 40, t.v_dim))))[0, :, 4:]
    with watch_attention(model) as watch:
        mx.eval(model(mx.array(tokens)))
        values = np.array(watch.take()[0].values)[0, :, 4:]
    size = np.square(values - statistics[first].values.mean[:, None]).mean(axis=-1)
    expected = (size * np.square(gradient).sum(axis=-1)).sum(axis=1) / (2 * 40)
    np.testing.assert_allclose(found.values[first], expected, rtol=2e-3)


def test_a_key_that_is_put_together_after_rope() -> None:
    """In gptj keys are not RoPE's own result: they are turned back by the traced rotation."""
    model = build("gptj")
    weights = draw(model)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 32)).astype(np.int32)
    traces = trace(model)
    streaming = StreamingForward(model, lambda: dict(weights))
    statistics = capture(streaming, tokens, traces)
    seen: list[gradients.Gradients] = []
    gradients.backward(streaming, tokens, traces, seen.append)
    found = sensitivity.measure(streaming, tokens, traces, statistics)
    for layer in (0, 1):
        keys = np.concatenate([g.keys[:, 4:] for g in seen if g.layer == layer], axis=1)
        np.testing.assert_allclose(keys.mean(axis=1), statistics[layer].keys_before.mean, atol=1e-5)
        assert np.all(found.keys[layer] > 0)


def test_layers_that_hand_on_more_than_one_activation_are_refused() -> None:
    model = build("gemma4_text")
    weights = draw(model)
    tokens = np.zeros((2, 32), np.int32)
    streaming = StreamingForward(model, lambda: dict(weights))
    traces = trace(build("gemma4_text"))
    for work in (
        lambda: sensitivity.measure(streaming, tokens, traces, {}),
        lambda: gradients.backward(streaming, tokens, traces, print),
    ):
        with pytest.raises(CalibrationError, match="more than one activation"):
            work()
