"""LitServe: batching by `max_batch_size`, and `fast_queue`, which it advises from 100 requests/s.

https://lightning.ai/docs/litserve/features/batching
"""

from typing import Annotated

import litserve
from fastapi import Body, Response

from benchmarks.models import MAX_BATCH_SIZE
from benchmarks.peers import wire

# LitServe gives FastAPI the annotation of `decode_request`: the body as it came, no JSON. Hence
# no `from __future__ import annotations` here: it would make a string of it.
Bytes = Annotated[bytes, Body(media_type="application/octet-stream")]


class Api(litserve.LitAPI):
    def __init__(self, model: str) -> None:
        super().__init__(max_batch_size=MAX_BATCH_SIZE, batch_timeout=wire.MAX_DELAY_SECONDS)
        self._model = model

    def setup(self, device: str) -> None:
        self._forward = wire.Forward(self._model)

    def decode_request(self, request: Bytes) -> bytes:
        return request

    def predict(self, bodies: list[bytes]) -> list[bytes]:
        return self._forward(bodies)

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="application/octet-stream")


def main() -> None:
    arguments = wire.arguments()
    server = litserve.LitServer(
        Api(arguments.model), accelerator="cpu", workers_per_device=1, fast_queue=True
    )
    server.run(
        host="127.0.0.1",
        port=arguments.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
