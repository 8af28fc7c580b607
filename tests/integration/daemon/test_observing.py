"""Dashboard and alerts against the /metrics of a daemon that has moved data."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvd.protocol.codes import Code
from tests.conftest import wait_for
from tests.integration.daemon.conftest import Site
from tests.integration.daemon.harness import Daemon

promql = pytest.importorskip("promql_parser", reason="the test extra has promql-parser")
yaml = pytest.importorskip("yaml", reason="the test extra has PyYAML")

DEPLOY = Path(__file__).parents[3] / "deploy"
ADDED_BY_PROMETHEUS = {"job", "instance"}
NOT_OURS = {"up"}
"""Made by Prometheus itself."""

Series = dict[str, list[dict[str, str]]]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    board = json.loads((DEPLOY / "grafana/kvd.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            yield f"panel {panel['title']}", text


def alert_queries() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((DEPLOY / "prometheus/kvd.rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


QUERIES = [*dashboard_queries(), *alert_queries()]


def selectors(node: Any) -> Iterator[Any]:
    """Every selector of a parsed query, wherever it stands."""
    if isinstance(node, promql.VectorSelector):
        yield node
        return
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, name, None)
        if child is not None:
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


def mistakes(query: str, series: Series) -> list[str]:
    """What a query names that these series do not have."""
    found = []
    names = list(selectors(promql.parse(query)))
    if not names:
        return ["names no metric"]
    for selector in names:
        if selector.name in NOT_OURS:
            continue
        samples = series.get(selector.name)
        if samples is None:
            found.append(f"no metric {selector.name}")
            continue
        for matcher in selector.matchers.matchers:
            if matcher.name in ADDED_BY_PROMETHEUS:
                continue
            values = {labels.get(matcher.name) for labels in samples}
            wanted = str(matcher.value).split("|")
            found += [f"no {matcher.name}={v!r}" for v in wanted if v not in values]
    # Labels that are grouped by, and those that the legend shows, have to be there too.
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", query)
    labels = {label.strip() for text in grouped for label in text.split(",")}
    there = {k for s in names for sample in series.get(s.name, ()) for k in sample}
    found += [f"no label {label}" for label in labels - there - ADDED_BY_PROMETHEUS]
    return found


@pytest.fixture(scope="module")
def series(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Series:
    """What a daemon tells that has fetched, served, failed and refused."""
    import shutil
    import tempfile

    from tests.conftest import RUN_ROOT

    folder = Path(tempfile.mkdtemp(dir=request.config.stash[RUN_ROOT]))
    site = Site(folder)
    try:
        daemon = site.daemon("both").ready()
        producer, consumer = site.engine(daemon, "p", seed=1), site.engine(daemon, "d")
        at = producer.up()
        consumer.up()
        producer.offer("t", [1, 2])
        assert consumer.fetch("t", [3, 4], remote=at, engine_id="p").code == Code.OK
        assert consumer.fetch("none", [5], remote=at, engine_id="p", park_s=0).code != Code.OK
        wait_for(lambda: daemon.metric("kvd_sessions") == 2, what="the gauges are set")
        return read(daemon)
    finally:
        site.close()
        shutil.rmtree(folder)


def read(daemon: Daemon) -> Series:
    found: Series = defaultdict(list)
    for family in text_string_to_metric_families(daemon.get("/metrics")):
        for sample in family.samples:
            found[sample.name].append(sample.labels)
    return dict(found)


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[w for w, _ in QUERIES])
def test_a_query_names_only_what_is_there(where: str, query: str, series: Series) -> None:
    assert mistakes(query, series) == [], query


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("rate(kvd_nothing_total[5m])", "no metric kvd_nothing_total"),
        ('kvd_peers{state="sideways"}', "no state='sideways'"),
        ('sum(kvd_fetches_total{code=~"ok|odd"}) / sum(kvd_sessions)', "no code='odd'"),
        ("sum by (engine) (kvd_sessions)", "no label engine"),
        ("1 + 1", "names no metric"),
    ],
)
def test_a_mistake_in_a_query_would_be_seen(query: str, said: str, series: Series) -> None:
    assert said in mistakes(query, series)


def test_every_metric_of_ours_is_looked_at(series: Series) -> None:
    used = {s.name for _, query in QUERIES for s in selectors(promql.parse(query))}
    ours = {re.sub(r"_(bucket|sum|count)$", "", n) for n in series if n.startswith("kvd_")}
    unused = ours - {re.sub(r"_(bucket|sum|count)$", "", n) for n in used}
    assert unused <= set(), "no panel and no alert shows these"


def test_alerts_say_what_to_do() -> None:
    runbook = (DEPLOY.parent / "docs/runbook.md").read_text()
    headings = {
        re.sub(r"[^a-z0-9 _-]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in runbook.splitlines()
        if line.startswith("#")
    }
    for group in yaml.safe_load((DEPLOY / "prometheus/kvd.rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            text = rule["annotations"]["description"]
            assert rule["annotations"]["summary"]
            assert text
            for anchor in re.findall(r"runbook\.md#([\w-]+)", text):
                assert anchor in headings, anchor
