"""What every benchmark writes down: where it ran, on what, and its rows."""

import json
from pathlib import Path
from typing import Any

from velox_pack.environment import describe

HERE = Path(__file__).parent


def save(name: str, rows: Any, **facts: Any) -> Path:
    """Write `benchmarks/<name>.json`: environment, facts about the run, rows."""
    path = HERE / f"{name}.json"
    content = {"environment": describe(), **facts, "rows": rows}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
