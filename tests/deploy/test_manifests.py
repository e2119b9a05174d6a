"""deploy/kustomize: built by its own tool, validated with official schemas."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from pathlib import Path

import deployed
import monitoring
import pytest
from deployed import BASE, DEPLOY, KEDA, NAME, Document

from torch_py_backend.server import tritonserver
from torch_py_backend.server.lifecycle import Snapshot
from torch_py_backend.server.readiness import ReadinessServer

_KUSTOMIZATION = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: inference
resources: [../deploy/kustomize/base]
components: {components}
configMapGenerator: [{{name: models, literals: [MODELS=s3://bucket/models]}}]
images: [{{name: torch-py-backend, newName: registry.example.com/models, newTag: "7"}}]
"""
_CACHE = "/var/cache/torch-py-backend"


def _kustomized(folder: Path, *components: str) -> list[Document]:
    (folder / "deploy").symlink_to(DEPLOY)
    (folder / "inference").mkdir()
    paths = [f"../deploy/kustomize/components/{name}" for name in components]
    text = _KUSTOMIZATION.format(components=paths)
    (folder / "inference" / "kustomization.yaml").write_text(text, encoding="utf-8")
    return deployed.build(folder / "inference")


_VARIANTS: dict[str, Callable[[Path], list[Document]]] = {
    "base": lambda _: deployed.build(BASE),
    "components": lambda folder: _kustomized(folder, "gpu", "object-store"),
}


@pytest.fixture(params=_VARIANTS)
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> list[Document]:
    return _VARIANTS[request.param](tmp_path)


def test_schemas(documents: list[Document]) -> None:
    """The oldest and newest Kubernetes and the Prometheus operator accept every field."""
    for document in documents:
        deployed.validate(document, "1.27")
        deployed.validate(document, "1.37")


def test_selectors(documents: list[Document]) -> None:
    """Services, disruption budget, PodMonitor and topology spread select the Deployment's pods.

    The alerts select the job that these pods get.
    """
    deployment = deployed.one(documents, "Deployment")
    monitor = deployed.one(documents, "PodMonitor")["spec"]
    (spread,) = deployed.pod(documents)["topologySpreadConstraints"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
        deployed.one(documents, "Service")["spec"]["selector"],
        deployed.one(documents, "Service", f"{NAME}-hosts")["spec"]["selector"],
        deployed.one(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        monitor["selector"]["matchLabels"],
    ]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    assert labels[monitor["jobLabel"]] == monitoring.JOB


def test_ports(documents: list[Document]) -> None:
    """Container, Services, probes and PodMonitor use the ports that `serve` listens on."""
    container = deployed.server(documents)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    arguments = deployed.serve_arguments(container["args"])
    assert ports == {
        name: arguments[f"{name}_port"] for name in ("http", "grpc", "metrics", "health")
    }
    for service in (NAME, f"{NAME}-hosts"):
        for port in deployed.one(documents, "Service", service)["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    (endpoint,) = deployed.one(documents, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    assert arguments["address"] == "0.0.0.0"


def test_probes(documents: list[Document]) -> None:
    """While a model loads, the replica has started and lives, but is not ready."""
    container = deployed.server(documents)
    snapshot = Snapshot({"m": "is being loaded"}, "", time.monotonic())
    with ReadinessServer("127.0.0.1", 0, lambda: snapshot) as readiness:
        for probe, status in {"startup": 200, "liveness": 200, "readiness": 503}.items():
            request = container[f"{probe}Probe"]["httpGet"]
            assert request["port"] == "health"
            assert readiness.answer(request["path"])[0].value == status


def test_shutdown(documents: list[Document]) -> None:
    """Connections of gRPC end within the drain (it adds 10 %), and the drain within the grace."""
    arguments = deployed.serve_arguments(deployed.server(documents)["args"])
    name, _, milliseconds = arguments["arguments"][0].partition("=")
    assert name == "--grpc-max-connection-age"
    assert 1.1 * int(milliseconds) < 1000 * arguments["drain"]
    stop = arguments["drain"] + tritonserver._EXIT_SECONDS + 2 * tritonserver._GRACE_SECONDS
    assert deployed.pod(documents)["terminationGracePeriodSeconds"] > stop


def test_volumes(documents: list[Document]) -> None:
    """Only /dev/shm, in memory, /tmp and the cache of an object store are writable."""
    container = deployed.server(documents)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]
    }
    models = {_CACHE: False} if _CACHE in mounts else {"/models": True}
    assert mounts == {"/dev/shm": False, "/tmp": False, **models}
    volumes = {volume["name"] for volume in deployed.pod(documents)["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
    assert _volume(documents, "/dev/shm")["emptyDir"]["medium"] == "Memory"


def test_pod_security(documents: list[Document]) -> None:
    """The pods fit the level `restricted`."""
    assert deployed.unrestricted(deployed.pod(documents)) == set()


# --- components ------------------------------------------------------------------------------


def test_gpu(tmp_path: Path) -> None:
    """Each replica has a GPU; an old one leaves first, because there may be no spare GPU."""
    documents = _kustomized(tmp_path, "gpu")
    assert deployed.server(documents)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    update = deployed.one(documents, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert update == {"maxSurge": 0, "maxUnavailable": 1}


def test_keda(tmp_path: Path) -> None:
    """The ScaledObject scales the Deployment, which then has no number of its own."""
    base = deployed.one(deployed.build(BASE), "Deployment")["spec"]
    documents = _kustomized(tmp_path, "keda")
    scaled = deployed.one(documents, "ScaledObject")
    deployed.validate(scaled, "1.37")
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] == NAME
    assert spec["minReplicaCount"] == base["replicas"]
    assert "replicas" not in deployed.one(documents, "Deployment")["spec"]
    queries = deployed.keda_queries(spec)
    names = {selector.name for query in queries for selector in monitoring.selectors(query)}
    ours = {name for name in names if name and not name.startswith("nv_")}
    assert ours == {"pytorch_py_live_streams"} <= monitoring.known().keys()
    assert all('namespace="inference"' in query for query in queries)


def test_keda_selects_the_pods() -> None:
    """The queries select the pods of this Deployment, and none of another release's."""
    (scaled,) = deployed.parse((KEDA / "scaled-object.yaml").read_text(encoding="utf-8"))
    for query in deployed.keda_queries(scaled["spec"]):
        (pattern,) = set(re.findall(r'pod=~"([^"]+)"', query))
        assert re.fullmatch(pattern, f"{NAME}-5d4f8c7b96-x2k4p")
        assert not re.fullmatch(pattern, f"{NAME}-canary-5d4f8c7b96-x2k4p")


def test_object_store(tmp_path: Path) -> None:
    """`serve` fetches the URL into a volume; another URL replaces the pods."""
    kustomized = _kustomized(tmp_path, "object-store")
    container = deployed.server(kustomized)
    arguments = deployed.serve_arguments(container["args"])
    assert str(arguments["repository"]) == "$(MODELS)"
    assert str(arguments["cache"]) == _CACHE
    assert _volume(kustomized, _CACHE)["emptyDir"] == {"sizeLimit": "20Gi"}
    sources = [source.popitem()[1]["name"] for source in copy.deepcopy(container["envFrom"])]
    assert [name.partition("-")[0] for name in sources] == ["models", "models"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
    (config,) = [document for document in kustomized if document["kind"] == "ConfigMap"]
    assert config["data"] == {"MODELS": "s3://bucket/models"}
    name = config["metadata"]["name"]
    assert re.fullmatch(r"models-\w{10}", name)  # a hash of the contents
    assert deployed.server(kustomized)["envFrom"][0]["configMapRef"]["name"] == name


def test_no_operator(tmp_path: Path) -> None:
    """The component leaves out what needs the Prometheus operator; image and namespace are mine."""
    documents = _kustomized(tmp_path, "no-operator")
    kinds = {document["kind"] for document in deployed.build(BASE)}
    assert {document["kind"] for document in documents} - {"ConfigMap"} == kinds - {
        "PodMonitor",
        "PrometheusRule",
    }
    assert deployed.server(documents)["image"] == "registry.example.com/models:7"
    assert {document["metadata"]["namespace"] for document in documents} == {"inference"}


def _volume(documents: list[Document], path: str) -> Document:
    """Return the volume that the server mounts at a path."""
    mounts = deployed.server(documents)["volumeMounts"]
    (name,) = [mount["name"] for mount in mounts if mount["mountPath"] == path]
    (volume,) = [volume for volume in deployed.pod(documents)["volumes"] if volume["name"] == name]
    return dict(volume)
