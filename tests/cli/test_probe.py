"""`deltazoo probe`, and the packaged runs that `list --evidence` and `show` cite."""

import json

from deltazoo.blocks.probes import records
from deltazoo.blocks.probes.claims import CLAIMS
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


def test_a_claim_has_mixers_and_tasks_of_its_own(run):
    result = run("probe", "--claim", "selection", "--tasks", "parity")
    assert result.code == 2
    assert "--claim has mixers and tasks of its own" in result.err


def test_list_and_show_cite_the_packaged_runs(ok):
    cells = records.cells(records.packaged())
    listed = {(row["task"], row["mixer"]): row["rate"] for row in json.loads(ok("list", "--evidence", "--json").out)}
    assert listed == {place: cell.rate for place, cell in cells.items()}
    cell = next(iter(cells.values()))
    name = cell.mixer.partition("(")[0]
    evidence = json.loads(ok("show", name, "--json").out)["about"]["evidence"]
    assert f"{cell.task} {cell.text()} %" in evidence
