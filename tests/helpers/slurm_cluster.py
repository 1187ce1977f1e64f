"""A Slurm cluster of one node, from Debian's packages: munged, slurmctld and slurmd, in a test's folder.

With GPULEASE_SLURM_ROOT=FOLDER, it uses the Slurm in another root folder, for example one of a newer Debian that
debootstrap made. That root must also have a python3 with the client's packages.
"""

import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.daemon import python_environment
from helpers.free_ports import free_port, free_ports
from helpers.processes import stop_process
from helpers.waiting import PATIENCE_S, wait_until

LOGS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "service")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
ROOT = os.environ.get("GPULEASE_SLURM_ROOT", "")
PYTHON = "/usr/bin/python3" if ROOT else sys.executable


def has(program: str) -> bool:
    if not ROOT:
        return shutil.which(program) is not None
    return any(Path(ROOT, folder, program).exists() for folder in ("usr/bin", "usr/sbin"))


def in_root(*command: str) -> list[str]:
    """Return a command that runs another one with the programs in Slurm's root. It can see the test's folders."""
    if not ROOT:
        return list(command)
    # The folders that tests write, the source tree, and the kernel's folders that Slurm reads.
    folders = ["/proc", "/dev", "/sys", "/tmp", "/var/lib", str(Path(__file__).parents[2])]
    script = "".join(f'mkdir -p "$root{folder}" && mount --rbind {folder} "$root{folder}" && ' for folder in folders)
    enter = f'root={ROOT} && mount --make-rprivate / && {script} exec chroot "$root" "$@"'
    return ["unshare", "--mount", "sh", "-c", enter, "sh", *command]


def missing() -> str:
    """Return the reason why Slurm can't run here; "" if it can."""
    lacking = [name for name in PROGRAMS if not has(name)]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.getuid() == 0 else "slurmd must be root"


def missing_accounting() -> str:
    """Return the reason why Slurm's accounting can't run here; "" if it can."""
    # The database always runs with the host's programs: slurmdbd 24.11 does not start on MariaDB 11.8.
    lacking = [name for name in ("mariadbd", "mariadb-install-db") if shutil.which(name) is None]
    lacking += [] if has("slurmdbd") else ["slurmdbd"]
    return missing() or (f"no {', '.join(lacking)}: apt-get install slurmdbd mariadb-server" if lacking else "")


class SlurmCluster:
    """The cluster's daemons, configured with the scripts of this source tree."""

    def __init__(
        self,
        folder: Path,
        address: str,
        vram_mib: int,
        largest_mib: int = 1 << 20,
        cards: int = 1,
        card_type: str = "",
        *,
        has_accounting: bool = False,
    ) -> None:
        self.folder = folder
        self._logs = [folder / f"{name}.log" for name in LOGS]
        scripts = Path(__file__).parents[2] / "client" / "integrations" / "slurm"
        self._command = command = folder / "gpulease-slurm"
        paths = python_environment()["PYTHONPATH"]
        folders = f'[ "$1" = prolog ] && more="--daemon {address}"\n'
        command.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={paths}\nverb=$1\nmore=\n{folders}exec {PYTHON} -P -m "
            f'gpulease.client.integrations.slurm "$verb" --folder {folder}/jobs $more\n'
        )
        command.chmod(0o755)
        for name in ("prolog.sh", "task_prolog.sh", "epilog.sh"):
            text = (scripts / name).read_text().replace("/usr/local/bin/gpulease-slurm", str(command))
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        policy = (scripts / "job_submit.lua").read_text()
        (folder / "job_submit.lua").write_text(policy.replace("= 81920", f"= {largest_mib}"))
        for name in ("state", "spool", "run"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._munge = folder / "run" / "munge.socket"
        self._configure(vram_mib, cards, card_type)
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
            if has_accounting:
                self._start_accounting()
            self._start(["slurmctld", "-D", "-i"])
            self._start(["slurmd", "-D", "-N", "gpu1"])
            wait_until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), "the node is idle", seen=self.logs)
            self.start_service()
        except BaseException:
            self.stop()
            raise

    def _configure(self, vram_mib: int, cards: int, card_type: str) -> None:
        ports = free_ports(2)
        of_type = f":{card_type}" if card_type else ""
        gres = f"vram{of_type}:{vram_mib},vram_cards:no_consume:{cards}"
        lines = f"""
ClusterName=test
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self._munge},cred_expire=5
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
GresTypes=vram,vram_cards
JobSubmitPlugins=lua
ReturnToService=2
MpiDefault=none
Prolog={self.folder}/prolog.sh
PrologFlags=Alloc
TaskProlog={self.folder}/task_prolog.sh
Epilog={self.folder}/epilog.sh
NodeName=gpu1 NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 Gres={gres}
PartitionName=main Nodes=gpu1 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
        (self.folder / "slurm.conf").write_text(lines)
        of_type = f" Type={card_type}" if card_type else ""
        counts = f"Name=vram{of_type} Count={vram_mib}\nName=vram_cards Count={cards}\n"
        (self.folder / "gres.conf").write_text(counts)

    def _start_accounting(self) -> None:
        """Start a database in the folder, and slurmdbd on it, and make slurmctld use slurmdbd."""
        data, database = self.folder / "data", self.folder / "run" / "database.socket"
        made = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root"]
        subprocess.run([*made, "--auth-root-authentication-method=normal"], capture_output=True, check=True)
        self._start(
            [
                "mariadbd",
                "--no-defaults",
                f"--datadir={data}",
                f"--socket={database}",
                "--skip-networking",
                "--user=root",
            ]
        )
        wait_until(database.exists, "the database listens", seen=self.logs)
        # slurmdbd's client library finds the database's socket by this variable.
        self.environment |= {"MYSQL_UNIX_PORT": str(database)}
        port = free_port()
        configuration = self.folder / "slurmdbd.conf"
        configuration.write_text(f"""
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self._munge}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
PidFile={self.folder}/run/slurmdbd.pid
""")
        configuration.chmod(0o600)
        with (self.folder / "slurm.conf").open("a") as file:
            file.write(
                f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
                f"AccountingStoragePort={port}\nAccountingStoragePass={self._munge}\n"
            )
        self._start(["slurmdbd", "-D"])
        add = ("sacctmgr", "-i", "add")
        wait_until(lambda: "test" in self.ask(*add, "cluster", "test"), "the accounting answers", seen=self.logs)
        self.ask(*add, "account", "site")
        self.ask(*add, "user", "root", "account=site")

    def use_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process's Slurm commands use this cluster, with the programs of its version."""
        monkeypatch.setenv("SLURM_CONF", str(self.folder / "slurm.conf"))
        if ROOT:
            commands = self.folder / "commands"
            commands.mkdir(exist_ok=True)
            for name in ("squeue", "sacct", "sacctmgr"):
                (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join(in_root(f"/usr/bin/{name}"))} "$@"\n')
                (commands / name).chmod(0o755)
            monkeypatch.setenv("PATH", str(commands), prepend=":")

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Stop one of the programs with SIGSTOP during the block, as if it hung."""
        (found,) = [process for process in self._processes if name in process.args]  # type: ignore[operator]
        stop_process(found.pid)
        try:
            yield
        finally:
            found.send_signal(signal.SIGCONT)

    def start_service(self) -> None:
        """Start the service that renews leases, and wait until prologs can reach it."""
        lock = self.folder / "jobs" / "service"
        self._start([str(self._command), "service"])
        wait_until(lambda: lock.exists() and _is_locked(lock), "the service runs", seen=self.logs)

    def stop_service(self) -> None:
        """Stop the service, which must be the process that was started last."""
        self._processes[-1].terminate()
        self._processes[-1].wait(PATIENCE_S)

    def _start(self, command: list[str]) -> None:
        name = "service" if command[0] == str(self._command) else command[0]
        log_path = self.folder / f"{name}.log"
        with log_path.open("ab") as log:
            started = subprocess.Popen(
                command if name == "mariadbd" else in_root(*command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )
        self._processes.append(started)

    def ask(self, *command: str) -> str:
        done = subprocess.run(in_root(*command), capture_output=True, text=True, env=self.environment, check=False)
        return done.stdout + done.stderr

    def run_prolog(self, job: str, vram_mib: int = 64, restarts: int = 0) -> None:
        """Run a running job's prolog again, as slurmd would. Fails with its output if it fails."""
        given = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": "0", "SLURM_JOB_RESTART_COUNT": str(restarts)}
        given |= {"SLURMD_NODENAME": "gpu1", "SLURM_CLUSTER_NAME": "test"}
        given |= {"SLURM_JOB_COMMENT": f"mine [vram_mib={vram_mib}]"}
        command = in_root(str(self.folder / "prolog.sh"))
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment | given, check=False)
        assert done.returncode == 0, done.stderr

    def submit(self, script: str, vram_mib: int, *options: str) -> str:
        """Submit a job's script, and return the job's number. Set `vram_mib` to 0 if the options contain --gres."""
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        name = "%A_%a" if any(option.startswith("--array") for option in options) else "%j"
        output = f"--output={self.folder}/job-{name}.out"
        gres = [f"--gres=vram:{vram_mib}"] if vram_mib else []
        told = self.ask("sbatch", "--parsable", output, "-t", "5", *gres, *options, str(path)).strip()
        assert told.isdecimal(), told
        return told

    def output(self, job: str) -> str:
        try:
            return (self.folder / f"job-{job}.out").read_text()
        except FileNotFoundError:
            return ""

    def logs(self) -> str:
        written = [path for path in self._logs if path.exists()]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in written)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_locked(path: Path) -> bool:
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
