"""Ray Serve: `serve.batch` on a deployment of one replica.

https://docs.ray.io/en/latest/serve/advanced-guides/dyn-req-batch.html
"""

from __future__ import annotations

import signal
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.models import MAX_BATCH_SIZE
from benchmarks.peers import wire

# More than any concurrency that is measured: a replica that is handed fewer requests than a batch
# and its successor hold would leave them at the proxy.
MAX_ONGOING_REQUESTS = 128


@serve.deployment(
    num_replicas=1, max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 1}
)
class Deployment:
    def __init__(self, model: str) -> None:
        self._forward = wire.Forward(model)

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=wire.MAX_DELAY_SECONDS)
    async def _answer(self, bodies: list[bytes]) -> list[bytes]:
        return self._forward(bodies)

    async def __call__(self, request: Request) -> Response:
        return Response(await self._answer(await request.body()))


def main() -> None:
    arguments = wire.arguments()
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
    deployment: Any = Deployment  # the decorator made more of it than a class
    serve.run(deployment.bind(arguments.model), route_prefix="/predict")
    try:
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
