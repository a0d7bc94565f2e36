"""Text from a bundle, piece by piece."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler

from velox_pack.environment import on_cpu
from velox_pack.loader import load, locate
from velox_pack.manifests.errors import VeloxError


def _as_chat(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a conversation that begins with `prompt`."""
    messages = [{"role": "user", "content": prompt}]
    try:
        tokens: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except Exception as error:  # a template may raise what it likes
        why = " ".join(str(error).split())[:200]
        raise VeloxError(f"the chat template refuses the prompt ({why}): try --raw") from error
    return tokens


def speak(
    bundle: str | Path,
    prompt: str,
    cache: str | None,
    revision: str | None,
    report: Callable[[str], None],
    *,
    max_tokens: int,
    temp: float,
    seed: int,
    raw: bool,
) -> Iterator[str]:
    """Load a bundle and yield pieces of the text that follows `prompt`.

    On MLX's CPU backend the model is computed in float32, which is fastest there.
    """
    report(f"loading {bundle}")
    dtype = mx.float32 if on_cpu() else None
    model, tokenizer = load(locate(bundle, revision, report), cache=cache, dtype=dtype)
    mx.random.seed(seed)
    tokens = prompt if raw or not tokenizer.has_chat_template else _as_chat(tokenizer, prompt)
    if tokens == prompt and not tokenizer.encode(prompt):
        raise VeloxError("the prompt is empty, and this model's tokenizer puts nothing before it")
    report("generating")
    for response in stream_generate(
        model, tokenizer, tokens, max_tokens=max_tokens, sampler=make_sampler(temp=temp)
    ):
        yield response.text
