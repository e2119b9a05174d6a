"""deploy/kustomize and deploy/helm: built by their own tools, compared with official schemas."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deployed
import monitoring
import pytest
import typer.main
import yaml
from deployed import BASE, CHART, DEPLOY, NAME, Document

from torch_py_backend.cli import commands
from torch_py_backend.server import tritonserver
from torch_py_backend.server.readiness import ReadinessServer
from torch_py_backend.server.supervision import Snapshot

_KUBERNETES = ("1.27", "1.37")
_KINDS = {
    ("Deployment", NAME),
    ("Service", NAME),
    ("Service", f"{NAME}-hosts"),
    ("HorizontalPodAutoscaler", NAME),
    ("PodDisruptionBudget", NAME),
    ("PodMonitor", NAME),
    ("PrometheusRule", NAME),
}
_MINE = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: inference
resources: [{base}]
components: {components}
configMapGenerator: [{{name: models, literals: [MODELS=s3:bucket/models]}}]
images: [{{name: torch-py-backend, newName: registry.example.com/models, newTag: "7"}}]
"""


def _kustomized(*components: str) -> Callable[[Path], list[Document]]:
    """The base with components, as a kustomization of a user's has them."""

    def make(folder: Path) -> list[Document]:
        (folder / "deploy").symlink_to(DEPLOY)
        mine = folder / "mine"
        mine.mkdir()
        paths = [f"../deploy/kustomize/components/{one}" for one in components]
        text = _MINE.format(base="../deploy/kustomize/base", components=paths)
        (mine / "kustomization.yaml").write_text(text, encoding="utf-8")
        return deployed.build(mine)

    return make


_WAYS: dict[str, Callable[[Path], list[Document]]] = {
    "base": lambda _: deployed.build(BASE),
    "gpu": _kustomized("gpu"),
    "object-store": _kustomized("object-store"),
    "both": _kustomized("gpu", "object-store"),
    "chart": lambda _: deployed.render({}),
    "chart-gpus": lambda _: deployed.render(
        {
            "gpus": 2,
            "drain": 30,
            "arguments": ["--restarts=3"],
            "tritonArguments": ["--log-verbose=1"],
        }
    ),
    "chart-object-store": lambda _: deployed.render(
        {"models": {"objectStore": {"path": "s3:bucket/models"}}}
    ),
}


@pytest.fixture(params=_WAYS)
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> list[Document]:
    """All objects, one way after another to come by them."""
    return _WAYS[request.param](tmp_path)


# --- schemas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", _KUBERNETES)
def test_every_object_fits_its_schema(documents: list[Document], version: str) -> None:
    """Kubernetes and the Prometheus operator take what is sent, without an unknown field."""
    for document in documents:
        deployed.validate(document, version)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec.template.spec.terminationGracePeriod", 60),
        ("Deployment", "spec.strategy.rollingUpdate.maxSurge", [1]),
        ("HorizontalPodAutoscaler", "spec.metrics", "queue"),
        ("PodDisruptionBudget", "spec.maxUnavailabel", 1),
        ("PodMonitor", "spec.podMetricsEndpoint", []),
        ("PodMonitor", "spec.podMetricsEndpoints", "metrics"),
        ("PrometheusRule", "spec.group", []),
        ("PrometheusRule", "spec.groups", [{"name": "mine", "rules": [{"alert": "Mine"}]}]),
    ],
)
def test_the_schemas_find_mistakes(kind: str, path: str, value: Any) -> None:
    """A misspelt field, and a value of another type, do not pass."""
    broken = copy.deepcopy(deployed.one(deployed.build(BASE), kind))
    *parents, last = path.split(".")
    inner = broken
    for key in parents:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(deployed.Misfit):
        deployed.validate(broken, _KUBERNETES[-1])


# --- what belongs together -------------------------------------------------------------------


def test_all_kinds_are_there(documents: list[Document]) -> None:
    """Deployment, Services, autoscaler, disruption budget, PodMonitor and PrometheusRule."""
    found = {(one["kind"], one["metadata"]["name"]) for one in documents}
    assert found - {one for one in found if one[0] == "ConfigMap"} == _KINDS


def test_the_kustomization_names_every_file() -> None:
    """No manifest is left out."""
    for file in DEPLOY.glob("kustomize/**/kustomization.yaml"):
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        named = set(document.get("resources", ())) | {
            one["path"] for one in document.get("patches", ())
        }
        assert named == {one.name for one in file.parent.glob("*.yaml")} - {file.name}


def test_the_alerts_are_those_of_the_file(documents: list[Document]) -> None:
    """They are copies of deploy/prometheus/alerts.yaml, and the job is the one that they name."""
    assert deployed.one(documents, "PrometheusRule")["spec"] == monitoring.alerts()
    monitor = deployed.one(documents, "PodMonitor")["spec"]
    pods = deployed.one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pods[monitor["jobLabel"]] == monitoring.JOB


def test_selectors_find_the_pods(documents: list[Document]) -> None:
    """Services, budget, PodMonitor and the spread over nodes mean the Deployment's pods."""
    deployment = deployed.one(documents, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    (spread,) = deployed.pod(documents)["topologySpreadConstraints"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
        deployed.one(documents, "Service")["spec"]["selector"],
        deployed.one(documents, "Service", f"{NAME}-hosts")["spec"]["selector"],
        deployed.one(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        deployed.one(documents, "PodMonitor")["spec"]["selector"]["matchLabels"],
    ]
    assert all(one and one.items() <= labels for one in selectors)
    target = deployed.one(documents, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", NAME)


def test_ports_are_those_of_serve(documents: list[Document]) -> None:
    """The container's ports are what `serve` listens on, and all that is named is one of them."""
    container = deployed.server(documents)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    arguments = _arguments(container["args"])
    assert ports == {name: arguments[f"{name}_port"] for name in ports}
    assert set(ports) == {"http", "grpc", "metrics", "health"}
    for service in (NAME, f"{NAME}-hosts"):
        for port in deployed.one(documents, "Service", service)["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    (endpoint,) = deployed.one(documents, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    probes = [container[f"{one}Probe"]["httpGet"] for one in ("startup", "liveness", "readiness")]
    assert [one["port"] for one in probes] == ["health"] * 3
    assert arguments["address"] == "0.0.0.0"


def test_probes_ask_what_readiness_answers(documents: list[Document]) -> None:
    """Start and liveness: tritonserver answers. ReadinessServer: every model that should serves."""
    container = deployed.server(documents)
    snapshot = Snapshot({"m": "is being loaded"}, "", time.monotonic())
    with ReadinessServer("127.0.0.1", 0, lambda: snapshot, lambda: True) as readiness:
        statuses = {
            probe: readiness.answer(container[f"{probe}Probe"]["httpGet"]["path"])[0].value
            for probe in ("startup", "liveness", "readiness")
        }
    assert statuses == {"startup": 200, "liveness": 200, "readiness": 503}


def test_grace_is_longer_than_leaving_takes(documents: list[Document]) -> None:
    """Kubernetes kills after the drain, Triton's own limit and the end of its processes."""
    drain = _arguments(deployed.server(documents)["args"])["drain"]
    assert drain >= 10
    leaving = drain + tritonserver._EXIT_SECONDS + 2 * tritonserver._GRACE_SECONDS
    assert deployed.pod(documents)["terminationGracePeriodSeconds"] > leaving


def test_grpc_clients_leave_within_the_drain(documents: list[Document]) -> None:
    """Their connections end, with what gRPC adds to them (10 %), before the replica does."""
    arguments = _arguments(deployed.server(documents)["args"])
    age, *others = arguments["arguments"]
    name, _, milliseconds = age.partition("=")
    assert name == "--grpc-max-connection-age"
    assert 1.1 * int(milliseconds) < 1000 * arguments["drain"]
    # What is the user's goes to whom it is for.
    assert others == (["--log-verbose=1"] if arguments["restarts"] == 3 else [])


def test_shared_memory_is_memory(documents: list[Document]) -> None:
    """/dev/shm is a volume in memory, which the container's limit holds."""
    (volume,) = _volumes(documents, "/dev/shm")
    assert volume["emptyDir"]["medium"] == "Memory"
    assert volume["emptyDir"]["sizeLimit"] == "1Gi"
    assert deployed.server(documents)["resources"]["limits"]["memory"] == "8Gi"


def test_nothing_else_is_written_to(documents: list[Document]) -> None:
    """The root is read-only and so are the models; /tmp and /dev/shm are volumes."""
    container = deployed.server(documents)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
    assert mounts == {"/models": True, "/dev/shm": False, "/tmp": False}
    assert deployed.pod(documents)["securityContext"]["runAsNonRoot"]
    names = {one["name"] for one in deployed.pod(documents)["volumes"]}
    assert names == {one["name"] for one in container["volumeMounts"]}


def test_pod_security(documents: list[Document]) -> None:
    """A namespace whose pods are `restricted` takes them; a pod that asks for more is found."""
    spec = deployed.pod(documents)
    assert deployed.unrestricted(spec) == set()
    del spec["securityContext"]["runAsNonRoot"]
    spec["containers"][0]["securityContext"]["capabilities"] = {"add": ["SYS_ADMIN"]}
    assert deployed.unrestricted(spec) == {"runAsNonRoot", "capabilities"}


def test_the_image_is_pulled_once(documents: list[Document]) -> None:
    """Also one without a tag, which Kubernetes would ask its registry for at each start."""
    assert deployed.server(documents)["imagePullPolicy"] == "IfNotPresent"


def test_the_autoscaler_reads_what_the_adapter_makes(documents: list[Document]) -> None:
    """The metric's name is the rule's; three replicas at least, and each may be replaced."""
    adapter = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
    (rule,) = adapter["rules"]["custom"]
    spec = deployed.one(documents, "HorizontalPodAutoscaler")["spec"]
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert spec["minReplicas"] == 3
    assert "replicas" not in deployed.one(documents, "Deployment")["spec"]
    assert deployed.one(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_the_adapter_s_query_is_promql() -> None:
    """With what the adapter puts in, Prometheus can read it."""
    adapter = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text(encoding="utf-8"))
    (rule,) = adapter["rules"]["custom"]
    query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod")
    query = query.replace("<<.LabelMatchers>>", 'namespace="inference",pod=~"a|b"')
    assert "<<" not in query
    deployed.parse_promql(query)
    deployed.parse_promql(rule["seriesQuery"])


# --- components and values -------------------------------------------------------------------


def test_gpus(tmp_path: Path) -> None:
    """A GPU each; an old replica leaves first, for there is no spare one."""
    ways = (_kustomized("gpu")(tmp_path), deployed.render({"gpus": 1}))
    for documents in ways:
        assert deployed.server(documents)["resources"]["limits"]["nvidia.com/gpu"] == "1"
        update = deployed.one(documents, "Deployment")["spec"]["strategy"]["rollingUpdate"]
        assert update == {"maxSurge": 0, "maxUnavailable": 1}
        (toleration,) = deployed.pod(documents)["tolerations"]
        assert toleration["key"] == "nvidia.com/gpu"


def test_models_of_an_object_store(tmp_path: Path) -> None:
    """They are copied into the volume that the server reads; no claim is needed."""
    ways = (
        _kustomized("object-store")(tmp_path),
        deployed.render({"models": {"objectStore": {"path": "s3:bucket/models"}}}),
    )
    for documents in ways:
        (volume,) = _volumes(documents, "/models")
        assert "persistentVolumeClaim" not in volume
        assert "emptyDir" in volume
        (copying,) = deployed.pod(documents)["initContainers"]
        assert {one["name"] for one in copying["volumeMounts"]} == {volume["name"], "scratch"}
        assert [one["name"] for one in copying["env"]] == ["MODELS"]


def test_a_change_of_the_store_s_path_replaces_the_pods(tmp_path: Path) -> None:
    """Kustomize names the ConfigMap by its contents; the pods refer to that name."""
    documents = _kustomized("object-store")(tmp_path)
    (made,) = [one for one in documents if one["kind"] == "ConfigMap"]
    name = made["metadata"]["name"]
    assert re.fullmatch(r"models-\w{10}", name)
    (copying,) = deployed.pod(documents)["initContainers"]
    assert copying["env"][0]["valueFrom"]["configMapKeyRef"]["name"] == name
    assert copying["envFrom"][0]["configMapRef"]["name"] == name


def test_a_kustomization_of_one_s_own(tmp_path: Path) -> None:
    """Image and namespace of the user's reach every object."""
    documents = _kustomized()(tmp_path)
    assert deployed.server(documents)["image"] == "registry.example.com/models:7"
    assert {one["metadata"]["namespace"] for one in documents} == {"inference"}


def test_the_chart_makes_what_the_base_makes() -> None:
    """But for Helm's own labels, both are the same."""
    helm_s = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"}
    assert _by_name(_without(deployed.render({}), helm_s)) == _by_name(deployed.build(BASE))


def test_what_the_chart_takes_for_an_operator_and_for_models() -> None:
    """Labels that a Prometheus asks for, and variables beside the chart's own."""
    label, variable = {"release": "prometheus"}, {"name": "OTEL_SERVICE_NAME", "value": "models"}
    documents = deployed.render(
        {
            "podMonitor": {"labels": label},
            "alerts": {"labels": label},
            "environment": [variable],
            "image": {"pullPolicy": "Always"},
        }
    )
    for kind in ("PodMonitor", "PrometheusRule"):
        assert label.items() <= deployed.one(documents, kind)["metadata"]["labels"].items()
    container = deployed.server(documents)
    assert [one["name"] for one in container["env"]] == [
        "TORCH_PY_BACKEND_ADMIN_KEY",
        variable["name"],
    ]
    assert container["imagePullPolicy"] == "Always"
    for document in documents:
        deployed.validate(document, _KUBERNETES[-1])


def test_two_releases_of_the_chart_do_not_meet() -> None:
    """Their objects have other names, and their selectors other labels."""
    first, second = (deployed.render({}, release) for release in ("a", "b"))
    assert not _by_name(first).keys() & _by_name(second).keys()
    selectors = [
        deployed.one(documents, "Service", name)["spec"]["selector"]
        for documents, name in ((first, "a"), (second, "b"))
    ]
    assert selectors[0] != selectors[1]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replicas": 3}, "replicas"),
        ({"drain": -1}, "drain"),
        ({"drain": "10s"}, "drain"),
        ({"gpus": "one"}, "gpus"),
        ({"image": {"repository": ""}}, "repository"),
        ({"sharedMemory": "a lot"}, "sharedMemory"),
        ({"arguments": ["restarts=3"]}, "arguments"),
        ({"arguments": ["--"]}, "arguments"),
        ({"models": {"pvc": "models"}}, "pvc"),
        ({"environment": [{"value": "1"}]}, "name"),
        ({"podMonitor": {"labels": {"release": 1}}}, "release"),
    ],
)
def test_the_chart_refuses_other_values(values: Document, says: str) -> None:
    """What it does not know, or cannot be, is an error with the value's name."""
    with pytest.raises(Exception, match=says):
        deployed.render(values)


def test_the_chart_s_values_are_all_used() -> None:
    """No value without a use in a template, and none in a template that values.yaml lacks."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    used = set()
    for template in (CHART / "templates").iterdir():
        used |= set(re.findall(r"\.Values\.(\w+)", template.read_text(encoding="utf-8")))
    assert used == values.keys()


def _arguments(words: list[str]) -> dict[str, Any]:
    """What the command makes of its words."""
    program, command, *rest = words
    assert program == "torch-py-backend"
    found = typer.main.get_command(commands).commands[command]  # type: ignore[attr-defined]
    with found.make_context(command, rest) as context:
        return dict(context.params)


def _volumes(documents: list[Document], path: str) -> list[Document]:
    """The volume that the server sees at a path."""
    mounts = deployed.server(documents)["volumeMounts"]
    names = [one["name"] for one in mounts if one["mountPath"] == path]
    return [one for one in deployed.pod(documents)["volumes"] if one["name"] in names]


def _by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(inner, keys) for key, inner in value.items() if key not in keys}
    return [_without(inner, keys) for inner in value] if isinstance(value, list) else value
