"""docs/deployment.md: its manifests are taken, and its commands name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import deployed
import pytest
from deployed import DEPLOY, ROOT

_TEXT = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"`(\S+\.yaml)`:\n\n```yaml\n(.*?)```", _TEXT, flags=re.DOTALL)


def test_every_block_of_yaml_has_a_name() -> None:
    """All of them are tried here."""
    assert len(_BLOCKS) == _TEXT.count("```yaml") == 3


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
    """The PersistentVolumeClaim of step 2 has the name that the base asks for."""
    claim = deployed.one(
        deployed.parse(dict(_BLOCKS[:1])["models.yaml"]), "PersistentVolumeClaim", "models"
    )
    (volume,) = [
        one
        for one in deployed.pod(deployed.build(deployed.BASE))["volumes"]
        if one["name"] == "models"
    ]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_paths_exist() -> None:
    """Whatever file or folder of this repository is named is there."""
    named = set(
        re.findall(r"(?<![\w/])(?:\.\./)?((?:deploy|docker|examples|tests)/[\w./-]*\w)", _TEXT)
    )
    assert {"deploy/haproxy.cfg", "deploy/kserve/runtime.yaml", "docker/Dockerfile"} <= named
    # What the text itself makes: the second version of a model on the volume.
    assert [one for one in named if not (ROOT / one).exists()] == []


def test_names_of_objects() -> None:
    """What kubectl is asked for is what the base makes."""
    names = {
        (one["kind"].lower(), one["metadata"]["name"]) for one in deployed.build(deployed.BASE)
    }
    for kind, name in re.findall(r"\b(deployment|service)/([\w-]+)", _TEXT):
        assert (kind, name) in names
    assert ("service", "torch-py-backend-hosts") in names
