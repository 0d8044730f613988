"""A dataset of sums."""

import json
from pathlib import Path
from typing import Any

SUMS = [{"prompt": f"{i}+1=", "answer": i + 1, "level": i % 3} for i in range(6)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
