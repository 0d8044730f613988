"""A dataset by its name on the Hugging Face Hub: the real client, against a server on this host
that answers as the Hub does."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.rigs.interpreter import python

COMMIT = "a" * 40
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 30)]
DATA = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ABOUT = {"id": "me/sums", "sha": COMMIT, "siblings": [{"rfilename": "data/train.jsonl"}]}
ENTRY = {"type": "file", "path": "data/train.jsonl", "oid": "b" * 40, "size": len(DATA)}
ANSWERS = {
    "/api/datasets/me/sums": json.dumps(ABOUT).encode(),
    f"/api/datasets/me/sums/revision/{COMMIT}": json.dumps(ABOUT).encode(),
    f"/api/datasets/me/sums/tree/{COMMIT}/data": json.dumps([ENTRY]).encode(),
    "/datasets/me/sums/resolve/main/README.md": (
        b"---\nconfigs:\n- config_name: default\n  data_files: data/train.jsonl\n---\n"
    ),
    f"/datasets/me/sums/resolve/{COMMIT}/data/train.jsonl": DATA,
}

SCRIPT = """
import json, sys
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.config.task import TaskKeys
from titan_grpo.rollout.tasks.dataset import open_table
print(json.dumps(list(open_table(TaskKeys(dataset="me/sums")))))
for name in ("me/nothing", sys.argv[1]):
    try:
        open_table(TaskKeys(dataset=name))
    except (ConfigError, DataError) as error:
        print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """What the Hub says about one dataset."""

    def do_GET(self) -> None:
        body = ANSWERS.get(self.path.partition("?")[0])
        self.send_response(404 if body is None else 200)
        if body is None:
            self.send_header("X-Error-Code", "EntryNotFound" if "/sums" in self.path else "Repo")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{len(body or b"")}"')
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Keep a test's output to itself."""


@contextmanager
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        # Looks so often whether it is to end: each test would end half a second later.
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_dataset_of_the_hub_is_loaded_by_its_name_and_one_that_is_not_there_is_one_line(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_text("no parquet")
    with hub() as endpoint:
        done = python("-c", SCRIPT, str(broken), HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows, error, unreadable = done.stdout.splitlines()
    assert json.loads(rows) == ROWS
    assert error.startswith("rollout.dataset 'me/nothing' is no file or folder here, and ")
    assert "cannot be loaded from the Hub: " in error
    assert unreadable.startswith(f"rollout.dataset '{broken}' cannot be read: ArrowInvalid: ")
    # The libraries' own lines say the same before ours does.
    assert done.stderr == ""
