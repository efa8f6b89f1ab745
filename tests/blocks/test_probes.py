"""Probes: labels against exact solvers, runs that repeat and resume, and the figures of the tables."""

import importlib.util
import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import deltazoo
from deltazoo.backends.io.errors import ConfigError, UnknownNameError
from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX
from deltazoo.backends.update import registry
from deltazoo.blocks.model.compilation import CompiledLayers
from deltazoo.blocks.probes import claims, pages, records, report, runner, table, verdicts
from deltazoo.blocks.probes.model import Decoder, probe_stack
from deltazoo.blocks.probes.progress import CellInProgress
from deltazoo.blocks.probes.runner import ProbeConfig, probe
from deltazoo.blocks.probes.tasks import TASKS, task
from deltazoo.blocks.probes.tasks.word_problem import compose, elements
from deltazoo.blocks.probes.trainer import Trainer
from deltazoo.mixers import DeltaNet, Mamba2

TINY = "parity(length=4,lengths=[4,8],steps=4,batch=4,width=16,heads=1,rates=[1e-2,1e-3],evaluation_tokens=256)"


def answers(batch, row):
    scored = zip(batch.places_BA[row].tolist(), batch.answers_BA[row].tolist(), strict=True)
    return {place: answer for place, answer in scored if answer != IGNORE_INDEX}


@pytest.mark.parametrize("name", TASKS)
def test_the_labels_are_those_of_an_exact_solver(name):
    each = TASKS[name]
    if each.name == "digits" and importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn, which ships the images, is not installed")
    for length in dict.fromkeys((each.length, each.lengths[-1])):
        batch = each.draw(3, length, torch.Generator().manual_seed(length))
        assert batch.tokens_BT.shape == (3, length)
        assert batch.tokens_BT.min() >= 0 and batch.tokens_BT.max() < each.vocab
        for row in range(3):
            solved = each.solve(batch.tokens_BT[row].tolist())
            if each.decoded:
                assert [*solved.values()] == batch.answers_BA[row].tolist()
                continue
            if each.name == "text":  # the answer at the last token is in the text only
                batch.answers_BA[row, -1] = IGNORE_INDEX
            assert solved == answers(batch, row)
            scored = answers(each.last_half(batch), row)
            assert scored and scored.items() <= solved.items()


def test_a_task_is_drawn_from_its_generator_alone():
    draws = [TASKS["stacks"].draw(2, 192, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0].tokens_BT, draws[1].tokens_BT)
    assert not torch.equal(draws[0].tokens_BT, draws[2].tokens_BT)


def test_forgetting_mqar_asks_for_values_that_replaced_others():
    each = task("forgetting_mqar(pairs=4, updates=4, length=64, lengths=[64])")
    tokens = each.draw(1, 64, torch.Generator().manual_seed(0)).tokens_BT[0].tolist()
    keys = tokens[:16:2]
    assert sorted(keys.count(key) for key in set(keys)) == [2, 2, 2, 2]


def test_a_curriculum_trains_on_a_growing_length():
    each = task("parity(length=64,curriculum=4,steps=100,batch=2)")
    assert each.scored_length(torch.tensor([0])).item() == 4
    assert each.scored_length(torch.tensor([25])).item() == 34
    assert each.scored_length(torch.tensor([80])).item() == 64
    trainer = Trainer(probe_stack("deltanet", each).build(), each, 1e-3, 0)
    trainer._draw()
    is_scored_T = (trainer.drawn.answers_NBA != IGNORE_INDEX).all(dim=(0, 1))
    assert is_scored_T.tolist() == [True] * 4 + [False] * 60


@pytest.mark.parametrize(("group", "order"), [("S3", 6), ("S4", 24), ("A5", 60), ("S5", 120)])
def test_the_elements_are_a_group(group, order):
    listed = elements(group)
    assert len(set(listed)) == order
    assert {compose(a, b) for a in listed for b in listed[: order // 2]} == set(listed)


def test_wrong_tasks_are_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="did you mean 'parity'"):
        task("parityy")
    with pytest.raises(ConfigError, match=r"parity\.lenth: unknown field; did you mean 'length'"):
        task("parity(lenth=3)")
    with pytest.raises(ConfigError, match="pairs must be at most length / 4"):
        task("mqar(pairs=100)")
    with pytest.raises(ConfigError, match="must be a name"):
        task("parity + mqar")


def test_a_task_states_how_its_defaults_differ_from_its_source():
    longer = task("mqar(length=512,pairs=64)")
    assert task("mqar").difference == task("mqar").scaled
    assert longer.changes == "length 512, lengths 512, pairs 64"
    assert longer.difference == f"{task('mqar').scaled}; but here {longer.changes}"
    assert longer.lengths == (512,)
    assert report.source_line("mqar(length=512,pairs=64)", {"mqar"}).endswith(
        f"Settings of `mqar` but for {longer.changes}"
    )


def test_every_mixer_gets_the_sizes_of_the_task_unless_it_names_its_own():
    (first, _) = probe_stack("deltanet", TASKS["mqar"]).expand()
    assert first.mixer == DeltaNet(heads=2)
    (first, _) = probe_stack("mamba2", TASKS["mqar"]).expand()
    assert first.mixer == Mamba2(key_width=32, value_width=32)
    (first,) = probe_stack("deltanet(heads=4, negative_eigenvalues=both)", TASKS["parity"]).expand()
    assert first.mixer == DeltaNet(heads=4, negative_eigenvalues="both")
    (first,) = probe_stack("mom", TASKS["parity"]).expand()
    assert first.mixer.memory.heads == 1
    assert probe_stack("3*gated_deltanet + attention", TASKS["mqar"]).depth == 4
    with pytest.raises(UnknownNameError, match="did you mean 'mamba2'"):
        probe_stack("mamba22", TASKS["mqar"])


def test_a_run_learns_and_ends_when_the_task_is_solved(tmp_path):
    easy = "parity(length=2,lengths=[2],steps=100,batch=16,width=16,heads=1,rates=[1e-2],evaluation_tokens=1024)"
    (run,) = probe([(["deltanet"], [easy])], tmp_path, ProbeConfig(seeds=1, workers=1)).runs
    assert run.score == 1.0 and run.steps < 100
    assert run.curve[-1].loss < 0.5 and run.curve[-1].accuracy == 1.0


def test_probe_runs_rates_then_seeds_and_resumes(tmp_path):
    config = ProbeConfig(seeds=2, workers=1)
    seen = []
    first = probe([(["deltanet"], [TINY])], tmp_path, config, on_run=seen.append)
    assert first.problems == [] and first.runs == seen == records.read(tmp_path / "runs.jsonl")
    assert [(run.rate, run.seed) for run in first.runs][:2] == [(1e-2, 0), (1e-3, 0)]
    best = max(first.runs[:2], key=lambda run: run.rank).rate
    assert [(run.rate, run.seed) for run in first.runs][2:] == [(best, 1)]
    assert set(first.runs[0].accuracy) == {4, 8} and first.runs[0].steps == 4

    seen.clear()
    assert probe([(["deltanet"], [TINY])], tmp_path, config, on_run=seen.append).runs == first.runs and seen == []
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join([*lines[:1], lines[1][:50]]))  # killed while it wrote the second
    again = probe([(["deltanet"], [TINY])], tmp_path, config, on_run=seen.append).runs
    assert len(seen) == 2
    figures = [(run.rate, run.seed, run.accuracy, run.curve) for run in again]
    assert figures == [(run.rate, run.seed, run.accuracy, run.curve) for run in first.runs]


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_gets_the_step_and_the_loss_of_runs_that_have_not_ended(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(runner, "_POLL", 0.02)
    monkeypatch.setattr(runner, "_REPORT", 0.0)
    monkeypatch.setattr(runner, "_worker_queue", [])
    monkeypatch.setattr(runner, "_begin_worker", lambda gpu, queue: runner._worker_queue.append(queue))
    monkeypatch.setattr(runner, "ProcessPoolExecutor", ThreadPoolExecutor)  # a process would import torch for seconds
    slow = "parity(length=8,lengths=[8],steps=20,batch=4,width=16,rates=[1e-2],evaluation_tokens=256)"
    reports, seen = [], []
    config = ProbeConfig(seeds=1, workers=workers)
    mixers = ["deltanet", "attention"]
    runs = probe([(mixers, [slow])], tmp_path, config, lambda *report: reports.append(report), seen.append).runs
    assert len(runs) == 2 and seen == runs
    assert [report[1] for report in reports] == sorted(report[1] for report in reports)
    assert [report for report in reports if len(report) == 3] == [("probing", ended, 2) for ended in range(3)]
    note = r"(deltanet|attention) on parity\(.*\): rate 0.01, seed 0, step \d+ of 20, loss \d\.\d{3}, \d+ s"
    notes = [report[3] for report in reports if len(report) == 4]
    assert notes and all(re.fullmatch(note, each) for each in notes)


def test_a_rate_that_solves_the_task_ends_the_search(tmp_path):
    easy = "parity(length=2,lengths=[2],steps=100,batch=16,width=16,heads=1,rates=[1e-2,1e-6],evaluation_tokens=1024)"
    runs = probe([(["deltanet"], [easy])], tmp_path, ProbeConfig(seeds=2, workers=1)).runs
    assert [(run.rate, run.seed, run.is_solved) for run in runs] == [(1e-2, 0, True), (1e-2, 1, True)]


def test_runs_of_cells_that_share_a_device_are_those_of_single_cells(tmp_path):
    """As a GPU trains them: a run must not depend on the runs that are trained at the same time."""
    single = probe([(["deltanet", "s4d"], [TINY])], tmp_path, ProbeConfig(seeds=2, workers=1)).runs
    running = [CellInProgress(TINY, mixer, [], 2, "cpu") for mixer in ("deltanet", "s4d")]
    together = []
    while running := [cell for cell in running if cell.members or cell.pending()]:
        for cell in running:
            cell.advance()
            together += cell.ended()
    figures = [[(r.mixer, r.rate, r.seed, r.accuracy, r.curve) for r in runs] for runs in (single, together)]
    assert sorted(figures[0]) == sorted(figures[1])


def test_a_run_that_diverges_is_read_again(tmp_path, finished):
    nan = finished[0].model_copy(update={"curve": [records.Point(1, math.nan, 0.5)], "bits": {4: math.nan}})
    records.append(tmp_path / "runs.jsonl", nan)
    (read,) = records.read(tmp_path / "runs.jsonl")
    assert math.isnan(read.curve[0].loss) and math.isnan(read.bits[4])


def test_answers_that_are_read_from_one_vector_differ_by_their_index():
    model = probe_stack("deltanet", TASKS["compression"]).build()
    Decoder.replace_head(model, TASKS["compression"])
    x_BAD = torch.randn(2, 1, 128).expand(-1, 31, -1)
    logits_BAL = model.logits(x_BAD)
    assert logits_BAL.shape == (2, 31, 17) and not torch.allclose(logits_BAL[:, 0], logits_BAL[:, 1])
    assert torch.allclose(model.logits(x_BAD.flatten(0, 1)), logits_BAL.flatten(0, 1))


@pytest.mark.parametrize("mixer", ["deltanet", "mamba2", "gla", "rwkv7"])
def test_models_for_a_text_have_equal_parameters(mixer):
    reference, model = (probe_stack(name, TASKS["text"]).describe().parameters for name in ("attention", mixer))
    assert abs(model / reference - 1) < 0.005


def test_a_spent_budget_names_what_is_missing(tmp_path):
    result = probe([(["deltanet"], [TINY])], tmp_path, ProbeConfig(budget=0, workers=1))
    assert result.runs == []
    assert result.problems == [(f"deltanet on {TINY}", "the budget is spent; the same command continues")]


@pytest.mark.parametrize("lines", ['{"step": 1}\n', '{"task": "par\n{"step": 1}\n'])
def test_a_file_of_something_else_is_refused(lines, tmp_path):
    (tmp_path / "runs.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match="must be a run of deltazoo probe"):
        records.read(tmp_path / "runs.jsonl")


def test_a_file_with_other_settings_is_refused(tmp_path):
    config = ProbeConfig(seeds=1, workers=1)
    (run, *_) = probe([(["deltanet"], [TINY])], tmp_path, config).runs
    changed = run.model_copy(update={"settings": {**run.settings, "steps": 5}})
    (tmp_path / "runs.jsonl").write_text(changed.model_dump_json() + "\n")
    with pytest.raises(ConfigError, match="with other settings"):
        probe([(["deltanet"], [TINY])], tmp_path, config)


def test_a_task_may_get_more_rates_but_not_lose_the_rate_of_a_run():
    older = task("parity").model_copy(update={"rates": (1e-3,)})
    run = records.packaged()[0].model_copy(update={"rate": 1e-3, "settings": older.model_dump(mode="json")})
    assert records.has_settings(run, task("parity"))
    assert not records.has_settings(run.model_copy(update={"rate": 2e-3}), task("parity"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs with set scores: two mixers on parity, the first with three seeds at its best rate."""
    one_rate, folder = TINY.replace("1e-2,1e-3", "1e-2"), tmp_path_factory.mktemp("runs")
    (run,) = probe([(["deltanet"], [one_rate])], folder, ProbeConfig(seeds=1, workers=1)).runs
    settings = run.settings | {"rates": [1e-2, 1e-3], "length": 40}

    def scored(mixer, rate, seed, score):
        figures = {"task": "parity", "mixer": mixer, "rate": rate, "seed": seed, "accuracy": {40: 1.0, 256: score}}
        return run.model_copy(update=figures | {"settings": settings})

    return [
        scored("better", 1e-2, 0, 0.8),
        scored("better", 1e-3, 0, 0.9),
        scored("better", 1e-3, 1, 0.7),
        scored("better", 1e-3, 2, 0.8),
        scored("worse", 1e-3, 0, 0.5),
    ]


def test_a_cell_has_the_seeds_of_the_best_rate(finished):
    cell = records.cells(finished)["parity", "better"]
    assert cell.rate == 1e-3 and math.isclose(cell.score, 0.8)
    assert cell.text() == "80.0 (70.0 to 90.0)"
    table = report.score_table(finished)
    assert table.rows == [["better", "80.0 (70.0 to 90.0)"], ["worse", "50.0"]]


def test_the_rate_is_not_chosen_by_noise_at_the_longest_length(finished):
    learned, lucky = finished[0], finished[1].model_copy(update={"accuracy": {40: 0.5, 256: 0.82}})
    assert records.cells([learned, lucky])["parity", "better"].rate == learned.rate


def with_accuracy(runs, trained, score=None):
    return [
        run.model_copy(update={"accuracy": {40: trained, 256: run.score if score is None else score}}) for run in runs
    ]


def test_a_verdict_compares_the_lowest_with_the_highest(finished):
    claim = claims.Claim("", "", "", ("parity",), ("better",), ("worse",))
    assert verdicts.verdict(claim, "parity", finished).holds is True
    assert verdicts.verdict(claim._replace(solved=True), "parity", finished).holds is False
    solved = finished[2].model_copy(update={"accuracy": {40: 1.0, 256: 0.995}, "seed": 3})
    assert verdicts.verdict(claim._replace(solved=True), "parity", [*finished, solved]).holds is True
    assert verdicts.verdict(claim._replace(better=("worse",), worse=("better",)), "parity", finished).holds is False
    undecided = verdicts.verdict(claim, "parity", finished[:-1])
    assert undecided.holds is None
    assert undecided.sentences == ["Not decided: there is no finished run on parity of `worse`."]
    assert verdicts.outcome(claim, finished) == "holds"
    assert verdicts.outcome(claim._replace(tasks=("parity", "s3")), finished) == "holds on parity, not decided on s3"


def test_a_verdict_names_what_leaves_a_claim_undecided(finished):
    claim = claims.Claim("", "", "", ("parity",), ("better",), ("worse",))
    better, worse = finished[1:-1], finished[-1:]

    def undecided(claim, runs):
        found = verdicts.verdict(claim, "parity", runs)
        assert found.holds is None
        return found.sentences[1]

    trained = "has not learned the task well enough: at the training length its seeds have"
    early = undecided(claim._replace(solved=True), with_accuracy(finished, 0.9))
    assert early == f"`better` {trained} 90.0, 90.0, 90.0 %."
    one_failed = [*better[:2], *with_accuracy(better[2:], 0.6, 0.2), *worse]
    assert (
        undecided(claim, [*one_failed, *with_accuracy(worse, 1.0, 0.6)]) == f"`better` {trained} 100.0, 100.0, 60.0 %."
    )
    extrapolation = claim._replace(learned=True)
    assert undecided(extrapolation, [*better, *with_accuracy(worse, 0.6)]) == f"`worse` {trained} 60.0 %."
    assert verdicts.verdict(claim, "parity", [*better, *with_accuracy(worse, 0.6)]).holds is True
    seed = worse[0].model_copy(update={"seed": 1, "accuracy": {40: 1.0, 256: 0.72}})
    overlap = "The seeds overlap: `better` has 70.0 to 90.0 %, `worse` 50.0 to 72.0 %."
    assert undecided(claim, [*finished, seed]) == overlap
    assert undecided(claim, [finished[0], *worse]) == "Each of them has one seed."
    equal = with_accuracy([*better, *worse, seed], 1.0, 1.0)
    assert undecided(claim, equal) == "The task does not separate them: `worse` has 100.0 %."
    one_rate = [
        run.model_copy(update={"settings": run.settings | {"rates": [1e-3]}})
        for run in [*better, *with_accuracy([*worse, seed], 1.0, 0.99)]
    ]
    assert undecided(claim, one_rate) == "One learning rate was tried, 0.001; others may be better for `better`."


def test_a_mixer_that_fails_at_every_number_of_pairs_has_not_learned(finished):
    claim = claims.Claim("", "", "", ("parity",), ("better",), ("worse",), learned=True)

    def holds(shorter):
        runs = [run.model_copy(update={"settings": run.settings | {"length": 256}}) for run in finished]
        runs[-1] = runs[-1].model_copy(update={"accuracy": {40: shorter, 256: 0.2}})
        return verdicts.verdict(claim, "parity", runs).holds

    assert (holds(0.9), holds(0.2)) == (True, None)


def test_a_claim_about_stability_counts_runs_at_the_same_rates_and_seeds(finished):
    claim = claims.Claim("", "", "", ("parity",), ("better",), ("worse",), stable=True)
    assert verdicts.verdict(claim, "parity", finished).holds is False
    diverged = [run.model_copy(update={"diverged": run.mixer == "worse"}) for run in finished]
    found = verdicts.verdict(claim, "parity", diverged)
    assert found.holds is True
    assert "`better` 0 of 1, `worse` 1 of 1" in found.sentences[0]
    other_seed = [run.model_copy(update={"seed": run.seed + 3 * (run.mixer == "worse")}) for run in diverged]
    found = verdicts.verdict(claim, "parity", other_seed)
    assert found.holds is None
    assert found.sentences[1] == "`worse` also diverged at rate 0.001, seed 3, which the other side has not run."


@pytest.mark.parametrize("name", claims.CLAIMS)
def test_every_claim_names_mixers_and_tasks_that_exist(name):
    claim = claims.CLAIMS[name]
    for each in claim.tasks:
        for mixer in claim.mixers:
            assert probe_stack(mixer, task(each)).depth >= task(each).depth


def test_the_table_names_mixers_and_tasks_that_exist(finished):
    for name in table.TASKS:
        for mixer in table.MIXERS:
            assert probe_stack(mixer, TASKS[name]).depth == TASKS[name].depth
    mixers = ("s4d", "lru", "deltanet(gate=true)")
    runs = [run.model_copy(update={"mixer": mixer}) for run in finished[:1] for mixer in mixers]
    on_cpu, on_gpu = (runs[1].model_copy(update={"task": name}) for name in next(iter(table.SHORT_TASKS.items())))
    assert table.of_table([*runs, on_cpu, on_gpu]) == runs[:1]
    assert table.of_short_rows([*runs, on_cpu, on_gpu]) == ([on_cpu], [on_gpu])
    for short in ([on_cpu], [on_gpu], [on_cpu, on_gpu]):
        assert table.missing([*runs, *short]) == len(table.wanted()) - 2
    reversed_rows = [runs[0].model_copy(update={"mixer": mixer}) for mixer in ("lru", "s4d", "deltanet")]
    group = table.of_group([*reversed_rows, on_cpu], [runs[0].task])
    assert [run.mixer for run in group] == ["deltanet", "s4d", "lru"]
    built_in = {each for each in registry.names(registry.MIXERS) if registry.is_built_in(registry.MIXERS, each)}
    assert {*table.MIXERS, *table.others()} >= built_in


def test_models_of_a_spec_share_compiled_layers():
    models = [probe_stack("deltanet", TASKS["parity"]).build() for _ in range(2)]
    first = CompiledLayers(models[0])
    second = first.of(models[1])
    assert [method.__func__ for _, method in first.forwards] == [method.__func__ for _, method in second.forwards]
    assert [module for module, _ in second.forwards] == [*models[1].stack.layers, models[1].stack.norm]
    assert all(method.__self__ is module for module, method in second.forwards)


def test_layers_compile_for_a_task_whose_head_reads_several_answers_from_a_vector():
    each = TASKS["compression"]
    model = probe_stack("attention", each).build()
    Decoder.replace_head(model, each)
    trainer = Trainer(model, each, 1e-3, 0)
    trainer.compiled = SimpleNamespace(active=nullcontext)  # which would take long on a CPU
    gradients = []
    model.stack.layers[0].register_full_backward_hook(lambda layer, inputs, outputs: gradients.append(outputs))
    trainer.compile()
    assert gradients
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("mixer", "name"), [("kda", "mqar"), ("deltanet", "parity"), ("deltaproduct", "s3"), ("attention", "parity")]
)
def test_a_captured_step_is_the_eager_step(mixer, name):
    """Two captured runs are equal bit for bit; an eager one differs by the order of atomic sums at most."""
    losses = []
    for captures in (True, True, False):
        torch.manual_seed(0)
        trainer = Trainer(probe_stack(mixer, TASKS[name]).build().cuda(), TASKS[name], 1e-3, 0)
        if not captures:
            trainer._capture = lambda: None
        losses.append([])
        for step in range(1, 11):
            trainer.train(step)
            losses[-1].append(trainer.last_loss())
        assert (trainer.graph is not None) == captures
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=1e-3)


@pytest.mark.cuda
def test_a_captured_evaluation_is_the_eager_evaluation():
    trainer = Trainer(probe_stack("gated_deltanet", TASKS["s3"]).build().cuda(), TASKS["s3"], 1e-3, 0)
    trainer.train(20)
    first = [trainer.read(trainer.queue_scores(tokens)) for tokens in (2**14, 2**14, 2**16)]
    assert first[0] == first[1] and 0.1 < first[0][0][0] < 0.9
    trainer.evaluations.clear()
    trainer._captured = lambda call, generator: SimpleNamespace(replay=call)
    assert [trainer.read(trainer.queue_scores(tokens)) for tokens in (2**14, 2**14, 2**16)] == first


def test_the_pages_of_the_site_are_those_of_the_packaged_runs():
    folder = Path(deltazoo.__file__).parent / "docs" / "evidence"
    written = pages.pages(records.packaged())
    assert sorted(written) == sorted(path.name for path in folder.glob("*.md"))
    for name, text in written.items():
        assert (folder / name).read_text(encoding="utf-8") == text, (
            "stale: run `deltazoo probe --pages docs/evidence --out blocks/probes/results`"
        )


def test_packaged_runs_have_a_commit_a_device_and_the_settings_of_their_tasks():
    for run in records.packaged():
        assert run.environment.commit is not None and run.environment.device
        assert records.has_settings(run, task(run.task))
