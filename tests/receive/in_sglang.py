"""Scripts of this folder in SGLang's environment, each in a fork of one process: the import of
SGLang takes longer than all of them.

``python -m tests.receive.in_sglang NAME[=ARGUMENT] ...`` prints one JSON object: of each script
that ended well the last line that it printed."""

import json
import os
import runpy
import sys
import tempfile

from sglang.srt.entrypoints import http_server
from sglang.srt.managers import scheduler

assert http_server
assert scheduler

found = {}
for script in sys.argv[1:]:
    name, _, argument = script.partition("=")
    with tempfile.TemporaryFile("w+") as said:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            os.dup2(said.fileno(), sys.stdout.fileno())
            sys.argv[:] = [name, argument]
            runpy.run_module(f"tests.receive.{name}", run_name="__main__")
            raise SystemExit
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        lines = said.read().splitlines()
    if status == 0 and lines:
        found[name] = json.loads(lines[-1])
print(json.dumps(found))
