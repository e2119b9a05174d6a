"""PyTriton: a function with `@batch`, bound with the dynamic batcher's defaults.

https://triton-inference-server.github.io/pytriton/latest/binding_configuration/
"""

from __future__ import annotations

import os
import sysconfig

import numpy as np
import numpy.typing as npt
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.models import MAX_BATCH_SIZE, MODELS, Parameter
from benchmarks.peers import wire


def main() -> None:
    arguments = wire.arguments()
    model = MODELS[arguments.model]
    module = model.build()
    # Its installation guide asks for this: Triton's stub needs the library of this very Python.
    os.environ["LD_LIBRARY_PATH"] = str(sysconfig.get_config_var("LIBDIR"))

    @batch
    def infer(**inputs: npt.NDArray[np.generic]) -> dict[str, npt.NDArray[np.generic]]:
        columns = [torch.from_numpy(inputs[spec.name]) for spec in model.inputs]
        with torch.inference_mode():
            return {model.output.name: module(*columns).numpy()}

    config = TritonConfig(
        grpc_address="127.0.0.1",
        grpc_port=arguments.port,
        http_address="127.0.0.1",
        http_port=wire.free_port(),
        allow_metrics=False,
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name=arguments.model,
            infer_func=infer,
            inputs=[_tensor(spec) for spec in model.inputs],
            outputs=[_tensor(model.output)],
            config=ModelConfig(max_batch_size=MAX_BATCH_SIZE, batcher=DynamicBatcher()),
            strict=False,
        )
        triton.serve()


def _tensor(parameter: Parameter) -> Tensor:
    dtype = wire.NUMPY_TYPES[parameter.dtype].type
    return Tensor(name=parameter.name, dtype=dtype, shape=parameter.dims)


if __name__ == "__main__":
    main()
