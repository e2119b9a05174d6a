"""deploy/kserve: what KServe's own models take, and what belongs together."""

from __future__ import annotations

import copy
from typing import Any

import deployed
import monitoring
import pytest
from deployed import KSERVE, Document

from torch_py_backend.server import tritonserver


def _read(name: str) -> Document:
    (document,) = deployed.parse((KSERVE / name).read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("name", sorted(one.name for one in KSERVE.iterdir()))
def test_fits_kserve_s_schema(name: str) -> None:
    """Every field is one of KServe's, and of its type; none that it requires is missing."""
    deployed.validate(_read(name), "1.37")


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("runtime.yaml", "spec.container", []),
        ("runtime.yaml", "spec.containers", "triton"),
        ("runtime.yaml", "spec.containers", None),
        ("runtime.yaml", "spec.supportedModelFormats", [{"autoselect": True, "name": "a"}]),
        ("inference-service.yaml", "spec.predictor.model.storageURI", "pvc://models"),
        ("inference-service.yaml", "spec.predictor.minReplicas", "three"),
        ("inference-service.yaml", "spec.predictor", None),
    ],
)
def test_the_schema_finds_mistakes(name: str, path: str, value: Any) -> None:
    """A misspelt field, a value of another type, and what is missing do not pass."""
    broken = copy.deepcopy(_read(name))
    *parents, last = path.split(".")
    inner = broken
    for key in parents:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(deployed.Misfit):
        deployed.validate(broken, "1.37")


def test_the_service_is_served_by_the_runtime() -> None:
    """Its format and protocol are among the runtime's, which is chosen by itself."""
    (offered,) = _read("runtime.yaml")["spec"]["supportedModelFormats"]
    model = _read("inference-service.yaml")["spec"]["predictor"]["model"]
    assert model["modelFormat"]["name"] == offered["name"]
    assert offered["autoSelect"]
    assert model["protocolVersion"] in _read("runtime.yaml")["spec"]["protocolVersions"]


def test_the_runtime_serves_as_the_base_does() -> None:
    """Probes, resources and shared memory are the base's; KServe's paths and ports are its own."""
    (container,) = _read("runtime.yaml")["spec"]["containers"]
    ours = deployed.server(deployed.build(deployed.BASE))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        expected = copy.deepcopy(ours[probe])
        expected["httpGet"]["port"] = 8003
        assert container[probe] == expected
    assert container["resources"] == ours["resources"]
    kserve_s = {"/mnt/models", "--http-port=8080", "--grpc-port=9000"}
    assert set(container["args"]) - kserve_s == set(ours["args"]) - {"/models"}
    assert container["imagePullPolicy"] == ours["imagePullPolicy"]
    assert container["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]


def test_every_port_is_in_the_service() -> None:
    """KServe makes the Service of the container's ports: HTTP, the first, becomes 80."""
    (container,) = _read("runtime.yaml")["spec"]["containers"]
    ports = [one["containerPort"] for one in container["ports"]]
    assert ports == [8080, 9000, 8002]
    assert {"--http-port=8080", "--grpc-port=9000"} <= set(container["args"])


def test_the_monitor_finds_the_runtime_s_pods() -> None:
    """By a label that Services of the base do not select, which is the job's name for alerts."""
    spec = _read("runtime.yaml")["spec"]
    monitor = _read("pod-monitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= spec["labels"].items()
    assert spec["labels"][monitor["jobLabel"]] == monitoring.JOB
    (endpoint,) = monitor["podMetricsEndpoints"]
    ports = {one["name"]: one["containerPort"] for one in spec["containers"][0]["ports"]}
    assert ports[endpoint["port"]] == 8002
    service = deployed.one(deployed.build(deployed.BASE), "Service")
    assert not service["spec"]["selector"].items() <= spec["labels"].items()


def test_pod_security() -> None:
    """A namespace whose pods are `restricted` takes them."""
    assert deployed.unrestricted(_read("runtime.yaml")["spec"]) == set()


def test_grace_is_longer_than_leaving_takes() -> None:
    """Kubernetes kills after the drain, Triton's own limit and the end of its processes."""
    grace = _read("inference-service.yaml")["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert grace > 10 + tritonserver._EXIT_SECONDS + 2 * tritonserver._GRACE_SECONDS
