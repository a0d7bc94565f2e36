"""Codes of vectors in the benchmark of calibrations: VecInfer, CommVQ, RaBitQ."""

from collections.abc import Callable
from functools import partial
from typing import Any

import calibrators_codecs as codecs
from calibrators_bench import PARTS, Bench, measured

from velox_pack.calibrators import commvq, rabitq, vecinfer
from velox_pack.calibrators.vecinfer import PAPER, Options


def add(b: Bench) -> None:
    """All methods of this part: 2 bits each, keys also at 1."""
    _vecinfer(b, "vecinfer, as in the paper", "keys", 4, PAPER)
    _vecinfer(b, "vecinfer", "keys", 4, Options())
    _vecinfer(b, "vecinfer", "keys", 8, Options())
    _vecinfer(b, "vecinfer", "values", 4, Options())
    for bits in (1.0, 2.0):
        made, cost = measured(partial(commvq.fit, b.statistics, b.traces, bits=bits))
        _add(b, "commvq", "keys", commvq.bits_per_element(made[0]), made, cost, commvq)
    for part in PARTS:
        made, cost = measured(partial(rabitq.fit, b.statistics, part))
        for count in (1, 2) if part == "keys" else (2,):
            used = rabitq.bits_per_element(made[0], count)
            encode = partial(rabitq.encode, bits=count, unbiased=part == "keys")
            _add(b, "rabitq", part, used, made, cost, rabitq, encode)


def _vecinfer(b: Bench, name: str, part: str, sub: int, options: Options) -> None:
    """Codebooks of 256 centroids for sub vectors of `sub`."""
    fit = partial(vecinfer.fit, b.statistics, b.traces, part, sub=sub, bits=8, options=options)
    made, cost = measured(fit)
    bits = vecinfer.bits_per_element(made[0])
    _add(b, name, part, bits, made, cost, vecinfer, after_rope=not options.before_rope)


def _add(
    b: Bench,
    name: str,
    part: str,
    bits: float,
    made: Any,
    cost: Any,
    module: Any,
    encode: Callable[..., Any] | None = None,
    after_rope: bool = False,
) -> None:
    make = codecs.through(made, encode or module.encode, module.decode)
    pair = (make, None) if part == "keys" else (None, make)
    b.add(name, part, bits, *pair, made, cost, after_rope=after_rope)
