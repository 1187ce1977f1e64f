"""Slurm's scripts in Slurm itself, on a real daemon."""

import fcntl
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpulease.client import GpuBuilder
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.reports import cards_of
from gpulease.client.errors import Denied
from gpulease.client.integrations.other_user import RefusedForUser
from gpulease.client.integrations.slurm import __main__ as slurm
from gpulease.client.integrations.slurm import slurm_jobs
from gpulease.client.integrations.slurm.job_records import JobRecord, JobRecords
from gpulease.client.integrations.slurm.job_usage import JobUsage
from gpulease.client.integrations.slurm.node_memory import bytes_without_job, countable_mib, lacks_room_by_others
from gpulease.client.integrations.slurm.other_users import as_user
from gpulease.client.integrations.slurm.slurm_jobs import JobRequest, JobState, request_of_job, state_of_job
from gpulease.protocol.opcodes import Status
from helpers.daemon import Daemon, Faults, python_environment
from helpers.slurm_cluster import PYTHON, SlurmCluster, missing, missing_accounting
from helpers.waiting import wait_until

needs_slurm = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is there")

BAD_IDS = '{"user": 1000, "restarts": 2, "address": "unix:/x", "lease_ids": [1]}'
OLDER = {"lease_id": "ab" * 16, "is_ready": True, "refusal": ""}

PROGRAM = """
import os
from gpulease.client import GpuSession
session = GpuSession.attach()
buffer = session.mem_alloc(12 << 20)
session.mem_write(buffer, 0, b'from a job')
print(bytes(session.mem_read(buffer, 0, 10)).decode(), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("comment", "request_"),
    [
        ("[vram_mib=16]", JobRequest(16 << 20)),
        ("of mine [vram_mib=16]", JobRequest(16 << 20)),
        ("[vram_mib=48] [vram_mib=16]", JobRequest(16 << 20)),
        ("[vram_mib=16 cards=2]", JobRequest(8 << 20, 2)),
        ("[vram_mib=16 type=h100]", JobRequest(16 << 20, 1, "h100")),
        ("[vram_mib=16 cards=2 type=h100]", JobRequest(8 << 20, 2, "h100")),
        ("[vram_mib=16] of mine", None),
        ("[vram_mib=\u0661]", None),
        ("[vram_mib=16 cards=\u0661]", None),
        ("[vram_mib=16 cards=65]", None),
        ("[vram_mib=]", None),
        ("[vram_mib=0]", None),
        ("[vram_mib=-1]", None),
        ("caf\udce9 [vram_mib=2]", JobRequest(2 << 20)),
        ("", None),
    ],
)
def test_a_job_s_request_is_the_mark_at_the_end_of_its_comment(comment: str, request_: JobRequest | None) -> None:
    assert request_of_job({"SLURM_JOB_COMMENT": comment}) == request_


def test_a_card_is_of_a_type_by_the_rule_of_gres_conf() -> None:
    assert JobRequest(1, 1, "H100_80gb").fits("NVIDIA H100 80GB HBM3")
    assert not JobRequest(1, 1, "h200").fits("NVIDIA H100 80GB HBM3")
    assert JobRequest(1).fits("any")


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ("echo RUNNING", JobState.LIVES),
        ("echo SUSPENDED", JobState.LIVES),
        ("echo COMPLETING", JobState.LIVES),
        ("printf '\\351\\n'", JobState.LIVES),
        ("echo COMPLETED", JobState.OVER),
        ("echo PENDING", JobState.OVER),
        ("true", JobState.OVER),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", JobState.OVER),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", JobState.UNKNOWN),
        ("sleep 60", JobState.UNKNOWN),
    ],
)
def test_slurmctld_alone_says_that_a_job_is_over(
    script: str, state: JobState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if "sleep" in script:
        monkeypatch.setattr(slurm_jobs, "COMMAND_LIMIT_S", 0.2)
    assert state_of_job("7", "gpu1") is state


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    records, record = JobRecords(tmp_path / "jobs"), JobRecord(1000, 2, "unix:/x", ("ab" * 16, "cd" * 16), True)
    assert records.read("7") is None
    records.write("7", record)
    assert (records.read("7"), records.jobs()) == (record, ["7"])
    for text in ("", "[]", "{}", '{"user": "1000", "restarts": 2, "address": "unix:/x"}', '{"no": 1}', BAD_IDS):
        (tmp_path / "jobs" / "7.json").write_text(text)
        with pytest.raises(MissingPrerequisite, match="must be a job's record"):
            records.read("7")
    records.forget("7")
    records.forget("7")
    assert records.jobs() == []
    # A job that runs while its node is upgraded: one lease, in the record's earlier form.
    (tmp_path / "jobs" / "7.json").write_text(json.dumps({"user": 1000, "restarts": 2, "address": "unix:/x"} | OLDER))
    assert records.read("7") == JobRecord(1000, 2, "unix:/x", ("ab" * 16,), True)


def test_a_job_s_usage_is_the_sum_over_its_starts(tmp_path: Path) -> None:
    records = JobRecords(tmp_path / "jobs")
    assert records.usage("7") == JobUsage()
    usage = JobUsage().plus({"state": "torndown", "size_bytes": 2 << 20, "age_ms": 1500, "gpu_seconds": 0.25})
    records.write_usage("7", usage.plus({"state": "torndown"}))
    assert (records.usage("7"), records.used(), records.jobs()) == (JobUsage(3 << 20, 0.25), ["7"], [])
    (tmp_path / "jobs" / "7.usage").write_text("[]")
    with pytest.raises(MissingPrerequisite, match="must be a job's usage"):
        records.usage("7")
    records.forget_usage("7")
    assert records.used() == []


def card_of(available_gib: float, **more: Any) -> dict[str, Any]:
    """A card of 80 GiB of which a context takes half a GiB."""
    sizes = {"capacity_bytes": 80 << 30, "available_bytes": int(available_gib * (1 << 30))}
    other = {"index": 0, "name": "H100", "uuid": "GPU-1", "leases": 0, "fenced_bytes": 0, "exclusive": False}
    return other | sizes | more


def test_the_count_of_an_idle_card_leaves_room_for_the_contexts_of_its_jobs() -> None:
    assert countable_mib(card_of(79.5), 1) == 79.5 * 1024
    assert countable_mib(card_of(79.5), 16) == 72 * 1024
    for busy in (card_of(79.5, leases=1), card_of(79.5, fenced_bytes=1), card_of(0), card_of(79.5, exclusive=True)):
        with pytest.raises(MissingPrerequisite, match=r"card 0 .* must be idle"):
            countable_mib(busy, 1)
    with pytest.raises(MissingPrerequisite, match="no memory left for jobs, because 160 contexts"):
        countable_mib(card_of(79.5), 160)


@pytest.mark.parametrize(
    ("cards", "without_job_gib", "request_", "is_by_others"),
    [
        # An empty card, and more than it can ever give; a card that leases of jobs fill.
        ([card_of(79.5)], 0, JobRequest(80 << 30), False),
        ([card_of(3.5)], 0, JobRequest(4 << 30), False),
        # A lease without a job, fenced memory, another program, and a card that such a lease has to itself.
        ([card_of(3.5)], 40, JobRequest(4 << 30), True),
        ([card_of(3.5, fenced_bytes=4 << 30)], 0, JobRequest(4 << 30), True),
        ([card_of(3.5, outside_bytes=4 << 30)], 0, JobRequest(4 << 30), True),
        ([card_of(3.5, unowned_bytes=4 << 30)], 0, JobRequest(4 << 30), True),
        ([card_of(0, exclusive=True)], 0, JobRequest(4 << 30), True),
        # Without them it would not fit either. Or it is free in pieces.
        ([card_of(3.5)], 4, JobRequest(80 << 30), False),
        ([card_of(3.5), card_of(3.5, uuid="GPU-2")], 40, JobRequest(4 << 30), False),
        # Two cards: the second one alone has room without the others' memory.
        ([card_of(1), card_of(1, uuid="GPU-2", fenced_bytes=8 << 30)], 0, JobRequest(4 << 30, 2), False),
        ([card_of(1), card_of(1, uuid="GPU-2", fenced_bytes=8 << 30)], 8, JobRequest(4 << 30, 2), True),
    ],
)
def test_a_node_is_at_fault_only_if_something_else_than_jobs_holds_its_memory(
    cards: list[dict[str, Any]], without_job_gib: int, request_: JobRequest, *, is_by_others: bool
) -> None:
    without_job = Counter({"GPU-1": without_job_gib << 30})
    assert lacks_room_by_others(cards, without_job, request_) is is_by_others


def test_leases_without_a_job_are_those_that_no_record_names() -> None:
    one = {"card_uuid": "GPU-1", "size_bytes": 1, "state": "active"}
    leases = [one | {"lease_id": "a"}, one | {"lease_id": "b"}, one | {"lease_id": "c", "state": "fenced"}]
    leases += [one | {"lease_id": "d", "parent": "b"}, one | {"lease_id": "e", "card_uuid": "GPU-2", "size_bytes": 4}]
    assert bytes_without_job(leases, {"a"}) == {"GPU-1": 1, "GPU-2": 4}


def test_a_job_without_room_fails_alone_unless_the_memory_is_held_outside_jobs(
    start_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, records = start_daemon(vram=["64MiB"]), JobRecords(tmp_path)
    monkeypatch.setattr(slurm, "WAIT_S", 0.1)

    def run(*command: str, job: str = "1", vram_mib: int = 40) -> Any:
        environment = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": str(os.geteuid())}
        environment |= {"SLURM_JOB_COMMENT": f"[vram_mib={vram_mib}]"}
        arguments = [*command, "--daemon", daemon.address]
        return CliRunner().invoke(slurm.main, arguments, env=environment)

    def refusal(job: str) -> str:
        record = records.read(job)
        assert record is not None
        return record.refusal

    prolog = ("prolog", "--folder", str(tmp_path))
    with (tmp_path / slurm.SERVICE_LOCK).open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "Name=vram Count=64\nName=vram_cards Count=1\n" in run("count", "--jobs-per-card", "2").output
        # Slurm would have to count correctly to keep these away: the empty card can't hold the first, and a lease of a
        # job leaves no room for the third.
        for job, vram_mib in (("1", 70), ("2", 40), ("3", 40)):
            done = run(*prolog, job=job, vram_mib=vram_mib)
            assert done.exit_code == 0, done.output
        for job in ("1", "3"):
            assert slurm.OVERCOUNTED in refusal(job)
        assert refusal("2") == ""
        counted = run("count", "--jobs-per-card", "2")
        assert (counted.exit_code, "must be idle" in counted.output) == (1, True)
        # The same lease, but no job has it.
        records.forget("2")
        refused = run(*prolog, job="4")
        assert (refused.exit_code, "was requested" in refused.output) == (1, True)
        assert records.read("4") is None


def test_a_prolog_waits_for_a_service_that_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ClockOfTest()
    monkeypatch.setattr(slurm, "time", clock)
    with pytest.raises(MissingPrerequisite, match="the service does not run"):
        slurm._check_service(tmp_path)
    assert clock.now_s >= 1000.0 + slurm.SERVICE_WAIT_S
    with (tmp_path / slurm.SERVICE_LOCK).open("ab") as held:
        monkeypatch.setattr(clock, "sleep", lambda seconds: fcntl.flock(held, fcntl.LOCK_EX))
        slurm._check_service(tmp_path)


def test_a_missing_command_of_slurm_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm_jobs._log_missing.cache_clear()
    assert {state_of_job(job, "gpu1") for job in ("7", "8")} == {JobState.UNKNOWN}
    assert capsys.readouterr().err.count("squeue is not in PATH") == 1


@pytest.fixture
def folder() -> Iterator[Path]:
    # Munge wants a folder that nobody else can write to, from the root on.
    with tempfile.TemporaryDirectory(prefix="gpul-slurm-", dir="/var/lib") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def withheld(folder: Path) -> Path:
    return folder / "withheld"


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon], withheld: Path) -> Daemon:
    limits = "[limits]\nreclaim_timeout_s = 1\n"
    return start_daemon(vram=["64MiB"], config=limits, faults=Faults(withhold_proof_while=withheld))


@pytest.fixture
def cluster(folder: Path, daemon: Daemon) -> Iterator[SlurmCluster]:
    made = SlurmCluster(folder, daemon.address, 64)
    yield made
    made.stop()


def test_a_long_refusal_of_any_script_reaches_the_job() -> None:
    def refused() -> str:
        raise Denied("\N{SNOWMAN}" * 5000)

    with pytest.raises(RefusedForUser, match="\N{SNOWMAN}") as raised:
        as_user(os.geteuid(), refused)
    assert raised.value.status is Status.DENIED


def test_the_service_renews_a_job_s_lease_until_slurmctld_says_that_it_is_over(
    start_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon(vram=["64MiB"])
    records, user = JobRecords(tmp_path / "jobs"), os.geteuid()
    lease = GpuBuilder(daemon.address).min_vram("16MiB").lease_secs(20).acquire()
    records.write("7", JobRecord(user, 0, daemon.address, (lease.lease_id_text,), True))

    def remaining_s() -> float:
        return float(daemon.query(int(lease.lease_id))["remaining_ms"]) / 1000

    def slurmctld_answers(state: JobState) -> None:
        monkeypatch.setattr(slurm, "state_of_job", lambda job, node: state)

    def serve() -> None:
        slurm._renew_job(records, "7")
        slurm._end_finished(records, "7")

    for state in (JobState.LIVES, JobState.UNKNOWN):
        slurmctld_answers(state)
        monkeypatch.setattr(slurm, "LEASE_S", slurm.LEASE_S + 100)
        serve()
        assert remaining_s() > slurm.LEASE_S - 100
    slurmctld_answers(JobState.OVER)
    serve()
    assert records.jobs() == []
    assert daemon.query(int(lease.lease_id))["state"] == "torndown"
    serve()
    # A lease that has ended by itself is reported while its job lives, and forgotten with the job.
    records.write("7", JobRecord(user, 0, daemon.address, (lease.lease_id_text,), True))
    slurmctld_answers(JobState.LIVES)
    with pytest.raises(RefusedForUser, match="already freed"):
        serve()
    slurmctld_answers(JobState.OVER)
    slurm._end_finished(records, "7")
    assert records.jobs() == []


class ClockOfTest:
    """Stands for the module `time`: requests to a slurmctld that hangs take their time in it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("answer", [JobState.UNKNOWN, JobState.LIVES])
def test_a_slurmctld_that_hangs_delays_no_renewal(
    answer: JobState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, clock = JobRecords(tmp_path / "jobs"), ClockOfTest()
    jobs = [str(number) for number in range(1, 41)]
    for job in jobs:
        records.write(job, JobRecord(1000, 0, "unix:/x", ("ab" * 16,), True, node="gpu1"))
        records.write_usage(job, JobUsage(1.0, 1.0))
    renewed: dict[str, list[float]] = {job: [] for job in jobs}
    asked: list[tuple[str, str]] = []

    def hang(what: str, job: str) -> None:
        asked.append((what, job))
        clock.now_s += slurm_jobs.COMMAND_LIMIT_S

    def state(job: str, node: str) -> JobState:
        assert node == "gpu1"
        # A prolog or an epilog of the job does not wait meanwhile.
        with records.locked(job, waits=False) as is_free:
            assert is_free
        hang("state", job)
        return answer

    def usage(job: str) -> JobState:
        hang("usage", job)
        return JobState.UNKNOWN

    monkeypatch.setattr(slurm, "time", clock)
    monkeypatch.setattr(slurm, "_renew_job", lambda records, job: renewed[job].append(clock.now_s))
    monkeypatch.setattr(slurm, "state_of_job", state)
    monkeypatch.setattr(slurm, "admin_comment", usage)
    asked_at_s: dict[tuple[str, str], float] = {}
    for _ in range(40):
        slurm._serve_round(records, asked_at_s)
    for times in renewed.values():
        gaps = [after - before for before, after in pairwise(times)]
        assert max(gaps) < slurm.LEASE_S / 4
    # Every job has its turn, again and again.
    assert {(what, job) for what in ("state", "usage") for job in jobs} == set(asked[:80]) == set(asked[-80:])


def test_a_job_that_ended_while_slurmctld_answered_is_left_to_its_epilog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = JobRecords(tmp_path / "jobs")
    records.write("7", JobRecord(1000, 0, "unix:/x", ("ab" * 16,), True))
    next_start = JobRecord(1000, 1, "unix:/x", ("cd" * 16,), True)

    def state(job: str, node: str) -> JobState:
        records.write(job, next_start)
        return JobState.OVER

    monkeypatch.setattr(slurm, "state_of_job", state)
    slurm._end_finished(records, "7")
    assert records.read("7") == next_start


@needs_slurm
@pytest.mark.exhaustive
def test_a_job_has_a_lease_from_prolog_to_epilog(
    cluster: SlurmCluster,
    daemon: Daemon,
    folder: Path,
    withheld: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = python_environment()["PYTHONPATH"]
    (folder / "program.py").write_text(PROGRAM)
    # Two steps: most of the lease is the first one's, and all of it is free when the second one begins.
    step = f"PYTHONPATH={paths} srun {PYTHON} -P {folder}/program.py"
    script = f"{step}; {step}; sleep 2; echo done"
    # Neither a mark of the user's own nor a size that Slurm does not count says how large its lease is.
    job = cluster.submit(script, 16, "--comment=[vram_mib=48]", "--gres=vram:64,vram:16")
    wait_until(daemon.leases, "the job has its lease", seen=cluster.logs)
    assert [lease["size_bytes"] for lease in daemon.leases()] == [16 << 20]
    assert "JOB_GRES=vram:16 " in cluster.ask("scontrol", "show", "job", "-d", "-o", job)
    wait_until(lambda: "done" in cluster.output(job), "the job ends", seen=lambda: cluster.output(job))
    assert cluster.output(job) == "from a job\nfrom a job\ndone\n"
    wait_until(lambda: not daemon.leases(), "the epilog freed it", seen=cluster.logs)
    wait_until(lambda: not list((folder / "jobs").glob("*.json")), "the job's record is gone")
    # The epilog recorded what it used. Without Slurm's accounting, the service logs it.
    records = JobRecords(folder / "jobs")
    wait_until(lambda: records.used() == [job], "the epilog recorded what the job used")
    assert records.usage(job).byte_seconds > 16 << 20
    cluster.use_here(monkeypatch)
    slurm._report_usage(records, job)
    assert records.used() == []
    assert re.search(r"used \[gpulease \S+ gib_s=0\.\d gpu_s=\d+\.\d\]", capsys.readouterr().err)
    # A job of no vram has no lease, and one whose memory can't be proved free drains the node.
    withheld.touch()
    job = cluster.submit("echo done", 64)
    state = ("sinfo", "-h", "-o", "%T")
    wait_until(lambda: "drain" in cluster.ask(*state), "the node is drained", seen=cluster.logs)
    assert [lease["state"] for lease in daemon.leases()] == ["fenced"] or daemon.available_bytes() == 0
    daemon.allowed_trouble += ["the test withholds the proof", "fence"]


@needs_slurm
@pytest.mark.exhaustive
def test_a_prolog_that_runs_again_looks_at_the_lease(cluster: SlurmCluster, daemon: Daemon, folder: Path) -> None:
    job = cluster.submit("sleep 600", 64)
    path = folder / "jobs" / f"{job}.json"

    def record() -> Any:
        return json.loads(path.read_text()) if path.exists() else {}

    wait_until(lambda: record().get("is_ready"), "the job's lease is ready", seen=cluster.logs)
    first = record()
    # A prolog asks nothing of slurmctld, which may hang.
    with cluster.stopped("slurmctld"):
        cluster.run_prolog(job)
    assert record() == first
    # Killed before it wrote its record: the lease takes the whole card, so another one would have no room.
    path.unlink()
    cluster.run_prolog(job)
    assert record() == first
    # Killed before the lease had its time, or of an earlier start of a job that Slurm requeued.
    for change in ({"is_ready": False}, {"restarts": 1}):
        before = record()["lease_ids"][0]
        path.write_text(json.dumps(record() | change))
        # The requests of one start are one request, so another lease is another start's.
        cluster.run_prolog(job)
        assert daemon.query(int(before, 16))["state"] == "torndown"
        assert record()["lease_ids"] != [before]
    # Its lease is over.
    before = record()["lease_ids"][0]
    daemon.revoke(int(before, 16))
    cluster.run_prolog(job)
    assert record()["lease_ids"] != [before]
    assert daemon.query(int(record()["lease_ids"][0], 16))["state"] == "active"
    cluster.ask("scancel", job)
    wait_until(lambda: "idle" in cluster.ask("sinfo", "-h", "-o", "%T"), "the epilog is done", seen=cluster.logs)
    assert not path.exists()
    assert daemon.available_bytes() == 64 << 20


@needs_slurm
@pytest.mark.exhaustive
def test_what_a_user_did_wrong_fails_the_job_and_leaves_the_node(
    folder: Path, start_daemon: Callable[..., Daemon]
) -> None:
    limits = "[limits]\nmax_leases = 1\n"
    daemon = start_daemon(vram=["64MiB", "32MiB"], config=limits)
    cluster = SlurmCluster(folder, daemon.address, 96, largest_mib=80)
    try:
        # Refused when it is submitted, by what the site has set.
        refused = cluster.ask("sbatch", "--parsable", "--gres=vram:81", "--wrap=true")
        assert "no card has 81 MiB; the largest has 80" in refused
        # By task, as newer versions of Slurm offer it.
        refused = cluster.ask("sbatch", "--parsable", "-n", "1", "--tres-per-task=gres/vram:16", "--wrap=true")
        assert "vram is requested per node" in refused or "unrecognized option" in refused
        # A size that no card has, and more leases than a tenant may have: the job fails, with the reason in its output.
        first = cluster.submit("sleep 600", 16)
        wait_until(daemon.leases, "the first job has its lease", seen=cluster.logs)
        for vram_mib, reason in ((70, "no lease"), (8, "max_leases")):
            job = cluster.submit("echo it ran", vram_mib)

            def has_failed(of: str = job) -> bool:
                return "JobState=FAILED" in cluster.ask("scontrol", "show", "job", "-o", of)

            wait_until(has_failed, "the job fails", seen=cluster.logs)
            assert "gpulease-slurm: the job has no lease: " in cluster.output(job)
            assert reason in cluster.output(job)
            assert "it ran" not in cluster.output(job)
            wait_until(lambda: not list((folder / "jobs").glob("[2-9].json")), "its record is gone", seen=cluster.logs)
            assert "drain" not in cluster.ask("sinfo", "-h", "-o", "%T")
        assert len(daemon.leases()) == 1
        cluster.ask("scancel", first)
        wait_until(lambda: not daemon.leases(), "its lease is freed", seen=cluster.logs)
        # A node whose service does not run would lose its jobs' leases: that is the node's fault.
        cluster.stop_service()
        cluster.submit("echo it ran", 16)
        wait_until(lambda: "drain" in cluster.ask("sinfo", "-h", "-o", "%T"), "the node is drained", seen=cluster.logs)
    finally:
        cluster.stop()


@needs_slurm
@pytest.mark.exhaustive
def test_the_service_frees_what_no_epilog_freed(cluster: SlurmCluster, daemon: Daemon, folder: Path) -> None:
    job = cluster.submit("sleep 600", 16)
    wait_until(daemon.leases, "the job has its lease", seen=cluster.logs)
    (lease,) = daemon.leases()
    path = folder / "jobs" / f"{job}.json"
    wait_until(
        lambda: path.exists() and json.loads(path.read_text())["is_ready"], "the lease is ready", seen=cluster.logs
    )
    kept = path.read_text()
    cluster.ask("scancel", job)
    wait_until(lambda: not path.exists(), "the epilog is done", seen=cluster.logs)
    # As after a crash of slurmd: the record of a job that is over.
    path.write_text(kept)
    cluster.stop_service()
    cluster.start_service()
    wait_until(lambda: not path.exists(), "the service has ended it", seen=cluster.logs)
    assert daemon.query(int(lease["lease_id"], 16))["state"] == "torndown"


@needs_slurm
@pytest.mark.first
@pytest.mark.exhaustive
def test_a_job_of_several_cards_has_a_lease_on_each(folder: Path, start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(vram=["64MiB", "64MiB"])
    name = cards_of(daemon.inventory())[0]["name"].lower().replace(" ", "_")
    cluster = SlurmCluster(folder, daemon.address, 128, cards=2, card_type=name)

    try:
        # Each task has a lease of its own, in turn, and each knows all of them.
        show = "srun --overcommit -n 3 --export=ALL sh -c 'echo $SLURM_LOCALID $GPULEASE_LEASE_ID $GPULEASE_LEASE_IDS'"
        job = cluster.submit(f"{show}; sleep 600", 0, f"--gres=vram:{name}:32,vram_cards:2", "--overcommit", "-n", "3")
        wait_until(lambda: len(cluster.output(job).splitlines()) == 3, "all tasks wrote", seen=cluster.logs)
        leases = daemon.leases()
        assert [lease["size_bytes"] for lease in leases] == [16 << 20] * 2
        assert len({lease["card_uuid"] for lease in leases}) == 2
        lines = sorted(line.split() for line in cluster.output(job).splitlines())
        (known,) = {line[2] for line in lines}
        first, second = known.split(",")
        assert {first, second} == {lease["lease_id"] for lease in leases}
        assert [line[:2] for line in lines] == [["0", first], ["1", second], ["2", first]]
        # Its limit is raised: its leases depend on its life only.
        cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=3-00:00:00")
        assert "TimeLimit=3-00:00:00" in cluster.ask("scontrol", "show", "job", "-o", job)
        # Suspended, it keeps them; requeued, it has others, and those of its first start are proved free.
        cluster.ask("scontrol", "suspend", job)
        slurm_folder = JobRecords(folder / "jobs")
        with pytest.MonkeyPatch.context() as patch:
            cluster.use_here(patch)
            slurm._renew_job(slurm_folder, job)
            slurm._end_finished(slurm_folder, job)
        assert len(daemon.leases()) == 2
        cluster.ask("scontrol", "resume", job)
        cluster.ask("scontrol", "requeue", job)
        wait_until(lambda: daemon.query(int(first, 16))["state"] == "torndown", "it is requeued", seen=cluster.logs)
        again = {first, second}

        def has_others() -> bool:
            ids = {lease["lease_id"] for lease in daemon.leases()}
            return len(ids) == 2 and not ids & again

        wait_until(has_others, "its next start has leases", seen=cluster.logs)
        cluster.ask("scancel", job)
        wait_until(lambda: not daemon.leases(), "they are freed", seen=cluster.logs)
        # An array: each task is a job of its own.
        job = cluster.submit("echo $GPULEASE_LEASE_ID; sleep 1", 16, "--array=0-3")
        wait_until(
            lambda: all(len(cluster.output(f"{job}_{task}")) > 32 for task in range(4)), "all ran", seen=cluster.logs
        )
        assert len({cluster.output(f"{job}_{task}") for task in range(4)}) == 4
        # A size that can't be shared is refused when it is submitted.
        refused = cluster.ask("sbatch", "--parsable", "--gres=vram:31,vram_cards:2", "--wrap=true")
        assert "can't be shared equally by 2 cards" in refused
        wait_until(lambda: not daemon.leases(), "they are freed", seen=cluster.logs)
        # One lease would have room, two have not, though enough is free in pieces: the job fails, nothing remains of
        # its first lease, and the node continues.
        held = GpuBuilder(daemon.address).min_vram("40MiB").lease_secs(600).acquire()
        job = cluster.submit("echo it ran", 0, "--gres=vram:64,vram_cards:2")
        state = ("scontrol", "show", "job", "-o", job)
        wait_until(lambda: "JobState=FAILED" in cluster.ask(*state), "the job fails", seen=cluster.logs)
        assert "gpulease-slurm: the job has no lease: " in cluster.output(job)
        assert [lease["lease_id"] for lease in daemon.leases()] == [held.lease_id_text]
        assert "drain" not in cluster.ask("sinfo", "-h", "-o", "%T")
        # Less is free than Slurm counts: the node's configuration is wrong, and the node is drained.
        also = GpuBuilder(daemon.address).min_vram("60MiB").lease_secs(600).acquire()
        cluster.submit("echo it ran", 64)
        wait_until(lambda: "drain" in cluster.ask("sinfo", "-h", "-o", "%T"), "the node is drained", seen=cluster.logs)
        held.free()
        also.free()
    finally:
        cluster.stop()


@pytest.mark.skipif(bool(missing_accounting()), reason=missing_accounting() or "slurmdbd is there")
@pytest.mark.exhaustive
def test_a_job_s_usage_is_appended_to_its_admin_comment(
    folder: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = SlurmCluster(folder, daemon.address, 64, has_accounting=True)
    records = JobRecords(folder / "jobs")
    cluster.use_here(monkeypatch)
    try:
        job = cluster.submit("sleep 1", 16)
        wait_until(lambda: records.used() == [job], "the epilog recorded what the job used", seen=cluster.logs)
        wait_until(lambda: slurm_jobs.admin_comment(job) == "", "the accounting knows the job", seen=cluster.logs)
        slurm_jobs.set_admin_comment(job, "of the site [gpulease other gib_s=1.0 gpu_s=1.0]")
        slurm._report_usage(records, job)
        told = str(slurm_jobs.admin_comment(job))
        assert re.fullmatch(
            r"of the site \[gpulease other \S+ \S+ \[gpulease \S+ gib_s=\d+\.\d gpu_s=\d+\.\d\]", told
        ), told
        # A later round finds it, and only then is the record gone.
        assert records.used() == [job]
        slurm._report_usage(records, job)
        assert (records.used(), slurm_jobs.admin_comment(job)) == ([], told)
        assert slurm_jobs.admin_comment("99") is JobState.UNKNOWN
    finally:
        cluster.stop()
