"""The engine's side of a weight sync, common to all engines: answer a hello, commit a version."""

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from titan_grpo.engines.generation import NO_ROUTES
from titan_grpo.errors import ConfigError, PeerError, TitanGrpoError, UpstreamError
from titan_grpo.layout.cuda_runtime import CudaRuntime
from titan_grpo.layout.image import ImageAddress, SharedImage
from titan_grpo.layout.manifest import Manifest
from titan_grpo.protocol.messages import Applied, Attach, Commit, Hello, reply_address
from titan_grpo.receive.checkpoint import CheckpointNames, difference, essential
from titan_grpo.receive.process import ReceiverHandle
from titan_grpo.receive.replay import Copies, Loading
from titan_grpo.receive.window import Tensors, WindowReader
from titan_grpo.runkey import Key, find_run_key
from titan_grpo.subprocesses import when_ended
from titan_grpo.sync.transports.broadcast import beside

log = logging.getLogger("titan_grpo.receive")


class Workers:
    """The processes that hold one model. All make the same calls in the same order."""

    def __init__(self, coordinator: Any = None) -> None:
        """``coordinator``: the engine's group coordinator (vLLM and SGLang name its attributes
        alike); None: the model is in one process."""
        self.rank: int = 0 if coordinator is None else coordinator.rank_in_group
        self.size: int = 1 if coordinator is None else coordinator.world_size
        self._group = None if coordinator is None else coordinator.cpu_group

    def share(self, value: Any) -> Any:
        """Return rank 0's value, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, group_src=0, group=self._group)
        return box[0]

    def gather(self, value: str) -> list[str]:
        """Return all ranks' values, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self._group)
        return values


class WorkerDevice:
    """The device that an engine's worker computes on: the calling thread's CUDA device, if this
    process uses CUDA; else the CPU.

    Create it on the worker's main thread: on other threads the current device is GPU 0.
    """

    def __init__(self) -> None:
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.name = f"cuda:{torch.cuda.current_device()}" if used else "cpu"
        """ "cpu", or "cuda:N" as this process and its children number devices."""

    def synchronize(self) -> None:
        """Wait for all work enqueued on the device, on all streams."""
        if self.name != "cpu":
            torch.cuda.synchronize(self.name)

    def pin(self, image: torch.Tensor) -> Callable[[], None] | None:
        """Pin host memory (uint8[nbytes]), so that copies to the device are asynchronous and
        several times as fast. Return the function that unpins it; None on a CPU or if refused."""
        if self.name == "cpu":
            return None
        pointer, nbytes = image.data_ptr(), image.numel()
        try:
            runtime = CudaRuntime()
            with torch.cuda.device(self.name):
                refusal = runtime.register(pointer, nbytes)
        except UpstreamError as error:
            refusal = str(error)
        if refusal is not None:
            log.warning(
                "%d bytes of staged weights could not be pinned (%s): each load reads pageable"
                " memory, and the pause is several times as long; dmesg may say why the driver"
                " refuses (ulimit -l does not limit it)",
                nbytes,
                refusal,
            )
            return None

        def unpin() -> None:
            # The calling thread's current device may be GPU 0: do not create a context there.
            with torch.cuda.device(self.name):
                runtime.unregister(pointer)

        return unpin


class Engine:
    """What differs between engines: names and loading."""

    config: Mapping[str, Any] = {}
    """The model's config.json, or empty."""

    routes = True
    """Whether completions can come with the experts of each token."""

    quantization = ""
    """See Joined."""

    in_place = True
    """Whether a load changes the weights that are served: one that fails leaves them half-way."""

    def filled(self) -> torch.nn.Module | None:
        """The module that a load fills, if that may be plain copies (see receive.replay)."""
        return None

    def refuses(self, manifest: Manifest) -> str:
        """Return why these tensors are not this model's, or "". Changes no weight."""
        return ""

    def load(self, tensors: Tensors) -> None:
        """Load all (HF name, host tensor) pairs, which are valid only during the call. Raises if
        loading fails half-way."""
        raise NotImplementedError


class LoadedModel(Engine):
    """Engine over a model that vLLM or SGLang has loaded: their ModelConfigs name these attributes
    alike."""

    def __init__(self, config: Any, path: str, routes: bool) -> None:
        """``config``: the ModelConfig. ``path``: directory or hub name of the checkpoint."""
        text = config.hf_text_config
        self.config, self.routes = text.to_dict(), routes
        self.quantization = config.quantization or ""
        tied = bool(getattr(text, "tie_word_embeddings", False))
        self.names = CheckpointNames(path, config.revision, tied)


def package_version() -> str:
    """Return name and version of this package, for the Joined answer."""
    try:
        return f"titan_grpo {version('titan_grpo')}"
    except PackageNotFoundError:
        return "titan_grpo (not installed, on the path)"


def log_to_stderr() -> None:
    """Log to stderr in an engine's process. Idempotent."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("titan_grpo plugin %(process)d: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def tensor_views(image: torch.Tensor, manifest: Manifest) -> Tensors:
    """Yield (name, view of ``image`` with the manifest's dtype and shape) in order; ``image`` is
    uint8[total_bytes]."""
    for spec in manifest.tensors:
        flat = image[spec.offset : spec.offset + spec.nbytes]
        yield spec.name, flat.view(getattr(torch, spec.dtype)).view(spec.shape)


class Attempt:
    """One worker's progress through one commit.

    ``touched``: weights may have changed. ``reader``: set for a windowed apply, where the mapped
    image is the window and not a whole version.
    """

    def __init__(self) -> None:
        self.loaded = 0
        self.load_s = 0.0
        self.final = False
        self.error = ""
        self.touched = False
        self.mapped: Mapped | None = None
        self.reader: WindowReader | None = None

    def tensors(self) -> Tensors:
        """Return all tensors in order, once the first has arrived. Raises TransferFailed if it does
        not arrive."""
        if self.reader is not None:
            return self.reader.begun()
        assert self.mapped is not None
        return iter(self.mapped.tensors)


class Mapped:
    """A worker's mapping of the receiver's memory, and the parsed manifest. ``accepted``: the
    engine does not refuse it."""

    def __init__(self, grant: Mapping[str, Any], device: WorkerDevice) -> None:
        """Map the granted memory, and pin it for copies to ``device``. Raises SyncError if the
        receiver is gone, DataError if the manifest is invalid."""
        self.accepted = False
        self.copies: Copies | str | None = None
        """What a load does; a text: why that is no copies; None: not known yet."""
        with SharedImage.attach(ImageAddress.from_json(grant["manifest"])) as text:
            self.manifest = Manifest.from_json(bytes(text.buffer))
        # Here, before a commit's pause: it takes a second with millions of extents.
        self.digest = self.manifest.digest
        self.image = SharedImage.attach(ImageAddress.from_json(grant["image"]))
        whole = [] if grant["streamed"] else tensor_views(self.image.tensor(), self.manifest)
        self.tensors = list(whole)
        # A window is refilled as soon as its tensors are taken: a copy from pinned memory is
        # asynchronous and could still read them.
        pinned = not grant["streamed"]
        self._unpin = device.pin(self.image.tensor()) if pinned else None

    def release(self) -> None:
        """Unpin the memory; do it before unmapping."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


def _release(mapping: Future[Mapped]) -> None:
    """Release a mapping that has ended (a callback of its future)."""
    # no deadline: it has ended
    if mapping.exception() is None:
        # no deadline: it has ended
        mapping.result().release()


class EngineSide:
    """The engine plugin's part of a sync, one per worker. ``hello`` and ``commit`` never raise: an
    exception in a worker ends the engine with all its requests, and leaves the other workers in a
    collective that this one never joins.
    """

    def __init__(
        self, engine: Engine, workers: Workers, problem: str, run_key: Key | None = None
    ) -> None:
        """``problem``: why commits cannot work in this engine, or ""; every lane that joins gets
        it. ``run_key``: serve only trainers that prove it."""
        self._engine, self._workers, self._problem = engine, workers, problem
        self._device = WorkerDevice()
        self._loading = Loading()
        self._mapping: tuple[dict[str, Any], Future[Mapped]] | None = None
        """A grant and its mapping. It is made and pinned while the engine generates, before the
        first commit: both take seconds for large models. It is kept between the commits of an
        epoch, so that a pause has no page faults, and until the receiver's end: the memory would
        not be freed."""
        self._turn = threading.RLock()
        """Held during a commit, and while the mapping is replaced: its receiver may end in a
        load."""
        self.receiver: ReceiverHandle | None = None
        if workers.rank == 0:
            self.receiver = ReceiverHandle(
                package_version(), run_key, self._device.name, engine.quantization
            )

    def hello(self, data: dict[str, Any]) -> None:
        """Handle a Hello, which is answered over the lane's channel, or an Attach (the body of POST
        /init_weight_transfer_engine), on every worker. Returns without waiting for the answer."""
        try:
            memory = self._workers.share(self.greet(data))
        except Exception:  # noqa: BLE001 - raising would end the engine
            log.error("the workers lost each other at a hello\n%s", traceback.format_exc())
            memory = {}
        self.remap(memory)

    def greet(self, data: Any) -> dict[str, Any] | None:
        """Handle a Hello or an Attach on rank 0. Return what every worker must ``remap``: a grant;
        {} if the hello has replaced the receiver; None if all keep their mappings."""
        if self.receiver is None:
            return None
        if isinstance(data, dict) and "attach" in data:
            return self._place(self.receiver, data["attach"])
        before = self.receiver.state.in_force
        try:
            refusal = self._hello(self.receiver, data)
        except TitanGrpoError as error:
            refusal = str(error)
        except Exception:  # noqa: BLE001 - raising would end the engine
            refusal = traceback.format_exc()
        level = logging.WARNING if refusal else logging.INFO
        log.log(level, "hello from a trainer: %s", refusal or "accepted")
        return {} if self.receiver.state.in_force != before else None

    def _hello(self, receiver: ReceiverHandle, data: dict[str, Any]) -> str:
        try:
            hello = Hello.from_dict(data)
        except PeerError as error:
            # Answer now: a trainer of another package version would wait for its deadline.
            if (address := reply_address(data)) is not None:
                receiver.answer(address, f"{error} (this server runs {package_version()})")
            return str(error)
        return receiver.hello(hello, self._problem or self._unfit(hello), self._unmap)

    def _unfit(self, hello: Hello) -> str:
        if found := difference(hello.model, essential(self._engine.config)):
            return (
                f"this server computes another model: {found}; start it with the trainer's"
                " config.json"
            )
        if hello.routes and not self._engine.routes:
            return (
                "this server does not send the experts of each token, and grpo.router_replay needs"
                f" those of every completion: {NO_ROUTES}"
            )
        return ""

    def _place(self, receiver: ReceiverHandle, data: Any) -> dict[str, Any] | None:
        """Return the grant of the memory that an Attach asks to map; None if refused."""
        try:
            return receiver.place(Attach.from_dict(data))
        except Exception as refusal:  # noqa: BLE001 - raising would end the engine
            log.warning("the staged weights are not mapped before a commit: %s", refusal)
            return None

    def remap(self, grant: dict[str, Any] | None) -> None:
        """Do on every worker what ``greet`` returned: drop the current mapping, and start to map
        and pin the grant, if any. None: keep the mapping, which a refused hello must not move into
        the next pause."""
        if grant is None:
            return
        self._unmap()
        if grant:
            try:
                self._keep(grant, beside(lambda: Mapped(grant, self._device), "map"))
            except RuntimeError as error:  # no thread is left: raising would end the engine
                log.warning("the staged weights are mapped by the first commit: %s", error)

    def commit(self, data: dict[str, Any]) -> Applied | None:
        """Load a version (``data``: the body of POST /update_weights), report the result to the
        lane and return it. None if ``data`` is not a Commit: it has no number to report under."""
        try:
            commit = Commit.from_dict(data)
        except Exception as refusal:  # noqa: BLE001 - raising would end the engine
            log.warning("update_weights was refused, the engine keeps its version: %s", refusal)
            return None
        start, attempt = time.monotonic(), Attempt()
        try:
            with self._turn:
                self._run(commit, attempt)
        except Exception as failure:  # noqa: BLE001 - raising would end the engine
            log.error("commit of version %d\n%s", commit.version, traceback.format_exc())
            attempt.error = f"the workers lost each other: {type(failure).__name__}: {failure}"
            # The exchange may have succeeded on other workers: they may have loaded.
            attempt.touched = self._engine.in_place
        ok, held = not attempt.error, self.receiver.state if self.receiver is not None else None
        report = Applied(
            number=commit.number,
            version=commit.version,
            ok=ok,
            fingerprint=commit.fingerprint if ok else "",
            loaded=attempt.loaded,
            apply_s=time.monotonic() - start,
            error=attempt.error,
            final=attempt.final,
            load_s=attempt.load_s,
            # A version beside the weights touches none.
            intact=ok or (not attempt.touched and (held is None or held.intact)),
        )
        self._report(commit, report)
        return report

    def close(self) -> None:
        """Unmap the receiver's memory and end the receiver."""
        self._unmap()
        if self.receiver is not None:
            self.receiver.close()

    def _run(self, commit: Commit, attempt: Attempt) -> None:
        """Run the commit on this worker. Raises only if an exchange with other workers fails."""
        self._prepare(commit, self._workers.share(self._request(commit)), attempt)
        attempt.error = self._first(attempt.error)
        if attempt.error:
            return
        self._load(commit, attempt)
        # A broken reader has failed on every worker, in an exchange of its own: no other follows.
        if attempt.reader is None or not attempt.reader.broken:
            attempt.error = self._first(attempt.error)

    def _first(self, error: str) -> str:
        """Return the first error of all workers, on every worker."""
        return next((why for why in self._workers.gather(error) if why), "")

    def _request(self, commit: Commit) -> dict[str, Any]:
        """Return on rank 0 the receiver's grant or ``{"error": reason}``; {} on other ranks."""
        if self.receiver is None:
            return {}
        if self._problem:
            return {"error": self._problem}
        try:
            return self.receiver.lend(commit)
        except TitanGrpoError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the other workers wait for what this one shares
            return {"error": f"{type(error).__name__}: {error}"}

    def _prepare(self, commit: Commit, grant: dict[str, Any], attempt: Attempt) -> None:
        """Map the grant and make every check, before a weight is touched."""
        try:
            attempt.error = str(grant.get("error", ""))
            if attempt.error:
                return
            mapped = self._map(grant)
            if not mapped.accepted:
                attempt.error = self._engine.refuses(mapped.manifest)
                attempt.final = bool(attempt.error)
                if attempt.error:
                    self._unmap()
                    return
                mapped.accepted = True
            if mapped.digest != (wanted := commit.manifest_digest):
                raise PeerError(f"the manifest must have digest {wanted}, got {mapped.digest}")
            attempt.mapped = mapped
            if grant["streamed"]:
                ring = mapped.image.tensor()
                attempt.reader = WindowReader(ring, mapped.manifest, self._workers, self._take)
        except Exception as error:  # noqa: BLE001 - the other workers wait for ours
            attempt.error = f"{type(error).__name__}: {error}"

    def _load(self, commit: Commit, attempt: Attempt) -> None:
        assert attempt.mapped is not None
        try:
            tensors = attempt.tensors()
            # After a pause the last batch may still run (in SGLang): it must not read new weights.
            self._device.synchronize()
            attempt.touched, start = self._engine.in_place, time.monotonic()
            try:
                self._fill(tensors, attempt)
            finally:
                # The receiver may overwrite the image after this: finish all copies from it.
                self._device.synchronize()
                attempt.load_s = time.monotonic() - start
            if attempt.loaded != (wanted := len(attempt.mapped.manifest.tensors)):
                attempt.error = f"the engine loaded {attempt.loaded} of {wanted} tensors"
        except Exception as failure:  # noqa: BLE001 - raising would end the engine
            log.error("loading version %d broke off\n%s", commit.version, traceback.format_exc())
            attempt.error = f"loading broke off: {type(failure).__name__}: {failure}"
            # If this worker failed alone, the others may have changed weights.
            if attempt.reader is None or not attempt.reader.broken:
                attempt.touched = self._engine.in_place

    def _fill(self, tensors: Tensors, attempt: Attempt) -> None:
        if attempt.reader is not None:
            self._engine.load(self._counted(tensors, attempt))  # copies, of this worker's own
            return
        mapped, filled = attempt.mapped, self._engine.filled()
        assert mapped is not None
        views = mapped.tensors

        def counted() -> Tensors:
            attempt.loaded = 0
            return self._counted(iter(views), attempt)

        sources, load = [tensor for _, tensor in views], self._engine.load
        mapped.copies = self._loading.run(load, counted, sources, filled, mapped.copies)

    def _counted(self, tensors: Tensors, attempt: Attempt) -> Tensors:
        for name, tensor in tensors:
            attempt.loaded += 1
            yield name, tensor
            self.taken(name, tensor)

    def taken(self, name: str, tensor: torch.Tensor) -> None:
        """Called when the engine's loader has taken a tensor; verify.recording overrides it."""

    def _map(self, grant: dict[str, Any]) -> Mapped:
        """Return the mapping of a grant: the one at hand, if it is of this grant."""
        if self._mapping is not None and self._mapping[0] == grant:
            # no deadline: the commit would do the same work itself, for as long
            error = self._mapping[1].exception()
            if error is None:
                # no deadline: it has ended
                return self._mapping[1].result()
            log.warning("the staged weights could not be mapped before a commit: %s", error)
        self._unmap()  # before the next one is mapped
        mapped, mapping = Mapped(grant, self._device), Future[Mapped]()
        mapping.set_result(mapped)
        self._keep(grant, mapping)
        return mapped

    def _keep(self, grant: dict[str, Any], mapping: Future[Mapped]) -> None:
        with self._turn:
            self._mapping = grant, mapping
        when_ended(int(grant["image"]["pid"]), lambda: self._receiver_ended(grant))

    def _receiver_ended(self, grant: dict[str, Any]) -> None:
        """Let go of a grant's memory (on a thread of its own)."""
        with self._turn:
            if self._mapping is not None and self._mapping[0] is grant:
                self._unmap()

    def _unmap(self) -> None:
        with self._turn:
            mapping, self._mapping = self._mapping, None
        if mapping is not None:
            # Runs now, or on the mapping thread when it ends: unmapping alone does not unpin.
            mapping[1].add_done_callback(_release)

    def _take(self, consumed: int) -> int:
        assert self.receiver is not None
        return self.receiver.take(consumed)

    def _report(self, commit: Commit, report: Applied) -> None:
        if self.receiver is None:
            return
        done = report.error or f"{report.loaded} tensors, {report.apply_s:.3f} s"
        log.info("commit of version %d: %s", report.version, done)
        try:
            self.receiver.applied(commit, report)
        except Exception as error:  # noqa: BLE001 - raising would end the engine
            log.warning(
                "version %d could not be reported to the trainer: %s", report.version, error
            )


make_side: Callable[[Engine, Workers, str, Key | None], EngineSide] = EngineSide
"""Makes the EngineSide of a worker; verify.recording replaces it before the engine starts."""


def start_side(engine: Engine, coordinator: Any, problem: str) -> EngineSide:
    """Return the EngineSide of an engine's worker, with the run key of its environment, and log
    that the plugin is ready. ``coordinator``: see Workers. ``problem``: see EngineSide."""
    workers, run_key = Workers(coordinator), None
    try:
        run_key = find_run_key(os.environ)
    except ConfigError as error:
        # Take no weights at all: without a key the server would take any trainer's.
        problem = problem or str(error)
    access = "no run key: takes weights from any trainer"
    if run_key is not None:
        access = "takes weights from trainers with the run key"
    log.info("plugin ready, worker %d of %d, %s", workers.rank, workers.size, problem or access)
    return make_side(engine, workers, problem, run_key)
