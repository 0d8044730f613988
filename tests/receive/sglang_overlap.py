"""What SGLang's overlap scheduler says which weights sampled each token, over a label that changes
while the result of the last batch waits. ``python -m tests.receive.sglang_overlap MODEL``, in
SGLang's environment, prints the spans (version, start, end) of each request."""

import json
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import SpawnRanks, get_serving, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.weight_versions import compute_weight_version_spans

from titan_grpo.receive import sglang_plugin

LATER = 3
"""Tokens after the label has changed."""


def request(tokens: int, middle_chunks: int = 0) -> Any:
    """A request that has these tokens, and so many results to come of an unfinished prompt."""
    made: Any = Req("", "", [1, 2], SamplingParams())
    made.output_ids.extend([7] * tokens)
    made.inflight_middle_chunks = middle_chunks
    return made


def spans(made: Any, pending: int) -> list[tuple[str, int, int]]:
    """Of the request's tokens, after those of its pending result and LATER others."""
    made.output_ids.extend([7] * (pending + LATER))
    found = compute_weight_version_spans(
        made.weight_version_events, get_serving().weight_version, len(made.output_ids)
    )
    return [(span.version, span.start, span.end) for span in found]


args: Any = ServerArgs(sys.argv[1], device="cpu", weight_version="v1")
publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
HookRegistry.register(sglang_plugin.RELABEL, sglang_plugin._relabelled, HookType.AROUND)
HookRegistry.apply_hooks()
scheduler: Any = Scheduler.__new__(Scheduler)  # its constructor loads a model
decoding, prefilled, chunked, waiting = request(5), request(0), request(0, 1), request(4)
batch = SimpleNamespace(reqs=[decoding, prefilled, chunked])
scheduler.running_batch, scheduler.last_batch = SimpleNamespace(reqs=[decoding]), batch
scheduler.waiting_queue, scheduler.chunked_req = [waiting], chunked
scheduler.result_queue = deque([(SimpleNamespace(reqs=list(batch.reqs)), None)])
scheduler.hisparse_coordinator, scheduler.enable_continuous_input_polling = None, False
for label in ("v1", "v2", "v2"):
    scheduler.record_weight_version_change(new_version=label)
found = {
    "decoding": spans(decoding, 1),
    "prefilled": spans(prefilled, 1),
    "chunked": spans(chunked, 0),
    "waiting": spans(waiting, 0),
}
print(json.dumps(found))
