"""Launch tables: lookup, merging, reading and writing, and errors in a table."""

import json
import logging
import math

import pytest
import torch
from tune_cases import FORWARD, LONG, PACK, T900, TOKEN, FakeRunner, by_kernel, problem_of

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.triton.chunk.heuristic import heuristic
from deltazoo.backends.triton.config import Launch
from deltazoo.backends.triton.runtime import table as tables
from deltazoo.backends.triton.runtime.revisions import REVISIONS
from deltazoo.backends.triton.runtime.table import Table, merge_tables, read_table, user_table
from deltazoo.backends.tuning.tune import tune


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without tables, in a process that has read none."""
    monkeypatch.setattr(tables.Path, "home", lambda: tmp_path)
    tables.use_table(None)
    yield tmp_path
    tables.use_table(None)


def test_record_overrides_the_heuristic_for_its_class_only(home, tmp_path):
    narrow = Launch(tile=32, warps=4, stages=2)
    tune([PACK], FakeRunner({narrow: 0.2}), FORWARD, tmp_path / "t.json")
    problem = problem_of(PACK, "scan")
    before = tables.launch_config(problem, T900)
    assert before == heuristic(problem, T900)
    tables.use_table(tmp_path / "t.json")
    found = tables.launch_config(problem, T900)
    assert found == before.model_copy(update={"scan": narrow})
    for other in (
        {"packed": False},
        {"K": 64},
        {"dtype": torch.float16},
        {"delta": False},
        {"HV": 32},
        {"erase_key": True},
    ):
        assert tables.launch_config(problem._replace(**other), T900).scan != narrow
    assert tables.launch_config(problem._replace(T=33000), T900).scan == narrow
    tables.use_table(None)
    assert tables.launch_config(problem, T900) == before


def test_record_may_change_segments_but_not_what_is_saved(home, tmp_path):
    tune([LONG], FakeRunner({64: 1.0}), None, tmp_path / "t.json")
    tables.use_table(tmp_path / "t.json")
    found = tables.launch_config(problem_of(LONG, "scan"), T900)
    default = heuristic(problem_of(LONG, "scan"), T900)
    assert (found.segment_chunks, default.segment_chunks) == (64, 32)
    assert (found.chunk, found.checkpoint_chunks) == (default.chunk, default.checkpoint_chunks)


def test_kernels_are_tuned_with_the_tables_in_use(home, tmp_path):
    tune([LONG], FakeRunner({64: 1.0}), None, tmp_path / "parts.json")
    tables.use_table(tmp_path / "parts.json")
    found = by_kernel(tune([LONG], FakeRunner(), FORWARD, tmp_path / "scans.json").records)
    assert found["scan"].key.programs == 64  # 8 heads in 8 parts of 64 chunks, and not 16 of 32
    tables.use_table(tmp_path / "scans.json")
    assert tables.launch_config(problem_of(LONG, "scan"), T900).scan == found["scan"].launch


def test_user_table_overrides_the_shipped_one_and_a_named_table_both(home, tmp_path, monkeypatch):
    shipped, narrow, wide = Launch(tile=64, stages=1), Launch(tile=32, warps=4, stages=2), Launch(tile=64, stages=3)
    problem = problem_of(PACK, "scan")
    package = tmp_path / "package"
    monkeypatch.setattr(tables, "files", lambda name: package)
    for launch, path in (
        (shipped, package / "tuned" / "nvidia-t900.json"),
        (narrow, user_table("NVIDIA T900")),
        (wide, tmp_path / "named.json"),
    ):
        assert tables.launch_config(problem, T900).scan != launch
        tune([PACK], FakeRunner({launch: 0.1}), FORWARD, path)
        if path.name == "named.json":
            tables.use_table(path)
        assert tables.launch_config(problem, T900).scan == launch


@pytest.mark.parametrize("other", ["triton", "revision"])
def test_records_of_another_triton_or_revision_are_ignored_with_one_warning(home, tmp_path, caplog, other):
    path = tmp_path / "t.json"
    tune([PACK], FakeRunner({Launch(tile=32): 0.1}), FORWARD, path)
    data = json.loads(path.read_text())
    for record in data["records"]:
        record[other] = "9.9" if other == "triton" else 99
    path.write_text(json.dumps(data))
    problem = problem_of(PACK, "scan")
    with caplog.at_level(logging.INFO, "deltazoo"):
        tables.use_table(path)
        for T in (100, 32768, 32769):
            assert tables.launch_config(problem._replace(T=T), T900) == heuristic(problem._replace(T=T), T900)
    assert len(caplog.records) == 1
    assert "2 records of launch tables for NVIDIA T900" in caplog.text


def test_outdated_records_beside_usable_ones_cause_no_warning(home, tmp_path, caplog):
    path = tmp_path / "t.json"
    tune([PACK], FakeRunner({Launch(tile=32): 0.1}), FORWARD, path)
    data = json.loads(path.read_text())
    data["records"] += [record | {"triton": "9.9"} for record in data["records"]]
    path.write_text(json.dumps(data))
    with caplog.at_level(logging.INFO, "deltazoo"):
        tables.use_table(path)
        assert tables.launch_config(problem_of(PACK, "scan"), T900).scan == Launch(tile=32)
    assert not caplog.records


@pytest.mark.parametrize(
    ("installed", "expected"), [("3.6.1", 32), ("3.7.0", 32), ("3.7.1", 128), ("3.8.0", None), ("3.9.0", None)]
)
def test_a_record_holds_for_the_versions_with_the_same_ptxas(home, tmp_path, installed, expected):
    path = tmp_path / "t.json"
    tune([PACK], FakeRunner({Launch(tile=32): 0.1}), FORWARD, path)  # with Triton 3.6.0
    problem, device = problem_of(PACK, "scan"), T900._replace(triton=installed)
    data = json.loads(path.read_text())
    exact = [record | {"triton": "3.7.1"} for record in data["records"] if record["key"]["kernel"] == "scan"]
    data["records"] = [record | {"launch": {"tile": 128}} for record in exact] + data["records"]
    path.write_text(json.dumps(data))
    tables.use_table(path)
    launch = tables.launch_config(problem, device).scan
    assert launch == (heuristic(problem, device).scan if expected is None else Launch(tile=expected))


def test_the_shipped_records_hold_for_both_versions_of_triton_with_their_ptxas(home):
    for version in ("3.6.0", "3.7.1"):
        assert len(tables.records_of("NVIDIA H200", version)) == 6
    assert not tables.records_of("NVIDIA H200", "3.9.0")


@pytest.mark.parametrize("denied", [True, False])
def test_unreadable_home_folder_means_no_user_table(home, monkeypatch, tmp_path, denied):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    def is_file(path):
        raise PermissionError(13, "Permission denied", str(path))

    problem = problem_of(PACK, "scan")
    if denied:
        monkeypatch.setattr(type(user_table("NVIDIA T900")), "is_file", is_file)
        monkeypatch.setattr(tables, "files", lambda name: _Nothing())
    else:
        monkeypatch.setattr(tables.Path, "home", no_home)
    assert tables.launch_config(problem, T900) == heuristic(problem, T900)
    if not denied:
        with pytest.raises(ConfigError, match="the user's launch table needs a home folder, and there is none"):
            tune([PACK], FakeRunner(), FORWARD)


class _Nothing:
    """A package without files."""

    def __truediv__(self, name):
        return self

    def is_file(self):
        return False


def test_concurrent_tuners_keep_each_others_records(tmp_path):
    path = tmp_path / "t.json"

    class Beside(FakeRunner):
        """Another tuner writes while this one times."""

        def time(self, *arguments):
            if not path.exists():
                tune([TOKEN], FakeRunner(), None, path)
            return super().time(*arguments)

    tune([PACK], Beside(), FORWARD, path)
    assert sorted(record.key.kernel for record in read_table(path).records) == [
        "decode",
        "fused_step",
        "prepare",
        "scan",
    ]


def test_record_of_a_kernel_that_does_not_take_the_problem_is_ignored_with_a_warning(home, tmp_path, caplog):
    path = tmp_path / "t.json"
    tune([PACK], FakeRunner({Launch(tile=32): 0.1}), FORWARD, path)
    data = json.loads(path.read_text())
    data["records"][-1]["launch"]["kernel"] = "sm90"
    path.write_text(json.dumps(data))
    tables.use_table(path)
    problem = problem_of(PACK, "scan")
    with caplog.at_level(logging.INFO, "deltazoo"):
        assert tables.launch_config(problem, T900).scan == heuristic(problem, T900).scan
    assert "is ignored: scan.kernel = 'sm90' needs an sm90 GPU" in caplog.text


def test_repeated_lookup_reads_no_file(home, monkeypatch):
    problem = problem_of(PACK, "scan")
    first = tables.launch_config(problem, T900)
    monkeypatch.setattr(tables, "configured", lambda *_: pytest.fail("looked up again"))
    assert tables.launch_config(problem, T900) is first


def test_later_table_overrides_an_earlier_one_in_a_merge(tmp_path):
    narrow, wide = Launch(tile=32), Launch(tile=64, stages=3)
    tune([PACK], FakeRunner({narrow: 0.1}), FORWARD, tmp_path / "a.json")
    tune([PACK], FakeRunner({wide: 0.1}), FORWARD, tmp_path / "b.json")
    tune([TOKEN], FakeRunner(), None, tmp_path / "c.json")
    merged = merge_tables([tmp_path / f"{name}.json" for name in "abc"], tmp_path / "out.json")
    assert read_table(tmp_path / "out.json") == merged
    assert sorted(record.key.kernel for record in merged.records) == ["decode", "fused_step", "prepare", "scan"]
    assert by_kernel(merged.records)["scan"].launch == wide


def test_table_of_another_device_is_refused(tmp_path):
    Table(device="NVIDIA B200").write(tmp_path / "b200.json")
    tune([PACK], FakeRunner(), FORWARD, tmp_path / "t900.json")
    message = r"tables of two devices do not merge: 'NVIDIA T900' and 'NVIDIA B200'"
    with pytest.raises(ConfigError, match=message):
        merge_tables([tmp_path / "t900.json", tmp_path / "b200.json"], tmp_path / "out.json")
    with pytest.raises(ConfigError, match=message):
        tune([PACK], FakeRunner(), FORWARD, tmp_path / "b200.json")
    assert not (tmp_path / "out.json").exists()


def broken(key=None, **change):
    key = {
        "kernel": "scan", "dtype": "bfloat16", "K": 128, "V": 128, "groups": 1, "delta": True, "erase_key": False,
        "decay": "head", "packed": False, "split_terms": False, "segments": False, "programs": 128, "chunks": 0,
    } | (key or {})  # fmt: skip
    record = {
        "key": key, "triton": "3.6.0", "revision": 1, "launch": {"tile": 64}, "shape": "s", "ms": 1.0, "tried": 1,
        "rejected": 0,
    }  # fmt: skip
    return json.dumps({"version": 3, "device": "NVIDIA T900", "records": [record | change]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "t.json is not a launch table: .*Invalid JSON"),
        (broken(launch={"tile": 2}), r"records.0.launch.tile must be at least"),
        (broken(launch={"tile": 64, "chunk": 32}), r"records.0.launch.chunk: Extra inputs are not permitted"),
        (broken({"kernel": "segment_chunks"}), r"records.0: kernel='segment_chunks' needs segment_chunks alone"),
        (
            broken({"kernel": "segment_chunks"}, launch=None, segment_chunks=24),
            r"segment_chunks must be 0 or a power of two and a multiple of checkpoint_chunks",
        ),
        (broken({"dtype": "float8"}), r"records.0.key.dtype"),
        (broken(ms=math.inf), r"records.0.ms must be a finite number"),
        (
            broken(launch={"tile": 64, "kernel": "fused"}),
            r"scan.kernel must be one of 'sm90', 'portable', got 'fused'",
        ),
        (
            broken({"kernel": "reverse", "segments": True}, launch={"tile": 64, "kernel": "fused"}),
            "launch.kernel must not be 'fused' with segments",
        ),
        (
            broken().replace('"version": 3', '"version": 2'),
            "t.json is a launch table of version 2, and this deltazoo reads version 3: remove the file",
        ),
        (None, r"t.json cannot be read: No such file or directory$"),
    ],
)
def test_invalid_table_error_names_file_and_field(tmp_path, text, message):
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        tables.use_table(path)


def test_failed_write_keeps_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    tune([PACK], FakeRunner(), FORWARD, path)
    before = path.read_text()
    monkeypatch.setattr(tables.os, "replace", lambda a, b: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Table(device="NVIDIA T900").write(path)
    assert path.read_text() == before
    assert sorted(found.name for found in tmp_path.iterdir()) == [".t.json.lock", "t.json"]


def test_shipped_records_have_a_gain_and_the_present_revision():
    folder = tables.files("deltazoo.backends.triton.runtime") / "tuned"
    for path in folder.iterdir() if folder.is_dir() else []:
        table = read_table(path)
        assert path.name == f"{tables.slug(table.device)}.json"
        assert table.records
        for record in table.records:
            assert record.gain is None or record.gain >= 1.01, "records without a gain are not shipped"
            assert record.revision == REVISIONS[record.key.kernel], f"{path.name}: {record.key.kernel} is outdated"
