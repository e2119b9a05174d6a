"""What deploy/ becomes on its way to a cluster, and whether a cluster takes it.

Kustomize's and KServe's packages fit no environment with a tritonserver's wheel (the one asks for a
newer Python than it needs, the other for an older psutil): they are put into a folder of their own.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pydantic
import typer.main
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule

from torch_py_backend.cli import commands

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kustomize" / "base"
KSERVE = DEPLOY / "kserve"
KEDA = DEPLOY / "kustomize" / "components" / "keda"
NAME = "torch-py-backend"
Document = dict[str, Any]
_PACKAGES = ("pykustomize==0.1.4", "kserve==0.21.0", "kubernetes==35.0.0", "six==1.17.0")
# https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
_RESTRICTED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_KSERVE = {
    "ClusterServingRuntime": "V1alpha1ClusterServingRuntime",
    "InferenceService": "V1beta1InferenceService",
}
_OPERATED: dict[str, type[pydantic.BaseModel]] = {
    "PodMonitor": PodMonitor,
    "PrometheusRule": PrometheusRule,
    "ScaledObject": ScaledObject,
}
_PLAIN: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "object": object,
    "datetime": str,
    "ResourceQuantity": (str, int),
    "V1beta1MetricQuantity": (str, int),  # the type of `value` in a metric's target
}


class Misfit(Exception):  # noqa: N818  what a cluster would say
    """An object does not fit its schema."""


# --- building --------------------------------------------------------------------------------


def parse(text: str) -> list[Document]:
    return [one for one in yaml.safe_load_all(text) if one]


def build(folder: Path) -> list[Document]:
    """What `kubectl apply --kustomize` sends."""
    return parse(asyncio.run(_packages("pykustomize").build(str(folder))).yaml)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="deployed-")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command = [*pip, "--ignore-requires-python", "--target", folder.name, *_PACKAGES]
    subprocess.run(command, check=True)
    return folder


def _packages(name: str) -> ModuleType:
    """A package of the folder, which ends with this process."""
    if name not in sys.modules:
        sys.path.append(_folder().name)
    return importlib.import_module(name)


def _part(name: str, part: str) -> ModuleType:
    """A part of a package, without what the package itself would import: a whole server."""
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(Path(_folder().name) / name)]
        sys.modules[name] = package
    return _packages(f"{name}.{part}")


# --- what a cluster says ---------------------------------------------------------------------


def validate(document: Document, version: str) -> None:
    """Compare an object with its schema, and allow no field that the schema does not know.

    Args:
        document: an object of Kubernetes, the Prometheus operator, KEDA or KServe.
        version: of Kubernetes, such as 1.30.

    Raises:
        Misfit: it does not fit.
    """
    group = document["apiVersion"].partition("/")[0]
    if group == "serving.kserve.io":
        _validate_for_kserve(document)
    elif group in ("monitoring.coreos.com", "keda.sh"):
        _validate_for_operator(document)
    else:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as no:
            raise Misfit(str(no)) from None


def _validate_for_operator(document: Document) -> None:
    try:
        taken = _OPERATED[document["kind"]].model_validate(document)
    except pydantic.ValidationError as error:
        raise Misfit(str(error)) from None
    _compare(document, taken.model_dump(mode="json", by_alias=True, exclude_unset=True))


def _validate_for_kserve(document: Document) -> None:
    _take(document, _KSERVE[document["kind"]], document["kind"])


def _take(value: Any, kind: str, path: str) -> Any:
    """A value as the type that KServe's models call `str`, `list[V1Container]` or `V1Container`."""
    inner = kind.partition("[")[2][:-1] or kind.partition(", ")[2][:-1]
    if kind.startswith("list["):
        _expect(list, value, path)
        return [_take(item, inner, f"{path}[{place}]") for place, item in enumerate(value)]
    if kind.startswith("dict("):
        _expect(dict, value, path)
        return {key: _take(item, inner, f"{path}.{key}") for key, item in value.items()}
    if kind in _PLAIN:
        _expect(_PLAIN[kind], value, path)
        return value
    model = getattr(_part("kserve", "models"), kind, None)
    model = model or getattr(_part("kubernetes", "client"), kind)
    _expect(dict, value, path)
    names = {key: name for name, key in model.attribute_map.items()}
    if unknown := value.keys() - names.keys():
        raise Misfit(f"{path}: unknown: {', '.join(sorted(unknown))}")
    parts = {
        names[key]: _take(item, model.openapi_types[names[key]], f"{path}.{key}")
        for key, item in value.items()
    }
    try:
        return model(**parts)
    except ValueError as error:  # a required field is missing
        raise Misfit(f"{path}: {error}") from None


def _expect(kind: type | tuple[type, ...], value: Any, path: str) -> None:
    if not isinstance(value, kind):
        raise Misfit(f"{path}: {value!r} is no {kind}")


def _compare(sent: Any, taken: Any) -> None:
    """What is taken is what was sent: fields that the schema does not know are left out of it."""
    if sent != taken:
        raise Misfit(f"sent {sent}, taken {taken}")


def unrestricted(spec: Document) -> set[str]:
    """What Pod Security's level `restricted` has against a pod: names of settings."""
    whole = spec.get("securityContext", {})
    found = set()
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            found.add("allowPrivilegeEscalation")
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            found.add("capabilities")
        for setting, wanted in _RESTRICTED.items():
            if {**whole, **own}.get(setting) != wanted:
                found.add(setting)
    return found


# --- looking ---------------------------------------------------------------------------------


def one(documents: list[Document], kind: str, name: str = NAME) -> Document:
    """The object of this kind and name."""
    (found,) = [
        document
        for document in documents
        if (document["kind"], document["metadata"]["name"]) == (kind, name)
    ]
    return found


def pod(documents: list[Document]) -> Document:
    """The pods' specification."""
    spec: Document = one(documents, "Deployment")["spec"]["template"]["spec"]
    return spec


def server(documents: list[Document]) -> Document:
    """The container that serves."""
    (container,) = pod(documents)["containers"]
    found: Document = container
    return found


def keda_queries(spec: Document) -> list[str]:
    """Return the queries of a ScaledObject's triggers."""
    return [trigger["metadata"]["query"] for trigger in spec["triggers"]]


def serve_arguments(words: list[str]) -> dict[str, Any]:
    """Return the parameters of `torch-py-backend serve`, as the command line parses them."""
    program, command, *rest = words
    assert Path(program).name == "torch-py-backend"
    group = typer.main.get_command(commands)
    with group.commands[command].make_context(command, rest) as context:  # type: ignore[attr-defined]
        return dict(context.params)
