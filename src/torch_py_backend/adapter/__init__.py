"""TritonPythonModel: the class that Triton calls.

Only this package uses `triton_python_backend_utils`. Triton adds names to that module after it has
imported this one, so they are looked up when they are used. torch is imported when an instance
starts: Triton also imports this module only to complete a config.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from torch_py_backend import autocomplete, composition
from torch_py_backend.adapter import logs
from torch_py_backend.config import execution_env, model_config, pbtxt, threads
from torch_py_backend.errors import BackendError, PlatformError, join_names, named, summarize
from torch_py_backend.loading import discovery
from torch_py_backend.processes import child_process, instance_status

if TYPE_CHECKING:
    from torch_py_backend.engine.engine import Engine

log = logging.getLogger(__name__)

PROFILED_BATCHES = 10  # of a trace (option PROFILE_DIR)


class TritonPythonModel:
    """One instance of a model, in its own process.

    Attributes:
        is_ready: returns whether requests can be answered, for servers from 26.03 on. Models with
            an AOTInductor package do not have it: calls of a package hold the GIL, and a model that
            does not answer within 5 seconds is not ready.
    """

    is_ready: Callable[[], bool]
    _answer: Callable[..., Any]
    _request: Sequence[pbtxt.JsonObject] = ()

    def __init__(self) -> None:
        # Before `initialize`: it is not known when a server looks for the method.
        with contextlib.suppress(OSError, BackendError):  # the load reports it
            version = Path(pb_utils.get_model_dir())
            types = {discovery.file_type(path) for path in version.iterdir() if path.is_file()}
            if not (discovery.ArtifactType.AOTI in types or "aoti" in pbtxt.text(version.parent)):
                self.is_ready = lambda: self._engine.failures.fatal is None

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model; Triton reports a failure with the exception's text."""
        handler = logs.install(args["model_name"])
        # A fatal signal, in a kernel or on a mapped file, prints a traceback to standard error.
        if not faulthandler.is_enabled():
            faulthandler.enable()
        self._modes = contextlib.ExitStack()
        self._status = instance_status.InstanceStatus()
        child_process.use_utf8()
        try:
            self._start(args)
        except BaseException as error:
            # The process did not die: Triton reports the exception.
            self.finalize()
            if isinstance(error, BackendError):
                raise pb_utils.TritonModelException(named(args["model_name"], error)) from error
            raise
        self._status.report(
            {**self._loaded, "warnings": handler.warnings, "request": self._request}
        )
        handler.warnings = None
        self._status.idle()

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Complete config.pbtxt from the model.

        Triton calls this in a separate stub, where a crash would hang the server. So the model is
        loaded in a child process. A complete config does not import torch.
        """
        document = auto_complete_model_config.as_dict()
        try:
            is_named = execution_env.KEY in document.get("parameters", {})
            execution_env.check_running_python(is_named=is_named)
            if autocomplete.is_incomplete(document):
                logs.install(document["name"])
                version = Path(pb_utils.get_model_dir())
                arguments = pbtxt.arguments(version.parent, version.name, document)
                autocomplete.complete(arguments, document)
                auto_complete_model_config.set_max_batch_size(document["max_batch_size"])
                if document["max_batch_size"]:
                    auto_complete_model_config.set_dynamic_batching()
        except BackendError as error:
            raise pb_utils.TritonModelException(named(document["name"], error)) from error
        return auto_complete_model_config

    def _start(self, args: Mapping[str, str]) -> None:
        settings = self._settings = model_config.parse(args)
        is_named = settings.options.execution_env_path is not None
        execution_env.check_running_python(is_named=is_named)
        self._status = instance_status.start(settings)
        share = threads.budget(settings)
        threads.set_environment(share)
        # Import torch only now: it reads its environment variables when it is imported.
        gc.disable()  # collections would take a tenth of that time
        from torch_py_backend.adapter import answering, calling, metrics, streaming
        from torch_py_backend.engine import load, runtime, warmup

        gc.enable()
        _check_numpy()
        engine = self._build(share)
        changed = []
        if settings.options.warmup is not False:
            with runtime.mode(settings.options):
                changed = warmup.run(engine, serving=True)
                self._request = warmup.request(engine)
            del engine.example
            if changed:
                log.warning(
                    "the warm-up has changed %s of the model, which is built again without a"
                    " warm-up: the first requests may take longer. Keep state in buffers.",
                    join_names(changed),
                )
                self._modes.close()
                del self._engine, engine
                gc.collect()
                engine = self._build(share)
        if settings.options.warmup is False or changed:
            with engine.preparing():  # nothing is compiled, as the model is not called
                pass
        # Triton calls only this thread, so the mode is entered once instead of for each batch.
        self._modes.enter_context(runtime.mode(settings.options))
        # Not as the last step: a log message in transit while the load ends can hang Triton. The
        # metrics that follow wait until it has arrived.
        self._loaded = load.report(engine)
        log.info("instance %s serves %s.", settings.instance, json.dumps(self._loaded))
        # Closed after the objects that are created below, to publish their last counts.
        self._publisher = metrics.Publisher(engine, self._status)
        self._modes.callback(self._publisher.close)
        # Only now: Triton refuses calls of other models while a model loads.
        composition.send = partial(calling.send, settings.name)
        # Only now: loading has no time limit.
        engine.failures.on_call = self._status.busy
        engine.failures.on_fatal = self._status.poisoned
        if settings.decoupled:
            streams = streaming.Streaming(engine, self._status)
            self._modes.callback(streams.close)
            self._publisher.streams = streams.live
            self._answer = streams.start
        else:
            answers = answering.Answering(engine)
            if answers.sequences is not None:
                self._publisher.sequences = answers.sequences
            self._answer = answers.answer
            if settings.options.profile_dir is not None:
                self._profile(settings.options.profile_dir)
        self._publisher.start()
        # A collection of all that torch and the model have made would stop a request for 30 ms.
        gc.collect()
        gc.freeze()

    def _build(self, share: threads.Threads) -> Engine:
        from torch_py_backend.engine import load

        self._engine = engine = load.build(self._settings, share)
        self._modes.callback(engine.close)
        return engine

    def execute(self, requests: Sequence[Any]) -> Any:
        """Return one response for each request, in order; None for a decoupled model."""
        self._engine.check_files()
        if self._settings.decoupled:  # the thread of the streams reports when it is busy
            return self._answer(requests)
        self._status.busy()
        try:
            return self._answer(requests)
        finally:
            self._status.idle()
            # The stub reports to the server that it has deleted the requests.
            logs.end_if_orphaned()

    def _profile(self, folder: str) -> None:
        """Record the first batches, after one that warms the profiler up."""
        from torch import profiler

        name = f"{self._settings.instance}-{self._settings.version}"  # versions share a name
        profile = profiler.profile(
            schedule=profiler.schedule(wait=0, warmup=1, active=PROFILED_BATCHES, repeat=1),
            on_trace_ready=profiler.tensorboard_trace_handler(folder, name, use_gzip=True),
        )
        self._modes.enter_context(profile)
        answer = self._answer

        def profiled(requests: Any) -> Any:
            responses = answer(requests)
            try:
                profile.step()
            except Exception as error:  # such as a full disk, or a profiler of the model's own code
                log.warning("the profiler failed: %s.", summarize(error))
                self._answer = answer
            return responses

        self._answer = profiled

    def finalize(self) -> None:
        """Release the model; Triton calls this before a healthy instance ends. May be repeated."""
        self._status.ended()
        self._modes.close()


def _check_numpy() -> None:
    """Raise PlatformError if Triton's utilities garble tensors: up to 24.10, with numpy 2."""
    import numpy as np
    import torch

    sent = torch.arange(4.0)
    if pb_utils.Tensor.from_dlpack("t", sent).as_numpy().tolist() != sent.tolist():
        raise PlatformError(
            f"numpy {np.__version__} garbles tensors in this server's Python stub",
            cure="Install numpy<2 where the stub runs, or use a server of 24.11 or newer.",
        )
