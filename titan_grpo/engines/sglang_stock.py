"""SGLang's own weight update over a process group (0.5.21 to 0.5.23), for servers without our
plugin."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from titan_grpo.engines.generation import Sampling
from titan_grpo.engines.http import Call, ServerAccess, ignore, want
from titan_grpo.errors import ServerRefused, ServerUnfit


@dataclass(frozen=True, slots=True)
class Group:
    """Process group of one transfer. Rank 0 is the trainer, ranks 1 to ``size - 1`` are the
    server's workers."""

    name: str
    host: str
    port: int
    size: int
    backend: str


@dataclass(frozen=True, slots=True)
class Announced:
    """Contents of one broadcast, in order: tensors by name, dtype (torch's name without "torch."),
    and shape."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]


MOST = {"pp_size": 1, "dp_size": 1, "nnodes": 1, "tokenizer_worker_num": 1, "offload_group_size": 0}
"""Option of a server -> its largest value that we take.

The first three: SGLang gives a worker the rank of a group that its tensor parallel rank says, so
the group would never be complete, and each attempt would stop generation for its deadline. Of
several tokenizer workers only the one that gets the call has the new label. Layers that are
prefetched are computed with old weights."""

STORES = "enable_hierarchical_cache", "enable_lmcache", "enable_unified_cache_external_linker"
"""Options of a server with which KV leaves the device's memory and comes back elsewhere in it."""

TEXT = "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"
"""What of a request decides about the text alone."""


def options_problem(args: Any) -> str:
    """Return why a server with these ServerArgs can get no versions, or its answers cannot be
    trained on; empty if it can. An option that is not there is one of a newer SGLang."""
    from titan_grpo.engines.sglang import generate  # not at the top: it imports this module

    def has(name: str) -> Any:
        return getattr(args, name, None)

    if (
        has("enable_eplb")
        or has("ep_num_redundant_experts")
        or has("init_expert_location") not in (None, "trivial")
    ):
        return (
            "a reload writes experts into the slots that they have without load balancing: start"
            " the server without --enable-eplb, --ep-num-redundant-experts and"
            " --init-expert-location"
        )
    # SGLang freezes these graphs, on CPUs alone (its model_executor/cpu_graph_runner.py).
    if has("device") == "cpu" and has("enable_torch_compile"):
        return (
            "a graph compiled for CPUs has copies of weights as constants, and would compute with"
            " these after a load: start the server without --enable-torch-compile"
        )
    # Some models turn it on by themselves.
    if has("dcp_replicate_q_proj"):
        return (
            "decoding would go on with the query projections of the start, of which SGLang keeps"
            " copies: start the server with --no-dcp-replicate-q-proj"
        )
    if has("enable_flexkv"):
        return (
            "FlexKV finds KV by tokens alone, so answers would go on from older prefixes:"
            " start the server without --enable-flexkv"
        )
    # SGLang keeps a token's experts by the place of its KV on the device.
    if has("enable_return_routed_experts") and any(map(has, STORES)):
        return (
            "KV that comes back from behind the device's memory has the experts of other tokens,"
            " and these would be replayed: start the server without --enable-hierarchical-cache,"
            " --enable-lmcache and --enable-unified-cache-external-linker, or without"
            " --enable-return-routed-experts"
        )
    if has("weight_cache_mode") not in (None, "off"):
        return (
            "other engines serve the same memory of weights: start the server without a weight"
            " cache (--weight-cache-mode off)"
        )
    if has("speculative_algorithm"):
        return "a speculative draft model would keep its old weights: start the server without one"
    if has("allow_auto_truncate"):
        return (
            "a prompt over the server's context would be cut without a word, and its completion"
            " trained on as one of the whole prompt: start the server without --allow-auto-truncate"
        )
    if has("enable_watermark"):
        return (
            "a watermark chooses each token by the ones before it, so all completions of a prompt"
            " would be alike: start the server without --enable-watermark"
        )
    preferred = has("preferred_sampling_params") or {}
    if isinstance(preferred, str):  # SGLang has not checked it yet
        preferred = json.loads(preferred)
    # A request names all that decides about its tokens.
    named = generate((), Sampling(1), 1.0).json["sampling_params"]
    if others := sorted({*preferred} - {*named, *TEXT}):
        return (
            f"the server's preference of {', '.join(others)} would decide which tokens are sampled,"
            " or end completions: start it without, in --preferred-sampling-params"
        )
    return ""


def world_size(timeout_s: float) -> Call[int]:
    """Return the number of the server's workers, all of them tensor parallel. Raises ServerUnfit
    for a server that a version would not reach whole (``MOST``), and as ``options_problem``."""
    path = "/server_info"

    def parse(answer: Any) -> int:
        size: int = want(answer, "tp_size", int, path, secret=True)
        for key, most in MOST.items():
            if (found := want(answer, key, int, path, secret=True)) > most:
                raise ServerUnfit(
                    f"a server without our plugin's routes must have {key} {most} at most, this one"
                    f" has {found}: not all of it would get a version and its label; start it"
                    " without that option, one server per replica"
                )
        if problem := options_problem(SimpleNamespace(**answer)):
            raise ServerUnfit(problem)
        if answer.get("json_model_override_args") not in (None, "", "{}"):
            raise ServerUnfit(
                "a server without our plugin does not say which model --json-model-override-args"
                " makes of the trainer's: start it without that option, or with the plugin"
            )
        return size

    return Call("GET", path, timeout_s, parse)


def update(group: str, announced: Announced, timeout_s: float) -> Call[None]:
    """Receive one broadcast of exactly the announced bytes, and load it. Needs a pause and an open
    update.

    Do not set the version or flush the cache here: SGLang cannot flush while requests are paused,
    and would answer 400 although the weights are loaded.
    """
    body: dict[str, Any] = {"names": list(announced.names), "dtypes": list(announced.dtypes)}
    body |= {"shapes": [list(shape) for shape in announced.shapes], "group_name": group}
    body |= {"load_format": "flattened_bucket", "flush_cache": False, "abort_all_requests": False}
    path = "/update_weights_from_distributed"
    return Call("POST", path, timeout_s, ignore, json=body, admin=True)


class StockRoutes:
    """Update routes of a server without our plugin, with connections of their own, for one thread
    beside the lane's control. Every method raises PeerError by ``timeout_s``, the deadline of each
    request, in seconds."""

    def __init__(self, access: ServerAccess) -> None:
        self._driver = access.driver()

    def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        return self._driver.run(
            Call("POST", path, timeout_s, lambda answer: answer, json=body, admin=True)
        )

    def workers(self, timeout_s: float) -> int:
        return self._driver.run(world_size(timeout_s))

    def parameter_names(self, timeout_s: float) -> frozenset[str]:
        """Return the names of the model's parameters, from the checksums: no other route of SGLang
        lists them."""
        path = "/weights_checker"
        answer = self._post(path, {"action": "checksum"}, timeout_s)
        ranks = want(answer, "ranks", list, path)
        if not ranks:
            raise ServerRefused(f"{path} must list at least one rank")
        return frozenset(str(name) for name in want(ranks[0], "checksums", dict, path))

    def init_group(self, group: Group, timeout_s: float) -> None:
        """Make the workers join; answered when all ranks have. The scheduler is blocked until
        then."""
        body = {"master_address": group.host, "master_port": group.port, "rank_offset": 1}
        body |= {"world_size": group.size, "group_name": group.name, "backend": group.backend}
        self._post("/init_weights_update_group", body, timeout_s)

    def destroy_group(self, name: str, timeout_s: float) -> None:
        """Leave the group; refused by a server without it, as after a restart."""
        self._post("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    def begin(self, timeout_s: float) -> None:
        """Open an update, after ending one that was left open."""
        try:
            self._post("/begin_weight_update", {}, timeout_s)
        except ServerRefused:
            self._post("/end_weight_update", {}, timeout_s)
            self._post("/begin_weight_update", {}, timeout_s)

    def update(self, group: str, announced: Announced, timeout_s: float) -> None:
        self._driver.run(update(group, announced, timeout_s))

    def close(self) -> None:
        self._driver.close()
