"""The driver's requests to the cluster's API server, through lightkube.

Objects are plain maps, so that fields that lightkube does not support are kept.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.models import Cluster, User
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.resources.core_v1 import Node
from lightkube.types import PatchType

from gpulease.client.integrations.kubernetes.cluster_refusals import ClusterRefused
from gpulease.client.integrations.kubernetes.resource_pool import API, DRIVER

API_LIMIT_S: Final = 10.0
"""Maximum seconds to wait for the API server. The kubelet waits 45 s for the whole request."""

WATCH_S: Final = 300
"""Seconds after which the server ends a watch, which the driver then continues on another connection. A lost connection
is noticed within this time."""

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_GROUP, _VERSION = API.split("/")
_Slice: Final = create_global_resource(_GROUP, _VERSION, "ResourceSlice", "resourceslices")
_Claim: Final = create_namespaced_resource(_GROUP, _VERSION, "ResourceClaim", "resourceclaims")


class KubernetesCluster:
    """Requests to the API server, with the service account of this pod. Thread-safe.

    Every method raises ClusterRefused.
    """

    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None) -> None:
        """Prepare requests. Raises ClusterRefused for a URL that would send the token unencrypted over a network."""
        parts = urlsplit(url)
        is_local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        if parts.scheme not in ("https", "http") or (parts.scheme == "http" and not is_local):
            raise ClusterRefused(f"the API server must be https, not {url!r}; http is for this host's `kubectl proxy`")
        user = User(token_file=None if token_file is None else str(token_file))
        config = KubeConfig.from_one(
            cluster=Cluster(server=url, certificate_auth=None if ca_file is None else str(ca_file)), user=user
        )
        # Ignore the environment's proxies, which are not for the API server of this cluster.
        self._client: Any = Client(
            config.get(), timeout=httpx2.Timeout(API_LIMIT_S), trust_env=False, field_manager=DRIVER
        )

    @classmethod
    def of_pod(cls) -> "KubernetesCluster":
        """Return the cluster in which this pod runs. Raises ClusterRefused if this is not a pod."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port:
            raise ClusterRefused("this is not a pod of a cluster, so --api-server must be given")
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", _ACCOUNT / "token", _ACCOUNT / "ca.crt")

    def claim(self, namespace: str, name: str) -> Mapping[str, Any]:
        with _refusals(f"the claim {namespace}/{name}"):
            return dict(self._client.get(_Claim, name, namespace=namespace))

    def report_devices(self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]]) -> None:
        """Write this driver's entries of a claim's status.devices. Entries of other drivers are not changed.

        If the claim was deleted and created again, it has another uid, and the request fails with the code 409.
        """
        body = {
            "apiVersion": API,
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "status": {"devices": devices},
        }
        # This is a server-side apply. The server merges the list by driver, pool and device, and removes earlier
        # entries of this driver that are not in the body.
        with _refusals(f"the status of the claim {namespace}/{name}"):
            self._client.patch(_Claim.Status, name, body, namespace=namespace, patch_type=PatchType.APPLY, force=True)

    def node_uid(self, name: str) -> str:
        with _refusals(f"the node {name}"):
            return str(self._client.get(Node, name).metadata.uid)

    def slices(self, node: str) -> tuple[list[dict[str, Any]], str]:
        """Return this driver's slices of a node, and the resourceVersion from which to watch them."""
        with _refusals("the list of ResourceSlices"):
            slices = self._client.list(_Slice, fields=_fields(node))
            items = [dict(item) for item in slices]
            return items, str(slices.resourceVersion)

    def watch_slices(self, node: str, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (ADDED, MODIFIED or DELETED, slice) for each change after a resourceVersion, until the watch fails.

        Raises ClusterRefused with the code 410 if the version is too old.
        """
        with _refusals("the watch of ResourceSlices"):
            for kind, slice_object in self._client.watch(
                _Slice, fields=_fields(node), resource_version=version, server_timeout=WATCH_S
            ):
                yield kind, dict(slice_object)

    def create_slice(self, slice_object: Mapping[str, Any]) -> dict[str, Any]:
        """Create a slice. Returns it as stored. Code 409 means that it exists."""
        with _refusals(f"creating the ResourceSlice {slice_object['metadata']['name']}"):
            return dict(self._client.create(_Slice(**slice_object)))

    def replace_slice(self, slice_object: Mapping[str, Any]) -> dict[str, Any]:
        """Replace a slice. Returns it as stored. Code 409: its resourceVersion differs from `slice_object`'s."""
        with _refusals(f"replacing the ResourceSlice {slice_object['metadata']['name']}"):
            return dict(self._client.replace(_Slice(**slice_object)))

    def delete_slice(self, name: str) -> None:
        with _refusals(f"deleting the ResourceSlice {name}"):
            self._client.delete(_Slice, name)

    def close(self) -> None:
        """Close the connections, which ends a watch in another thread."""
        self._client.close()


def _fields(node: str) -> dict[str, str]:
    return {"spec.driver": DRIVER, "spec.nodeName": node}


@contextmanager
def _refusals(label: str) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        code = int(error.status.code or 0)
        raise ClusterRefused(f"the API server answers {code} for {label}: {error.status.message}", code) from None
    except httpx2.HTTPStatusError as error:
        code = error.response.status_code
        raise ClusterRefused(f"the API server answers {code} for {label}", code) from None
    # The client raises RuntimeError if it was closed, when the driver stops.
    except (httpx2.HTTPError, httpx2.StreamError, ConfigError, OSError, RuntimeError) as error:
        raise ClusterRefused(f"the API server gives no answer for {label}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        # msgspec's errors are ValueErrors: a body that is not JSON, or not an object.
        raise ClusterRefused(f"the API server's answer for {label} can't be read: {error}") from None
