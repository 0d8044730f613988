"""SGLang's side of a weight sync. Found by SGLang through the entry-point group
``sglang.srt.plugins``; no patch of SGLang.

Written for SGLang 0.5.23. The server is started with ``--custom-weight-loader LOADER``.

The HTTP process gets four routes. ``/titan_grpo/hello`` forwards a Hello over a Unix socket to the
scheduler of rank 0, and what is to be mapped to all, without a pause: SGLang's own routes to the
scheduler's model wait for all running requests. ``/titan_grpo/state`` shows what no route of SGLang
does: whether generation is paused. ``/titan_grpo/load`` is one message to the schedulers, where
SGLang's own routes need three (begin, update, end): a paused server waits for each.
``/titan_grpo/finish`` is SGLang's label, which only a loaded version may have. Each scheduler
process holds an EngineSide; a commit reaches it between two batches, as an update from tensors
whose load format is LOADER.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from titan_grpo.engines.sglang import LOADER, commit_payload
from titan_grpo.errors import PeerError, UpstreamError
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.peft import has_adapters
from titan_grpo.receive.checkpoint import CheckpointNames
from titan_grpo.receive.commit import (
    Counted,
    Engine,
    EngineSide,
    Workers,
    log_ready,
    log_to_stderr,
    package_version,
    quantization_of,
)
from titan_grpo.runkey import Key, environment_key
from titan_grpo.unix_rpc import Server, abstract_address, call

SOCKET_VARIABLE = "TITAN_GRPO_SOCKET"
"""Set by the HTTP process for the processes that it starts: the name of their socket."""

HELLO_S = 120.0
"""Longest wait of a hello, in seconds: a commit may be under way, with a transfer that stalls."""

SideFactory = Callable[[Engine, Workers, str, Key | None], EngineSide]

log = logging.getLogger("titan_grpo.receive")


class Plugin:
    """State of this process: the side of its scheduler, if it is one. ``make_side`` may be replaced
    before the start."""

    def __init__(self) -> None:
        self.make_side: SideFactory = EngineSide
        self.side: EngineSide | None = None
        self.turn = threading.Lock()
        """Held during a hello and during a commit, which come from two threads."""
        self.commits = 0
        self.scheduler: Any = None
        self.loaded = False
        """HTTP process: a version was loaded, and no lane greeted or set a label since."""

    def hello(self, message: dict[str, Any]) -> dict[str, Any]:
        """RPC thread: a lane's greeting, whose answer goes over the lane's channel; or the call to
        map its memory. What this one answers is for the other schedulers to map, if anything: this
        thread may not take part in their exchanges."""
        with self.turn:
            if self.side is None:
                return {}
            if "attach" in message:
                message = {"map": self.side.place(message["attach"])}
            elif "map" not in message:
                self.side.hello(message)
                # The others map nothing more: the hello may end the receiver, whose memory must not
                # be held beside that of the next one.
                return {"map": {}}
            self.side.map_ahead(message["map"])
            return message


plugin = Plugin()


def register() -> None:
    """Entry point; every SGLang process calls it once."""
    log_to_stderr()
    if multiprocessing.parent_process() is None:
        os.environ[SOCKET_VARIABLE] = secrets.token_hex(16)
        _add_routes()
    elif "sglang.srt.managers.scheduler" in sys.modules:  # in the detokenizer it is not
        scheduler = "sglang.srt.managers.scheduler.Scheduler"
        HookRegistry.register(f"{scheduler}.__init__", _scheduler_made, HookType.AFTER)
        HookRegistry.register(f"{scheduler}.handle_generate_request", _asked, HookType.BEFORE)
        HookRegistry.register(UPDATE, _updated, HookType.AROUND)


UPDATE = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".update_weights_from_tensor"
)


def _updated(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Scheduler process, between two batches: SGLang's update from tensors, or all of ours.

    SGLang's own would walk over the model twice, paused, for what ``model_problem`` asks once.
    """
    if request.load_format != LOADER:
        return original(manager, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    worker = manager.tp_worker
    updater = worker.model_runner.weight_updater
    with manager._observe_weight_load("tensor"):
        tensors = worker.deserialize_own_rank(request.serialized_named_tensors)
        updater.begin_weight_update()
        commit(worker.model_runner.model, tensors)
        # The model's own loader has done what may follow a load.
        updater.end_weight_update(run_post_load=False)
        # Rank 0 answers for all.
        torch.distributed.barrier(group=manager.tp_cpu_group)
    return UpdateWeightsFromTensorReqOutput(success=True, message="")


def commit(_model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """One commit in this scheduler, with the signature of SGLang's custom weight loaders, by which
    it is named: the first name is a Commit in JSON. Never raises: an exception ends the server."""
    try:
        data = json.loads(named_tensors[0][0])
    except (IndexError, TypeError, ValueError):
        data = {}
    if plugin.side is None:
        log.error("a commit was refused: the plugin did not start with this scheduler")
        return
    with plugin.turn:
        plugin.side.commit(data if isinstance(data, dict) else {})
    before, plugin.commits = unsalted(plugin.commits), plugin.commits + 1
    for request in plugin.scheduler.waiting_queue:
        # The key of one that a retraction put back stays: its KV is computed anew under it.
        if request.extra_key == before:
            request.extra_key = unsalted(plugin.commits)


def unsalted(commits: int) -> str:
    """The part of the prefix cache of requests that name none: another one after each commit, since
    a pause that keeps running requests keeps the prefixes of older weights too."""
    return f"titan_grpo {commits}"


def _asked(_scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    """Scheduler process, before a request goes into the queue."""
    if request.extra_key is None:
        request.extra_key = unsalted(plugin.commits)


def _address(rank: int) -> str:
    """Where the scheduler of a tensor-parallel rank listens."""
    return abstract_address(f"{os.environ[SOCKET_VARIABLE]}/{rank}")


def _add_routes() -> None:
    """HTTP process: the routes, guarded by the admin key as SGLang's own weight routes are."""
    from fastapi import HTTPException, Request
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers import io_struct
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @http_server.app.post("/titan_grpo/hello")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def hello(request: Request) -> dict[str, Any]:
        manager = http_server.get_global_state().tokenizer_manager
        # The load of a lane that did not come to its label allows none to another one.
        plugin.loaded = False
        try:
            answer = await asyncio.to_thread(call, _address(0), await request.json(), HELLO_S)
            if "map" in answer:
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
        return {"package": package_version(), "paused": bool(manager.is_pause)}

    @http_server.app.post("/titan_grpo/load")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def load(request: Request) -> dict[str, Any]:
        manager = http_server.get_global_state().tokenizer_manager
        plugin.loaded = False
        # The prefix cache is not flushed: SGLang cannot while requests are paused, and calls that a
        # failure although the weights are in. Requests are kept apart by their keys.
        update = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[commit_payload(await request.json())]
            * int(manager.server_args.tp_size),
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
            raise HTTPException(400, "no version was loaded since the last hello or label")
        plugin.loaded = False
        # The scheduler takes it first. By SGLang's default this would abort all requests.
        version = io_struct.UpdateWeightVersionReqInput(new_version=label, abort_all_requests=False)
        await manager.update_weight_version(version)
        return {}


def _scheduler_made(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Scheduler process, after the model is loaded."""
    plugin.scheduler = scheduler
    workers = Workers(scheduler.tp_group)
    run_key, key_problem = environment_key(os.environ)
    model = scheduler.tp_worker.model_runner.model
    args = scheduler.server_args
    problem = compatibility(args) or model_problem(model) or experts_problem(args) or key_problem
    plugin.side = plugin.make_side(SglangModel(scheduler), workers, problem, run_key)
    Server(_address(workers.rank), plugin.hello).start()
    log_ready(workers, problem, run_key)


def compatibility(args: Any) -> str:
    """Why commits cannot work in a server with these ServerArgs; empty if they can."""
    if args.dp_size > 1:
        return "data-parallel replicas behind one URL are not synced: start one server per replica"
    if args.pp_size > 1 or args.nnodes > 1:
        return (
            "pipeline-parallel stages and an engine over several hosts are not synced: use tensor"
            " parallelism on one host"
        )
    if args.enable_eplb or args.ep_num_redundant_experts or args.init_expert_location != "trivial":
        return (
            "a reload writes experts into the slots that they have without load balancing: start"
            " the server without --enable-eplb, --ep-num-redundant-experts and"
            " --init-expert-location"
        )
    if args.weight_cache_mode != "off":
        return (
            "other engines serve the same memory of weights: start the server without a weight"
            " cache (--weight-cache-mode off)"
        )
    if args.speculative_algorithm:
        return "a speculative draft model would keep its old weights: start the server without one"
    if LOADER not in (args.custom_weight_loader or []):
        return f"start the server with --custom-weight-loader {LOADER}"
    return ""


def sends_routes(args: Any) -> bool:
    """Whether a server with these ServerArgs answers with the experts of each token."""
    return bool(args.enable_return_routed_experts)


def experts_problem(args: Any) -> str:
    """Why experts that are spread over workers cannot be served with these ServerArgs; empty if
    they can."""
    if args.ep_size == 1:
        return ""
    from titan_grpo.patches import sglang_cpu_experts

    try:
        sglang_cpu_experts.apply(args.device)
    except UpstreamError as error:
        return str(error)
    return ""


NEVER_REPACKED = tuple(f"sglang.srt.layers.quantization.{name}" for name in ("unquant", "kv_cache"))
"""Modules of SGLang whose methods keep weights as they are loaded."""


def model_problem(model: torch.nn.Module) -> str:
    """Why this model cannot be reloaded: something is derived from its weights, or a layer's
    weights are repacked after a load and not put back before the next one. Empty if it can.

    SGLang asks the first at every update; its answer is that of the start.

    SGLang calls restore_weights_before_loading when an update begins. Only a class that repacks
    (or a subclass) knows how to put back: its bases do nothing there, or have no such call.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    if derived := weight_updater._unsupported_derived_weight_cache_error(model):
        return str(derived)
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or type(method).__module__ in NEVER_REPACKED:
            continue
        # methods with a scheme leave both calls to it
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


class SglangModel:
    """commit.Engine over SGLang's model."""

    def __init__(self, scheduler: Any) -> None:
        self._runner = scheduler.tp_worker.model_runner
        self.routes = sends_routes(scheduler.server_args)
        config = scheduler.model_config
        self.quantization = quantization_of(config)
        self.config: Mapping[str, Any] = config.hf_text_config.to_dict()
        tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
        self._names = CheckpointNames(config.model_path, config.revision, tied)

    def refuses(self, manifest: Manifest) -> str:
        """See Engine. SGLang ignores unknown names and answers with success, so a server without a
        checkpoint to compare them with takes nothing."""
        if has_adapters(manifest):
            return (
                "SGLang takes no adapters as versions: send merged weights (lora.sync ="
                ' "merged"), or serve with vLLM'
            )
        if not self._names.shapes:
            return (
                f"SGLang ignores names it does not know, and {self._names.model} holds no"
                " safetensors files to check them against: start the server from a directory with"
                " the model's weights"
            )
        return self._names.problem(manifest)

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
        counted = Counted(tensors)
        with torch.no_grad():
            self._runner.model.load_weights(counted)
        return counted.count
