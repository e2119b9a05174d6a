"""docs/deployment.md: valid manifests, and names of files and objects that exist."""

from __future__ import annotations

import re
from pathlib import Path

import deployed
import pytest
from deployed import DEPLOY, ROOT

_TEXT = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
_KUSTOMIZATIONS = re.findall(
    r"`inference/kustomization.yaml`:\n\n```yaml\n(.*?)```", _TEXT, flags=re.DOTALL
)
# Services of the Prometheus operator, of the chart kube-prometheus-stack, and of KServe.
_OTHER_SERVICES = ("prometheus-operated", "kube-prometheus-stack-grafana", "digits-predictor")


_PLAIN, _PATCHED, _OBJECT_STORE = range(3)


@pytest.mark.parametrize("place", range(3))
def test_kustomizations(place: int, tmp_path: Path) -> None:
    """A kustomization beside deploy/ builds valid objects with the reader's image."""
    assert _TEXT.count("```yaml") == len(_KUSTOMIZATIONS) == 3
    documents = _build(_KUSTOMIZATIONS[place], tmp_path)
    for document in documents:
        deployed.validate(document, "1.37")
    assert deployed.server(documents)["image"] == "registry.example.com/torch-py-backend:1"


def test_patches(tmp_path: Path) -> None:
    """The patches add to the base; they replace neither its volumes nor its variables."""
    documents = _build(_KUSTOMIZATIONS[_PATCHED], tmp_path)
    volumes = {volume["name"]: volume for volume in deployed.pod(documents)["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    names = {variable["name"] for variable in deployed.server(documents)["env"]}
    assert names == {"TORCH_PY_BACKEND_ADMIN_KEY", "OTEL_EXPORTER_OTLP_ENDPOINT"}
    monitor = deployed.one(documents, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_object_store(tmp_path: Path) -> None:
    """The URL and the credentials are variables of the server; none is an argument."""
    documents = _build(_KUSTOMIZATIONS[_OBJECT_STORE], tmp_path)
    names = {
        document["kind"]: document["metadata"]["name"]
        for document in documents
        if document["kind"] in ("ConfigMap", "Secret")
    }
    container = deployed.server(documents)
    config, secret = container["envFrom"]
    assert config["configMapRef"]["name"] == names["ConfigMap"]
    assert secret["secretRef"]["name"] == names["Secret"]
    assert "YOUR_KEY" not in str(container)


def _build(text: str, folder: Path) -> list[deployed.Document]:
    if "kind: Kustomization" not in text:  # an addition to the first one
        text = _KUSTOMIZATIONS[_PLAIN] + text
    (folder / "deploy").symlink_to(DEPLOY)
    (folder / "inference").mkdir()
    (folder / "inference" / "kustomization.yaml").write_text(text, encoding="utf-8")
    return deployed.build(folder / "inference")


def test_models_volume() -> None:
    """Replicas and KServe mount the claim; the pod that copies models has the replicas' user."""
    documents = deployed.parse((DEPLOY / "models-volume.yaml").read_text(encoding="utf-8"))
    for document in documents:
        deployed.validate(document, "1.37")
    base = deployed.pod(deployed.build(deployed.BASE))
    (volume,) = [volume for volume in base["volumes"] if volume["name"] == "models"]
    deployed.one(documents, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
    service = (deployed.KSERVE / "inference-service.yaml").read_text(encoding="utf-8")
    assert "storageUri: pvc://models\n" in service
    pod = deployed.one(documents, "Pod", "models")["spec"]
    assert base["securityContext"].items() <= pod["securityContext"].items()
    assert deployed.unrestricted(pod) == set()


def test_names_exist() -> None:
    """Each file of this repository, deployment and service that the page names exists."""
    paths = set(re.findall(r"(?<![\w/])(?:\.\./)?((?:deploy|docker|tests)/[\w./-]*\w)", _TEXT))
    assert "deploy/kserve/runtime.yaml" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    base = deployed.build(deployed.BASE)
    names = {(document["kind"].lower(), document["metadata"]["name"]) for document in base}
    names |= {("service", name) for name in _OTHER_SERVICES}
    assert set(re.findall(r"\b(deployment|service)/([\w-]+)", _TEXT)) <= names
