"""vLLM's weight-transfer backend "titan_grpo". vLLM finds it through the entry-point group
``vllm.general_plugins``.

Written for vLLM 0.32 and later; tested with 0.32, on CPUs and on an H200, and with 0.33 on CPUs.
Start the server with ``--weight-transfer-config '{"backend": "titan_grpo"}'`` and
``VLLM_SERVER_DEV_MODE=1``.
"""

import contextlib
from importlib.metadata import entry_points
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from titan_grpo.engines.vllm import BACKEND, LOGPROBS_MODE
from titan_grpo.errors import TitanGrpoError
from titan_grpo.layout.manifest import Manifest
from titan_grpo.layout.peft import has_adapters
from titan_grpo.receive import vllm_http
from titan_grpo.receive.commit import LoadedModel, log_to_stderr, start_side
from titan_grpo.receive.window import Tensors


def register() -> None:
    """Register the backend. Every vLLM process calls this entry point, some more than once."""
    # vLLM's attention on CPUs uses AMX, which a process must request from the kernel. oneDNN does
    # so only for large matrices: without this a first request of few tokens ends in a SIGILL.
    # Private in torch, and an error here would end every server.
    with contextlib.suppress(AttributeError):
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
    # the factory refuses a second registration of a name
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            BACKEND, __name__, TitanWeightTransferEngine.__name__
        )
    vllm_http.choose_folder()
    log_to_stderr()


PROCESSORS = "vllm.logits_processors"
"""Entry points whose logits processors vLLM loads without an option."""

NO_DRAFT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that propose tokens without weights of their own."""


BY_TOKENS = ("LMCacheConnectorV1", "HF3FSKVConnector", "ExampleConnector", "FlexKVConnectorV1")
"""KV connectors that find blocks by their tokens alone. The others of vLLM that keep blocks hash
the salt with them."""

ONLINE = (
    "online",
    "fp8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "mxfp8",
)
"""Quantisations that vLLM's layerwise reload repeats from the loaded weights (see its source,
model_executor/layers/quantization/online). Only fp8 was tested, on an H200: on a CPU it does not
start, and a reload of int8 experts fails because the first load has packed their weights."""


EXACT = "standard", "block"
"""Ways to verify drafts that sample from the distribution of the log-probabilities."""


def problem_of(vllm_config: Any) -> str:
    """Return why commits cannot work in a server with this VllmConfig, or ""."""
    parallel = vllm_config.parallel_config
    # Of a dense model's replicas each one's config says that it is alone, but keeps their ports.
    ports = getattr(parallel, "_data_parallel_master_port_list", ())
    if parallel.data_parallel_size > 1 or ports:
        return "data-parallel replicas behind one URL are not synced: start one server per replica"
    # --api-server-count, as vLLM's workers know it.
    if (frontends := getattr(parallel, "_api_process_count", 1)) > 1:
        return (
            f"of {frontends} HTTP processes only one learns of a commit, and the others would go on"
            " from prefixes of older weights: start the server with --api-server-count 1"
        )
    # Under Ray or an external launcher nnodes is 1 even if the workers are on several hosts.
    spread = parallel.use_ray or parallel.distributed_executor_backend == "external_launcher"
    if parallel.pipeline_parallel_size > 1 or parallel.nnodes > 1 or spread:
        return (
            "pipeline-parallel workers and an engine over several hosts, or under Ray or another"
            " launcher, are not synced: use tensor parallelism on one host"
        )
    model = vllm_config.model_config
    if (kind := model.hf_text_config.model_type) == "gpt_oss":
        return (
            f"vLLM's loader of {kind} gives nothing to its experts in a reload, and"
            " they would keep their old weights: serve it with SGLang, on one GPU"
        )
    if model.skip_tokenizer_init:
        return (
            "without a tokenizer vLLM refuses every completion: start the server without"
            " --skip-tokenizer-init"
        )
    quantization, device = model.quantization, vllm_config.device_config.device_type
    if quantization not in (None, *ONLINE):
        return (
            f"quantisation {quantization} cannot be made anew from whole"
            f" weights: serve the unquantised model, or one of {', '.join(ONLINE)}"
        )
    if quantization is not None and device == "cpu":
        return (
            f"quantisation {quantization} cannot be made anew on a CPU, whose weights are packed"
            " once: serve the unquantised model"
        )
    if device == "cpu" and vllm_config.scheduler_config.enable_chunked_prefill:
        return (
            "on a CPU, a prompt that is computed in pieces for a request with a seed, as all of a"
            " run's have, ends vLLM: start the server with --no-enable-chunked-prefill"
        )
    # Layers that are prefetched would get their old weights back at the next step.
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        return (
            "vLLM's reload is not made for weights in the CPU's memory: start the server without"
            " --cpu-offload-gb and --offload-group-size"
        )
    kv = vllm_config.kv_transfer_config
    if kv is not None and (found := [name for name in BY_TOKENS if kv.has_connector(name)]):
        return (
            f"{found[0]} finds KV by tokens alone, so answers would go on from prefixes of older"
            " weights: use another connector (of LMCache, LMCacheMPConnector)"
        )
    if parallel.enable_eplb:
        return (
            "after a rebalance of experts a reload writes them into the slots of other experts:"
            " start the server without --enable-eplb"
        )
    load = vllm_config.load_config
    # Its default is the daemon's own memory.
    copied = (load.model_loader_extra_config or {}).get("mode") == "copy"
    if load.load_format == "ipc_cache" and not copied:
        return (
            "a load would write into the memory of vLLM's weight cache, which other servers serve"
            " and start from: start the server with another --load-format, or with"
            """ --model-loader-extra-config '{"mode": "copy"}'"""
        )
    return sampling_problem(vllm_config)


def sampling_problem(vllm_config: Any) -> str:
    """Return why its tokens are not samples of the distribution that they are trained by, or ""."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    if model.logprobs_mode != LOGPROBS_MODE:
        return (
            "log-probabilities must be those after the temperature, and with logprobs mode"
            f" {model.logprobs_mode} every weight of the loss would be wrong: start it with"
            f" --logprobs-mode {LOGPROBS_MODE}"
        )
    # Of a folder's generation_config.json this bounds every request, as of this option.
    chosen = model.generation_config not in ("auto", "vllm")
    given = model.get_diff_sampling_param() if chosen else model.override_generation_config
    if most := given.get("max_tokens") or given.get("max_new_tokens"):
        return (
            f"every completion would end at {most} tokens, as a truncated one: start the server"
            " without max_new_tokens in --override-generation-config and --generation-config"
        )
    # vLLM also loads those of installed packages, without an option.
    installed = sorted({f"{e.name} = {e.value}" for e in entry_points(group=PROCESSORS)})
    if model.logits_processors or installed:
        remedy = "start the server without --logits-processors"
        if installed:
            remedy = f"uninstall the package of {installed[0]} from its environment"
        return (
            "logits processors would decide which tokens are sampled, and the trainer knows nothing"
            f" of them: {remedy}"
        )
    if getattr(vllm_config, "watermark_config", None) is not None:
        return (
            "a watermark chooses each token by the ones before it, so all completions of a prompt"
            " would be alike: start the server without --watermark-config"
        )
    if speculative is not None and speculative.method not in NO_DRAFT_WEIGHTS:
        return (
            f"speculative decoding with {speculative.method} would keep its old draft weights:"
            f" start the server without --speculative-config, or with {', '.join(NO_DRAFT_WEIGHTS)}"
        )
    if speculative is not None and vllm_config.device_config.device_type == "cpu":
        return (
            "on a CPU, speculative decoding divides logits by memory that holds no temperature, and"
            " log-probabilities would be of no distribution: start the server without"
            " --speculative-config"
        )
    if speculative is not None and (way := speculative.rejection_sample_method) not in EXACT:
        return (
            f"speculative decoding with rejection_sample_method {way} samples other tokens than its"
            " log-probabilities say, and every weight of the loss would be wrong: use"
            f" {' or '.join(EXACT)}"
        )
    return ""


def model_problem(model: torch.nn.Module) -> str:
    """Return why a reload would leave this model with old weights, or ""."""
    if not hasattr(model, "process_weights_after_loading"):
        return ""
    return (
        f"{type(model).__name__} computes with its weights once, after its first load, and vLLM's"
        " reload does not do it again: serve it with SGLang"
    )


def sends_routes(vllm_config: Any) -> bool:
    """Whether a server with this VllmConfig answers with the experts of each token."""
    return bool(vllm_config.aux_output_config.enable_return_routed_experts)


def compatibility(vllm_config: Any) -> tuple[bool, str]:
    """Apply vLLM's patches. Return (whether each reload needs the CPU repair, why commits cannot
    work here or "")."""
    from titan_grpo.patches import vllm_cpu_experts, vllm_cpu_reload

    if problem := problem_of(vllm_config):
        return False, problem
    try:
        vllm_cpu_experts.apply()
        return vllm_cpu_reload.apply(), ""
    except TitanGrpoError as error:
        return False, str(error)


def unloaded(model: torch.nn.Module) -> list[str]:
    """Return the layers to which a layerwise reload has given nothing. Call it before the reload's
    end, which warns, and puts their old weights back.

    So it is with a loader that copies into parameters that it found by itself (gpt_oss): during a
    reload these have no memory. What shares another layer's weights, as a tied head does, or is
    computed from them, as in attention, is not named.
    """
    idle, filled = dict[str, set[int]](), set[int]()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        kept = (
            info.kernel_tensors[0].values() if info.kernel_tensors else layer._parameters.values()
        )
        found = {p.untyped_storage().data_ptr() for p in kept if p is not None and p.numel()}
        if not info.can_load() or info.load_numel:
            filled |= found
        elif info.load_numel_total and not is_deferred_attention_layer(layer):
            idle[name] = found
    return [name for name, found in idle.items() if found - filled]


class VllmModel(LoadedModel):
    """Engine over vLLM's model."""

    def __init__(self, owner: "TitanWeightTransferEngine", repair: bool) -> None:
        """``repair``: each reload needs the CPU repair."""
        config = owner.model_config
        super().__init__(config, config.model, sends_routes(owner.vllm_config))
        self._owner, self._repair = owner, repair
        self._writes = get_world_group().rank_in_group == 0

    def filled(self) -> torch.nn.Module | None:
        """See Engine. A quantised layer is computed from its weights."""
        return self._owner.model if self.in_place and not self.quantization else None

    def refuses(self, manifest: Manifest) -> str:
        lora = self._owner.vllm_config.lora_config
        # An adapter is loaded beside the weights: if it cannot be written, the old one is whole.
        self.in_place = not has_adapters(manifest)
        if not self.in_place:
            return vllm_http.adapter_problem(manifest, lora, self.names.shapes)
        if lora is not None:
            return (
                "whole weights are not loaded under vLLM's adapters: start the server without"
                ' --enable-lora, or send adapters (lora.sync = "adapter")'
            )
        return self.names.problem(manifest)

    def load(self, tensors: Tensors) -> None:
        """See Engine. Reload layer by layer: load_weights alone corrupts quantised experts. Write
        an adapter to files, which the HTTP process makes vLLM load."""
        if not self.in_place:
            if self._writes:
                vllm_http.write_staged(tensors)
            else:
                all(True for _ in tensors)
            return
        model, config = self._owner.model, self._owner.model_config
        # Before the reload: while it lasts, a tied head has a parameter of its own.
        expected = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        with torch.no_grad():
            initialize_layerwise_reload(model)
            try:
                loaded = model.load_weights(tensors)
                stale = unloaded(model)
            finally:
                # After a failure too: it restores the tensors of the layers not reached.
                finalize_layerwise_reload(model, config)
            if self._repair:
                from titan_grpo.patches import vllm_cpu_reload

                vllm_cpu_reload.repair(model)
        if stale and config.quantization is None:
            raise RuntimeError(
                f"vLLM's loader of this model gives nothing to {len(stale)} layers in a reload, and"
                f" they keep old weights: {', '.join(stale[:4])}"
            )
        # A parameter may have several names, as a router beside its experts, and is loaded by one.
        given = {expected.get(name) for name in loaded or ()}
        left = sorted(name for name, parameter in expected.items() if parameter not in given)
        if config.quantization is None and loaded is not None and left:
            raise RuntimeError(f"{len(left)} parameters got no value: {', '.join(left[:4])}")


class TitanWeightTransferEngine(WeightTransferEngine[dict[str, Any], dict[str, Any]]):
    """vLLM's handle of the EngineSide, one per worker, made after the model is loaded. No method
    raises: an exception ends the engine. Results are reported over the lane's channel."""

    supports_draft_weight_update = False
    # The bodies as they are: validated later, where a refusal can be reported.
    init_info_cls = update_info_cls = dict

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        repair, problem = compatibility(self.vllm_config)
        problem = problem or model_problem(self.model)
        self._side = start_side(VllmModel(self, repair), get_world_group(), problem)

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Handle a Hello or an Attach (protocol.messages) without waiting for its outcome."""
        self._side.hello(init_info)

    def start_weight_update(self) -> None:
        """Do nothing: layers are touched only after all checks of a commit."""

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Handle a Commit (protocol.messages)."""
        self._side.commit(update_info)

    def finish_weight_update(self) -> None:
        """Do nothing: a commit is complete when ``receive_weights`` returns."""

    def shutdown(self) -> None:
        """End the receiver process."""
        self._side.close()
