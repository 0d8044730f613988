"""SGLang's side of a weight sync. SGLang finds it through the entry-point group
``sglang.srt.plugins``; SGLang itself is not patched.

Written for SGLang 0.5.23. Start the server with ``--custom-weight-loader LOADER``.

The HTTP process gets four routes:
* ``/titan_grpo/hello`` forwards a Hello over a Unix socket to the scheduler of rank 0, and the
  memory to map to all schedulers. It needs no pause: SGLang's own routes to the scheduler's model
  wait for all running requests.
* ``/titan_grpo/state`` says whether generation is paused; no route of SGLang does.
* ``/titan_grpo/load`` sends the schedulers one message; SGLang's own routes send three (begin,
  update, end), and the paused server waits for each.
* ``/titan_grpo/finish`` sets SGLang's label, once after each load.

Each scheduler process has an EngineSide. A commit reaches it between two batches, as an update from
tensors whose load format is LOADER.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import secrets
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from titan_grpo.engines.sglang import LOADER
from titan_grpo.engines.sglang_stock import options_problem
from titan_grpo.errors import NOT_JSON, PeerError, UpstreamError
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.peft import has_adapters
from titan_grpo.receive.commit import (
    EngineSide,
    LoadedModel,
    log_to_stderr,
    start_side,
)
from titan_grpo.receive.window import Tensors
from titan_grpo.unix_rpc import Server, abstract_address, call

SOCKET_VARIABLE = "TITAN_GRPO_SOCKET"
"""Environment variable with the name of the schedulers' sockets, set by the HTTP process."""

HELLO_S = 120.0
"""Seconds to wait for the answer to a hello: a commit may be in progress, with a stalled
transfer."""

log = logging.getLogger("titan_grpo.receive")


class Plugin:
    """State of this process: of the HTTP process, or of a scheduler with its EngineSide."""

    def __init__(self) -> None:
        self.side: EngineSide | None = None
        self.turn = threading.Lock()
        """Held during a hello and a commit, which come from two threads."""
        self.commits = 0
        self.scheduler: Any = None
        self.loaded = False
        """HTTP process: SGLang has run a load, and no lane has joined or set a label since."""

    def hello(self, message: dict[str, Any]) -> dict[str, Any]:
        """Handle a Hello (answered over the lane's channel) or an Attach in rank 0's scheduler, in
        the others the map message that it returned, on the RPC thread. This thread cannot share it
        by a collective, which belongs to the scheduler's main thread."""
        with self.turn:
            if self.side is None:
                return {"map": None}
            if self.side.receiver is not None:
                message = {"map": self.side.greet(message)}
            self.side.remap(message["map"])
            return message


plugin = Plugin()


def register() -> None:
    """Install the routes or hooks of this process. Every SGLang process calls this entry point
    once."""
    log_to_stderr()
    # A launcher of several servers starts each by multiprocessing: the HTTP process is then the one
    # that inherits no name.
    if multiprocessing.parent_process() is None or SOCKET_VARIABLE not in os.environ:
        os.environ[SOCKET_VARIABLE] = secrets.token_hex(16)
        _add_routes()
        HookRegistry.register(RELEASE, _kept, HookType.AROUND)
    elif "sglang.srt.managers.scheduler" in sys.modules:  # in the detokenizer it is not
        HookRegistry.register(f"{SCHEDULER}.__init__", _scheduler_made, HookType.AFTER)
        HookRegistry.register(f"{SCHEDULER}.handle_generate_request", _asked, HookType.BEFORE)
        HookRegistry.register(RELABEL, _relabelled, HookType.AROUND)
        HookRegistry.register(UPDATE, _updated, HookType.AROUND)


SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RELABEL = f"{SCHEDULER}.record_weight_version_change"
RELEASE = (
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.release_memory_occupation"
)
UPDATE = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".update_weights_from_tensor"
)


def _kept(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> None:
    """Refuse to give memory up, in the HTTP process, whose route answers with a raised error."""
    raise ValueError(
        "a version would be loaded into memory that the engine has given up, which ends it, and a"
        " resume brings no weights back, under their label: pause generation (POST"
        " /pause_generation), or end the server"
    )


def _updated(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Run a commit between two batches, in the scheduler process; other updates are SGLang's.

    SGLang's own update would walk over the model twice, paused, for the check that
    ``model_problem`` makes once.
    """
    if request.load_format != LOADER:
        return original(manager, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    with manager._observe_weight_load("tensor"):
        commit(request.serialized_named_tensors)
        if torch.distributed.get_world_size(manager.tp_cpu_group) > 1:
            # Rank 0 answers for all: wait until all have finished.
            torch.distributed.barrier(group=manager.tp_cpu_group)
    return UpdateWeightsFromTensorReqOutput(success=True, message="")


def commit(payloads: list[bytes]) -> None:
    """Run a commit in this scheduler: the first payload, in JSON. (SGLang's own route sends
    anything.) Never raises: an exception ends the server."""
    try:
        data = json.loads(payloads[0])
    except (IndexError, *NOT_JSON):
        data = {}
    if plugin.side is None:
        log.error("a commit was refused: the plugin did not start with this scheduler")
        return
    # A pause keeps the current batch. While there is one and none runs, for --watchdog-timeout
    # (300 s), SGLang's watchdog ends the server: during a long load, or while it waits for a whole
    # version. The next batch sets it again; nothing else reads it.
    plugin.scheduler.cur_batch_for_debug = None
    with plugin.turn:
        plugin.side.commit(data if isinstance(data, dict) else {})
    before, plugin.commits = unsalted(plugin.commits), plugin.commits + 1
    scheduler = plugin.scheduler
    # The second: requests whose grammar is still compiled.
    for request in (*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue):
        # A retracted request with a still older key keeps it: its KV is recomputed under it.
        if request.extra_key == before:
            request.extra_key = unsalted(plugin.commits)


def unsalted(commits: int) -> str:
    """Return the prefix-cache key of requests without one. It changes with each commit: a pause
    that keeps running requests also keeps the prefixes of older weights.

    It has the server's own name, which all its schedulers know: a storage behind the cache has KV
    of other servers, and of this one before its restart, after as many commits.
    """
    return f"titan_grpo {os.environ[SOCKET_VARIABLE]} {commits}"


def _asked(_scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    """Set a request's cache key before it is queued, in the scheduler process."""
    if request.extra_key is None:
        request.extra_key = unsalted(plugin.commits)


def _relabelled(original: Callable[..., None], scheduler: Any, new_version: str | None) -> None:
    """Note tokens whose result waits as the old version's, in the scheduler process.

    SGLang notes how many tokens each request has when the label changes. Its overlap scheduler
    reads the result of the last batch before a pause after the resume: that token would have the
    new version, which did not sample it. A request that is put back into the queue before its
    result is read samples that token again: the old version is then a lower bound.
    """
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old = get_serving().weight_version
    original(scheduler, new_version=new_version)
    if get_serving().weight_version == old:
        return
    # SGLang 0.5.21 has no queue without its overlap scheduler.
    for batch, _ in getattr(scheduler, "result_queue", ()):
        for request in batch.reqs:
            if request.inflight_middle_chunks <= 0:  # otherwise its prompt goes on: no token
                event = WeightVersionEvent(old, len(request.output_ids) + 1)
                request.weight_version_events.append(event)


def _address(rank: int) -> str:
    """Return the socket address of a tensor-parallel rank's scheduler."""
    return abstract_address(f"{os.environ[SOCKET_VARIABLE]}/{rank}")


def _add_routes() -> None:
    """Add the routes to the HTTP process, under the admin key like SGLang's own weight routes."""
    from fastapi import HTTPException, Request
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers import io_struct
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @http_server.app.post("/titan_grpo/hello")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def hello(request: Request) -> dict[str, Any]:
        manager = http_server.get_global_state().tokenizer_manager
        try:
            answer = await asyncio.to_thread(call, _address(0), await request.json(), HELLO_S)
            if answer["map"] == {}:
                # The next lane must not label the load of one that ended before its label. (A
                # refused hello leaves the lane in force its load.)
                plugin.loaded = False
            if answer["map"] is not None:
                for rank in range(1, int(manager.server_args.tp_size)):
                    await asyncio.to_thread(call, _address(rank), answer, HELLO_S)
            return {}
        except (PeerError, ValueError) as error:
            text = f"the model's process did not answer; is it still loading? {error}"
            raise HTTPException(503, text) from error

    @http_server.app.get("/titan_grpo/state")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def state() -> dict[str, Any]:
        manager = http_server.get_global_state().tokenizer_manager
        return {"paused": bool(manager.is_pause)}

    @http_server.app.post("/titan_grpo/load")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def load(request: Request) -> dict[str, Any]:
        manager = http_server.get_global_state().tokenizer_manager
        plugin.loaded = False
        # Do not flush the prefix cache: SGLang cannot while requests are paused, and reports a
        # failure although the weights are loaded. The cache keys separate the versions instead.
        update = io_struct.UpdateWeightsFromTensorReqInput(
            # An object: SGLang takes a bare number for base64.
            serialized_named_tensors=[json.dumps(dict(await request.json())).encode()],
            load_format=LOADER,
            flush_cache=False,
        )
        plugin.loaded, why = await manager.update_weights_from_tensor(update)
        if not plugin.loaded:
            raise HTTPException(400, why)
        return {}

    @http_server.app.post("/titan_grpo/finish")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def finish(request: Request) -> dict[str, Any]:
        manager = http_server.get_global_state().tokenizer_manager
        label = str((await request.json())["label"])
        if not plugin.loaded:
            raise HTTPException(400, "no version was loaded since a lane joined or set a label")
        plugin.loaded = False
        # SGLang's default would abort all requests.
        version = io_struct.UpdateWeightVersionReqInput(new_version=label, abort_all_requests=False)
        await manager.update_weight_version(version)
        return {}


def _scheduler_made(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Make the EngineSide in a scheduler process, after the model is loaded."""
    plugin.scheduler = scheduler
    model, args = scheduler.tp_worker.model_runner.model, scheduler.server_args
    problem = compatibility(args) or model_problem(model) or experts_problem(args)
    engine = SglangModel(scheduler)
    plugin.side = start_side(engine, scheduler.tp_group, problem or engine.unnamed())
    rank = scheduler.tp_group.rank_in_group
    try:
        Server(_address(rank), plugin.hello).start()
    except OSError as error:
        # Raising would end the server. Each data-parallel replica or pipeline stage has a rank 0:
        # the first one answers hellos, with the refusal.
        log.error("no trainer reaches this scheduler of rank %d (%s): %s", rank, error, problem)


def compatibility(args: Any) -> str:
    """Return why commits cannot work in a server with these ServerArgs, or ""."""
    from sglang.srt.utils import get_bool_env_var

    # SGLang 0.5.21 has no attn_dp_size.
    if args.dp_size > 1 or getattr(args, "attn_dp_size", 1) > 1:
        return (
            "data-parallel replicas, or attention, behind one URL are not synced: start one server"
            " per replica, without --attn-dp-size"
        )
    if args.pp_size > 1 or args.nnodes > 1:
        return (
            "pipeline-parallel stages and an engine over several hosts are not synced: use tensor"
            " parallelism on one host"
        )
    if args.offload_group_size > 0:
        return (
            "layers that are prefetched from the CPU's memory would be computed with old weights"
            " after a load: start the server without --offload-group-size"
        )
    if get_bool_env_var("SGLANG_RETURN_ORIGINAL_LOGPROB"):
        return (
            "log-probabilities must be those after the temperature, and others would make every"
            " weight of the loss wrong: start the server without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
    if problem := options_problem(args):
        return problem
    if LOADER not in (args.custom_weight_loader or []):
        return f"start the server with --custom-weight-loader {LOADER}"
    return ""


def sends_routes(args: Any) -> bool:
    """Whether a server with these ServerArgs answers with the experts of each token."""
    return bool(args.enable_return_routed_experts)


def experts_problem(args: Any) -> str:
    """Return why experts distributed over workers cannot be served with these ServerArgs, or ""."""
    if args.ep_size == 1:
        return ""
    from titan_grpo.patches import sglang_cpu_experts

    try:
        sglang_cpu_experts.apply(args.device)
    except UpstreamError as error:
        return str(error)
    return ""


LOADED_OVER = tuple(f"sglang.srt.layers.quantization.{name}" for name in ("unquant", "kv_cache"))
"""Modules of SGLang whose methods can load over weights that they have repacked."""


def model_problem(model: torch.nn.Module) -> str:
    """Return why this model cannot be reloaded, or "": a value is cached that is derived from its
    weights, a wrapper for adapters hides weights from the loader, or a layer repacks its weights
    after a load and cannot restore them before the next.

    SGLang makes the first check at every update; its result does not change after the start.
    A wrapper has the weight and bias of what it wraps under their own names, but not the weights of
    experts: SGLang's loader would pass over them in silence.
    For the last, SGLang calls restore_weights_before_loading when an update begins. Only the
    class that repacks, or a subclass, can restore: its bases lack the method or do nothing in it.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    if derived := weight_updater._unsupported_derived_weight_cache_error(model):
        return str(derived)
    if hidden := next((name for name, _ in model.named_parameters() if ".base_layer." in name), ""):
        return (
            f"{hidden} would keep its old value: start the server without --enable-lora and"
            " --lora-paths, or with --lora-target-modules that leave experts and quantised layers"
            " out"
        )
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or type(method).__module__ in LOADED_OVER:
            continue
        # A method with a scheme delegates both calls to it.
        classes = type(getattr(module, "scheme", None) or method).__mro__
        repacks, restores = (
            next((kind for kind in classes if call in vars(kind)), None)
            for call in ("process_weights_after_loading", "restore_weights_before_loading")
        )
        if repacks is not None and (restores is None or not issubclass(restores, repacks)):
            return (
                f"{name} ({classes[0].__name__}) is quantised by a method that cannot restore its"
                " weights before a reload: serve the unquantised model"
            )
    return ""


class SglangModel(LoadedModel):
    """Engine over SGLang's model."""

    def __init__(self, scheduler: Any) -> None:
        config = scheduler.model_config
        super().__init__(config, config.model_path, sends_routes(scheduler.server_args))
        self._runner = scheduler.tp_worker.model_runner

    def filled(self) -> torch.nn.Module | None:
        """See Engine. A quantised layer is computed from its weights."""
        model: torch.nn.Module = self._runner.model
        return None if self.quantization else model

    def refuses(self, manifest: Manifest) -> str:
        """See Engine. SGLang ignores unknown names and reports success: refuse everything if there
        is no checkpoint to compare them with."""
        if has_adapters(manifest):
            return (
                "SGLang takes no adapters as versions: send merged weights (lora.sync ="
                ' "merged"), or serve with vLLM'
            )
        return self.unnamed() or self.names.problem(manifest)

    def unnamed(self) -> str:
        """Return why names cannot be compared, or ""."""
        if not self.names.absent:
            return ""
        return (
            f"SGLang ignores names it does not know, and {self.names.model} holds no checkpoint of"
            " safetensors files to check them against (an engine's own shards are none): start the"
            " server from a directory with the model's weights"
        )

    def load(self, tensors: Tensors) -> None:
        """See Engine. SGLang restores repacked weights as an update begins, and repacks them as it
        ends: some layers not twice without a load in between, so only an accepted commit may."""
        updater = self._runner.weight_updater
        with torch.no_grad():
            updater.begin_weight_update()
            self._runner.model.load_weights(tensors)
            # The model's own load_weights has done its post-load work.
            updater.end_weight_update(run_post_load=False)
