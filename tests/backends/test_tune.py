"""The tuner without a GPU: what it measures, rejects, stores, resumes and merges, with a runner that makes times up."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from deltazoo.backends.environment import environment
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.shapes import SHAPES, Shape
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.triton import config as configs
from deltazoo.backends.triton import table as tables
from deltazoo.backends.triton.config import Device, Launch, LaunchConfig, heuristic
from deltazoo.backends.triton.table import Table, configured, key_of, merge_tables, read_table, user_table
from deltazoo.backends.tuning.candidates import Target, candidates, problem_of
from deltazoo.backends.tuning.measure import checks_of
from deltazoo.backends.tuning.tune import Runner, TuneConfig, kernels_of, plan, tune

GATED = UpdateSpec(decay="head", beta="head")
T900 = Device("NVIDIA T900", 132, 232448)
PACK = Target(GATED, SHAPES["pack_8x4096"], torch.bfloat16)
LONG = Target(GATED, SHAPES["dense_1x32768"], torch.bfloat16)
TOKEN = Target(GATED, SHAPES["decode_64"], torch.bfloat16)
FORWARD = TuneConfig(directions=("forward",))


class FakeRunner(Runner):
    """Each kernel's time is its warps, but for `quick`; what `wrong` names fails the check."""

    device, triton = T900, "3.6.0"

    def __init__(self, quick=None, wrong=(), stop_after=None):
        self.quick, self.wrong, self.stop_after = quick or {}, wrong, stop_after
        self.checked, self.timed, self.closed, self.heard = [], [], False, []

    def environment(self):
        return environment().model_copy(update={"device": self.device.name})

    def ahead(self, steps):
        self.heard.append([(step.target, step.kernel) for step in steps])

    def check(self, target, kernel, configs):
        if self.stop_after is not None and len(self.checked) == self.stop_after:
            raise KeyboardInterrupt
        self.checked.append((target, kernel))
        return ["o has relative RMS error 1, above 5e-3" if self._of(c, kernel) in self.wrong else "" for c in configs]

    def time(self, target, direction, configs, rounds):
        self.timed.append((target, direction, configs))
        return [self._seconds(config) for config in configs]

    def close(self):
        self.closed = True

    def _of(self, config, kernel):
        return config.split if kernel == "split" else getattr(config, kernel)

    def _seconds(self, config):
        split = self.quick.get(config.split, 10.0) if isinstance(config.split, int) else 10.0
        launches = (config.prepare, config.scan, config.replay, config.reverse, config.gradients, config.decode)
        return (split + sum(self.quick.get(launch, 1.0) for launch in launches)) / 1e3


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without tables, in a process that has read none."""
    monkeypatch.setattr(tables.Path, "home", lambda: tmp_path)
    tables.use_table(None)
    yield tmp_path
    tables.use_table(None)


@pytest.fixture
def on_t900(home, monkeypatch):
    """As if on a T900, with a Triton of the tables' version."""
    monkeypatch.setattr(tables, "device_of", lambda index: T900)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0", __spec__="here"))
    tables.forget()


def by_kernel(records):
    return {record.kernel: record for record in records}


def test_the_quickest_right_launch_of_each_kernel_is_chosen_with_its_gain(tmp_path):
    narrow, wide = Launch(tile=32, warps=4, stages=2), Launch(tile=64, warps=4, stages=3)
    found = tune([PACK], FakeRunner({narrow: 0.2, wide: 0.5}), FORWARD, tmp_path / "t.json")
    assert list(by_kernel(found.records)) == ["prepare", "scan"]
    scan = by_kernel(found.records)["scan"]
    assert scan.launch == narrow
    assert scan.ms == pytest.approx(15.2)
    assert scan.gain == pytest.approx(16 / 15.2)
    assert (scan.tried, scan.rejected) == (7, 0)
    assert read_table(tmp_path / "t.json").records == tuple(found.records)


def test_what_fails_the_numeric_check_is_never_timed_nor_chosen(tmp_path):
    wrong, right = Launch(tile=32, warps=4, stages=2), Launch(tile=64, warps=4, stages=3)
    runner = FakeRunner({wrong: 0.0, right: 0.5}, [wrong])
    found = tune([PACK], runner, FORWARD, tmp_path / "t.json")
    scan = by_kernel(found.records)["scan"]
    assert (scan.launch, scan.rejected) == (right, 1)
    assert all(config.scan != wrong for _, _, timed in runner.timed for config in timed)
    assert found.rejected == ["pack_8x4096 scan tile=32 warps=4 stages=2: o has relative RMS error 1, above 5e-3"]


def test_a_wrong_heuristic_is_replaced_and_has_no_gain(tmp_path):
    default = heuristic(problem_of(PACK, "scan"), T900).scan
    found = tune([PACK], FakeRunner(wrong=[default]), FORWARD, tmp_path / "t.json")
    scan = by_kernel(found.records)["scan"]
    assert scan.launch != default
    assert scan.gain is None


def test_where_all_candidates_fail_none_is_chosen_and_it_is_said(tmp_path):
    every = [config.scan for config in candidates("scan", problem_of(PACK, "scan"), LaunchConfig(), T900)]
    every.append(heuristic(problem_of(PACK, "scan"), T900).scan)
    found = tune([PACK], FakeRunner(wrong=every), FORWARD, tmp_path / "t.json")
    assert list(by_kernel(found.records)) == ["prepare"]
    assert found.failures == ["scan of pack_8x4096: no candidate runs and is right; none is chosen"]


def test_less_than_a_hundredth_is_noise(tmp_path):
    default = heuristic(problem_of(PACK, "scan"), T900).scan
    found = tune([PACK], FakeRunner({Launch(tile=64): 0.9}), FORWARD, tmp_path / "t.json")
    assert by_kernel(found.records)["scan"].launch == default
    assert by_kernel(found.records)["scan"].gain == 1


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "t.json"
    first = FakeRunner(stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        tune([LONG], first, None, out)
    assert first.closed
    assert set(by_kernel(read_table(out).records)) == {"split", "prepare", "scan"}
    second = FakeRunner()
    found = tune([LONG], second, None, out)
    assert [kernel for _, kernel in second.checked] == ["replay", "reverse", "gradients", "decode"]
    assert second.heard == [[(LONG, kernel) for kernel in ("replay", "reverse", "gradients", "decode")]]
    assert (found.kept, found.left) == (3, 0)
    assert len(read_table(out).records) == 7
    third = FakeRunner()
    assert tune([LONG], third, None, out).kept == 7
    assert third.checked == []
    assert len(tune([LONG], FakeRunner(), TuneConfig(again=True), out).records) == 7


def test_no_kernel_is_begun_after_the_budget(tmp_path, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("deltazoo.backends.tuning.tune.time.monotonic", lambda: next(clock))
    found = tune([LONG], FakeRunner(), TuneConfig(budget=25), tmp_path / "t.json")
    assert [record.kernel for record in found.records] == ["split", "prepare"]
    assert found.left == 5


def test_shapes_of_one_class_are_measured_once(tmp_path):
    shorter = PACK._replace(shape=Shape("shorter", 1, 24000, 16, 16, 128, 128, (3000,) * 8))
    runner = FakeRunner()
    found = tune([PACK, shorter], runner, FORWARD, tmp_path / "t.json")
    assert {target.shape.name for target, _ in runner.checked} == {"pack_8x4096"}
    assert found.left == 0


def test_parts_are_chosen_first_and_the_scans_are_measured_with_them(tmp_path):
    found = tune([LONG], FakeRunner({64: 1.0}), None, tmp_path / "t.json")
    records = by_kernel(found.records)
    assert found.records[0].kernel == "split"
    assert records["split"].split == 64
    assert records["scan"].parts
    assert records["scan"].programs == 64  # 8 heads in 8 parts of 64 chunks
    assert records["split"].chunks == 512


def test_no_parts_are_tried_where_half_the_device_has_work_without(tmp_path):
    assert plan([PACK], FakeRunner(), None, tmp_path / "t.json")[0].kernel == "prepare"
    found = tune([PACK], FakeRunner({16: 0.1}), None, tmp_path / "t.json")
    assert "split" not in by_kernel(found.records)


def test_an_additive_update_in_one_part_prepares_nothing():
    additive = PACK._replace(spec=UpdateSpec(decay="head", transition="additive"))
    assert "prepare" not in kernels_of(additive, TuneConfig())
    assert "prepare" in kernels_of(PACK, TuneConfig())
    assert kernels_of(TOKEN, TuneConfig()) == ["decode"]


def test_a_plan_lists_what_would_be_measured_and_measures_nothing(tmp_path):
    out, runner = tmp_path / "t.json", FakeRunner()
    listed = plan([LONG, TOKEN], runner, None, out)
    assert [step.kernel for step in listed] == [
        "split", "prepare", "scan", "replay", "reverse", "gradients", "decode", "decode",
    ]  # fmt: skip
    assert not any(step.done for step in listed)
    assert listed[2].candidates == 7
    assert (runner.checked, runner.timed, out.exists()) == ([], [], False)
    tune([LONG], FakeRunner(), FORWARD, out)
    assert [step.kernel for step in plan([LONG], runner, None, out) if step.done] == ["prepare", "scan"]


def test_full_effort_tries_all_that_quick_does_and_more():
    problem = problem_of(PACK, "scan")
    for kernel in ("prepare", "scan", "gradients", "decode"):
        quick = {getattr(config, kernel) for config in candidates(kernel, problem, LaunchConfig(), T900)}
        full = {getattr(config, kernel) for config in candidates(kernel, problem, LaunchConfig(), T900, "full")}
        assert quick < full
    for config in candidates("scan", problem, LaunchConfig(), T900, "full"):
        assert (config.chunk, config.every) == (LaunchConfig().chunk, LaunchConfig().every)


def test_no_tile_is_wider_than_the_values():
    narrow = problem_of(PACK._replace(shape=PACK.shape._replace(K=64, V=32)), "scan")
    assert {config.scan.tile for config in candidates("scan", narrow, LaunchConfig(scan=Launch(tile=32)), T900)} == {32}
    gradients = candidates("gradients", narrow, LaunchConfig(gradients=Launch(tile=32, keys=32)), T900)
    assert all(config.gradients.tile <= 32 and config.gradients.keys <= 64 for config in gradients)


def test_only_a_hopper_gpu_gets_the_kernel_for_it_and_only_for_what_that_takes():
    hopper = T900._replace(hopper=True)
    never = [{"dtype": torch.float32}, {"precise": True}, {"own": True}]
    beyond = {
        "prepare": [],
        "scan": [{"V": 32}, {"V": 520}],
        "replay": [{"V": 32}, {"V": 520}],
        "reverse": [{"V": 32}, {"V": 136}, {"K": 64}, {"K": 136}],
        "gradients": [{"V": 520}],
    }
    for kernel, others in beyond.items():
        problem = problem_of(PACK, "scan")
        assert problem.dtype.itemsize == 2
        assert getattr(heuristic(problem, hopper), kernel).hopper
        assert any(getattr(config, kernel).hopper for config in candidates(kernel, problem, LaunchConfig(), hopper))
        for other, device in [(problem, T900), *((problem._replace(**change), hopper) for change in never + others)]:
            assert not getattr(heuristic(other, device), kernel).hopper
            tried = candidates(kernel, other, LaunchConfig(), device)
            assert not any(getattr(config, kernel).hopper for config in tried)
    few = problem_of(PACK, "scan")._replace(V=64)
    assert heuristic(few, hopper).scan.hopper
    assert not heuristic(few._replace(delta=False), hopper).scan.hopper
    assert heuristic(few._replace(K=32), hopper).scan.hopper
    assert heuristic(few._replace(delta=False), hopper).reverse.hopper
    wide = heuristic(few._replace(K=200, V=400), hopper)
    assert all(getattr(wide, kernel).hopper for kernel in ("prepare", "scan", "replay", "gradients"))


def test_a_long_sequence_is_split_where_its_heads_and_tiles_of_values_are_few():
    h200 = T900._replace(hopper=True, processors=132)
    problem = problem_of(PACK, "scan")._replace(N=8, T=4096, H=6, HV=6, packed=False)
    assert [heuristic(problem._replace(V=V), h200).split for V in (128, 129, 384)] == [32, 0, 0]
    assert heuristic(problem._replace(V=512, HV=2, H=2), h200).split == 0
    assert heuristic(problem._replace(V=512, HV=1, H=1), h200).split == 16


@pytest.mark.parametrize("kernel", ["scan", "replay"])
def test_the_kernel_for_a_hopper_gpu_is_tried_where_the_heuristic_does_not_take_it(kernel):
    hopper, problem = T900._replace(hopper=True), problem_of(PACK, "scan")._replace(V=64, delta=False)
    assert not getattr(heuristic(problem, hopper), kernel).hopper
    assert any(getattr(config, kernel).hopper for config in candidates(kernel, problem, LaunchConfig(), hopper))


def test_decode_is_tuned_on_a_hopper_gpu_as_anywhere():
    hopper, problem = T900._replace(hopper=True), problem_of(PACK, "decode")
    assert problem.dtype.itemsize == 2
    tried = candidates("decode", problem, LaunchConfig(), hopper)
    assert tried == candidates("decode", problem, LaunchConfig(), T900)
    assert len(tried) > 1


def test_where_gates_alone_are_prepared_there_is_nothing_to_try():
    additive = problem_of(PACK, "scan")._replace(delta=False)
    assert candidates("prepare", additive, LaunchConfig(), T900._replace(hopper=True)) == [LaunchConfig()]


def test_gradients_that_the_reverse_scan_makes_are_not_tuned():
    base = LaunchConfig(reverse=Launch(tile=128, warps=8, hopper=True))
    assert candidates("gradients", problem_of(PACK, "scan"), base, T900._replace(hopper=True)) == [base]


def test_replay_and_reverse_scan_in_one_launch_are_a_choice_of_the_reverse_scan_alone():
    hopper, problem = T900._replace(hopper=True), problem_of(PACK, "scan")
    base = heuristic(problem, hopper)
    assert base.reverse.replays
    assert candidates("replay", problem, base, hopper) == [base]
    tried = {config.reverse.replays for config in candidates("reverse", problem, base, hopper)}
    assert tried == {True, False}
    fewer = problem._replace(N=3)
    for other in (problem._replace(H=8), problem._replace(N=4), problem._replace(N=17)):
        assert not heuristic(other, hopper).reverse.replays
    assert not any(config.reverse.replays for config in candidates("reverse", problem._replace(H=8), base, hopper)[1:])
    assert {config.split > 0: config.reverse.replays for config in candidates("split", fewer, base, hopper)} == {
        False: True, True: False,
    }  # fmt: skip
    in_parts = heuristic(fewer, hopper, 16)
    assert not any(config.reverse.replays for config in candidates("reverse", fewer, in_parts, hopper))


def test_a_check_runs_the_code_of_the_target_on_a_short_case():
    config, cases = checks_of(PACK, "scan", LaunchConfig())
    assert config == LaunchConfig()
    assert [case.regime for case in cases] == ["ordinary", "parallel", "decays"]
    assert all(case.shape.T == sum(case.shape.lengths) == 208 and 0 in case.shape.lengths for case in cases)
    config, cases = checks_of(LONG, "split", LaunchConfig(split=64))
    assert (config.split, cases[0].shape.HV, cases[0].shape.T) == (64, 4, 64 * 64 + 80)
    config, cases = checks_of(LONG, "scan", LaunchConfig(split=64))
    assert (config.split, cases[0].shape.T) == (16, 16 * 64 + 80)
    config, cases = checks_of(TOKEN, "decode", LaunchConfig())
    assert cases[0].shape.T == 1


@pytest.mark.parametrize(
    "spec",
    [
        GATED,
        UpdateSpec(beta="head", negative_eigenvalues="both", householders=2),
        UpdateSpec(decay="fixed", transition="additive"),
        UpdateSpec(decay="head", beta="head", erase_key="own"),
    ],
    ids=lambda spec: f"{spec.decay}-{spec.transition}-{spec.erase_key}-{spec.householders}",
)
@pytest.mark.parametrize("shape", [Shape("dense", 2, 70, 1, 2, 12, 20), Shape("pack", 1, 70, 1, 2, 16, 8, (30, 40))])
def test_the_problem_tuned_for_is_the_one_looked_up(spec, shape, monkeypatch):
    launch = pytest.importorskip("deltazoo.backends.triton.launch")
    from deltazoo.backends.conformance.cases import Case, draw
    from deltazoo.backends.triton import backend as triton_backend

    looked_up = []
    monkeypatch.setattr(launch.configs, "launch_config", lambda problem, index: looked_up.append(problem))
    x, kind = triton_backend.TritonBackend()._operands(spec, draw(Case(spec, shape)))
    if spec.householders > 1:
        x = triton_backend._by_micro_steps(spec, x, spec.householders)
    launch.resolve(x, kind)
    assert looked_up == [problem_of(Target(spec, shape, torch.float32), "scan", "cpu")]


def test_the_table_goes_before_the_heuristic_for_its_class_alone(on_t900, tmp_path):
    narrow = Launch(tile=32, warps=4, stages=2)
    tune([PACK], FakeRunner({narrow: 0.2}), FORWARD, tmp_path / "t.json")
    problem = problem_of(PACK, "scan")
    before = configs.launch_config(problem, 0)
    assert before == heuristic(problem, T900)
    tables.use_table(tmp_path / "t.json")
    found = configs.launch_config(problem, 0)
    assert found == before.model_copy(update={"scan": narrow})
    for other in ({"packed": False}, {"K": 64}, {"dtype": torch.float16}, {"delta": False}, {"HV": 32}, {"own": True}):
        assert configs.launch_config(problem._replace(**other), 0).scan != narrow
    assert configs.launch_config(problem._replace(T=30000), 0).scan == narrow
    tables.use_table(None)
    assert configs.launch_config(problem, 0) == before


def test_a_table_may_change_the_parts_but_never_what_is_saved(on_t900, tmp_path):
    tune([LONG], FakeRunner({64: 1.0}), None, tmp_path / "t.json")
    tables.use_table(tmp_path / "t.json")
    found = configs.launch_config(problem_of(LONG, "scan"), 0)
    default = heuristic(problem_of(LONG, "scan"), T900)
    assert (found.split, default.split) == (64, 32)
    assert (found.chunk, found.every) == (default.chunk, default.every)


def test_the_user_s_table_goes_over_the_shipped_and_a_named_one_over_both(on_t900, tmp_path, monkeypatch):
    shipped, narrow, wide = Launch(tile=64, stages=1), Launch(tile=32, warps=4, stages=2), Launch(tile=64, stages=3)
    problem = problem_of(PACK, "scan")
    package = tmp_path / "package"
    monkeypatch.setattr(tables, "files", lambda name: package)
    monkeypatch.setattr(tables, "source_of", lambda kernel: "same")
    monkeypatch.setattr("deltazoo.backends.tuning.tune.source_of", lambda kernel: "same")
    for launch, path in (
        (shipped, package / "tuned" / "nvidia-t900.json"),
        (narrow, user_table("NVIDIA T900")),
        (wide, tmp_path / "named.json"),
    ):
        assert configs.launch_config(problem, 0).scan != launch
        tune([PACK], FakeRunner({launch: 0.1}), FORWARD, path)
        if path.name == "named.json":
            tables.use_table(path)
        assert configs.launch_config(problem, 0).scan == launch


@pytest.mark.parametrize("other", ["triton", "source"])
def test_records_for_another_triton_or_other_kernels_are_ignored_with_one_line(on_t900, tmp_path, caplog, other):
    path = tmp_path / "t.json"
    tune([PACK], FakeRunner({Launch(tile=32): 0.1}), FORWARD, path)
    data = json.loads(path.read_text())
    for record in data["records"]:
        record[other] = "9.9"
    path.write_text(json.dumps(data))
    problem = problem_of(PACK, "scan")
    with caplog.at_level(logging.INFO, "deltazoo"):
        tables.use_table(path)
        for T in (100, 32768, 32769):
            assert configs.launch_config(problem._replace(T=T), 0) == heuristic(problem._replace(T=T), T900)
    assert len(caplog.records) == 1
    assert "2 of 2 records of a launch table for NVIDIA T900" in caplog.text


def test_a_look_up_that_was_made_before_reads_no_file(on_t900, monkeypatch):
    problem = problem_of(PACK, "scan")
    first = configs.launch_config(problem, 0)
    monkeypatch.setattr(tables, "configured", lambda *_: pytest.fail("looked up again"))
    assert configs.launch_config(problem, 0) is first


def test_tables_of_one_device_merge_the_later_over_the_earlier(tmp_path):
    narrow, wide = Launch(tile=32), Launch(tile=64, stages=3)
    tune([PACK], FakeRunner({narrow: 0.1}), FORWARD, tmp_path / "a.json")
    tune([PACK], FakeRunner({wide: 0.1}), FORWARD, tmp_path / "b.json")
    tune([TOKEN], FakeRunner(), None, tmp_path / "c.json")
    merged = merge_tables([tmp_path / f"{name}.json" for name in "abc"], tmp_path / "out.json")
    assert read_table(tmp_path / "out.json") == merged
    assert sorted(record.kernel for record in merged.records) == ["decode", "prepare", "scan"]
    assert by_kernel(merged.records)["scan"].launch == wide


def test_another_device_s_table_is_refused(tmp_path):
    Table(device="NVIDIA B200").write(tmp_path / "b200.json")
    tune([PACK], FakeRunner(), FORWARD, tmp_path / "t900.json")
    message = r"tables of two devices do not merge: 'NVIDIA T900' and 'NVIDIA B200'"
    with pytest.raises(ConfigError, match=message):
        merge_tables([tmp_path / "t900.json", tmp_path / "b200.json"], tmp_path / "out.json")
    with pytest.raises(ConfigError, match=message):
        tune([PACK], FakeRunner(), FORWARD, tmp_path / "b200.json")
    assert not (tmp_path / "out.json").exists()


def broken(**change):
    record = {
        "triton": "3.6.0", "source": "x", "kernel": "scan", "dtype": "bfloat16", "K": 128, "V": 128, "groups": 1,
        "delta": True, "own": False, "decayed": True, "packed": False, "precise": False, "parts": False,
        "programs": 128, "chunks": 0, "launch": {"tile": 64}, "shape": "s", "ms": 1.0, "tried": 1, "rejected": 0,
    }  # fmt: skip
    return json.dumps({"version": 1, "device": "NVIDIA T900", "records": [record | change]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "t.json is not a launch table: .*Invalid JSON"),
        (broken(launch={"tile": 2}), r"records.0.launch.tile: Input should be greater than or equal to"),
        (broken(launch={"tile": 64, "chunk": 32}), r"records.0.launch.chunk: Extra inputs are not permitted"),
        (broken(kernel="split"), r"records.0: kernel='split' needs split alone"),
        (broken(kernel="split", launch=None, split=24), r"split must be 0 or a power of two and a multiple of every"),
        (broken(dtype="float8"), r"records.0.dtype"),
        (None, "t.json cannot be read"),
    ],
)
def test_a_broken_table_is_an_error_that_names_the_file_and_the_field(tmp_path, text, says):
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        tables.use_table(path)


def test_a_table_that_cannot_be_written_whole_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    tune([PACK], FakeRunner(), FORWARD, path)
    before = path.read_text()
    monkeypatch.setattr(tables.os, "replace", lambda a, b: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Table(device="NVIDIA T900").write(path)
    assert path.read_text() == before
    assert [found.name for found in tmp_path.iterdir()] == ["t.json"]


def test_the_shipped_tables_are_valid_and_hold_what_the_key_says():
    folder = tables.files("deltazoo.backends.triton") / "tuned"
    for path in folder.iterdir() if folder.is_dir() else []:
        table = read_table(path)
        assert path.name == f"{tables.slug(table.device)}.json"
        assert table.records
        for record in table.records:
            assert record.gain is None or record.gain >= 1
            assert record.source == tables.source_of(record.kernel), (
                f"{path.name}: measured with another {record.kernel}"
            )


def test_comments_and_docstrings_of_a_kernel_do_not_count_but_its_blocks_do():
    def code(text: str) -> list[str]:
        return list(tables._code_of(text))

    plain = "def f(x):\n    if x:\n        y = 1\n        z = 'a'\n"
    assert code(
        '"""Of it."""\n\ndef f(x):  # so\n    """Says."""\n    if x:\n\n        y = 1\n        z = \'a\'\n'
    ) == code(plain)
    assert code(plain.replace("        z", "    z")) != code(plain)
    assert code(plain.replace("'a'", "'b'")) != code(plain)


def test_a_kernels_fingerprint_is_the_same_in_every_python():
    nested = 'f"""{{a}} {b!r:>{c}}\n {f\'{d}\'}"""'  # Python 3.12 takes it apart
    assert list(tables._code_of(f"x = g({nested})\n"))[:6] == ["x", "=", "g", "(", nested, ")"]


def test_tuning_nothing_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match="tuning needs at least one shape, got none"):
        tune([], FakeRunner(), None, tmp_path / "t.json")


def test_a_key_s_programs_count_what_the_kernel_can_run_at_once():
    problem = problem_of(LONG, "scan")
    assert [key_of(kernel, problem, 32).programs for kernel in ("split", "prepare", "replay", "scan")] == [
        8,
        256,
        256,
        128,
    ]
    assert configured(problem, T900, {}) == heuristic(problem, T900)
