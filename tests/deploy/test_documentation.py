"""docs/deployment.md: its manifests are taken, and its commands name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import deployed
import pytest
from deployed import DEPLOY, ROOT

_TEXT = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"`(\S+\.yaml)`:\n\n```yaml\n(.*?)```", _TEXT, flags=re.DOTALL)

# Of the Prometheus operator, of the chart kube-prometheus-stack, and of KServe.
_OF_OTHERS = ("prometheus-operated", "kube-prometheus-stack-grafana", "digits-predictor")


def test_every_block_of_yaml_has_a_name() -> None:
    """All of them are tried here."""
    assert len(_BLOCKS) == _TEXT.count("```yaml") == 5


@pytest.mark.parametrize(
    ("name", "text"), _BLOCKS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(_BLOCKS)]
)
def test_manifests(name: str, text: str, tmp_path: Path) -> None:
    """A file of objects fits their schemas; a kustomization beside deploy/ builds some that do."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    kustomized = path.name == "kustomization.yaml"
    documents = deployed.build(path.parent) if kustomized else deployed.parse(text)
    assert documents
    for document in documents:
        deployed.validate(document, "1.37")
    if kustomized:
        assert deployed.server(documents)["image"] == "registry.example.com/torch-py-backend:1"


def test_the_volume_is_what_the_replicas_claim() -> None:
    """The PersistentVolumeClaim of step 3 has the name that the base and KServe ask for."""
    claim = deployed.one(_models(), "PersistentVolumeClaim", "models")
    (volume,) = [
        one
        for one in deployed.pod(deployed.build(deployed.BASE))["volumes"]
        if one["name"] == "models"
    ]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    service = (deployed.KSERVE / "inference-service.yaml").read_text(encoding="utf-8")
    assert f"storageUri: pvc://{claim['metadata']['name']}\n" in service


def test_the_pod_that_copies_is_the_replicas_user() -> None:
    """What it writes belongs to them, and it runs wherever they do, for as long as it is wanted."""
    pod = deployed.one(_models(), "Pod", "models")["spec"]
    theirs = deployed.pod(deployed.build(deployed.BASE))["securityContext"]
    assert theirs.items() <= pod["securityContext"].items()
    assert deployed.unrestricted(pod) == set()
    assert "sleep" not in pod["containers"][0]["command"]


def test_patches_of_the_reader_s(tmp_path: Path) -> None:
    """One kustomization adds to what is there; the other takes out what is the operator's."""
    patched, plain = (
        deployed.build(_laid_out(text, tmp_path / str(number)))
        for number, (_, text) in enumerate(_BLOCKS[2:4])
    )
    volumes = {one["name"]: one for one in deployed.pod(patched)["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    names = [one["name"] for one in deployed.server(patched)["env"]]
    assert set(names) == {"TORCH_PY_BACKEND_ADMIN_KEY", "OTEL_EXPORTER_OTLP_ENDPOINT"}
    monitor = deployed.one(patched, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    kinds = {one["kind"] for one in deployed.build(deployed.BASE)}
    assert {one["kind"] for one in plain} == kinds - {"PodMonitor", "PrometheusRule"}


def _models() -> list[deployed.Document]:
    return deployed.parse(dict(_BLOCKS[:1])["models.yaml"])


def _laid_out(text: str, folder: Path) -> Path:
    """A kustomization beside deploy/."""
    mine = folder / "inference"
    mine.mkdir(parents=True)
    (folder / "deploy").symlink_to(DEPLOY)
    (mine / "kustomization.yaml").write_text(text, encoding="utf-8")
    return mine


def test_paths_exist() -> None:
    """Whatever file or folder of this repository is named is there."""
    named = set(
        re.findall(r"(?<![\w/])(?:\.\./)?((?:deploy|docker|examples|tests)/[\w./-]*\w)", _TEXT)
    )
    assert {"deploy/haproxy.cfg", "deploy/kserve/runtime.yaml", "docker/Dockerfile"} <= named
    # What the text itself makes: the second version of a model on the volume.
    assert [one for one in named if not (ROOT / one).exists()] == []


def test_names_of_objects() -> None:
    """What kubectl is asked for is what the base makes, KServe, or a chart of others."""
    names = {
        (one["kind"].lower(), one["metadata"]["name"]) for one in deployed.build(deployed.BASE)
    }
    names |= {("service", one) for one in _OF_OTHERS}
    for kind, name in re.findall(r"\b(deployment|service)/([\w-]+)", _TEXT):
        assert (kind, name) in names
    assert ("service", "torch-py-backend-hosts") in names
