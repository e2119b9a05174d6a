"""MLServer: a custom runtime with adaptive batching and the one worker that it starts by default.

https://docs.seldon.ai/mlserver/user-guide/custom
https://docs.seldon.ai/mlserver/user-guide/adaptive-batching
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.models import MAX_BATCH_SIZE, MODELS
from benchmarks.peers import wire


class Runtime(MLModel):
    async def load(self) -> bool:
        self._model = MODELS[self.name]
        self._module = self._model.build()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        named = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        columns = [torch.from_numpy(named[spec.name]) for spec in self._model.inputs]
        with torch.inference_mode():
            answer = self._module(*columns).numpy()
        output = NumpyCodec.encode_output(self._model.output.name, answer)
        return InferenceResponse(model_name=self.name, outputs=[output])


def main() -> None:
    arguments = wire.arguments()
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-mlserver-"))
    settings = {
        "host": "127.0.0.1",
        "grpc_port": arguments.port,
        "http_port": wire.free_port(),
        "metrics_port": wire.free_port(),
        "parallel_workers": 1,
        "debug": False,
    }
    model = {
        "name": arguments.model,
        "implementation": f"{__spec__.name}.Runtime",
        "max_batch_size": MAX_BATCH_SIZE,
        "max_batch_time": wire.MAX_DELAY_SECONDS,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "model-settings.json").write_text(json.dumps(model))
    command = Path(sys.executable).with_name("mlserver")
    os.execv(command, [str(command), "start", str(folder)])


if __name__ == "__main__":
    main()
