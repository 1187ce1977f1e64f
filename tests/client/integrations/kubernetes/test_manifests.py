"""The manifests: Kubernetes' types have all that they say, and what they say fits the driver and its image."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightkube.models import admissionregistration_v1, apps_v1, core_v1, rbac_v1, resource_v1

from gpulease.client.core.assigned_leases import FOLDER_VARIABLE
from gpulease.client.decode.openai.decode_settings import load_decode_settings
from gpulease.client.integrations.kubernetes.kubelet_plugin import ClaimRef
from gpulease.client.integrations.kubernetes.kubernetes_objects import parse_claim
from gpulease.client.integrations.kubernetes.resource_pool import DRIVER
from helpers.kubelet import NODE, Claim
from helpers.kubernetes_api import MANIFESTS, Refused, check_type

KINDS = {
    f"{api}/{kind}": module
    for api, module, kinds in (
        ("v1", core_v1, ("Namespace", "ServiceAccount", "Pod", "Service", "ConfigMap")),
        ("apps/v1", apps_v1, ("DaemonSet", "Deployment")),
        ("rbac.authorization.k8s.io/v1", rbac_v1, ("ClusterRole", "ClusterRoleBinding")),
        ("resource.k8s.io/v1", resource_v1, ("DeviceClass", "ResourceClaimTemplate")),
        (
            "admissionregistration.k8s.io/v1",
            admissionregistration_v1,
            ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
        ),
    )
    for kind in kinds
}
FILES = sorted(path for path in MANIFESTS.rglob("*.yaml") if path.name != "kustomization.yaml")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def every(kind: str) -> list[dict[str, Any]]:
    return [found for path in FILES for found in documents(path) if found["kind"] == kind]


def pod_specs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in FILES:
        for found in documents(path):
            if found["kind"] in ("DaemonSet", "Deployment"):
                yield found["metadata"]["name"], found["spec"]["template"]["spec"]
            elif found["kind"] == "Pod":
                yield found["metadata"]["name"], found["spec"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kubernetes_types_have_all_that_a_manifest_says(path: Path) -> None:
    for found in documents(path):
        module = KINDS[f"{found['apiVersion']}/{found['kind']}"]
        check_type(found, getattr(module, found["kind"]))


def test_a_manifest_with_an_unknown_field_is_refused() -> None:
    (found,) = documents(MANIFESTS / "deviceclass.yaml")
    found["spec"]["selector"] = found["spec"].pop("selectors")
    with pytest.raises(Refused, match="unknown field"):
        check_type(found, resource_v1.DeviceClass)


def test_the_kustomization_has_every_file_but_the_examples() -> None:
    listed = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in FILES if path.parent == MANIFESTS)
    if shutil.which("kubectl"):
        built = subprocess.run(["kubectl", "kustomize", str(MANIFESTS)], capture_output=True, text=True, check=True)
        names = [(found["kind"], found["metadata"]["name"]) for found in yaml.safe_load_all(built.stdout)]
        assert len(names) == sum(len(documents(MANIFESTS / name)) for name in listed)


def test_every_tenant_s_pod_meets_the_restricted_standard() -> None:
    tenants = [(name, spec) for name, spec in pod_specs() if name != "gpulease-dra"]
    assert len(tenants) == 4
    for name, spec in tenants:
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not any("hostPath" in volume for volume in spec.get("volumes", [])), name
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name


def test_a_claim_s_user_is_the_one_that_its_pods_run_as() -> None:
    users = {
        found["metadata"]["name"]: found["spec"]["spec"]["devices"]["config"][0]["opaque"]["parameters"]["user"]
        for found in every("ResourceClaimTemplate")
    }
    used = set()
    for _, spec in pod_specs():
        for claim in spec.get("resourceClaims", []):
            used.add(claim["resourceClaimTemplateName"])
            assert users[claim["resourceClaimTemplateName"]] == spec["securityContext"]["runAsUser"]
    assert used == users.keys()


def test_the_driver_accepts_the_examples_parameters() -> None:
    for found in every("ResourceClaimTemplate"):
        (config,) = found["spec"]["spec"]["devices"]["config"]
        parameters = {k: v for k, v in config["opaque"]["parameters"].items() if k not in ("apiVersion", "kind")}
        claim = Claim({"gpu": ("card", "1Gi")}, parameters=parameters)
        want = parse_claim(claim.as_object(), ClaimRef(claim.namespace, claim.uid, claim.name), DRIVER, NODE)
        assert want.devices[0].user == parameters["user"]


def test_the_decode_server_accepts_the_example_s_settings(tmp_path: Path) -> None:
    (found,) = every("ConfigMap")
    model = tmp_path / "model"
    model.mkdir()
    path = tmp_path / "decode.toml"
    path.write_text(found["data"]["decode.toml"].replace("/models/SmolLM2-135M", str(model)))
    assert "ann" in [tenant.id for tenant in load_decode_settings(path).tenants]


def test_the_image_has_what_the_manifests_start() -> None:
    containerfile = (Path(__file__).parents[4] / "systemd" / "Containerfile").read_text()
    extras = re.findall(r"\[([a-z,-]+)\]", containerfile)[0].split(",")
    assert {"dra", "decode", "fleet"} <= set(extras)


def test_the_guide_names_what_a_container_gets() -> None:
    guide = (MANIFESTS.parent / "README.md").read_text()
    assert FOLDER_VARIABLE in guide
    for path in FILES:
        assert path.parent == MANIFESTS or f"examples/{path.name}" in guide
