"""An OpenAPI document of the inference endpoints of the models, for generators of clients."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterable
from pathlib import Path

from torch_py_backend.config.pbtxt import JsonObject

_BASE = Path(__file__).with_name("assets") / "openapi-base.json"


def document(configs: Iterable[JsonObject], url: str) -> JsonObject:
    """Return the document of models with these configs, from Triton, which serves HTTP at a URL."""
    base: JsonObject = json.loads(_BASE.read_bytes())
    base["servers"] = [{"url": url}]
    for config in configs:
        # Triton refuses other requests to decoupled models over HTTP.
        is_decoupled = config.get("model_transaction_policy", {}).get("decoupled")
        answered = "text/event-stream" if is_decoupled else "application/json"
        for endpoint in ("generate_stream",) if is_decoupled else ("infer", "generate"):
            describe = _infer if endpoint == "infer" else _generate
            taken = {"application/json": {"schema": describe(config, "input")}}
            returned = {answered: {"schema": describe(config, "output")}}
            operation = {
                "operationId": f"{config['name']}_{endpoint}",
                "tags": [config["name"]],
                "requestBody": {"required": True, "content": taken},
                "responses": {
                    "200": {"description": "The outputs.", "content": returned},
                    "default": {"$ref": "#/components/responses/error"},
                },
            }
            path = f"/v2/models/{urllib.parse.quote(config['name'], safe='')}/{endpoint}"
            base["paths"][path] = {"post": operation}
    return base


def _infer(config: JsonObject, key: str) -> JsonObject:
    """Return the schema of the request ("input") or the response ("output") of `infer`."""
    tensors = []
    for entry in config[key]:
        rank = len(entry["dims"]) + (config["max_batch_size"] > 0)
        datatype, value = _type(entry)
        properties = {
            "name": {"type": "string", "enum": [entry["name"]]},
            "datatype": {"type": "string", "enum": [datatype]},
            "shape": _list({"type": "integer"}) | {"minItems": rank, "maxItems": rank},
            "data": _list(value),
        }
        tensors.append({"type": "object", "properties": properties, "required": [*properties]})
    properties = {f"{key}s": _list({"oneOf": tensors})}
    common = {"$ref": f"#/components/schemas/{key}"}
    own = {"type": "object", "properties": properties, "required": [*properties]}
    return {"allOf": [common, own]}


def _generate(config: JsonObject, key: str) -> JsonObject:
    """Return the schema of the request or the response of `generate`: values by name."""
    properties = {}
    for entry in config[key]:
        _, value = _type(entry)
        properties[entry["name"]] = {"oneOf": [value, _list(value)]}
    required = [entry["name"] for entry in config[key] if not entry.get("optional")]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: JsonObject) -> JsonObject:
    return {"type": "array", "items": items}


def _type(entry: JsonObject) -> tuple[str, JsonObject]:
    """Return the datatype of a tensor in requests, and the schema of one value."""
    datatype = entry["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
    kinds = {"BYTES": "string", "BOOL": "boolean"}
    return datatype, {"type": kinds.get(datatype, "integer" if "INT" in datatype else "number")}
