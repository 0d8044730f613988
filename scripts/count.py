"""Count the project's Python: what the wheel ships, what is outside it, longest files, comments.

python scripts/count.py [--rooms]
"""

import argparse
import io
import signal
import statistics
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("titan_grpo/", "patches/")
"""The wheel's files; ``titan_grpo/patches`` is a link to ``patches``."""


def comments(text: str) -> int:
    """Lines that have a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({t.start[0] for t in tokens if t.type == tokenize.COMMENT})


def main() -> None:
    # `| head` ends it without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", action="store_true", help="also lines by directory")
    by_room = parser.parse_args().rooms
    listed = subprocess.run(
        ["git", "ls-files", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()
    texts = {n: (ROOT / n).read_text() for n in listed if not (ROOT / n).is_symlink()}
    lines = {name: text.count("\n") for name, text in texts.items()}
    rooms: Counter[str] = Counter()
    for title, inside in (("shipped by the wheel", True), ("Python outside it", False)):
        names = [n for n in texts if n.startswith(SHIPPED) == inside]
        total = sum(lines[n] for n in names)
        share = sum(comments(texts[n]) for n in names) / total
        middle = statistics.median(lines[n] for n in names)
        print(f"{title}: {total:,} lines in {len(names)} files (median {middle:g}), comments in")
        print(f"  {share:.1%} of the lines; longest:")
        for name in sorted(names, key=lines.__getitem__, reverse=True)[:8]:
            print(f"  {lines[name]:6,} {name}")
        rooms.update({n: lines[n] for n in names})
    if by_room:
        sums: Counter[str] = Counter()
        for name, count in rooms.items():
            sums["/".join(name.split("/")[:2]) if name.count("/") > 1 else name] += count
        for room, count in sums.most_common():
            print(f"{count:7,} {room}")


if __name__ == "__main__":
    main()
