"""deploy/ and its README.md: manifests and a unit that are valid, and that fit `serve`."""

from __future__ import annotations

import asyncio
import configparser
import functools
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import cloudcoil.pydantic
import kubernetes_validate
import monitoring
import pytest
import typer.main
import yaml

from torch_py_backend.cli import commands
from torch_py_backend.server import tritonserver

_ROOT = Path(__file__).parents[2]
_DEPLOY = _ROOT / "deploy"
_NAME = "torch-py-backend"
_CACHE = "/var/cache/torch-py-backend"
# What serve takes to end a server, at most, after the drain.
_STOP_S = tritonserver.EXIT_SECONDS + 2 * tritonserver._GRACE_SECONDS
_KUSTOMIZATION = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: inference
resources: [../deploy/kustomize/base]
components: {components}
configMapGenerator: [{{name: models, literals: [MODELS=s3://bucket/models]}}]
images: [{{name: torch-py-backend, newName: registry.example.com/torch-py-backend, newTag: "1"}}]
"""
# In which module of cloudcoil.models each is.
_OPERATORS = {
    "PodMonitor": "prometheus_operator/v1",
    "PrometheusRule": "prometheus_operator/v1",
    "ScaledObject": "keda/v1alpha1",
}
Document: TypeAlias = dict[str, Any]
# Builds the kustomization that has this text and lies beside deploy/.
Build: TypeAlias = Callable[[str], list[Document]]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Kustomize itself; its package fits no environment, because it asks for a newer Python."""
    packages = tmp_path_factory.mktemp("packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    pip += ["--ignore-requires-python", "--target", str(packages), "pykustomize==0.1.4"]
    subprocess.run(pip, check=True)

    @functools.cache
    def kustomize(text: str) -> list[Document]:
        folder = tmp_path_factory.mktemp("kustomize")
        (folder / "deploy").symlink_to(_DEPLOY)
        (folder / "inference").mkdir()
        (folder / "inference" / "kustomization.yaml").write_text(text, encoding="utf-8")
        built = asyncio.run(package.build(str(folder / "inference")))
        return _parse(built.yaml)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        package = importlib.import_module("pykustomize")
        yield kustomize


def _parse(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


def _read(name: str) -> Document:
    (document,) = _parse((_DEPLOY / name).read_text(encoding="utf-8"))
    return document


def _with(*components: str) -> str:
    """Return the text of a kustomization with these components."""
    paths = [f"../deploy/kustomize/components/{name}" for name in components]
    return _KUSTOMIZATION.format(components=paths)


def _page() -> list[str]:
    """Return the kustomizations of deploy/README.md; the later ones are additions."""
    text = (_DEPLOY / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"kustomization.yaml`:\n\n```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert text.count("```yaml") == len(blocks) == 3
    return [block if "kind: Kustom" in block else blocks[0] + block for block in blocks]


_VARIANTS = {
    "base": _with(),
    "components": _with("gpu", "object-store"),
    "keda": _with("keda"),
    **{f"page {place}": text for place, text in enumerate(_page())},
}


@pytest.fixture(params=_VARIANTS, scope="module")
def documents(request: pytest.FixtureRequest, build: Build) -> list[Document]:
    return build(_VARIANTS[request.param])


def _one(documents: list[Document], kind: str, name: str = _NAME) -> Document:
    (found,) = [
        document
        for document in documents
        if (document["kind"], document["metadata"]["name"]) == (kind, name)
    ]
    return found


def _pod(documents: list[Document]) -> Document:
    return dict(_one(documents, "Deployment")["spec"]["template"]["spec"])


def _container(documents: list[Document]) -> Document:
    (container,) = _pod(documents)["containers"]
    return dict(container)


def _arguments(words: list[str]) -> Document:
    """Return the parameters of `torch-py-backend serve`, as the command line parses them."""
    program, command, *rest = words
    assert Path(program).name == "torch-py-backend"
    group: Any = typer.main.get_command(commands)
    with group.commands[command].make_context(command, rest) as context:
        return dict(context.params)


def _validate(document: Document) -> None:
    """Compare an object with its schemas, which allow no unknown field."""
    _validate_text(json.dumps(document))


@functools.cache
def _validate_text(text: str) -> None:
    document = json.loads(text)
    kind = document["kind"]
    if kind not in _OPERATORS:
        for version in ("1.27", "1.37"):
            kubernetes_validate.validate(document, version, strict=True)
        return
    parsed = getattr(_operator(_OPERATORS[kind]), kind).model_validate(document)
    # Unknown fields would be left out.
    assert parsed.model_dump(mode="json", by_alias=True, exclude_unset=True) == document


@functools.cache
def _operator(name: str) -> Any:
    """Import a module alone: the package of each would import others for seconds."""
    path = Path(cloudcoil.pydantic.__file__).parent / "models" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _assert_restricted(spec: Document) -> None:
    """The pod fits Pod Security's level `restricted`.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
    """
    for container in spec["containers"]:
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"]["drop"] == ["ALL"]
        both = {**spec.get("securityContext", {}), **own}
        assert both["runAsNonRoot"] is True
        assert both["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_oldest_and_newest_kubernetes_and_the_operators_accept_every_field(
    documents: list[Document],
) -> None:
    for document in documents:
        _validate(document)
    assert _container(documents)["image"] == "registry.example.com/torch-py-backend:1"


def test_selectors(documents: list[Document]) -> None:
    """Services, disruption budget, PodMonitor and topology spread select the Deployment's pods."""
    deployment = _one(documents, "Deployment")
    monitor = _one(documents, "PodMonitor")["spec"]
    (spread,) = _pod(documents)["topologySpreadConstraints"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
        _one(documents, "Service")["spec"]["selector"],
        _one(documents, "Service", f"{_NAME}-hosts")["spec"]["selector"],
        _one(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        monitor["selector"]["matchLabels"],
    ]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    # The alerts select this job.
    assert labels[monitor["jobLabel"]] == monitoring.JOB


def test_pods_fit_serve(documents: list[Document]) -> None:
    """Ports and probes are those of `serve`; connections end within its drain and the grace."""
    container = _container(documents)
    arguments = _arguments(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    services = ("http", "grpc", "metrics", "health")
    assert ports == {name: arguments[f"{name}_port"] for name in services}
    for service in (_NAME, f"{_NAME}-hosts"):
        for port in _one(documents, "Service", service)["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    probes = {"startup": "/live", "liveness": "/live", "readiness": "/ready"}
    for probe, path in probes.items():
        request = container[f"{probe}Probe"]["httpGet"]
        assert (request["path"], request["port"]) == (path, "health")
    assert arguments["address"] == "0.0.0.0"
    name, _, milliseconds = arguments["arguments"][0].partition("=")
    assert name == "--grpc-max-connection-age"
    assert 1.1 * int(milliseconds) < 1000 * arguments["drain"]  # gRPC adds up to 10 %
    grace = _pod(documents)["terminationGracePeriodSeconds"]
    assert grace > arguments["drain"] + _STOP_S


def test_security(documents: list[Document]) -> None:
    """Pods are restricted, and write only to memory, /tmp and the cache of an object store."""
    _assert_restricted(_pod(documents))
    container = _container(documents)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]
    }
    models = {_CACHE: False} if _CACHE in mounts else {"/models": True}
    assert mounts == {"/dev/shm": False, "/tmp": False, **models}


def test_keda(build: Build) -> None:
    """The ScaledObject scales the Deployment, and its queries select this Deployment's pods."""
    documents = build(_with("keda"))
    spec = _one(documents, "ScaledObject")["spec"]
    assert spec["scaleTargetRef"]["name"] == _NAME
    assert spec["minReplicaCount"] == _one(build(_with()), "Deployment")["spec"]["replicas"]
    assert "replicas" not in _one(documents, "Deployment")["spec"]
    for trigger in spec["triggers"]:
        (pattern,) = set(re.findall(r'pod=~"([^"]+)"', trigger["metadata"]["query"]))
        assert re.fullmatch(pattern, f"{_NAME}-5d4f8c7b96-x2k4p")
        assert not re.fullmatch(pattern, f"{_NAME}-canary-5d4f8c7b96-x2k4p")


def test_object_store(build: Build) -> None:
    """`serve` fetches the URL into a volume; a changed URL replaces the pods."""
    documents = build(_with("object-store"))
    container = _container(documents)
    arguments = _arguments(container["args"])
    assert str(arguments["repository"]) == "$(MODELS)"
    assert str(arguments["cache"]) == _CACHE
    (config,) = [document for document in documents if document["kind"] == "ConfigMap"]
    assert config["data"] == {"MODELS": "s3://bucket/models"}
    assert re.fullmatch(r"models-\w{10}", config["metadata"]["name"])  # a hash of the contents
    assert container["envFrom"][0]["configMapRef"]["name"] == config["metadata"]["name"]


def test_no_operator_leaves_out_what_needs_the_prometheus_operator(build: Build) -> None:
    kinds = [{one["kind"] for one in build(_with(*names))} for names in ((), ("no-operator",))]
    assert kinds[0] - kinds[1] == {"PodMonitor", "PrometheusRule"}


def test_models_volume(build: Build) -> None:
    """Replicas mount the claim, and the pod that copies models has their user."""
    documents = _parse((_DEPLOY / "models-volume.yaml").read_text(encoding="utf-8"))
    for document in documents:
        _validate(document)
    base = _pod(build(_with()))
    (claim,) = [one["persistentVolumeClaim"] for one in base["volumes"] if one["name"] == "models"]
    _one(documents, "PersistentVolumeClaim", claim["claimName"])
    pod = _one(documents, "Pod", "models")["spec"]
    assert base["securityContext"].items() <= pod["securityContext"].items()
    _assert_restricted(pod)


def test_kserve_runtime(build: Build) -> None:
    """The runtime is a valid pod with probes, resources and arguments of the base."""
    spec = _read("kserve/runtime.yaml")["spec"]
    pod = {key: spec[key] for key in ("containers", "volumes")}
    kind = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runtime"}}
    _validate({**kind, "spec": pod})
    _assert_restricted(pod)
    (container,) = spec["containers"]
    base = _container(build(_with()))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        request = {**base[probe]["httpGet"], "port": 8003}
        assert container[probe] == {**base[probe], "httpGet": request}
    assert container["resources"] == base["resources"]
    kserve = {"/mnt/models", "--http-port=8080", "--grpc-port=9000"}
    assert set(container["args"]) - kserve == set(base["args"]) - {"/models"}
    # KServe maps the first port to 80 of the Service.
    assert [port["containerPort"] for port in container["ports"]] == [8080, 9000, 8002]
    monitor = _read("kserve/pod-monitor.yaml")
    _validate(monitor)
    assert monitor["spec"]["selector"]["matchLabels"].items() <= spec["labels"].items()
    assert spec["labels"][monitor["spec"]["jobLabel"]] == monitoring.JOB


def test_kserve_service() -> None:
    """The InferenceService selects the runtime and scales on the queries of the component keda."""
    predictor = _read("kserve/inference-service.yaml")["spec"]["predictor"]
    formats = _read("kserve/runtime.yaml")["spec"]["supportedModelFormats"]
    selected = {entry["name"] for entry in formats if entry["autoSelect"]}
    assert selected == {predictor["model"]["modelFormat"]["name"]}
    assert predictor["terminationGracePeriodSeconds"] > 10 + _STOP_S
    text = monitoring.SCALED_OBJECT.read_text(encoding="utf-8")
    (scaled,) = _parse(text.replace(f"{_NAME}-[", "digits-predictor-["))
    metrics = predictor["autoScaling"]["metrics"]
    for metric, trigger in zip(metrics, scaled["spec"]["triggers"], strict=True):
        assert metric["external"]["metric"]["query"] == trigger["metadata"]["query"]
        value = trigger["metadata"]["threshold"]
        assert metric["external"]["target"] == {"type": "Value", "value": value}


def test_systemd() -> None:
    """Systemd kills nothing before the drain has ended; the arguments are those of HAProxy's."""
    unit = configparser.ConfigParser(interpolation=None)
    text = (_DEPLOY / "systemd" / "torch-py-backend.service").read_text(encoding="utf-8")
    unit.read_string(text.replace("\\\n", " "))
    service = unit["Service"]
    arguments = _arguments(shlex.split(service["ExecStart"]))
    assert service["KillMode"] == "mixed"  # only `serve` gets the signal
    assert service["Restart"] == "always"
    assert int(service["TimeoutStopSec"]) > arguments["drain"] + _STOP_S
    balancer = re.sub(r"[\s\\#]+", " ", (_DEPLOY / "haproxy.cfg").read_text(encoding="utf-8"))
    assert arguments["address"] == "0.0.0.0"
    assert f"--drain={arguments['drain']:g} " in balancer
    assert f"--restrict={arguments['restrict']} " in balancer
