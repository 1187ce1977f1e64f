"""What ships for Prometheus and Grafana: every query is one, and asks for what daemon and decode server tell."""

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import ProcessCollector

from gpulease.client.decode.openai.decode_metrics import DecodeMetrics
from gpulease.daemon.record.metrics.families import FAMILIES

FOLDER = Path(__file__).parents[1] / "systemd" / "prometheus"
RULES = FOLDER / "gpulease.rules.yml"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "gpulease.dashboard.json").read_text())

OF_PROMETHEUS = {"up"}
"""What Prometheus makes itself."""
OF_THE_PROCESS = {sample.name for family in ProcessCollector(registry=None).collect() for sample in family.samples}
ENDINGS = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",), "gauge": ("",)}
OF_DECODE_SERVERS = {
    family.name + ending for family in DecodeMetrics(["ann"]).registry.collect() for ending in ENDINGS[family.type]
}
DECODE_LABELS = {"tenant", "kind", "scope", "reason"}
TOLD = {name for family in FAMILIES for name in family.series_names}
TOLD |= OF_DECODE_SERVERS | OF_PROMETHEUS | OF_THE_PROCESS
LABELS = {label for family in FAMILIES for label in family.labels} | DECODE_LABELS | {"le", "instance", "job"}

WORDS = {"and", "or", "unless", "bool", "offset", "group_left", "group_right", "inf", "nan"}
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_BRACES = re.compile(r"\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])")

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")


def metrics_of(query: str) -> set[str]:
    """The metrics a PromQL expression names: identifiers that are no function, word, label or string."""
    for pattern in (_QUOTED, _BRACES, _RANGE, _GROUPING):
        query = pattern.sub(" ", query)
    return set(_NAME.findall(query)) - WORDS


def labels_of(query: str) -> set[str]:
    """The labels it names."""
    bare = _QUOTED.sub(" ", query)
    matchers = ",".join(_BRACES.findall(bare))
    groupings = ",".join(_GROUPING.findall(_BRACES.sub(" ", bare)))
    return set(_NAME.findall(f"{matchers},{groupings}"))


def alerts() -> list[tuple[str, str]]:
    """Name and expression of each."""
    texts = re.split(r"^ +- alert: ", RULES.read_text(), flags=re.MULTILINE)[1:]
    return [
        (
            text.split()[0],
            re.split(r"^ +(?:for|labels):", text.partition("expr:")[2], flags=re.MULTILINE)[0].strip("| \n"),
        )
        for text in texts
    ]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            inner = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert inner, variable
            assert inner[2] in LABELS
            yield variable["name"], inner[1]


def promql(query: str) -> str:
    """A query as Prometheus gets it: Grafana's variables replaced."""
    return query.replace("$__rate_interval", "5m")


@pytest.mark.parametrize(
    ("query", "metrics", "labels"),
    [
        ("up", {"up"}, set()),
        ('rate(a_total{x="b_total", y=~"$z"}[5m]) > 0.5e3', {"a_total"}, {"x", "y"}),
        ("sum by (k) (a) / on (k) group_left (m) (b offset 5m)", {"a", "b"}, {"k", "m"}),
        ("histogram_quantile(0.99, sum by (le, k) (rate(h_bucket[$__rate_interval])))", {"h_bucket"}, {"le", "k"}),
        ("a unless on (i) sum without (j) (b) > 0 or vector(1)", {"a", "b"}, {"i", "j"}),
        ('a{q="x\\"} b"}', {"a"}, {"q"}),
    ],
)
def test_names_are_found(query: str, metrics: set[str], labels: set[str]) -> None:
    assert (metrics_of(query), labels_of(query)) == (metrics, labels)


@pytest.mark.parametrize(("name", "query"), [*alerts(), *queries()])
def test_a_query_asks_for_what_is_told(name: str, query: str) -> None:
    assert metrics_of(query), f"{name} asks for nothing"
    assert metrics_of(query) <= TOLD, name
    assert labels_of(query) <= LABELS, name


def test_each_alert_is_whole() -> None:
    texts = re.split(r"^ +- alert: ", RULES.read_text(), flags=re.MULTILINE)[1:]
    assert len(texts) >= 10
    for text in texts:
        assert re.search(r"severity: (critical|warning)", text), text
        assert re.search(r'summary: ".+\."', text), text
        assert re.search(r'action: ".+\."', text), text
    tests = (FOLDER / "gpulease.rules.test.yml").read_text()
    for name, _ in alerts():
        assert f'alertname="{name}"' in tests, f"nothing makes {name} fire"


@promtool
def test_prometheus_takes_the_rules_and_they_do_what_they_are_for() -> None:
    for command in (["check", "rules", RULES.name], ["test", "rules", "gpulease.rules.test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    """Prometheus's own parser is asked, by a file of rules made of them."""
    rules = [{"record": f"query_{number}", "expr": promql(query)} for number, (_, query) in enumerate(queries())]
    file = tmp_path / "queries.yml"
    # JSON is YAML.
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_the_dashboard_as_it_is_laid_out() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Now", "Tenants", "Cards", "Leases come and go", "The daemon", "Decode servers"]
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance", "card", "tenant", "server"}
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= variables | {"__rate_interval"}, panel["title"]
            assert used & {"instance", "server"}, f"{panel['title']} mixes nodes up"
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= LABELS, panel["title"]


def test_what_must_not_be_missed_is_on_it() -> None:
    shown = {name for _, query in queries() for name in metrics_of(query)}
    families = {family.name for family in FAMILIES if shown & set(family.series_names)}
    assert families >= {family.name for family in FAMILIES if family.kind.value == "histogram"}
    assert families >= {"gpu_lease_leaked_bytes", "gpu_lease_fenced_slices", "gpulease_queue_length", "gpulease_ready"}
    histograms = {name for name in OF_DECODE_SERVERS if name.endswith("_bucket")}
    assert len(histograms) == 6
    assert histograms <= shown
