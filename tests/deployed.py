"""What deploy/ becomes on its way to a cluster, and whether a cluster takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pykustomize
import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kustomize" / "base"
CHART = DEPLOY / "helm" / "torch-py-backend"
NAME = "torch-py-backend"
Document = dict[str, Any]


def parse(text: str) -> list[Document]:
    return [one for one in yaml.safe_load_all(text) if one]


def build(folder: Path) -> list[Document]:
    """What `kubectl apply --kustomize` sends."""
    return parse(asyncio.run(pykustomize.build(str(folder))).yaml)


def render(values: Mapping[str, Any], release: str = NAME) -> list[Document]:
    """What `helm install` sends."""
    raise NotImplementedError


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
