"""Several sequences in one batch, as mlx-lm's batches and server handle them."""

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step

from velox_pack.caches.batch import VeloxBatchCache

RECIPES = ["joint-spectral:bits=2", "turboquant-mse:bits=3", "affine:bits=4,axis=channel"]
LENGTHS = (9, 170, 61, 300)


def prompts(heldout: mx.array) -> list[list[int]]:
    ids = heldout.tolist()
    return [ids[i * 17 : i * 17 + n] for i, n in enumerate(LENGTHS)]


def batched(model, rows, count, **options) -> list[list[int]]:
    generator = BatchGenerator(model, max_tokens=count, **options)
    uids = generator.insert(rows)
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    return [found[uid] for uid in uids]


@pytest.fixture
def use(demo, monkeypatch):
    def install(recipe):
        monkeypatch.setattr(demo.model, "make_cache", lambda: demo.caches(recipe), raising=False)

    return install


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("step", [2048, 64])
def test_a_batch_generates_what_each_does_alone(demo, heldout, use, recipe, step) -> None:
    use(recipe)
    rows = prompts(heldout)
    alone = [
        [int(t) for t, _ in generate_step(mx.array(r), demo.model, max_tokens=8,
                                          prefill_step_size=step)]
        for r in rows
    ]  # fmt: skip
    assert batched(demo.model, rows, 8, prefill_step_size=step) == alone
    if step < 2048:  # below, chunks of a prompt depend on what else is going on
        return
    # Fewer at a time: later rows come into a batch that is on its way.
    assert batched(demo.model, rows, 8, completion_batch_size=2, prefill_batch_size=1) == alone


def test_padding_never_enters_a_row(demo, heldout) -> None:
    rows = prompts(heldout)
    plan = demo.plan("turboquant-mse:bits=3")
    singles = [demo.caches(plan) for _ in rows]
    batch = [VeloxBatchCache.merge(layer) for layer in zip(*singles, strict=True)]
    longest = max(LENGTHS)
    padded = mx.array([r + [0] * (longest - len(r)) for r in rows])
    for cache in batch:
        cache.prepare(lengths=list(LENGTHS), right_padding=[longest - n for n in LENGTHS])
    for start in range(0, longest, 128):
        demo.model(padded[:, start : start + 128], cache=batch)
        mx.eval([c.state for c in batch])
    for cache in batch:
        cache.finalize()
    assert batch[0].offset.tolist() == list(LENGTHS)
    assert batch[0].left_padding == [longest - n for n in LENGTHS]
    for i, (row, own) in enumerate(zip(rows, singles, strict=True)):
        for start in range(0, len(row), 128):
            demo.model(mx.array([row[start : start + 128]]), cache=own)
        for layer, (one, cache) in enumerate(zip(own, batch, strict=True)):
            row_cache = cache.extract(i)
            assert row_cache.offset == one.offset
            assert row_cache.nbytes == one.nbytes
            for a, b in zip(row_cache.arrays(), one.arrays(), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                # Later layers see what codes make of differences in the last digit.
                if layer == 0 and a.dtype == mx.float32:
                    assert mx.abs(a - b).max().item() < 1e-4
    assert batch[0].nbytes == sum(own[0].nbytes for own in singles) + batch[0].offset.nbytes


def test_left_padding(demo, heldout) -> None:
    rows = [heldout[:50].tolist(), heldout[60:90].tolist()]
    plan = demo.plan("turboquant-mse:bits=3")
    singles = [demo.caches(plan) for _ in rows]
    batch = [VeloxBatchCache.merge(layer) for layer in zip(*singles, strict=True)]
    for cache in batch:
        cache.prepare(left_padding=[0, 20])
    tokens = mx.array([rows[0], [0] * 20 + rows[1]])
    out = demo.model(tokens, cache=batch)
    for i, row in enumerate(rows):
        alone = demo.model(mx.array([row]), cache=singles[i])
        assert mx.abs(out[i, -1] - alone[0, -1]).max().item() < 1e-3
    assert batch[0].offset.tolist() == [50, 30]
    with pytest.raises(ValueError, match="empty"):
        batch[0].prepare(left_padding=[1, 1])
    with pytest.raises(ValueError, match="lengths"):
        batch[0].prepare(right_padding=[1, 0])


def test_filter_extend_extract_and_trim(demo, heldout) -> None:
    plan = demo.plan("turboquant-mse:bits=3")
    rows = prompts(heldout)
    singles = []
    for row in rows:
        caches = demo.caches(plan)
        demo.model(mx.array([row]), cache=caches)
        singles.append(caches[0])
    batch = VeloxBatchCache.merge(singles[:2])
    batch.extend(VeloxBatchCache.merge(singles[2:]))
    assert batch.offset.tolist() == list(LENGTHS)
    assert batch.left_padding == [batch.size() - n for n in LENGTHS]
    batch.filter(mx.array([2, 0]))
    assert batch.offset.tolist() == [61, 9]
    assert (batch.size(), batch.left_padding) == (61, [0, 52])
    assert batch.extract(1).offset == 9
    assert batch.is_trimmable()
    assert batch.trim(5) == 5
    assert batch.offset.tolist() == [56, 4]
    # Copies: the singles are as they were.
    assert [s.offset for s in singles] == list(LENGTHS)


def test_a_model_with_its_own_attention_gets_padded_rows(demo) -> None:
    from dataclasses import replace

    from velox_pack.caches.cache import VeloxCache

    plan = replace(demo.plan("exact").layers[0], routed=False)
    caches = [VeloxCache(plan, "f", 0) for _ in range(2)]
    batch = VeloxBatchCache.merge(caches)
    x = mx.random.normal((2, 2, 6, 64))
    batch.prepare(lengths=[6, 4], right_padding=[0, 2])
    keys, values = batch.update_and_fetch(x, 2 * x)
    assert mx.array_equal(keys[0], x[0])
    assert mx.array_equal(keys[1, :, :4], x[1, :, :4])
    assert keys.shape == (2, 2, 6, 64)
    assert not keys[1, :, 4:].any().item()
    batch.finalize()
    keys, values = batch.update_and_fetch(x[:, :, :1], x[:, :, :1])
    assert keys.shape == (2, 2, 7, 64)
    assert not keys[1, :, :2].any().item()
    assert mx.array_equal(keys[1, :, 2:6], x[1, :, :4])
    assert mx.array_equal(values[1, :, 2:6], 2 * x[1, :, :4])
