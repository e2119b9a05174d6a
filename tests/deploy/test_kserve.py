"""deploy/kserve: valid for KServe, and consistent with deploy/kustomize."""

from __future__ import annotations

import copy

import deployed
import monitoring
import pytest
from deployed import KSERVE, Document

from torch_py_backend.server import tritonserver


def _read(name: str) -> Document:
    (document,) = deployed.parse((KSERVE / name).read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("name", sorted(path.name for path in KSERVE.iterdir()))
def test_schema(name: str) -> None:
    """KServe's own models accept every field; none that they require is missing."""
    deployed.validate(_read(name), "1.37")


def test_service_selects_the_runtime() -> None:
    """The InferenceService has the runtime's own format and protocol, and time to stop.

    A runtime of the cluster may select itself for `pytorch`; this one must be named for it.
    """
    runtime = _read("runtime.yaml")["spec"]
    predictor = _read("inference-service.yaml")["spec"]["predictor"]
    offered = {entry["name"]: entry["autoSelect"] for entry in runtime["supportedModelFormats"]}
    assert offered == {"pytorch-py": True, "pytorch": False}
    assert offered[predictor["model"]["modelFormat"]["name"]]
    assert predictor["model"]["protocolVersion"] in runtime["protocolVersions"]
    stop = 10 + tritonserver._EXIT_SECONDS + 2 * tritonserver._GRACE_SECONDS
    assert predictor["terminationGracePeriodSeconds"] > stop


def test_runtime_serves_as_the_base_does() -> None:
    """Probes, resources and arguments are the base's; paths and ports are KServe's."""
    spec = _read("runtime.yaml")["spec"]
    (container,) = spec["containers"]
    base = deployed.server(deployed.build(deployed.BASE))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        expected = copy.deepcopy(base[probe])
        expected["httpGet"]["port"] = 8003
        assert container[probe] == expected
    assert container["resources"] == base["resources"]
    kserve = {"/mnt/models", "--http-port=8080", "--grpc-port=9000"}
    assert set(container["args"]) - kserve == set(base["args"]) - {"/models"}
    # KServe maps the first port to 80 of the Service.
    assert [port["containerPort"] for port in container["ports"]] == [8080, 9000, 8002]
    assert container["volumeMounts"] == [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    assert deployed.unrestricted(spec) == set()


def test_autoscaler() -> None:
    """KServe scales on the queries and limits of the component `keda`, for its own pods."""
    service = _read("inference-service.yaml")
    assert service["metadata"]["annotations"]["serving.kserve.io/autoscalerClass"] == "keda"
    metrics = [
        metric["external"] for metric in service["spec"]["predictor"]["autoScaling"]["metrics"]
    ]
    text = (deployed.KEDA / "scaled-object.yaml").read_text(encoding="utf-8")
    (scaled,) = deployed.parse(text.replace(f"{deployed.NAME}-[", "digits-predictor-["))
    for metric, trigger in zip(metrics, scaled["spec"]["triggers"], strict=True):
        assert metric["metric"] == {
            "backend": trigger["type"],
            "serverAddress": trigger["metadata"]["serverAddress"],
            "query": trigger["metadata"]["query"],
        }
        # The field that KServe's controller reads for an external metric.
        assert metric["target"] == {"type": "Value", "value": trigger["metadata"]["threshold"]}


def test_monitor_selects_the_pods() -> None:
    """The PodMonitor scrapes the metrics port of the runtime's pods, and not those of the base."""
    spec = _read("runtime.yaml")["spec"]
    monitor = _read("pod-monitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= spec["labels"].items()
    assert spec["labels"][monitor["jobLabel"]] == monitoring.JOB
    (endpoint,) = monitor["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
    assert ports[endpoint["port"]] == 8002
    service = deployed.one(deployed.build(deployed.BASE), "Service")
    assert not service["spec"]["selector"].items() <= spec["labels"].items()
