"""The tuner without a GPU: what it measures, rejects, stores and resumes, with a runner that makes times up."""

import math
import queue
import threading
import time

import pytest
import torch
from tune_cases import FORWARD, GATED, LONG, PACK, T900, TOKEN, FakeRunner, by_kernel

from deltazoo.backends.conformance.decode_step import draw_step, typical_step
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.shapes import Shape
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.triton import decode_step as fused
from deltazoo.backends.triton.config import Launch, LaunchConfig, heuristic
from deltazoo.backends.triton.table import configured, key_of, read_table
from deltazoo.backends.tuning import measure
from deltazoo.backends.tuning.candidates import Target, candidates, problem_of
from deltazoo.backends.tuning.measure import CudaRunner, checks_of
from deltazoo.backends.tuning.tune import TuneConfig, kernels_of, plan, tune


def test_the_quickest_right_launch_of_each_kernel_is_chosen_with_its_gain(tmp_path):
    narrow, wide = Launch(tile=32, warps=4, stages=2), Launch(tile=64, warps=4, stages=3)
    found = tune([PACK], FakeRunner({narrow: 0.2, wide: 0.5}), FORWARD, tmp_path / "t.json")
    assert list(by_kernel(found.records)) == ["prepare", "scan"]
    scan = by_kernel(found.records)["scan"]
    assert scan.launch == narrow
    assert scan.ms == pytest.approx(16.2)
    assert scan.gain == pytest.approx(17 / 16.2)
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


def test_where_no_time_is_a_number_none_is_chosen_and_the_table_can_be_read(tmp_path):
    default = heuristic(problem_of(PACK, "prepare"), T900).prepare
    found = tune([PACK], FakeRunner({default: math.inf}), FORWARD, tmp_path / "t.json")
    prepare = by_kernel(found.records)["prepare"]
    assert prepare.launch != default
    assert prepare.gain is None
    found = tune([PACK], FakeRunner({0: math.inf}), FORWARD, tmp_path / "none.json")
    assert len(found.failures) == 2
    assert not (tmp_path / "none.json").exists()
    assert read_table(tmp_path / "t.json").records


def test_an_interrupted_check_waits_for_none_of_those_to_come(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    runner, ran = CudaRunner.__new__(CudaRunner), []
    runner._bench, runner._verdicts, runner._count, runner.on = None, {}, 2, "cuda"

    def ask(one, until):
        ran.append(one)
        time.sleep(0.05)
        if len(ran) > 3:
            raise KeyboardInterrupt
        return ""

    runner._ask = ask
    tried = [LaunchConfig(scan=Launch(tile=64, warps=w, stages=s)) for w in (4, 8) for s in range(1, 17)]
    with pytest.raises(KeyboardInterrupt):
        runner.check(PACK, "scan", tried)
    assert len(ran) < 10
    assert len(runner._verdicts) >= 1  # what is known is kept


def test_a_replay_is_tuned_where_the_reverse_scan_was_chosen_without(tmp_path):
    runner = FakeRunner()
    runner.device = T900._replace(hopper=True)
    replays = heuristic(problem_of(PACK, "reverse"), runner.device).reverse
    assert replays.replays
    runner.quick[replays.model_copy(update={"replays": False})] = 0.1
    found = tune([PACK], runner, TuneConfig(directions=("backward",)), tmp_path / "t.json")
    assert [record.kernel for record in found.records] == ["reverse", "replay"]
    assert not found.records[0].launch.replays


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
    assert [kernel for _, kernel in second.checked] == ["reverse", "replay", "gradients", "decode", "fused_step"]
    assert second.heard == [[(LONG, kernel) for kernel in ("reverse", "replay", "gradients", "decode", "fused_step")]]
    assert (found.kept, found.left) == (3, 0)
    assert len(read_table(out).records) == 8
    third = FakeRunner()
    assert tune([LONG], third, None, out).kept == 8
    assert third.checked == []
    assert len(tune([LONG], FakeRunner(), TuneConfig(again=True), out).records) == 8


def test_no_kernel_is_begun_after_the_budget(tmp_path, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("deltazoo.backends.tuning.tune.time.monotonic", lambda: next(clock))
    found = tune([LONG], FakeRunner(), TuneConfig(budget=25), tmp_path / "t.json")
    assert [record.kernel for record in found.records] == ["split", "prepare"]
    assert found.left == 6


def test_nothing_is_checked_ahead_after_the_budget(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("deltazoo.backends.tuning.tune.time.monotonic", lambda: now[0])

    class Slow(FakeRunner):
        def ahead(self, steps, until):
            assert until == 25
            now[0] = 26.0

    runner = Slow()
    found = tune([LONG], runner, TuneConfig(budget=25), tmp_path / "t.json")
    assert (found.records, found.left, runner.checked) == ([], 8, [])


def test_a_check_that_would_begin_too_late_has_no_verdict_and_may_be_asked_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    class Worker:
        def ask(self, job):
            return "wrong"

    runner = CudaRunner.__new__(CudaRunner)
    runner._bench, runner._verdicts, runner._count, runner.on = None, {}, 1, "cuda"
    runner._answering, runner._free, runner._job = threading.Lock(), queue.Queue(), lambda *one: one
    runner._free.put(Worker())
    asked = [(PACK, "scan", LaunchConfig(scan=Launch(tile=64, warps=w))) for w in (4, 8)]
    runner._check(asked, until=time.monotonic() - 1)
    assert runner._verdicts == {}
    assert runner.check(PACK, "scan", [config for _, _, config in asked]) == ["wrong", "wrong"]


def test_what_had_no_memory_beside_others_is_checked_again_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    runner, asked = CudaRunner.__new__(CudaRunner), []
    runner.on, runner._count, runner._verdicts, runner._bench = torch.device("cuda"), 2, {}, None

    def ask(one, until):
        asked.append(one[2].scan.tile)
        if one[2].scan.tile == 64:
            return "failed with OutOfMemoryError: CUDA out of memory."
        return "failed with OutOfMemoryError: CUDA out of memory." if asked.count(32) == 1 else ""

    monkeypatch.setattr(runner, "_ask", ask)
    configs = [LaunchConfig(scan=Launch(tile=tile)) for tile in (32, 64)]
    assert [bool(verdict) for verdict in runner.check(PACK, "scan", configs)] == [False, True]
    assert sorted(asked) == [32, 32, 64, 64]


def test_a_comparison_without_memory_has_no_times_and_the_next_begins_anew(monkeypatch):
    class Full:
        def __init__(self, target, timed, device):
            self.target, self.timed = target, timed

        def time(self, configs, rounds):
            if len(configs) > 1:
                raise torch.OutOfMemoryError
            return [0.5]

    monkeypatch.setattr(measure, "_Bench", Full)
    runner = CudaRunner.__new__(CudaRunner)
    runner.on, runner._bench = torch.device("cuda"), None
    assert runner.time(PACK, "scan", [LaunchConfig(), LaunchConfig(split=16)], 3) == [math.inf] * 2
    assert runner._bench is None
    assert runner.time(PACK, "scan", [LaunchConfig()], 3) == [0.5]


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
    assert kernels_of(TOKEN, TuneConfig()) == ["decode", "fused_step"]
    retnet = TOKEN._replace(spec=UpdateSpec(decay="fixed", transition="additive"))
    assert kernels_of(retnet, TuneConfig()) == ["decode"]  # no step of a mixer is around a fixed decay
    assert kernels_of(TOKEN._replace(spec=UpdateSpec(householders=2)), TuneConfig()) == ["decode"]


def test_a_plan_lists_what_would_be_measured_and_measures_nothing(tmp_path):
    out, runner = tmp_path / "t.json", FakeRunner()
    listed = plan([LONG, TOKEN], runner, None, out)
    assert [step.kernel for step in listed] == [
        "split", "prepare", "scan", "reverse", "replay", "gradients", "decode", "fused_step", "decode", "fused_step",
    ]  # fmt: skip
    assert not any(step.done for step in listed)
    assert listed[2].candidates == 7
    assert (runner.checked, runner.timed, out.exists()) == ([], [], False)
    tune([LONG], FakeRunner(), FORWARD, out)
    assert [step.kernel for step in plan([LONG], runner, None, out) if step.done] == ["prepare", "scan"]


def test_full_effort_tries_all_that_quick_does_and_more():
    problem = problem_of(PACK, "scan")
    for kernel in ("prepare", "scan", "gradients", "decode", "fused_step"):
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


WIDTHS = {"V": 136}, {"K": 64}, {"K": 136}  # where the reverse scan is not one with the gradients


def test_only_a_hopper_gpu_gets_the_kernel_for_it_and_only_for_what_that_takes():
    hopper = T900._replace(hopper=True)
    never = [{"dtype": torch.float32}, {"precise": True}, {"own": True}]
    beyond = {
        "prepare": [],
        "scan": [{"V": 32}, {"V": 520}],
        "replay": [{"V": 32}, {"V": 520}],
        "reverse": [{"V": 32}, {"V": 520}],
        "gradients": [{"V": 520}],
    }
    assert heuristic(problem_of(PACK, "scan")._replace(N=0, T=0), hopper).split == 0
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
    assert all(getattr(wide, kernel).hopper for kernel in ("prepare", "scan", "replay", "reverse", "gradients"))
    by_itself = [heuristic(problem_of(PACK, "scan")._replace(**asked), hopper).reverse for asked in WIDTHS]
    assert all(reverse.hopper and not reverse.replays for reverse in by_itself)


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
    problem, hopper = problem_of(PACK, "scan"), T900._replace(hopper=True)
    assert candidates("gradients", problem, base, hopper) == [base]
    assert len(candidates("gradients", problem._replace(K=136), base, hopper)) > 1


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
    assert config == LaunchConfig(every=2, scratch=0)  # several segments
    assert [case.regime for case in cases] == ["ordinary", "parallel", "decays"]
    assert all(case.shape.T == sum(case.shape.lengths) == 1040 and 0 in case.shape.lengths for case in cases)
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
        UpdateSpec(transition="additive"),
        UpdateSpec(beta="head", negative_eigenvalues="both"),
        UpdateSpec(decay="head", beta="head", erase_key="own"),
    ],
    ids=str,
)
def test_the_fused_step_tuned_for_is_the_one_looked_up(spec, monkeypatch):
    looked_up, chosen = [], LaunchConfig(fused_step=Launch(tile=32))
    monkeypatch.setattr(fused, "launch_config", lambda problem, index: looked_up.append(problem) or chosen)
    shape = Shape("rows", 5, 1, 1, 2, 12, 20)
    step = typical_step(spec, shape)
    given = draw_step(step, (), shape.B, torch.bfloat16)
    found = fused._resolve(given.inputs, given.states, fused.StepKind.of(step), 1, "")
    assert (found, looked_up) == (
        chosen.fused_step,
        [problem_of(Target(spec, shape, torch.bfloat16), "fused_step", "cpu")],
    )


def test_a_fused_step_of_which_neither_config_nor_table_speaks_is_launched_by_its_sizes(monkeypatch):
    monkeypatch.setattr(fused, "launch_config", lambda problem, index: LaunchConfig(fused_step=Launch(tile=16)))
    step = typical_step(GATED, Shape("rows", 2, 1, 1, 1, 256, 64))
    given = draw_step(step, (), 2)
    speaks = LaunchConfig(fused_step=Launch(tile=32)).model_dump_json()
    silent = LaunchConfig(split=16).model_dump_json()
    found = [
        fused._resolve(given.inputs, given.states, fused.StepKind.of(step), n, config)
        for n, config in ((1, ""), (2, ""), (1, silent), (2, speaks))
    ]
    by_sizes = Launch(tile=64, warps=8, stages=1)
    assert found == [Launch(tile=16), by_sizes, by_sizes, Launch(tile=32)]


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
    launch = pytest.importorskip("deltazoo.backends.triton.forward")
    from deltazoo.backends.conformance.cases import Case, draw
    from deltazoo.backends.triton import backend as triton_backend

    looked_up = []
    monkeypatch.setattr(launch.configs, "launch_config", lambda problem, index: looked_up.append(problem))
    x, kind = triton_backend.TritonBackend()._operands(spec, draw(Case(spec, shape)))
    if spec.householders > 1:
        x = triton_backend._by_micro_steps(spec, x, spec.householders)
    launch.resolve(x, kind)
    assert looked_up == [problem_of(Target(spec, shape, torch.float32), "scan", "cpu")]


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
