"""One node's Slurm, from Debian's packages: munged, slurmctld and slurmd in a folder of a test."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from helpers.daemon import python_environment
from helpers.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")


def missing() -> str:
    """What keeps Slurm from running here; "" if nothing does."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.getuid() == 0 else "slurmd must be root"


class SlurmCluster:
    """Its daemons, with the scripts of the tree."""

    def __init__(self, folder: Path, address: str, vram_mib: int) -> None:
        self.folder = folder
        self._logs = [folder / f"{name}.log" for name in ("munged", "slurmctld", "slurmd")]
        scripts = Path(__file__).parents[2] / "client" / "integrations" / "slurm"
        command = folder / "gpulease-slurm"
        paths = python_environment()["PYTHONPATH"]
        folders = f'[ "$1" = prolog ] && more="--daemon {address}"\n'
        command.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={paths}\nverb=$1\nmore=\n{folders}exec {sys.executable} -P -m "
            f'gpulease.client.integrations.slurm "$verb" --folder {folder}/jobs $more\n'
        )
        command.chmod(0o755)
        for name in ("prolog.sh", "task_prolog.sh", "epilog.sh"):
            text = (scripts / name).read_text().replace("/usr/local/bin/gpulease-slurm", str(command))
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        for name in ("state", "spool", "run"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._munge = folder / "run" / "munge.socket"
        self._configure(vram_mib)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []
        munged = ["munged", "--foreground", "--force", f"--socket={self._munge}", f"--key-file={key}"]
        munged += [
            f"--pid-file={folder}/run/munged.pid",
            f"--seed-file={folder}/run/seed",
            f"--log-file={folder}/m.log",
        ]
        try:
            self._start(munged)
            wait_until(self._munge.exists, "munged listens")
            self._start(["slurmctld", "-D", "-i"])
            self._start(["slurmd", "-D", "-N", "gpu1"])
            wait_until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), "the node is idle", seen=self.logs)
        except BaseException:
            self.stop()
            raise

    def _configure(self, vram_mib: int) -> None:
        ports = []
        for _ in range(2):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                ports.append(free.getsockname()[1])
        lines = f"""
ClusterName=test
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self._munge}
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool
SlurmctldPidFile={self.folder}/run/slurmctld.pid
SlurmdPidFile={self.folder}/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=vram
ReturnToService=2
MpiDefault=none
Prolog={self.folder}/prolog.sh
PrologFlags=Alloc
TaskProlog={self.folder}/task_prolog.sh
Epilog={self.folder}/epilog.sh
NodeName=gpu1 NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 Gres=vram:{vram_mib}
PartitionName=main Nodes=gpu1 Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:4
"""
        (self.folder / "slurm.conf").write_text(lines)
        (self.folder / "gres.conf").write_text(f"Name=vram Count={vram_mib}\n")

    def _start(self, command: list[str]) -> None:
        with self._logs[len(self._processes)].open("wb") as log:
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment)
            )

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
        return done.stdout + done.stderr

    def run_prolog(self, job: str) -> None:
        """Run a running job's prolog once more, as root's job has it. Fails with what it says if it fails."""
        told = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": "0", "SLURM_JOB_RESTART_COUNT": "0"}
        told |= {"SLURMD_NODENAME": "gpu1", "SLURM_CLUSTER_NAME": "test"}
        command = [str(self.folder / "prolog.sh")]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment | told, check=False)
        assert done.returncode == 0, done.stderr

    def submit(self, script: str, vram_mib: int, *options: str) -> str:
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        output = f"--output={self.folder}/job-%j.out"
        told = self.ask(
            "sbatch", "--parsable", output, "-t", "5", f"--gres=vram:{vram_mib}", *options, str(path)
        ).strip()
        assert told.isdecimal(), told
        return told

    def output(self, job: str) -> str:
        try:
            return (self.folder / f"job-{job}.out").read_text()
        except FileNotFoundError:
            return ""

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self._logs)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
