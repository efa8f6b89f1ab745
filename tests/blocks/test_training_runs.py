"""Training runs: token shards, optimizers, gradient accumulation, skipped steps and metrics."""

import csv
import json
import math
import sys
from functools import partial

import pytest
import torch
import training_cases
from tokenizers import Tokenizer, models, pre_tokenizers
from training_cases import SPEC

import deltazoo
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.progress import silent
from deltazoo.blocks.checkpoints.sharded import saved_steps
from deltazoo.blocks.data.shards import open_shards
from deltazoo.blocks.data.tokenizer import read_tokenizer
from deltazoo.blocks.data.writing import ShardConfig, write_shards
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.config import DataConfig
from deltazoo.blocks.training.optimizer import Optimizer
from deltazoo.blocks.training.positions import PositionSums, ranges_of
from deltazoo.blocks.training.preparation import check_run
from deltazoo.blocks.training.run import Run
from deltazoo.blocks.training.settings import read_config
from deltazoo.blocks.training.source import Place, Rows, ShardSource, open_source
from deltazoo.blocks.training.step import Stepper
from deltazoo.blocks.training.tasks import resume
from deltazoo.blocks.training.watching import recurrent_statistics

pytestmark = pytest.mark.runs
CONFIG = training_cases.changed(
    training_cases.CONFIG, steps=4, batch__rows=4, batch__length=16, schedule__warmup=0, evaluation__every=2,
    evaluation__batches=1, checkpoint__background=True,
)  # fmt: skip
changed = partial(training_cases.changed, CONFIG)


def train(text, config, folder=None, spec=SPEC, **options):
    return deltazoo.train(spec, folder, text, config, progress=silent, **options)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A folder of documents, each a prompt and an answer."""
    folder = tmp_path_factory.mktemp("data")
    lines = (json.dumps({"question": f"{a} + {b} = ", "answer": f"{a + b}\n"}) for a in range(20) for b in range(4))
    (folder / "sums.jsonl").write_text("\n".join(lines) + "\n")
    config = ShardConfig(tokenizer="bytes", fields=("question", "answer"), held_out=0.2)
    write_shards([folder / "sums.jsonl"], folder / "sums", config, 1)
    return folder / "sums"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "bottles.txt"
    path.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(300)))
    return path


def weights(folder):
    return deltazoo.load(folder, backend="reference").state_dict()


def test_a_run_on_shards_resumes_bit_for_bit_and_refuses_changed_data(sums, tmp_path):
    whole = train(sums, CONFIG, tmp_path / "whole")
    train(sums, CONFIG, tmp_path / "parts", until=3)
    parts = resume(tmp_path / "parts", progress=silent)
    expected, actual = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
    assert parts.validation_bits == whole.validation_bits
    lines = (f'{{"question": "{n}", "answer": "2"}}\n' for n in range(40))
    (tmp_path / "new.jsonl").write_text("".join(lines))
    config = ShardConfig(tokenizer="bytes", fields=("question", "answer"), held_out=0.2)
    write_shards([tmp_path / "new.jsonl"], tmp_path / "new", config, 1)
    with pytest.raises(ConfigError, match="have changed since the run was trained on them"):
        resume(tmp_path / "whole", tmp_path / "new", changes={"steps": 6})
    model = deltazoo.load(tmp_path / "whole", backend="reference")
    evaluation = deltazoo.evaluate(model)
    assert evaluation.bits_per_token == pytest.approx(whole.validation_bits, rel=1e-6)
    assert (evaluation.is_text_of_run, evaluation.bits_per_byte) == (True, None)
    assert not deltazoo.evaluate(model, tmp_path / "new").is_text_of_run


def test_evaluation_on_documents_covers_them_and_counts_bytes(text, tmp_path):
    lines = text.read_text().splitlines()
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    write_shards([tmp_path / "lines.jsonl"], tmp_path / "lines", ShardConfig(tokenizer="bytes", held_out=0.05), 1)
    model = SPEC.build("reference").eval()
    shards = open_shards(tmp_path / "lines", "validation")
    row = deltazoo.evaluate(model, tmp_path / "lines", length=shards.positions, batch=1, batches=0)
    total = 0.0
    with torch.no_grad():
        for number in range(shards.documents):
            tokens = torch.from_numpy(shards.document(number))[None]
            total += float(model.token_losses(tokens[:, :-1], tokens[:, 1:]).sum())
    assert row.bits_per_token == pytest.approx(total / shards.positions / math.log(2), rel=1e-6)
    evaluation = deltazoo.evaluate(model, tmp_path / "lines", length=32, batch=2, batches=0)  # rows end documents
    assert evaluation.tokens == row.tokens == shards.positions
    assert evaluation.bits_per_token == pytest.approx(row.bits_per_token, rel=2e-2)
    assert evaluation.bits_per_byte == pytest.approx(
        evaluation.bits_per_token * evaluation.tokens / shards.text_bytes, rel=1e-12
    )
    assert " per byte, on " in evaluation.line()
    write_shards([tmp_path / "lines.jsonl"], tmp_path / "all", ShardConfig(tokenizer="bytes"), 1)
    with pytest.raises(
        ConfigError, match=f"^{tmp_path / 'all'} has no held-out documents: encode them with --held-out"
    ):
        train(tmp_path / "all", CONFIG)


def test_evaluation_refuses_rows_that_are_shorter_than_every_question(tmp_path):
    lines = (f'{{"question": "{n} has a long question", "answer": "2"}}\n' for n in range(40))
    (tmp_path / "new.jsonl").write_text("".join(lines))
    config = ShardConfig(tokenizer="bytes", fields=("question", "answer"), held_out=0.3)
    write_shards([tmp_path / "new.jsonl"], tmp_path / "new", config, 1)
    model = SPEC.build("reference").eval()
    with pytest.raises(ConfigError, match=f"^the held-out part of {tmp_path / 'new'} has no token to predict"):
        deltazoo.evaluate(model, tmp_path / "new", length=8, batch=1)


def test_only_answers_have_a_loss_and_accumulated_steps_equal_one_pass(sums, tmp_path):
    source = open_source(sums, DataConfig())
    assert isinstance(source, ShardSource)
    assert source.row_end == "whole"
    config = changed(steps=2, precision="float64", logging__groups=True)
    passes = []
    take = Stepper.take
    with pytest.MonkeyPatch.context() as patch:

        def record(stepper, batches, *arguments):
            passes.append([rows.counted for rows in batches])
            for rows in batches:
                text = bytes(rows.targets[rows.targets >= 0].tolist()).decode()
                assert set(text) <= set("0123456789\n")
            return take(stepper, batches, *arguments)

        patch.setattr(Stepper, "take", record)
        at_once = train(sums, config, tmp_path / "a")
        parts = train(sums, changed(steps=2, precision="float64", batch__micro_rows=1), tmp_path / "b")
    assert [len(counts) for counts in passes] == [1, 1, 4, 4]
    assert len({*passes[-1]}) > 1  # the passes have different numbers of targets
    assert parts.validation_bits == pytest.approx(at_once.validation_bits, rel=1e-10)
    for name, weight in weights(tmp_path / "a").items():
        torch.testing.assert_close(weights(tmp_path / "b")[name], weight, rtol=1e-6, atol=1e-8)


def test_a_mixture_trains(sums, tmp_path):
    (tmp_path / "ones.jsonl").write_text("".join(f'{{"text": "{n} 1 1 1 1 1"}}\n' for n in range(30)))
    write_shards([tmp_path / "ones.jsonl"], tmp_path / "ones", ShardConfig(tokenizer="bytes", held_out=0.2), 1)
    config = changed(data__mixture={str(sums): 1.0, str(tmp_path / "ones"): 3.0})
    assert train(None, config, tmp_path / "run").points[-1].step == 4
    assert resume(tmp_path / "run", changes={"steps": 5}, progress=silent).points[-1].step == 5


def test_a_text_beside_a_mixture_is_refused(sums, text, tmp_path):
    config = changed(data__mixture={str(sums): 1.0})
    for given in (sums, text):
        with pytest.raises(ConfigError, match=r"text and data\.mixture must not both be given, got .* and {"):
            train(given, config)
    train(None, config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"text and data\.mixture must not both be given"):
        resume(tmp_path / "run", text)


def test_the_settings_of_a_run_name_its_data_for_a_new_run(sums, tmp_path):
    train(sums, changed(data__row_end="whole", steps=1), tmp_path / "run")
    data = read_config(tmp_path / "run" / "train.yaml", None, {})["data"]
    assert (data["path"], data["row_end"]) == (str(sums), "whole")


def test_text_that_is_not_encoded_by_the_tokenizer_of_the_model_is_refused(sums, text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(Tokenizer(models.BPE()).to_str())
    model = SPEC.build("reference")
    model.tokenizer = read_tokenizer(tmp_path, {}, SPEC.vocab)
    for given in (sums, text):
        source = open_source(given, DataConfig())
        check_run(SPEC.build("reference"), source, CONFIG, None)
        with pytest.raises(ConfigError, match=r"must be encoded by the tokenizer of the model: .*, got bytes"):
            check_run(model, source, CONFIG, None)
        with pytest.raises(ConfigError, match=r"must be encoded by the tokenizer of the model: .*, got bytes"):
            deltazoo.evaluate(model, given)


def test_evaluation_refuses_documents_of_another_tokenizer_than_the_model_has(tmp_path):
    for part in ("train", "held-out"):
        (tmp_path / f"{part}.txt").write_text("red green blue|" * 8)
    words = ["red", "green", "blue", "<unk>"]
    for name, order in (("a", words), ("b", words[::-1])):
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(order)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        held_out = (str(tmp_path / "held-out.txt"),)
        config = ShardConfig(tokenizer=str(tmp_path / name), end="none", separator="|", validation=held_out)
        write_shards([tmp_path / "train.txt"], tmp_path / name / "data", config, 1)
    model = SPEC.build("reference")
    model.tokenizer = read_tokenizer(tmp_path / "a", {}, SPEC.vocab)
    assert deltazoo.evaluate(model, tmp_path / "a" / "data", 4, 1).tokens > 0
    with pytest.raises(ConfigError, match=r"must be encoded by the tokenizer of the model: .*, got another tokenizer"):
        deltazoo.evaluate(model, tmp_path / "b" / "data", 4, 1)


def test_muon_updates_the_matrices_of_layers_only_and_resumes(text, tmp_path):
    config = changed(optimizer__name="muon")
    whole = train(text, config, tmp_path / "whole")
    train(text, config, tmp_path / "parts", until=1)
    assert resume(tmp_path / "parts", progress=silent).validation_bits == whole.validation_bits
    optimizer = Optimizer(SPEC.build("reference"), config.optimizer, sharded=False)
    muon = [part for part in optimizer.parts if isinstance(part.optimizer, torch.optim.Muon)]
    names = {weight.name for part in muon for weight in part.weights}
    assert "stack.layers.0.mlp.out.weight" in names
    assert not [name for name in names if "embedding" in name or "norm" in name or "conv" in name]
    with pytest.raises(ConfigError, match=r"optimizer\.name muon needs whole matrices"):
        Optimizer(SPEC.build("reference"), config.optimizer, sharded=True)


def test_muon_leaves_a_part_without_gradients():
    """Such as frozen weights with a rate of their own."""
    model = SPEC.build("reference")
    config = changed(optimizer__name="muon", optimizer__rates={"stack.layers.0.*": 0.5})
    optimizer = Optimizer(model, config.optimizer, sharded=False)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = None if name.startswith("stack.layers.0.") else torch.ones_like(parameter)
    optimizer.step(0.1, torch.tensor(1.0), torch.tensor(0.0))
    same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert same == {name for name in before if name.startswith("stack.layers.0.")}


def test_weights_that_are_updated_in_parts_equal_those_of_one_update(text, tmp_path, monkeypatch):
    config = changed(precision="bfloat16")
    train(text, config, tmp_path / "whole")
    monkeypatch.setattr("deltazoo.blocks.training.optimizer._AT_ONCE", 300)
    model = SPEC.build("reference").bfloat16()
    assert 4 < len(Optimizer(model, config.optimizer, sharded=False).parts) < len(list(model.parameters()))
    train(text, config, tmp_path / "parts", until=2)
    resume(tmp_path / "parts", progress=silent)
    expected, actual = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())


def test_rates_scale_the_steps_of_the_named_parameters(text, tmp_path):
    torch.manual_seed(CONFIG.seed)
    before = SPEC.build("reference").state_dict()
    train(text, changed(steps=1, optimizer__rates={"embedding.*": 1e-9}), tmp_path)
    after = weights(tmp_path)
    assert torch.allclose(after["embedding.weight"], before["embedding.weight"], atol=1e-8)
    assert not torch.allclose(after["stack.norm.weight"], before["stack.norm.weight"], atol=1e-4)
    with pytest.raises(ConfigError, match=r"no parameter has a name like 'head\.\*', such as embedding\.weight"):
        train(text, changed(optimizer__rates={"head.*": 2.0}))


def test_gradients_are_clipped_by_the_norm_of_all(text, tmp_path):
    config = changed(steps=1, optimizer__clip=0.05)
    point = train(text, config, tmp_path).points[-1]
    torch.manual_seed(config.seed)
    model = SPEC.build("reference")
    source = open_source(text, config.data)
    source.begin(config, Place.of(config.batch, 0, 1), None)
    rows = source.rows(0, 0)
    model.loss(rows.tokens, rows.targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert point.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    assert norm > 0.1
    groups = [
        {"params": [x for x in model.parameters() if x.dim() >= 2], "weight_decay": 0.1},
        {"params": [x for x in model.parameters() if x.dim() < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True).step()
    expected = {name: x.detach() for name, x in model.named_parameters()}
    for name, weight in expected.items():
        torch.testing.assert_close(weights(tmp_path)[name], weight, rtol=1e-4, atol=1e-6, msg=name)


def test_a_z_loss_is_in_the_training_loss_and_not_in_the_validation(text):
    plain, punished = train(text, changed(steps=1)), train(text, changed(steps=1, z_loss=0.1))
    lse = math.log(256)  # of the logits of an untrained model, which are near 0
    difference = punished.points[-1].train_bits - plain.points[-1].train_bits
    assert difference == pytest.approx(0.1 * lse**2 / math.log(2), rel=0.05)
    assert punished.points[0].validation_bits == plain.points[0].validation_bits


def test_a_step_without_a_finite_gradient_leaves_the_weights_and_is_counted(text, tmp_path, monkeypatch, caplog):
    losses, calls = Stepper.losses, []

    def nan_once(stepper, rows, by_token=False):
        calls.append(1)
        found = losses(stepper, rows, by_token)
        return found._replace(cross_entropy=found.cross_entropy * math.nan) if len(calls) == 4 else found

    train(text, changed(steps=1), tmp_path / "one")
    monkeypatch.setattr(Stepper, "losses", nan_once)  # calls: warm-up, validation, step 1, step 2
    training = train(text, changed(steps=2, schedule__name="constant"), tmp_path / "two")
    assert training.points[-1].skipped == 1
    assert "step 2 is skipped: the loss is nan bits" in caplog.text
    for name, weight in weights(tmp_path / "one").items():
        assert torch.equal(weights(tmp_path / "two")[name], weight), name


def test_the_loss_by_position_averages_to_the_loss_and_knows_documents(text):
    point = train(text, changed(steps=1, evaluation__positions=True)).points[-1]
    assert list(point.positions) == ["0", "1", "2-3", "4-7", "8-15"]
    mean = sum(bits * n for bits, n in zip(point.positions.values(), (1, 1, 2, 4, 8), strict=True)) / 16
    assert mean == pytest.approx(point.validation_bits, rel=1e-6)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    rows = Rows(tokens, tokens, torch.tensor([0, 3, 8, 8]), 8)
    assert ranges_of(rows).tolist() == [0, 1, 2, 0, 1, 2, 2, 3]
    assert PositionSums(9, torch.device("cpu")).ranges == 5


def test_groups_and_statistics_of_recurrent_layers_are_logged_and_in_the_table(text, tmp_path):
    config = changed(logging__groups=True, logging__watch=True)
    point = train(text, config, tmp_path).points[-1]
    assert list(point.gradient_norms) == ["embedding", "layer 0", "layer 1", "norm"]
    assert point.gradient_norm == pytest.approx(sum(x**2 for x in point.gradient_norms.values()) ** 0.5)
    assert list(point.watched) == ["layer 0"]
    assert 0 < point.watched["layer 0"]["decay_min"] <= point.watched["layer 0"]["decay_mean"] < 1
    assert point.watched["layer 0"]["state_rms"] > 0
    with (tmp_path / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["step"] for row in table] == ["0", "2", "4"]
    assert float(table[-1]["watched.layer 0.decay_mean"]) == point.watched["layer 0"]["decay_mean"]
    assert float(table[-1]["gradient_norms.layer 1"]) == point.gradient_norms["layer 1"]


def test_the_last_checkpoints_and_the_best_are_kept(text, tmp_path, monkeypatch):
    losses = iter([9.0, 3.0, 1.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(Run, "_validate", lambda run: (next(losses), {}))
    config = changed(steps=5, evaluation__every=1, checkpoint__keep=1)
    train(text, config, tmp_path / "best")
    assert saved_steps(tmp_path / "best") == [2, 5]


def test_what_would_fail_later_fails_before_the_first_step(sums, text, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "_warm_up", lambda *_: pytest.fail("it trained"))
    cases = {
        r"batch\.micro_rows must divide the rows of a process, 4, got 3": changed(batch__micro_rows=3),
        r"tokens must be a multiple of length = 16, got 17": lambda: changed(batch__tokens=17),
        r"the stack is not any family of transformers": changed(checkpoint__pretrained=True),
    }
    for message, config in cases.items():
        with pytest.raises(ConfigError, match=message):
            train(text, config() if callable(config) else config, tmp_path / "run")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(
        ConfigError, match=r"the checkpoints need .* has 1,000\.0 B free: lower checkpoint\.keep, got 2"
    ):
        train(text, CONFIG, tmp_path / "new" / "full")
    with pytest.raises(ConfigError, match="must be encoded first: deltazoo data"):
        train(tmp_path / "a.jsonl", CONFIG)
    small = StackSpec(width=16, depth=1, vocab=100, pattern="attention(heads=1)")
    with pytest.raises(ConfigError, match="vocab must be at least 256 to train on these data, got 100"):
        train(sums, CONFIG, tmp_path / "run", spec=small)
    assert not (tmp_path / "run").exists() and not (tmp_path / "new").exists()


def test_tensorboard_gets_every_figure_of_a_point(text, tmp_path):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training = train(text, changed(logging__tensorboard=True, logging__groups=True), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("validation_bits")}
    assert losses == pytest.approx({point.step: point.validation_bits for point in training.points})
    assert events.Scalars("gradient_norms/layer 1")[-1].value == pytest.approx(
        training.points[-1].gradient_norms["layer 1"]
    )


def test_without_tensorboard_a_run_that_logs_to_it_is_refused_in_a_sentence(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ConfigError, match=r"^logging\.tensorboard needs the package tensorboard: pip install tensorboard$"
    ):
        train(text, changed(logging__tensorboard=True), tmp_path / "run")
    assert saved_steps(tmp_path / "run") == []


def test_watched_statistics_are_those_of_the_gates_and_states():
    torch.manual_seed(0)
    model, tokens = SPEC.build("reference").double(), torch.randint(256, (2, 12))
    layer = model.stack.layers[0]
    gate = layer.mixers[0].operands.decay
    with torch.no_grad():
        gate.proj.weight.mul_(20)  # decays from 0 to 1
        rate = torch.nn.functional.softplus(gate.proj(layer.norm(model.embedding(tokens))) + gate.dt_bias)
        decay = (-gate.A_log.exp() * rate).exp()
        state = model.features(tokens, model.init_state(2, 12))[1].layers[0][0]["gated_deltanet.update"]
    found = recurrent_statistics(model, tokens)["layer 0"]
    expected = {
        "decay_mean": decay.mean(), "decay_min": decay.min(), "decay_max": decay.max(),
        "forgets": (decay < 0.5).double().mean(), "state_rms": state.square().mean().sqrt(),
    }  # fmt: skip
    assert 0 < float(expected["forgets"]) < 1
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)
