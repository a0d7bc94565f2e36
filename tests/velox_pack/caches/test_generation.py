"""VeloxCache under mlx-lm's own generation, on the trained demo model."""

import copy

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

import velox_pack.door  # noqa: F401 - makes VeloxCache known to mlx-lm
from velox_pack.caches.plan import register
from velox_pack.source import resolve

RECIPES = [
    "spectral:bits=3",
    "joint-spectral:bits=2",
    "turboquant-mse:bits=4",
    "affine:bits=4,axis=channel",
]


@pytest.fixture
def use(demo, monkeypatch):
    """`use(recipe)`: the model makes caches of this plan from now on."""

    def install(recipe):
        monkeypatch.setattr(demo.model, "make_cache", lambda: demo.caches(recipe), raising=False)

    return install


def generated(demo, prompt, count=12, **options):
    steps = generate_step(prompt, demo.model, max_tokens=count, **options)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_short_prompt_is_bit_equal_to_a_plain_cache(demo, heldout, recipe):
    for chunks in ([26], [20, 6], [13] + [1] * 13):
        plain = demo.logits(heldout[:26], demo.caches(None), chunks)
        ours = demo.logits(heldout[:26], demo.caches(recipe), chunks)
        assert mx.array_equal(plain, ours)


def test_exact_codes_are_a_plain_cache_for_long_prompts(demo, heldout):
    chunks = [200, 100, 100] + [1] * 10
    plain = demo.logits(heldout[:410], demo.caches(None), chunks)
    caches = demo.caches("exact")
    ours = demo.logits(heldout[:410], caches, chunks)
    assert caches[0].codes[0][0].shape[2] == 256
    assert mx.abs(plain - ours).max().item() < 1e-4


@pytest.mark.parametrize("recipe", RECIPES)
def test_stream_generate(demo, use, recipe):
    use(recipe)
    tokenizer = resolve("demo").tokenizer()
    prompt = "She had not seen him since the morning, and when he came into the room she "
    pieces = list(mlx_lm.stream_generate(demo.model, tokenizer, prompt * 4, max_tokens=20))
    text = "".join(p.text for p in pieces)
    assert text == mlx_lm.generate(demo.model, tokenizer, prompt * 4, max_tokens=20)
    assert sum(c.isalpha() or c.isspace() for c in text) > 0.8 * len(text) > 0


def test_generation_with_exact_codes_gives_the_tokens_of_a_plain_cache(demo, heldout, use):
    plain = generated(demo, heldout[:300])
    use("exact")
    assert generated(demo, heldout[:300]) == plain


def test_a_prompt_longer_than_a_prefill_step(demo, heldout, use):
    """mlx-lm feeds all but the last token in steps of this size, then one at a time."""
    use("spectral:bits=3")
    prompt = heldout[:200]
    found = generated(demo, prompt, count=4, prefill_step_size=64)
    caches = demo.caches("spectral:bits=3")
    demo.logits(prompt[:199], caches, [64, 64, 64, 7])
    token, expected = prompt[-1:], []
    for _ in range(4):
        token = mx.argmax(demo.logits(token, caches)[-1:], axis=-1)
        expected.append(token.item())
    assert found == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_saved_prompt_goes_on_as_an_unbroken_one(demo, heldout, recipe, tmp_path):
    register(demo.plan(recipe))
    caches = demo.caches(recipe)
    demo.logits(heldout[:150], caches)
    copied = copy.deepcopy(caches)
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file)
    found = [
        generated(demo, heldout[150:160], prompt_cache=each) for each in (caches, copied, loaded)
    ]
    assert found[0] == found[1] == found[2]
    assert [c.offset for c in loaded] == [c.offset for c in caches]


@pytest.mark.parametrize("recipe", RECIPES)
def test_trimmed_within_the_window_it_is_as_if_nothing_had_been(demo, heldout, recipe):
    caches = demo.caches(recipe)
    demo.logits(heldout[:150], caches)
    expected = demo.logits(heldout[150:160], copy.deepcopy(caches))
    demo.logits(heldout[300:303], caches)  # too few to push a group out of the window
    assert trim_prompt_cache(caches, 3) == 3
    found = demo.logits(heldout[150:160], caches)
    assert mx.abs(found - expected).max().item() < 1e-4


def test_a_batch_of_equal_lengths(demo, heldout):
    rows = mx.stack([heldout[:100], heldout[100:200]])
    batch = demo.caches("spectral:bits=3")
    together = []
    for start, stop in ((0, 90), (90, 91), (91, 100)):
        together.append(demo.model(rows[:, start:stop], cache=batch))
    together = mx.concatenate(together, axis=1)
    for i in range(2):
        alone = demo.logits(rows[i], demo.caches("spectral:bits=3"), [90, 1, 9])
        # A code may tip where a product of another size rounds otherwise.
        assert mx.abs(together[i] - alone).mean().item() < 1e-3


def test_a_bfloat16_model_holds_half_the_bytes_of_the_exact_rows(demo, heldout):
    model, dtype = demo.model, mx.bfloat16
    weights = model.parameters()
    wide = demo.caches("spectral:bits=3")
    exact = demo.logits(heldout[:120], wide, [100] + [1] * 20)
    try:
        model.set_dtype(dtype)
        caches = demo.caches("spectral:bits=3")
        found = demo.logits(heldout[:120], caches, [100] + [1] * 20)
    finally:
        model.update(weights)
    assert mx.abs(found - exact).mean().item() < 0.1
    for narrow, full in zip(caches, wide, strict=True):
        assert {a.dtype for a in (*narrow.sinks, *narrow.recent)} == {dtype}
        rows = sum(a.nbytes for a in (*full.sinks, *full.recent))
        assert full.nbytes - narrow.nbytes == rows // 2
