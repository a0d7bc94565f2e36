"""Which layers share a table of rotary frequencies."""

from collections.abc import Sequence

from velox_pack.calibrators.trace import LayerTrace


def rope_groups(traces: Sequence[LayerTrace]) -> dict[str, list[LayerTrace]]:
    """Layers whose RoPE tables can be stacked, by artifact id."""
    groups: dict[tuple[int, bool], list[LayerTrace]] = {}
    for t in traces:
        if t.rope is not None:
            groups.setdefault((t.rope.dims, t.rope.traditional), []).append(t)
    return {
        f"rope-{dims}{'-traditional' if traditional else ''}": group
        for (dims, traditional), group in groups.items()
    }
