"""A real Kubernetes control plane, without nodes: etcd, API server, controller manager and scheduler.

GPULEASE_KUBERNETES=FOLDER names the folder with kube-apiserver, kube-controller-manager and kube-scheduler. kubectl is
the host's.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from helpers.etcd_cluster import EtcdCluster
from helpers.free_ports import free_port
from helpers.kubernetes_api import MANIFESTS
from helpers.waiting import wait_until

FOLDER: Final = os.environ.get("GPULEASE_KUBERNETES", "")
VERSION: Final = os.environ.get("GPULEASE_KUBERNETES_VERSION", "")
OF_VERSION: Final = (
    (f"--emulated-version={VERSION}", "--feature-gates=DRAConsumableCapacity=true,DRADeviceTaints=true")
    if VERSION
    else ()
)
"""Options of all three programs."""
PROGRAMS: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
TOKENS: Final = (
    ("admin", "system:masters"),
    ("system:kube-controller-manager", ""),
    ("system:kube-scheduler", ""),
    ("system:node:node-a", "system:nodes"),
)
"""Users that the API server recognises by a token, which is the user's name: (user, group)."""


def need_control_plane() -> None:
    lacking = [name for name in PROGRAMS if not Path(FOLDER, name).exists()]
    if not FOLDER or lacking or shutil.which("kubectl") is None:
        pytest.skip(
            "GPULEASE_KUBERNETES=FOLDER of kube-apiserver, kube-controller-manager, kube-scheduler; and kubectl"
        )


class ControlPlane:
    """The programs, each with its log in the folder. Use it as a context manager.

    Attributes:
        url: The API server's address.
        ca: The file with the certificate of the authority that signed the API server's certificate.
    """

    def __init__(self, folder: Path) -> None:
        need_control_plane()
        self.folder = folder
        self._port = free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.ca = folder / "certificates" / "apiserver.crt"
        self._etcd = EtcdCluster(folder / "etcd")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "ControlPlane":
        self._etcd.__enter__()
        try:
            self._start_api_server()
            for name in PROGRAMS[1:]:
                options = [f"--kubeconfig={self.config(f'system:{name}')}", "--leader-elect=false"]
                options += [*OF_VERSION, "--authorization-always-allow-paths=*", f"--secure-port={free_port()}"]
                options += [f"--cert-dir={self.folder / name}", "--bind-address=127.0.0.1"]
                if name == "kube-controller-manager":
                    options += [f"--service-account-private-key-file={self.folder / 'account.key'}"]
                    options += ["--use-service-account-credentials=true"]
                self.start(name, *options)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._processes)):
            self.stop(name)
        self._etcd.__exit__()

    def start(self, name: str, *options: str, prefix: Sequence[str] = ()) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [*prefix, str(Path(FOLDER, name)), *options]
            self._processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self, name: str) -> None:
        """Kill a program. Has no effect if it is not running."""
        if process := self._processes.pop(name, None):
            process.kill()
            process.wait()

    def kubectl(self, *arguments: str, given: str = "", user: str = "admin") -> str:
        """Run kubectl, and return its output. Fails the test with kubectl's error."""
        done = self.try_kubectl(*arguments, given=given, user=user)
        assert done.returncode == 0, f"{arguments}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def try_kubectl(self, *arguments: str, given: str = "", user: str = "admin") -> subprocess.CompletedProcess[str]:
        command = ["kubectl", f"--kubeconfig={self.config(user)}", *arguments]
        environment = os.environ | {"HOME": str(self.folder)}
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=environment)

    def get(self, *arguments: str) -> Any:
        """Run `kubectl get`, and return the object, or the items of a list."""
        found = json.loads(self.kubectl("get", "-o", "json", *arguments))
        return found.get("items", found)

    def apply(self, *documents: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(documents))

    def apply_manifests(self) -> None:
        """Apply the manifests as the guide says. kubectl and the server validate them by Kubernetes' schemas."""
        self.kubectl("apply", "--validate=strict", "-k", str(MANIFESTS))

    def add_node(self, name: str) -> None:
        """Add a node on which the scheduler may place pods."""
        self.apply(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}
        )
        status = {"capacity": {"cpu": "8", "memory": "8Gi", "pods": "100"}}
        status["allocatable"] = status["capacity"]
        status["conditions"] = [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}]  # type: ignore[assignment]
        self.kubectl(
            "patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
        )

    def driver_token(self, node: str) -> Path:
        """Return a file with a token of the driver's service account on a node, like that of the driver's pod."""
        bound = ("--bound-object-kind=Node", f"--bound-object-name={node}")
        path = self.folder / f"token-{node}"
        path.write_text(self.kubectl("create", "token", "-n", "gpulease", "gpulease-dra", *bound))
        return path

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.log")
        )

    def _start_api_server(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (self.folder / "account.key").write_bytes(private)
        lines = [f'{user},{user},{user},"{group}"' for user, group in TOKENS]
        (self.folder / "tokens.csv").write_text("\n".join(lines) + "\n")
        self.start(
            "kube-apiserver",
            *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={self._port}"),
            f"--etcd-servers=http://{self._etcd.endpoints[0]}",
            f"--cert-dir={self.ca.parent}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self.folder / 'account.key'}",
            f"--service-account-key-file={self.folder / 'account.key'}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=Node,RBAC",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--endpoint-reconciler-type=none",
            *OF_VERSION,
        )
        ready = ("get", "--raw", "/readyz")
        wait_until(lambda: self.ca.exists(), "the API server has its certificate", seen=self.logs)
        wait_until(lambda: self.try_kubectl(*ready).stdout == "ok", "the API server is ready", seen=self.logs)

    def config(self, user: str) -> Path:
        """Return the kubeconfig file of a user who has a token."""
        path = self.folder / f"{user.replace(':', '-')}.config"
        cluster = {"server": self.url, "certificate-authority": str(self.ca)}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": user, "user": {"token": user}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
                    "current-context": "test",
                }
            )
        )
        return path
