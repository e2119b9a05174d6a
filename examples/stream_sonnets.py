"""Continue a text with the example model `sonnets`, and print it as it arrives.

make serve                                                  # or: torch-py-backend serve …
python examples/stream_sonnets.py "Shall I compare" --length 400 --temperature 0.5
"""

import queue
from typing import Annotated, Any

import numpy as np
import typer
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException


def tensor(name: str, datatype: str, value: Any, dtype: Any) -> InferInput:
    """Return an input with one value."""
    made = InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], dtype=dtype))
    return made


def main(
    prompt: Annotated[str, typer.Argument(help="The beginning.")] = "Shall I compare",
    length: Annotated[int, typer.Option(help="Characters to come.")] = 400,
    temperature: Annotated[float, typer.Option(help="0: the likeliest, 1: daring.")] = 0.5,
    address: Annotated[str, typer.Option(help="The server's gRPC address.")] = "localhost:8001",
) -> None:
    """Print a text as its characters arrive."""
    inputs = [
        tensor("prompt", "BYTES", prompt.encode(), np.object_),
        tensor("length", "INT32", length, np.int32),
        tensor("temperature", "FP32", temperature, np.float32),
    ]
    arrived: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    print(prompt, end="", flush=True)
    with InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer("sonnets", inputs, enable_empty_final_response=True)
        last = False
        while not last:
            result, error = arrived.get()
            if error is not None:
                raise SystemExit(f"\n{error}")
            # The response with the last character is marked as final.
            last = result.get_response().parameters["triton_final_response"].bool_param
            characters = result.as_numpy("text")
            if characters is not None:
                print(characters[0].decode(), end="", flush=True)
        client.stop_stream()
    print()


if __name__ == "__main__":
    typer.run(main)
