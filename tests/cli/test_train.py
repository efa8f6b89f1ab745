"""train and generate print the results of the library, and share checkpoints."""

import json
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

import deltazoo
from deltazoo.blocks.checkpoints.sharded import saved_steps, step_folder
from deltazoo.blocks.generation.decoder import _step
from deltazoo.blocks.training.config import TrainConfig
from deltazoo.blocks.training.nested import flat
from deltazoo.blocks.training.rules import RESUMABLE, RULES
from deltazoo.blocks.training.tasks import train
from deltazoo.cli import app

QUICK = ("--length", 8, "--batch", 2, "--every", 3, "--backend", "reference", "--no-compile")


@pytest.fixture
def folder(ok, stack_file, text_file, tmp_path):
    ok("train", stack_file, "--text", text_file, "--out", tmp_path / "run", "--steps", 6, *QUICK)
    return tmp_path / "run"


def test_train_equals_the_library_function(ok, stack_file, text_file, tmp_path):
    result = ok(
        "train", stack_file, "--text", text_file, "--out", tmp_path / "a", "--steps", 6, "--seed", 3, *QUICK, "--json"
    )
    config = TrainConfig(
        steps=6,
        batch={"length": 8, "rows": 2},
        evaluation={"every": 3},
        seed=3,
        backend="reference",
        compile=False,
    )
    expected = train(stack_file, None, text_file, config)
    for actual, point in zip(result.json["points"], expected.points, strict=True):
        actual |= {name: getattr(point, name) for name in ("tokens_per_second", "data_share", "time")}
        assert actual == point.model_dump()
    assert result.json["config"] == json.loads(config.model_dump_json()) | {"model": str(stack_file)}
    assert result.json["source"] == str(text_file)


def test_until_and_resume_equal_an_uninterrupted_run(ok, stack_file, text_file, folder, tmp_path):
    half = tmp_path / "half"
    ok("train", stack_file, "--text", text_file, "--out", half, "--steps", 6, "--until", 4, *QUICK)
    result = ok("train", "--resume", half)
    assert "after 6 steps" in result.out
    expected, actual = (deltazoo.load(path).state_dict() for path in (folder, half))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_resumed_run_can_stop_compiling(ok, stack_file, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("deltazoo.blocks.training.preparation.compile_layers", lambda model: model)
    options = ("--length", 8, "--batch", 2, "--backend", "reference", "--steps", 2)
    ok("train", stack_file, "--text", text_file, "--out", tmp_path, *options, "--until", 1)
    monkeypatch.setattr(
        "deltazoo.blocks.training.preparation.compile_layers", lambda model: pytest.fail("it was compiled")
    )
    assert ok("train", "--resume", tmp_path, "--no-compile", "--json").json["config"]["compile"] is False


def test_the_last_line_holds_the_last_validation_loss(ok, folder):
    result = ok("train", "--resume", folder, "--json").json
    printed = ok("train", "--resume", folder).out
    assert f"{result['points'][-1]['validation_bits']:.3f} bits per token on validation after 6 steps" in printed


def test_the_default_folder_is_named_after_the_stack(ok, stack_file, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ok("train", stack_file, "--text", text_file, "--steps", 1, *QUICK)
    assert saved_steps(tmp_path / "runs" / "tiny") == [1]


def test_the_help_shows_the_defaults_of_the_library(ok, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    help_defaults = dict(re.findall(r"--([a-z-]+)\s.*\[default: \(?([^\])]+)\)?\]", ok("train", "--help").out))
    defaults = flat(TrainConfig().model_dump())
    paths = {rule.option: path for path, rule in RULES.items()}
    checked = 0
    for option, text in help_defaults.items():
        path = paths.get(f"--{option}")
        if path is not None and path != "compile":
            assert type(defaults[path])(text) == defaults[path], option
            checked += 1
    assert checked == 13


def test_generate_prints_the_prompt_and_its_completion(ok, folder):
    options = ("--prompt", "9 green", "--max-tokens", 30, "--seed", 2)
    result = ok("generate", folder, *options, "--json").json
    assert result["prompt"] == "9 green"
    assert result["bytes"] == 30
    assert ok("generate", folder, *options).out == f"9 green{result['text']}\n"
    assert ok("generate", folder, *options[:-1], 3, "--json").json["text"] != result["text"]


def test_options_of_generate_are_the_fields_of_sampling(ok, folder):
    fields = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4, "seed": 3}
    options = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", value)]
    result = ok("generate", folder, "--max-tokens", 12, *options, "--json").json
    sampling = deltazoo.Sampling(max_tokens=12, **fields)
    assert result["sampling"] == sampling.model_dump(mode="json")
    assert result["text"] == deltazoo.generate(deltazoo.load(folder), "def ", sampling).text


def test_generate_at_temperature_zero_is_greedy(ok, folder):
    from deltazoo.blocks.checkpoints.folder import load_model

    result = ok("generate", folder, "--prompt", "1 g", "--max-tokens", 3, "--temperature", 0, "--json").json
    model, tokens = load_model(folder, backend="reference"), list(b"1 g")
    for _ in range(3):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0][0, -1].argmax()))
    assert result["text"] == bytes(tokens[3:]).decode("utf-8", "replace")


def test_demo_without_matplotlib_says_so_before_the_work(run, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("deltazoo.blocks.training.demo.train", lambda *args, **kwargs: sys.exit("training started"))
    result = run("demo", "--text", text_file, "--out", tmp_path / "demo")
    reason = "plots need matplotlib: pip install 'deltazoo[plot]'"
    assert result.err.splitlines()[0] == f"the report will have no plots: {reason}"


def test_a_signal_prints_the_command_that_continues(run, ok, stack_file, text_file, tmp_path, monkeypatch):
    folder = tmp_path / "a run"
    with monkeypatch.context() as patch:
        patch.setattr("deltazoo.blocks.training.run.Run._warm_up", lambda *_: signal.raise_signal(signal.SIGTERM))
        result = run("train", stack_file, "--text", text_file, "--out", folder, "--steps", 6, *QUICK)
    assert result.code == 128 + signal.SIGTERM
    continuation = f"deltazoo train --resume '{folder}'"
    assert result.err == f"stopped by SIGTERM after step 0; checkpoint in {folder}; continue with: {continuation}\n"
    resumed = ok(*shlex.split(continuation)[1:], "--steps", 7, "--device", "cpu")
    assert "after 7 steps" in resumed.out
    assert resumed.err == "steps: 6 -> 7 from step 0 on\n"


def test_a_signal_prints_one_json_document(run, stack_file, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("deltazoo.blocks.training.run.Run._warm_up", lambda *_: signal.raise_signal(signal.SIGINT))
    result = run("train", stack_file, "--text", text_file, "--out", tmp_path, "--steps", 6, *QUICK, "--json")
    assert result.code == 128 + signal.SIGINT
    assert result.json["interrupted"] == {
        "message": f"SIGINT after step 0; checkpoint in {tmp_path}",
        "step": 0,
        "folder": str(tmp_path),
        "continue": f"deltazoo train --resume {tmp_path}",
    }


def test_generate_says_that_it_compiles(ok, folder, monkeypatch):
    compiled = []
    monkeypatch.setattr("deltazoo.blocks.generation.decoder.compiled_step", lambda *_: compiled.append(1) or _step)
    eager = ok("generate", folder, "--max-tokens", 9)
    assert (eager.err, compiled) == ("stopped at the limit of 9 bytes\n", [])
    result = ok("generate", folder, "--max-tokens", 9, "--compile")
    assert result.err.startswith("compiling the decode step")
    assert compiled == [1]
    assert result.out == eager.out


def test_evaluate_prints_the_library_result(ok, folder, text_file):
    options = ("--text", text_file, "--length", 4, "--batch", 3, "--backend", "reference")
    expected = deltazoo.evaluate(deltazoo.load(folder, backend="reference"), text_file, length=4, batch=3)
    assert ok("evaluate", folder, *options, "--json").json == expected.model_dump()
    assert ok("evaluate", folder, *options).out == f"{expected.line()}\n"
    whole = deltazoo.evaluate(deltazoo.load(folder, backend="reference"), text_file, 4, 3, batches=0)
    assert ok("evaluate", folder, *options, "--batches", 0, "--json").json == whole.model_dump()


def test_evaluate_reports_the_last_validation_loss_of_the_run_by_default(ok, folder, text_file):
    bits = ok("train", "--resume", folder, "--json").json["points"][-1]["validation_bits"]
    evaluated = ok("evaluate", folder, "--backend", "reference")
    assert evaluated.out == f"{bits:.3f} bits per byte on 64 held-out bytes of {text_file} (the text of the run)\n"


def test_rows_arrive_at_once_and_a_second_run_in_the_folder_is_refused(
    run, stack_file, text_file, tmp_path, monkeypatch
):
    monkeypatch.setattr("deltazoo.blocks.checkpoints.lock._PATIENCE", 0.05)
    folder = tmp_path / "run"
    train = ("train", stack_file, "--text", text_file, "--out", folder, *QUICK[:4], "--every", 2, "--no-compile")
    command = [sys.executable, "-c", "from deltazoo.cli import main; main()", *map(str, train), "--steps", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(5)]  # the process goes on
    assert lines[0].split() == ["step", "train", "validation,", "bits", "per", "token", "tokens/s"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "2", "4"]
    refused = run("train", "--resume", folder)
    assert refused.code == 2
    assert f"another process trains in {folder}: process {process.pid} on " in refused.err
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"continue with: deltazoo train --resume {folder}" in err
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [line.split() for line in (*lines[2:], *out.splitlines())]
    assert [row[0] for row in rows] == [str(record["step"]) for record in records]
    assert [row[-2] for row in rows[1:]] == [f"{record['validation_bits']:.3f}" for record in records[1:]]


def test_a_row_names_the_auxiliary_losses(ok, text_file, tmp_path):
    stack = tmp_path / "moe.yaml"
    stack.write_text(
        "{width: 16, depth: 1, vocab: 256, pattern: attention(heads=1), mlp: {type: moe, experts: 2, width: 16}}"
    )
    result = ok("train", stack, "--text", text_file, "--out", tmp_path / "run", "--steps", 2, *QUICK, "--json")
    (name,) = result.json["points"][-1]["auxiliary"]
    result = ok("train", stack, "--text", text_file, "--out", tmp_path / "b", "--steps", 2, *QUICK)
    assert re.search(rf"^      2 .* {name} \d\.\d\d\d\d$", result.out, flags=re.MULTILINE)


def test_resume_says_which_settings_change_and_what_to_do_for_others(run, ok, folder):
    assert ok("train", "--resume", folder, "--lr", 0.5, "--every", 3, "--set", "steps=7").err == (
        "steps: 6 -> 7 from step 6 on\noptimizer.learning_rate: 0.002 -> 0.5 from step 6 on\n"
    )
    refused = run("train", "--resume", folder, "--batch", 3, "--seed", 1)
    command = f"a new run can: deltazoo train {folder}/stack.yaml --seed 1 --batch 3 --out FOLDER"
    assert refused.code == 2
    assert refused.err.startswith(
        "deltazoo: seed must stay 0 in a resumed run, got 1: it drew the weights and the crops; batch.rows must "
    )
    assert refused.err.endswith(f"{command}\n")
    settings = (folder / "train.yaml").read_text()
    (folder / "train.yaml").write_text(settings.replace("seed: 0", "seed: 1"))
    for command in (("train", "--resume", folder), ("generate", folder), ("evaluate", folder)):
        assert f"{folder}/train.yaml: seed must stay 0 in a resumed run, got 1" in run(*command).err


def test_the_rules_name_the_options_of_the_command(ok, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    command = typer.main.get_command(app).commands["train"]
    options = {parameter.name: parameter.opts[0] for parameter in command.params}
    named = {rule.option for rule in RULES.values() if rule.option}
    other = {"--stack", "--config", "--set", "--text", "--out", "--resume", "--until", "--gpus", "--trust", "--json"}
    assert {*options.values()} - {"stack", "--help"} == named | other - {"--stack"}
    listed = ", ".join(RULES[name].option for name in RESUMABLE if RULES[name].option)
    assert f"Of these, only {listed} can change, and with --set" in ok("train", "--help").out


def test_a_damaged_checkpoint_is_one_sentence_in_each_command(run, folder):
    for step in saved_steps(folder):
        file = step_folder(folder, step) / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    for command in (("train", "--resume", folder), ("generate", folder), ("evaluate", folder)):
        result = run(*command)
        assert result.code == 2
        sentence = result.err.splitlines()[-1]
        assert re.match(
            rf"deltazoo: {folder}/checkpoints/step-\d+/__0_0.distcp cannot be read: it is damaged", sentence
        )


def test_settings_of_a_file_of_paths_and_of_options_are_merged_in_this_order(run, ok, stack_file, text_file, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {stack_file}\nsteps: 9\nbatch: {{rows: 2, length: 8}}\n"
        "schedule: {name: linear}\nevaluation: {every: 1}\n"
    )
    options = ("--set", "schedule.name=wsd", "--set", "batch.tokens=24", "--steps", 2, "--no-compile", "--json")
    options = (*options, "--text", text_file)
    result = ok("train", "--config", config, "--out", tmp_path / "run", "--backend", "reference", *options).json
    assert result["config"]["schedule"]["name"] == "wsd"
    assert (result["config"]["steps"], result["points"][-1]["tokens"]) == (2, 48)
    again = ok("train", "--config", tmp_path / "run" / "train.yaml", "--out", tmp_path / "again", "--json").json
    assert [point["validation_bits"] for point in again["points"]] == [
        point["validation_bits"] for point in result["points"]
    ]
    for setting, message in {
        "schedule.nam=wsd": "schedule.nam: unknown field; did you mean 'name'?",
        "scedule.name=wsd": "scedule: unknown field; did you mean 'schedule'?",
        "learning_rate=1": "learning_rate: unknown field; did you mean 'optimizer.learning_rate'?",
        "schedule.name=cosin": "got 'cosin'; did you mean 'cosine'?",
        "schedule": "a setting must be PATH=VALUE, such as schedule.name=wsd, got 'schedule'",
    }.items():
        refused = run("train", stack_file, "--out", tmp_path / "c", "--set", setting)
        assert refused.code == 2
        assert message in refused.err, refused.err
        assert refused.err.count("\n") == 1
    assert not (tmp_path / "c").exists()


def test_every_stop_of_generate_counts_and_the_reason_is_printed(ok, folder):
    options = ("generate", folder, "--temperature", 0, "--max-tokens", 30)
    whole = ok(*options, "--json").json
    assert (whole["reason"], whole["stop"]) == ("max_tokens", None)
    stop = next(character for character in whole["text"] if character.isascii() and character.isprintable())
    for stops in ((stop, "never"), ("never", stop)):
        result = ok(*options, "--stop", stops[0], "--stop", stops[1])
        assert result.out == f"def {whole['text'][: whole['text'].index(stop) + 1]}\n"
        assert result.err == f"stopped after the text {stop!r}\n"


def test_generate_reads_the_prompt_from_a_file_or_standard_input(run, ok, folder, tmp_path):
    prompt = "naïve\r\nbottles\n"
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    options = ("generate", folder, "--max-tokens", 5, "--json")
    expected = ok(*options, "--prompt", prompt).json["text"]
    from_file = ok(*options, "--prompt-file", tmp_path / "prompt.txt").json
    assert (from_file["prompt"], from_file["text"]) == (prompt, expected)
    piped = CliRunner().invoke(app, [*map(str, options), "--prompt-file", "-"], input=prompt.encode())
    assert json.loads(piped.stdout)["text"] == expected
    (tmp_path / "prompt.txt").write_bytes(b"ab\xff")
    assert (
        "must be text in UTF-8: invalid start byte at byte 2"
        in run(*options, "--prompt-file", tmp_path / "prompt.txt").err
    )
    assert f"cannot read {tmp_path / 'no'}: No such file" in run(*options, "--prompt-file", tmp_path / "no").err
    assert "got both" in run(*options, "--prompt", "a", "--prompt-file", tmp_path / "no").err


def test_generate_continues_a_file_of_prompts(ok, run, folder, tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "9 green"}\n{"prompt": "1 g", "id": "b", "temperature": 0}\n')
    options = ("--prompts", prompts, "--out", out, "--max-tokens", 5)
    result = ok("generate", folder, *options, "--slots", 2, "--json").json
    assert (result["completed"], result["tokens"]) == (2, 10)
    assert {json.loads(line)["id"] for line in out.read_text().splitlines()} == {0, "b"}
    assert "2 were done before" in ok("generate", folder, *options).err
    drafts = ("--speculate", 3, "--max-tokens", 40, "--temperature", 0)
    other = ok("generate", folder, *options, "--out", tmp_path / "other.jsonl", *drafts, "--json").json
    assert other["tokens_per_pass"] >= 1
    texts = {x["id"]: x["text"] for x in map(json.loads, (tmp_path / "other.jsonl").read_text().splitlines())}
    plain = ("generate", folder, "--max-tokens", 40, "--temperature", 0, "--json")
    for prompt, id in (("9 green", 0), ("1 g", "b")):
        lone = ok(*plain, "--prompt", prompt).json["text"]
        assert ok(*plain, "--prompt", prompt, "--speculate", 3).json["text"] == lone
        assert lone.startswith(texts[id])
    assert run("generate", folder, "--prompts", prompts).code == 2
    assert run("generate", folder, *options, "--prompt", "a").code == 2
    assert run("generate", folder, *options, "--slots", 0).code == 2
