"""`deltazoo probe`, and the packaged runs that `list --evidence` and `show` cite."""

import json
import re

from deltazoo.blocks.inspect import show
from deltazoo.blocks.probes import records
from deltazoo.blocks.probes.claims import CLAIMS
from deltazoo.blocks.probes.runner import ProbeConfig, probe
from deltazoo.blocks.probes.tasks import TASKS

TINY = "parity(length=4,lengths=[4,8],steps=4,batch=4,width=16,rates=[1e-2],evaluation_tokens=256)"


def test_probe_trains_appends_and_prints_the_runs(ok, tmp_path):
    arguments = ["probe", "--mixers", "deltanet", "--tasks", TINY, "--out", tmp_path, "--seeds", "1"]
    printed = json.loads(ok(*arguments, "--json").out)
    assert printed["problems"] == []
    assert [line["accuracy"] for line in printed["runs"]] == [
        json.loads(line)["accuracy"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()
    ]
    score = f"{100 * printed['runs'][0]['accuracy']['8']:.1f}"
    assert score in ok(*arguments).out  # reads the file, and trains nothing


def test_probe_lists_every_task_and_claim(ok):
    listed = json.loads(ok("probe", "--list", "--json").out)
    assert set(listed["tasks"]) == set(TASKS)
    assert set(listed["claims"]) == set(CLAIMS)
    assert all(TASKS[name].source == task["source"] for name, task in listed["tasks"].items())
    printed = ok("probe", "--list").out
    assert {*TASKS, *CLAIMS} <= {line.split()[0].strip(",") for line in printed.splitlines() if line.split()}
    assert printed.count(TASKS["s3"].source[:20]) == 1


def test_a_claim_excludes_mixers_and_tasks(run):
    result = run("probe", "--claim", "selection", "--tasks", "parity")
    assert result.code == 2
    assert "got --claim and --mixers/--tasks" in result.err


def test_a_text_that_cannot_be_read_is_refused_before_any_run(run, tmp_path):
    for name, problem in (("missing", "cannot read .*missing"), ('quo"te', "a path without quotation marks")):
        result = run("probe", "--text", tmp_path / name, "--mixers", "attention", "--out", tmp_path / "runs")
        assert result.code == 2 and re.search(problem, result.err)
    assert not (tmp_path / "runs").exists()


def test_list_and_show_cite_the_packaged_runs(ok, tmp_path, monkeypatch):
    one_rate = ProbeConfig(seeds=1, workers=1)
    runs = probe([(["deltanet", "deltanet(negative_eigenvalues=both)"], [TINY])], tmp_path, one_rate).runs
    monkeypatch.setattr(records, "packaged", lambda: tuple(runs))
    monkeypatch.setattr(show, "packaged", lambda: tuple(runs))
    listed = json.loads(ok("list", "--evidence", "--json").out)
    assert [(row["task"], row["mixer"], row["rate"]) for row in listed] == [(r.task, r.mixer, r.rate) for r in runs]
    evidence = json.loads(ok("show", "deltanet", "--json").out)["about"]["evidence"]
    assert all(f"{TINY} {100 * run.score:.1f} %" in evidence for run in runs)
    assert "(negative_eigenvalues=both)" in evidence
