"""The tuner with simulated times: measurements, rejections, records, resumption and candidates."""

import math

import pytest
import torch
from tune_cases import FORWARD, GATED, HOPPER, LONG, PACK, T900, TOKEN, FakeRunner, by_kernel, problem_of

from deltazoo.backends.conformance.decode_step import draw_step, typical_step
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.triton.chunk.heuristic import heuristic
from deltazoo.backends.triton.chunk.plan import make_plan
from deltazoo.backends.triton.config import Launch, LaunchConfig
from deltazoo.backends.triton.decode import fused
from deltazoo.backends.triton.runtime.records import key_of
from deltazoo.backends.triton.runtime.table import configured, read_table
from deltazoo.backends.tuning import measure
from deltazoo.backends.tuning.candidates import Target, candidates
from deltazoo.backends.tuning.measure import CudaRunner, checks_of
from deltazoo.backends.tuning.tune import TuneConfig, kernels_of, plan, tune
from deltazoo.backends.update.spec import UpdateSpec


def test_fastest_correct_launch_of_each_kernel_is_stored_with_its_gain(tmp_path):
    narrow, wide = Launch(tile=32, warps=4, stages=2), Launch(tile=64, warps=4, stages=3)
    result = tune([PACK], FakeRunner({narrow: 0.2, wide: 0.5}), FORWARD, tmp_path / "t.json")
    assert list(by_kernel(result.records)) == ["scan", "prepare"]
    scan = by_kernel(result.records)["scan"]
    assert scan.launch == narrow
    assert scan.ms == pytest.approx(16.2)
    assert scan.gain == pytest.approx(17 / 16.2)
    assert (scan.tried, scan.rejected) == (7, 0)
    assert by_kernel(read_table(tmp_path / "t.json").records) == by_kernel(result.records)


def test_candidate_that_fails_the_numeric_check_is_not_timed(tmp_path):
    wrong, right = Launch(tile=32, warps=4, stages=2), Launch(tile=64, warps=4, stages=3)
    runner = FakeRunner({wrong: 0.0, right: 0.5}, [wrong])
    result = tune([PACK], runner, FORWARD, tmp_path / "t.json")
    scan = by_kernel(result.records)["scan"]
    assert (scan.launch, scan.rejected) == (right, 1)
    assert all(config.scan != wrong for _, _, timed in runner.timed for config in timed)
    assert result.rejected == ["pack_8x4096 scan tile=32 warps=4 stages=2: o has relative RMS error 1, above 5e-3"]


def test_record_has_no_gain_if_the_heuristic_fails_the_check(tmp_path):
    default = heuristic(problem_of(PACK, "scan"), T900).scan
    result = tune([PACK], FakeRunner(wrong=[default]), FORWARD, tmp_path / "t.json")
    scan = by_kernel(result.records)["scan"]
    assert scan.launch != default
    assert scan.gain is None


def test_kernel_whose_candidates_all_fail_is_reported(tmp_path):
    every = [config.scan for config in candidates("scan", problem_of(PACK, "scan"), LaunchConfig(), T900)]
    every.append(heuristic(problem_of(PACK, "scan"), T900).scan)
    result = tune([PACK], FakeRunner(wrong=every), FORWARD, tmp_path / "t.json")
    assert list(by_kernel(result.records)) == ["prepare"]
    assert result.failures == [
        "scan of pack_8x4096: no candidate passes the numeric check and can be timed; none is chosen"
    ]


def test_infinite_times_are_not_stored(tmp_path):
    default = heuristic(problem_of(PACK, "prepare"), T900).prepare
    result = tune([PACK], FakeRunner({default: math.inf}), FORWARD, tmp_path / "t.json")
    prepare = by_kernel(result.records)["prepare"]
    assert prepare.launch != default
    assert prepare.gain is None
    split = heuristic(problem_of(PACK, "scan"), T900).segment_chunks
    result = tune([PACK], FakeRunner({split: math.inf}), FORWARD, tmp_path / "none.json")
    assert len(result.failures) == 2
    assert not (tmp_path / "none.json").exists()
    assert read_table(tmp_path / "t.json").records


def test_recomputation_is_tuned_if_the_fused_backward_lost(tmp_path):
    runner = FakeRunner()
    runner.device = HOPPER
    default = heuristic(problem_of(PACK, "reverse"), runner.device).reverse
    assert default.kernel == "fused"
    runner.quick[default.model_copy(update={"kernel": "sm90"})] = 0.1
    result = tune([PACK], runner, TuneConfig(directions=("backward",)), tmp_path / "t.json")
    assert [record.key.kernel for record in result.records] == ["reverse", "recompute"]
    assert result.records[0].launch.kernel == "sm90"


def test_gain_below_one_percent_is_ignored(tmp_path):
    default = heuristic(problem_of(PACK, "scan"), T900).scan
    result = tune([PACK], FakeRunner({Launch(tile=64): 0.9}), FORWARD, tmp_path / "t.json")
    assert by_kernel(result.records)["scan"].launch == default
    assert by_kernel(result.records)["scan"].gain == 1


def test_a_class_of_two_targets_is_kept_once(tmp_path):
    twin = PACK._replace(shape=PACK.shape._replace(name="twin"))
    out = tmp_path / "t.json"
    assert len(tune([PACK, twin], FakeRunner(), FORWARD, out).records) == 2
    assert tune([PACK, twin], FakeRunner(), FORWARD, out).kept == 2


def test_interrupted_run_resumes_from_the_table(tmp_path):
    out = tmp_path / "t.json"
    first = FakeRunner(stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        tune([LONG], first, None, out)
    assert set(by_kernel(read_table(out).records)) == {"decode", "segment_chunks", "reverse"}
    second = FakeRunner()
    result = tune([LONG], second, None, out)
    assert [kernel for _, kernel in second.checked] == ["gradients", "scan", "recompute", "prepare", "fused_step"]
    assert (result.kept, result.left) == (3, 0)
    assert len(read_table(out).records) == 8
    third = FakeRunner()
    assert tune([LONG], third, None, out).kept == 8
    assert third.checked == []
    assert len(tune([LONG], FakeRunner(), TuneConfig(again=True), out).records) == 8


def test_no_kernel_is_tuned_after_the_budget(tmp_path, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("deltazoo.backends.tuning.tune.time.monotonic", lambda: next(clock))
    result = tune([LONG], FakeRunner(), TuneConfig(budget=25), tmp_path / "t.json")
    assert [record.key.kernel for record in result.records] == ["decode", "segment_chunks"]
    assert result.left == 6


def test_comparison_that_runs_out_of_memory_has_infinite_times(monkeypatch):
    class Full:
        def __init__(self, target, timed, device):
            self.target, self.timed = target, timed

        def time(self, configs, rounds):
            if len(configs) > 1:
                raise torch.OutOfMemoryError
            return [0.5]

    monkeypatch.setattr(measure, "_Bench", Full)
    runner = CudaRunner.__new__(CudaRunner)
    runner.cuda, runner._bench = torch.device("cuda"), None
    assert runner.time(PACK, "scan", [LaunchConfig(), LaunchConfig(segment_chunks=16)], 3) == [math.inf] * 2
    assert runner._bench is None
    assert runner.time(PACK, "scan", [LaunchConfig()], 3) == [0.5]


def test_shapes_of_one_class_are_measured_once(tmp_path):
    longer = PACK._replace(shape=Shape("longer", 1, 32800, 16, 16, 128, 128, (4100,) * 8))
    runner = FakeRunner()
    result = tune([PACK, longer], runner, FORWARD, tmp_path / "t.json")
    assert {target.shape.name for target, _ in runner.checked} == {"pack_8x4096"}
    assert result.left == 0


def test_segments_are_tuned_before_the_scans(tmp_path):
    result = tune([LONG], FakeRunner({64: 1.0}), None, tmp_path / "t.json")
    records = by_kernel(result.records)
    assert [record.key.kernel for record in result.records][:2] == ["decode", "segment_chunks"]
    assert records["segment_chunks"].segment_chunks == 64
    assert records["scan"].key.segments
    assert records["scan"].key.programs == 64  # 8 heads in 8 segments of 64 chunks
    assert records["segment_chunks"].key.chunks == 512


def test_no_segments_are_tried_if_sequences_and_heads_fill_half_of_the_gpu(tmp_path):
    assert [step.kernel for step in plan([PACK], T900, None, tmp_path / "t.json")][:2] == ["decode", "reverse"]
    result = tune([PACK], FakeRunner({16: 0.1}), None, tmp_path / "t.json")
    assert "segment_chunks" not in by_kernel(result.records)


def test_gain_of_each_direction_compares_the_heuristic_with_all_choices(tmp_path):
    narrow, wide = Launch(tile=32, warps=4, stages=2), Launch(tile=64, warps=8, stages=2, keys=128)
    result = tune([PACK], FakeRunner({narrow: 0.2, wide: 0.5}), None, tmp_path / "t.json")
    saved = {gain.direction: gain.heuristic_ms - gain.tuned_ms for gain in result.gains}
    # the times of the whole config: scan, recomputation and reverse scan, gradients
    expected = pytest.approx(3 * 0.8 + 0.5)
    assert saved == {"backward": expected, "forward": expected}
    assert tune([PACK], FakeRunner(), None, tmp_path / "u.json").gains == []


def test_no_table_is_announced_if_nothing_was_measured(tmp_path, monkeypatch):
    clock = iter(range(0, 1000, 100))
    monkeypatch.setattr("deltazoo.backends.tuning.tune.time.monotonic", lambda: next(clock))
    result = tune([LONG], FakeRunner(), TuneConfig(budget=25), tmp_path / "t.json")
    assert result.records == []
    assert result.last_line == "# nothing was measured; no table was written"
    assert not (tmp_path / "t.json").exists()


def test_candidates_of_the_next_kernel_compile_while_a_kernel_is_measured(tmp_path):
    runner = FakeRunner()
    compiled_at_check = {}

    def check(target, kernel, config):
        compiled_at_check.setdefault(kernel, [kernel for _, kernel, _ in runner.compiled])
        return FakeRunner.check(runner, target, kernel, config)

    runner.check = check
    tune([PACK], runner, FORWARD, tmp_path / "t.json")
    order = [kernel for _, kernel in runner.checked]
    assert len(order) > 1
    for n, kernel in enumerate(order):
        assert set(compiled_at_check[kernel]) == set(order[: n + 2])
    assert all(len(configs) > 1 for *_, configs in runner.compiled)


def test_quick_effort_tries_one_portable_launch_beside_the_hopper_kernels():
    problem = problem_of(PACK, "scan")
    for kernel in ("prepare", "scan", "reverse"):
        quick = candidates(kernel, problem, heuristic(problem, HOPPER), HOPPER)
        assert sum(getattr(config, kernel).kernel == "portable" for config in quick) == 1
        assert len(candidates(kernel, problem, heuristic(problem, HOPPER), HOPPER, "full")) > len(quick)


def test_kernels_of_a_target_depend_on_spec_and_length():
    additive = PACK._replace(spec=UpdateSpec(decay="head", transition="additive"))
    assert "prepare" not in kernels_of(additive, TuneConfig())
    assert "prepare" in kernels_of(PACK, TuneConfig())
    assert kernels_of(TOKEN, TuneConfig()) == ["decode", "fused_step"]
    rwkv7 = TOKEN._replace(spec=UpdateSpec(decay="channel", transition="dplr"))
    assert kernels_of(rwkv7, TuneConfig()) == ["decode"]  # it has no fused step
    assert kernels_of(TOKEN._replace(spec=UpdateSpec(householders=2)), TuneConfig()) == ["decode"]


def test_hopper_kernels_are_candidates_for_updates_with_split_terms(tmp_path):
    negative = PACK._replace(spec=UpdateSpec(decay="head", beta="head", negative_eigenvalues="both"))
    runner = FakeRunner()
    runner.device = HOPPER
    tune([negative], runner, FORWARD, tmp_path / "t.json")
    scans = [config.scan.kernel for _, kernel, configs in runner.compiled if kernel == "scan" for config in configs]
    assert scans[0] == "sm90"


def test_dry_run_lists_kernels_and_measures_nothing(tmp_path):
    out, runner = tmp_path / "t.json", FakeRunner()
    listed = plan([LONG, TOKEN], T900, None, out)
    assert [step.kernel for step in listed] == [
        "decode", "segment_chunks", "reverse", "gradients", "scan", "recompute", "prepare", "fused_step", "decode",
        "fused_step",
    ]  # fmt: skip
    assert not any(step.done for step in listed)
    assert len(listed[4].candidates) == 7
    assert "tile=128 warps=8 stages=3" in listed[4].candidates
    assert (runner.checked, runner.timed, out.exists()) == ([], [], False)
    tune([LONG], FakeRunner(), FORWARD, out)
    assert [step.kernel for step in plan([LONG], T900, None, out) if step.done] == ["scan", "prepare"]


def test_full_effort_includes_all_quick_candidates():
    problem = problem_of(PACK, "scan")
    for kernel in ("prepare", "scan", "gradients", "decode", "fused_step"):
        quick = {getattr(config, kernel) for config in candidates(kernel, problem, LaunchConfig(), T900)}
        full = {getattr(config, kernel) for config in candidates(kernel, problem, LaunchConfig(), T900, "full")}
        assert quick < full
    for config in candidates("scan", problem, LaunchConfig(), T900, "full"):
        assert (config.chunk, config.checkpoint_chunks) == (LaunchConfig().chunk, LaunchConfig().checkpoint_chunks)


def test_tiles_are_not_wider_than_the_values():
    narrow = problem_of(PACK._replace(shape=PACK.shape._replace(K=64, V=32)), "scan")
    assert {config.scan.tile for config in candidates("scan", narrow, LaunchConfig(scan=Launch(tile=32)), T900)} == {32}
    gradients = candidates("gradients", narrow, LaunchConfig(gradients=Launch(tile=32, keys=32)), T900)
    assert all(config.gradients.tile <= 32 and config.gradients.keys <= 64 for config in gradients)


HOPPER_KERNELS = ("prepare", "scan", "recompute", "reverse", "gradients")


def on_hopper(config, kernel):
    """Whether a config launches the Hopper version of a kernel."""
    return getattr(config, kernel).kernel != "portable"


def test_hopper_kernels_are_chosen_and_tried_only_on_hopper_and_for_supported_problems():
    portable_only = [{"dtype": torch.float32}, {"split_terms": True}]
    wide_key = {"K": 136, "erase_key": True}
    unsupported = {
        "prepare": [],
        "scan": [{"V": 32}, {"V": 520}, wide_key],
        "recompute": [{"V": 32}, {"V": 520}, wide_key],
        "reverse": [{"V": 32}, {"V": 520}, wide_key],
        "gradients": [{"V": 520}],
    }
    problem = problem_of(PACK, "scan")
    assert heuristic(problem._replace(N=0, T=0), HOPPER).segment_chunks == 0
    for kernel, others in unsupported.items():
        # the sweep kernel also computes the gradients, so K = 136 is needed to tune their kernel
        tunable = problem._replace(K=136, H=8)
        assert on_hopper(heuristic(problem, HOPPER), kernel)
        assert any(on_hopper(config, kernel) for config in candidates(kernel, tunable, LaunchConfig(), HOPPER))
        for other, device in [
            (problem, T900),
            *((problem._replace(**change), HOPPER) for change in portable_only + others),
        ]:
            assert not on_hopper(heuristic(other, device), kernel)
            assert not any(on_hopper(config, kernel) for config in candidates(kernel, other, LaunchConfig(), device))


@pytest.mark.parametrize(
    ("change", "kernel", "hopper"),
    [
        ({"V": 64}, "scan", True),
        ({"V": 64, "delta": False}, "scan", False),
        ({"V": 64, "K": 32}, "scan", True),
        ({"V": 64, "delta": False}, "reverse", True),
        *(({"K": 200, "V": 400}, kernel, True) for kernel in HOPPER_KERNELS),
    ],
)
def test_heuristic_prefers_hopper_kernels_except_few_values_without_erase(change, kernel, hopper):
    assert on_hopper(heuristic(problem_of(PACK, "scan")._replace(**change), HOPPER), kernel) is hopper


@pytest.mark.parametrize("change", [{"V": 136}, {"K": 64}, {"K": 136}])
def test_reverse_and_gradients_are_separate_launches_where_the_sweep_does_not_support_the_widths(change):
    problem = problem_of(PACK, "scan")._replace(**change)
    config = heuristic(problem, HOPPER)
    assert config.reverse.kernel == "sm90"
    assert "gradients" in make_plan(problem, HOPPER, config, grad=True).kernels


def test_long_sequences_are_split_into_segments_if_heads_and_value_tiles_are_few():
    problem = problem_of(PACK, "scan")._replace(N=8, T=4096, H=6, HV=6, packed=False)
    assert [heuristic(problem._replace(V=V), HOPPER).segment_chunks for V in (128, 129, 384)] == [32, 0, 0]
    assert heuristic(problem._replace(V=512, HV=2, H=2), HOPPER).segment_chunks == 32
    assert heuristic(problem._replace(V=512, HV=1, H=1), HOPPER).segment_chunks == 16


@pytest.mark.parametrize("kernel", ["scan", "recompute"])
def test_hopper_version_is_a_candidate_where_the_heuristic_prefers_the_portable_one(kernel):
    problem = problem_of(PACK, "scan")._replace(V=64, delta=False)
    assert not on_hopper(heuristic(problem, HOPPER), kernel)
    assert any(on_hopper(config, kernel) for config in candidates(kernel, problem, LaunchConfig(), HOPPER))


def test_decode_has_the_same_candidates_on_every_gpu():
    problem = problem_of(PACK, "decode")
    tried = candidates("decode", problem, LaunchConfig(), HOPPER)
    assert tried == candidates("decode", problem, LaunchConfig(), T900)
    assert len(tried) > 1


def test_gates_have_no_candidates():
    additive = problem_of(PACK, "scan")._replace(delta=False)
    assert candidates("prepare", additive, LaunchConfig(), HOPPER) == [LaunchConfig()]


def test_gradients_have_no_candidates_if_the_sweep_computes_them():
    base = LaunchConfig(reverse=Launch(tile=128, warps=8, kernel="sm90"))
    problem = problem_of(PACK, "scan")
    assert candidates("gradients", problem, base, HOPPER) == [base]
    assert len(candidates("gradients", problem._replace(K=136), base, HOPPER)) > 1


def test_fused_backward_is_a_candidate_of_the_reverse_scan_without_segments_and_grouped_heads():
    def tried(problem, base):
        return {config.reverse.kernel for config in candidates("reverse", problem, base, HOPPER)}

    problem = problem_of(PACK, "scan")
    base = heuristic(problem, HOPPER)
    assert base.reverse.kernel == "fused"
    assert candidates("recompute", problem, base, HOPPER) == [base]
    assert tried(problem, base) == {"portable", "sm90", "fused"}
    for other in (problem._replace(H=8), problem._replace(N=4), problem._replace(N=17)):
        assert heuristic(other, HOPPER).reverse.kernel == "sm90"
    grouped, few = problem._replace(H=8), problem._replace(N=3)
    assert tried(grouped, heuristic(grouped, HOPPER)) == {"portable", "sm90"}
    assert tried(few, heuristic(few, HOPPER, 16)) == {"portable", "sm90"}
    splits = {
        config.segment_chunks > 0: config.reverse.kernel for config in candidates("segment_chunks", few, base, HOPPER)
    }
    assert splits == {False: "fused", True: "sm90"}


def test_check_uses_short_cases_with_the_target_s_kernels():
    cases = checks_of(PACK, "scan", LaunchConfig(checkpoint_chunks=8))
    assert [case.regime for case in cases] == ["ordinary", "parallel", "decays"]
    assert all(case.shape.T == sum(case.shape.lengths) == 16 * 64 + 144 and 0 in case.shape.lengths for case in cases)
    for kernel in ("segment_chunks", "scan"):
        (case,) = checks_of(LONG, kernel, LaunchConfig(segment_chunks=64))
        assert (case.shape.H, case.shape.HV, case.shape.T) == (2, 8, 64 * 64 + 144)
    assert checks_of(TOKEN, "decode", LaunchConfig())[0].shape.T == 1


@pytest.mark.parametrize(
    "spec",
    [
        GATED,
        UpdateSpec(transition="additive"),
        UpdateSpec(beta="head", negative_eigenvalues="both"),
        UpdateSpec(decay="head", beta="separate"),
    ],
    ids=str,
)
def test_tuner_and_fused_step_look_up_the_same_problem(spec, monkeypatch):
    looked_up, chosen = [], LaunchConfig(fused_step=Launch(tile=32))
    monkeypatch.setattr(fused, "launch_config", lambda problem, device: looked_up.append(problem) or chosen)
    shape = Shape("rows", 5, 1, 1, 2, 12, 20)
    step = typical_step(spec, shape)
    operands = draw_step(step, (), shape.B, torch.bfloat16)
    launch = fused._resolve(operands.inputs, operands.states, fused.StepOptions.of(step), 1, "")
    assert launch == chosen.fused_step
    assert looked_up == [problem_of(Target(spec, shape, torch.bfloat16), "fused_step")]


def test_fused_step_without_config_or_record_uses_the_heuristic(monkeypatch):
    monkeypatch.setattr(fused, "launch_config", lambda problem, device: LaunchConfig(fused_step=Launch(tile=16)))
    step = typical_step(GATED, Shape("rows", 2, 1, 1, 1, 256, 64))
    operands = draw_step(step, (), 2)
    with_launch = LaunchConfig(fused_step=Launch(tile=32)).model_dump_json()
    without_launch = LaunchConfig(segment_chunks=16).model_dump_json()
    result = [
        fused._resolve(operands.inputs, operands.states, fused.StepOptions.of(step), n, config)
        for n, config in ((1, ""), (2, ""), (1, without_launch), (2, with_launch))
    ]
    by_heuristic = Launch(tile=64, warps=8, stages=1)
    assert result == [Launch(tile=16), by_heuristic, by_heuristic, Launch(tile=32)]


@pytest.mark.parametrize(
    "spec",
    [
        GATED,
        UpdateSpec(beta="head", negative_eigenvalues="both", householders=2),
        UpdateSpec(decay="fixed", transition="additive"),
        UpdateSpec(decay="head", beta="head", erase_key="own"),
        UpdateSpec(decay="head", beta="separate", erase_from="previous"),
        UpdateSpec(decay="channel", beta="head"),
        UpdateSpec(decay="channel", beta="channel"),
        UpdateSpec(decay="channel", transition="dplr"),
    ],
    ids=lambda spec: f"{spec.decay}-{spec.transition}-{spec.beta}-{spec.erase_key}-{spec.householders}",
)
@pytest.mark.parametrize("shape", [Shape("dense", 2, 70, 1, 2, 12, 20), Shape("pack", 1, 70, 1, 2, 16, 8, (30, 40))])
def test_tuner_and_backend_look_up_the_same_problem(spec, shape):
    from deltazoo.backends.conformance.cases import Case, draw
    from deltazoo.backends.triton.lower import lower
    from deltazoo.backends.triton.operands import problem_of as problem_of_operands

    lowered = lower(spec, draw(Case(spec, shape)), "")
    looked_up = problem_of(Target(spec, shape, torch.float32), "scan")
    assert problem_of_operands(lowered.operands, lowered.kind, T900) == looked_up


def test_tuning_without_shapes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="tuning needs at least one shape, got none"):
        tune([], FakeRunner(), None, tmp_path / "t.json")


def test_key_counts_the_programs_that_run_at_once():
    problem = problem_of(LONG, "scan")
    assert [key_of(kernel, problem, 32).programs for kernel in ("segment_chunks", "prepare", "recompute", "scan")] == [
        8,
        256,
        256,
        128,
    ]
    assert configured(problem, T900, {}) == heuristic(problem, T900)
