"""A real node of a test's control plane: kubelet and containerd, with all their files in one folder.

GPULEASE_KUBERNETES names a folder. For a node it must also contain kubelet, containerd, containerd-shim-runc-v2, ctr,
and images.tar with two images: `registry.example/pause:1`, which sleeps, and `gpulease:latest`, built from
systemd/Containerfile. runc is the host's.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from helpers.control_plane import FOLDER, ControlPlane
from helpers.waiting import wait_until

NEEDED: Final = ("kubelet", "containerd", "containerd-shim-runc-v2", "ctr", "images.tar")


def need_node() -> None:
    if os.geteuid() != 0 or not shutil.which("runc") or not all(Path(FOLDER, name).exists() for name in NEEDED):
        pytest.skip(f"GPULEASE_KUBERNETES=FOLDER with {', '.join(NEEDED)}; root, and runc")


class ClusterNode:
    """The node's programs. Use it as a context manager: afterwards its containers, mounts and processes are gone.

    Attributes:
        folder: The kubelet's folder.
        cdi: The folder of CDI specifications that containerd reads.
    """

    def __init__(self, control_plane: ControlPlane, name: str, folder: Path) -> None:
        need_node()
        self.name, self.folder, self.cdi = name, folder / "kubelet", folder / "cdi"
        self._control_plane, self._base = control_plane, folder
        self._socket = folder / "containerd.sock"

    def __enter__(self) -> "ClusterNode":
        for made in (self.folder / "plugins_registry", self.cdi):
            made.mkdir(parents=True)
        self._start_containerd()
        try:
            self._start_kubelet()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._control_plane.stop("kubelet")
        # Do what the kubelet would have done: end the tasks, then unmount everything below the folder.
        for task in self._ctr("task", "ls", "-q").split():
            self._ctr("task", "kill", "-s", "SIGKILL", task)
        wait_until(lambda: "RUNNING" not in self._ctr("task", "ls"), "the containers end")
        for container in self._ctr("container", "ls", "-q").split():
            self._ctr("task", "rm", container)
            self._ctr("container", "rm", container)
        self._control_plane.stop("containerd")
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in reversed([mount for mount in mounts if mount.startswith(f"{self._base}/")]):
            subprocess.run(["umount", "--lazy", mount], check=False)

    def _start_containerd(self) -> None:
        binaries = f"{FOLDER}:{os.environ['PATH']}"
        (self._base / "containerd.toml").write_text(f"""
version = 2
root = "{self._base}/containerd"
state = "{self._base}/containerd-state"
[grpc]
address = "{self._socket}"
[ttrpc]
address = "{self._socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "registry.example/pause:1"
enable_cdi = true
cdi_spec_dirs = ["{self.cdi}"]
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{self._base}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
""")
        self._control_plane.start(
            "containerd", "--config", str(self._base / "containerd.toml"), prefix=("env", f"PATH={binaries}")
        )
        wait_until(self._socket.exists, "containerd listens", seen=self._control_plane.logs)
        wait_until(lambda: "Server" in self._ctr("version"), "containerd answers", seen=self._control_plane.logs)
        assert "unpacking" in self._ctr("images", "import", str(Path(FOLDER, "images.tar")))

    def _start_kubelet(self) -> None:
        configuration = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "address": "127.0.0.1",
            "port": 0,
            "healthzPort": 0,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "podLogsDir": str(self._base / "logs"),
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
        }
        (self._base / "kubelet.json").write_text(json.dumps(configuration))
        self._control_plane.start(
            "kubelet",
            f"--config={self._base / 'kubelet.json'}",
            f"--kubeconfig={self._control_plane.config(f'system:node:{self.name}')}",
            f"--hostname-override={self.name}",
            f"--root-dir={self.folder}",
            f"--cert-dir={self._base / 'pki'}",
        )
        registered = ("get", "node", self.name)
        wait_until(
            lambda: self._control_plane.try_kubectl(*registered).returncode == 0,
            "the kubelet has registered its node",
            seen=self._control_plane.logs,
        )

    def restart_kubelet(self) -> None:
        self._control_plane.stop("kubelet")
        self._start_kubelet()

    def log_of(self, pod: str) -> str:
        """Return the output of a pod's container."""
        paths = sorted((self._base / "logs").glob(f"*_{pod}_*/main/*.log"))
        lines = [line for path in paths for line in path.read_text().splitlines()]
        return "\n".join(line.split(" ", 3)[3] for line in lines)

    def _ctr(self, *arguments: str) -> str:
        command = [str(Path(FOLDER, "ctr")), "--address", str(self._socket), "-n", "k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr
