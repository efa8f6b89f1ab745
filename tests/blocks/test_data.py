"""Token shards: what is written, in which order it is read, and how documents fill rows."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from deltazoo import StackSpec
from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.data import readers, writing
from deltazoo.blocks.data.loader import Batch, Loader
from deltazoo.blocks.data.order import Mixture, Source, permuted
from deltazoo.blocks.data.prefetch import Prefetch
from deltazoo.blocks.data.shards import TokenShards, open_shards
from deltazoo.blocks.data.writing import ShardConfig, write_shards
from deltazoo.blocks.model.compilation import run_eagerly
from deltazoo.mixers import GatedDeltaNet, SlidingWindow
from deltazoo.mixers.core.mixer import Context

BYTES = ShardConfig(tokenizer="bytes")
MODES = ("carry", "cut", "whole")


def written(folder: Path, texts: list[str], config: ShardConfig = BYTES) -> Path:
    """Write one JSON line per text, and the data folder of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_shards([folder / "a.jsonl"], folder / "data", config, processes=1)
    return folder / "data"


def words(number: int, seed: int, letters: str = "abcdefghij") -> list[str]:
    """Texts of 2 to 40 letters."""
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list(letters), random.integers(2, 41))) for _ in range(number)]


def numbered(number: int, seed: int) -> list[str]:
    """Texts that begin with their number."""
    return [f"{n:03d}{text}" for n, text in enumerate(words(number, seed))]


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    """Two sources that share no letter, with weights of 2 and 1."""
    first = open_shards(written(tmp_path / "a", words(60, 1)))
    second = open_shards(written(tmp_path / "b", words(25, 2, "ABCDE")))
    return [Source(first, 2.0), Source(second, 1.0)]


def texts(shards: TokenShards) -> list[str]:
    return [bytes(shards.document(n).tolist()).decode() for n in range(shards.documents)]


def pieces(batch: Batch) -> list[str]:
    """The inputs of each sequence of a batch, and its last target."""
    tokens, targets = batch.tokens.flatten().tolist(), batch.targets.flatten().tolist()
    result = []
    for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        if targets[begin] != -100:
            assert targets[begin : end - 1] == tokens[begin + 1 : end]
            result.append(bytes([*tokens[begin:end], targets[end - 1]]).decode())
    return result


def packed(documents: list[str], T: int, mode: str) -> Iterator[list[str]]:
    """The pieces of each row, as one would fill them by hand. A document of n letters takes n - 1 places."""
    row, left = list[str](), T
    for document in documents:
        rest = document
        if mode == "whole":
            rest = rest[: T + 1]
            if len(rest) - 1 > left:
                yield row
                row, left = [], T
        while len(rest) > 1:
            if left == 0:
                yield row
                row, left = [], T
            row.append(rest[: left + 1])
            left -= len(row[-1]) - 1
            rest = rest[len(row[-1]) - 1 :] if mode == "carry" else ""
    yield row


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("T", [7, 64])
def test_rows_are_filled_in_the_order_of_the_documents(tmp_path: Path, mode: str, T: int) -> None:
    shards = open_shards(written(tmp_path, words(50, 3)))
    mixture = Mixture([Source(shards)], shuffle=False, repeat=False)
    rows = [pieces(batch) for batch in Loader(mixture, rows=1, row_tokens=T, at_row_end=mode)]
    expected = list(packed(texts(shards), T, mode))
    if mode == "whole":  # rows of a document each, if T is short
        assert rows == [row for row in expected if row]
    else:
        assert rows == expected


def test_targets_cover_each_document_and_counts_are_exact(sources: list[Source]) -> None:
    loader = Loader(Mixture(sources, repeat=False), rows=3, row_tokens=50)
    batches = list(loader)
    assert sum(batch.counted for batch in batches) == sum(source.shards.positions for source in sources)
    for batch in batches:
        assert batch.counted == int((batch.targets != -100).sum())
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == 150
        assert {50, 100} <= {*batch.cu_seqlens.tolist()}
    assert loader.epochs == [1.0, 1.0]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000])
def test_permutations_are_bijective_and_differ(size: int) -> None:
    index = np.arange(size)
    found = [permuted(index, size, f"{seed}") for seed in range(200)]
    for result in found:
        assert sorted(result.tolist()) == index.tolist()
    if size > 2:
        assert len({tuple(result) for result in found}) > min(5, size)
        # in each place, the mean over 200 permutations is (size - 1) / 2 within five standard deviations
        spread = np.sqrt((size**2 - 1) / 12 / len(found))
        assert np.abs(np.mean(found, axis=0) - (size - 1) / 2).max() < 5 * spread


def test_each_epoch_has_every_document_once_in_another_order(tmp_path: Path) -> None:
    shards = open_shards(written(tmp_path, numbered(40, 4)))
    loader = Loader(Mixture([Source(shards)], seed=9), rows=1, row_tokens=60, at_row_end="whole")
    order: list[str] = []
    while len(order) < 80:
        order += [piece[:3] for piece in pieces(next(loader))]
    numbers = [f"{n:03d}" for n in range(40)]
    assert sorted(order[:40]) == sorted(order[40:80]) == numbers
    assert order[:40] != order[40:80]
    assert order[:40] != numbers


def test_shares_of_a_mixture_follow_the_weights(sources: list[Source]) -> None:
    loader = Loader(Mixture(sources), rows=1, row_tokens=100)
    of_first = total = 0
    for _ in range(200):
        letters = "".join(pieces(next(loader)))
        of_first += sum(letter.islower() for letter in letters)
        total += len(letters)
        assert abs(of_first - total * 2 / 3) < 80  # a document of each source, and the rest of one


@pytest.mark.parametrize("mode", MODES)
def test_resume_with_other_ranks_and_batches_continues_the_order(sources: list[Source], mode: str) -> None:
    mixture = Mixture(sources, seed=3)
    single = Loader(mixture, rows=1, row_tokens=33, at_row_end=mode)
    expected = [next(single) for _ in range(40 + 36)]
    ranks = [Loader(mixture, rows=2, row_tokens=33, rank=rank, world=4, at_row_end=mode) for rank in range(4)]
    got = [torch.stack([batch.tokens, batch.targets]) for _ in range(5) for batch in map(next, ranks)]
    state = ranks[0].state()
    assert all(loader.state() == state for loader in ranks)
    state = json.loads(json.dumps(state))
    ranks = [Loader(mixture, 3, 33, rank=rank, world=2, at_row_end=mode, state=state) for rank in range(2)]
    got += [torch.stack([batch.tokens, batch.targets]) for _ in range(6) for batch in map(next, ranks)]
    rows = torch.cat(got, dim=1)
    assert torch.equal(rows[0], torch.cat([batch.tokens for batch in expected]))
    assert torch.equal(rows[1], torch.cat([batch.targets for batch in expected]))
    assert ranks[0].state() == single.state()


def test_prefetched_batches_and_states_are_those_of_the_loader(sources: list[Source]) -> None:
    mixture = Mixture(sources, repeat=False)
    plain, ahead = Loader(mixture, 2, 40), Prefetch(Loader(mixture, 2, 40), depth=3)
    assert ahead.state() == plain.state()
    for expected in plain:
        assert torch.equal(next(ahead).tokens, expected.tokens)
        assert ahead.state() == plain.state()
    with pytest.raises(StopIteration):
        next(ahead)
    endless = Prefetch(Loader(Mixture(sources), 2, 40))
    next(endless)
    endless.close()
    assert not endless._thread.is_alive()


def test_other_weights_hold_from_the_state_on(sources: list[Source]) -> None:
    loader = Loader(Mixture(sources), rows=1, row_tokens=100)
    rest = [next(loader) for _ in range(7)][-1]
    changed = [sources[0]._replace(weight=1.0), sources[1]._replace(weight=3.0)]
    resumed = Loader(Mixture(changed), rows=1, row_tokens=100, state=loader.state())
    assert pieces(next(resumed))[0][0] == pieces(rest)[-1][-1]  # the document that the row has ended
    letters = "".join("".join(pieces(next(resumed))) for _ in range(100))
    assert 0.22 < sum(letter.islower() for letter in letters) / len(letters) < 0.28


def test_other_data_and_other_seeds_are_refused(sources: list[Source], tmp_path: Path) -> None:
    state = Loader(Mixture(sources), rows=1, row_tokens=8).state()
    for mixture, message in [
        (Mixture(sources[::-1]), "the state of the loader is of other data"),
        (Mixture(sources, seed=1), "seed must stay 0 to continue the order, got 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Loader(mixture, rows=1, row_tokens=8, state=state)
    with pytest.raises(ConfigError, match=r"weight of .* must be positive and finite, got 0"):
        Loader(Mixture([sources[0]._replace(weight=0.0)]), rows=1, row_tokens=8)
    with pytest.raises(ConfigError, match=r"rank must be in \[0, 2\), got 2"):
        Loader(Mixture(sources), rows=1, row_tokens=8, rank=2, world=2)


def test_a_changed_document_changes_no_loss_of_another(tmp_path: Path) -> None:
    documents = words(12, 5)
    changed = [*documents[:4], documents[4].translate(str.maketrans("abcdefghij", "jihgfedcba")), *documents[5:]]
    spec = StackSpec(width=16, depth=2, vocab=256, pattern=GatedDeltaNet(heads=2) + SlidingWindow(heads=2, window=8))
    torch.manual_seed(0)
    with run_eagerly(torch.device("cpu")):
        model = spec.build().eval()
    losses = []
    for n, variant in enumerate((documents, changed)):
        shards = open_shards(written(tmp_path / str(n), variant))
        batch = next(Loader(Mixture([Source(shards)], shuffle=False), rows=2, row_tokens=90))
        with torch.no_grad():
            logits, _ = model(batch.tokens.view(1, -1), context=Context(cu_seqlens=batch.cu_seqlens))
        losses.append(torch.nn.functional.cross_entropy(logits[0], batch.targets.flatten(), reduction="none"))
    begin = sum(len(document) - 1 for document in documents[:4])
    inside = torch.zeros(180, dtype=torch.bool)
    inside[begin : begin + len(documents[4]) - 1] = True
    assert torch.equal(losses[0][~inside], losses[1][~inside])
    assert (losses[0] != losses[1])[inside].any()


def test_only_answers_have_targets(tmp_path: Path) -> None:
    lines = [{"prompt": "ab", "answer": "xyz"}, {"prompt": "", "answer": "uvw"}, {"prompt": "abcdefghi", "answer": "x"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = ShardConfig(tokenizer="bytes", fields=("prompt", "answer"))
    write_shards([tmp_path / "a.jsonl"], tmp_path / "data", config)
    mixture = Mixture([Source(open_shards(tmp_path / "data"))], shuffle=False, repeat=False)
    batch = next(Loader(mixture, rows=2, row_tokens=9, at_row_end="whole"))
    inputs = ["abxy", "uv", "abcdefghi"]
    assert batch.tokens.tolist() == [[*b"abxyuv", 0, 0, 0], [*b"abcdefghi"]]
    assert batch.targets.tolist() == [[-100, *b"xyz", *b"vw", -100, -100, -100], [*[-100] * 8, *b"x"]]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 9, 18]
    assert batch.counted == 6
    assert len(inputs[2]) == 9
    with pytest.raises(ConfigError, match="at_row_end must be whole for documents with prompts, got carry"):
        Loader(mixture, rows=2, row_tokens=9)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 100)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_processes_and_interruptions_do_not_change_the_result(
    tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ShardConfig(tokenizer="bytes", held_out=0.2)
    expected = written(tmp_path, words(200, 6), config)
    assert open_shards(expected, "validation").documents > 10
    encode, calls = writing.encode_unit, []

    def interrupted(*arguments: object) -> int:
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return encode(*arguments)

    monkeypatch.setattr(writing, "encode_unit", interrupted)
    again = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        write_shards([tmp_path / "a.jsonl"], again, config, processes=1)
    assert not again.exists()
    assert len([*(tmp_path / "again.unfinished" / "units").glob("*.npz")]) == 4
    monkeypatch.setattr(writing, "encode_unit", lambda *arguments: pytest.fail("encoded by this process"))
    reports: list[tuple[int, int]] = []
    write_shards(
        [tmp_path / "a.jsonl"], again, config, 2, lambda task, done, total, note="": reports.append((done, total))
    )
    assert reports[0][0] == 4
    assert reports[-1][0] == reports[-1][1]
    assert content(again) == content(expected)
    assert not (tmp_path / "again.unfinished").exists()


def test_a_failure_while_joining_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("abc")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("deltazoo.blocks.data.part_writer.os.fsync", fail)
        with pytest.raises(ConfigError, match=r"cannot write .*: No space left on device"):
            write_shards([tmp_path / "a.txt"], tmp_path / "data", BYTES)
    assert not (tmp_path / "data").exists()
    write_shards([tmp_path / "a.txt"], tmp_path / "data", BYTES)
    assert texts(open_shards(tmp_path / "data")) == ["abc"]


@pytest.mark.parametrize("size", [3, 40])
def test_units_split_between_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", size)
    expected = [*words(8, 7), "grüß"]
    (tmp_path / "a.txt").write_text("\n<|end|>\n".join(expected) + "\n<|end|>\n")
    for n, (source, config) in enumerate(
        [
            (tmp_path / "a.txt", ShardConfig(tokenizer="bytes", separator="<|end|>")),
            (written(tmp_path / "lines", expected).parent / "a.jsonl", BYTES),
        ]
    ):
        write_shards([source], tmp_path / f"data{n}", config, processes=1)
        assert texts(open_shards(tmp_path / f"data{n}")) == expected


def test_folders_are_read_by_name_and_held_out_files_are_validation(tmp_path: Path) -> None:
    for name, text in [("b.md", "bb"), ("a/c.md", "cc"), (".git/x.md", "no"), ("a/d.txt", "no"), ("a/empty.md", "")]:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    config = ShardConfig(tokenizer="bytes", only="*.md", validation=(str(tmp_path / "in" / "a" / "c.md"),))
    index = write_shards([tmp_path / "in"], tmp_path / "data", config)
    assert index.skipped == 1
    assert texts(open_shards(tmp_path / "data")) == ["bb"]
    assert texts(open_shards(tmp_path / "data", "validation")) == ["cc"]


def test_equal_documents_are_in_the_same_part(tmp_path: Path) -> None:
    folder = written(tmp_path, words(40, 8) * 3, ShardConfig(tokenizer="bytes", held_out=0.3))
    train, validation = texts(open_shards(folder)), texts(open_shards(folder, "validation"))
    assert len(train) + len(validation) == 120
    assert not {*train} & {*validation}
    assert 15 < len(validation) < 70


def test_a_tokenizer_ends_each_document_and_tables_equal_lines(tmp_path: Path) -> None:
    """Tokens of a word-level tokenizer, also as a token file."""
    tokenizers = pytest.importorskip("tokenizers", reason="deltazoo[data] is not installed")
    vocabulary = {"<end>": 0, "<unk>": 1, "red": 2, "green": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    config = ShardConfig(tokenizer=str(tmp_path))
    shards = open_shards(written(tmp_path, ["red green", "green blue green"], config))
    assert [shards.document(n).tolist() for n in range(2)] == [[2, 3, 0], [3, 1, 3, 0]]
    tokens = np.array([0, 2, 3, 0, 3, 1, 3], "<u2")  # an end token before each document, as in the speedruns' files
    header = np.zeros(256, "<i4")
    header[:3] = readers.BIN_MAGIC, 1, len(tokens)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + tokens.tobytes())
    write_shards([tmp_path / "a.bin"], tmp_path / "bin", config)
    assert (tmp_path / "bin" / "train-00000.tokens").read_bytes() == shards.files[0].tobytes()
    (tmp_path / "a.bin").write_bytes(header.tobytes() + tokens.tobytes()[:-2])
    with pytest.raises(ConfigError, match="must have 14 bytes after its header, which counts 7 tokens"):
        write_shards([tmp_path / "a.bin"], tmp_path / "cut", config)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="does not say which token ends a document"):
        write_shards([tmp_path / "a.jsonl"], tmp_path / "none", config)


def test_parquet_and_arrow_equal_json_lines(tmp_path: Path, small_units: None) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="deltazoo[data] is not installed")
    from pyarrow.parquet import write_table

    documents = words(40, 9)
    expected = content(written(tmp_path, documents))
    table = pyarrow.table({"id": range(40), "text": documents})
    write_table(table, tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "set").mkdir()
    with pyarrow.ipc.new_stream(str(tmp_path / "set" / "data.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=6)
    (tmp_path / "set" / "cache.arrow").write_bytes(b"not data")
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with pyarrow.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=6)
    for name in ("a.parquet", "set", "file.arrow"):
        write_shards([tmp_path / name], tmp_path / f"{name}.data", BYTES, processes=1)
        found = content(tmp_path / f"{name}.data")
        assert {x: found[x] for x in found if x != "index.json"} == {
            x: expected[x] for x in expected if x != "index.json"
        }
        assert open_shards(tmp_path / f"{name}.data").digest == open_shards(tmp_path / "data").digest
        with pytest.raises(ConfigError, match=r"has no field txt; its fields: id, text"):
            write_shards([tmp_path / name], tmp_path / "x", BYTES.model_copy(update={"fields": ("txt",)}), processes=1)
    with pytest.raises(ConfigError, match=r"a.parquet, row 1: field id must be a string, got 0"):
        write_shards([tmp_path / "a.parquet"], tmp_path / "x", BYTES.model_copy(update={"fields": ("id",)}))


def lines(*values: bytes) -> bytes:
    return b"\n".join([b'{"text": "a"}', *values, b'{"text": "b"}'])


@pytest.mark.parametrize(
    ("name", "data", "fields", "message"),
    [
        ("a.jsonl", lines(b'{"text": "a'), ("text",), r"a.jsonl, line 2: must be a JSON object: Unterminated string"),
        ("a.jsonl", lines(b'{"text": "\xff"}'), ("text",), r"a.jsonl, line 2: must be a JSON object: 'utf-8' codec"),
        ("a.jsonl", lines(b"", b"[1]"), ("text",), r"a.jsonl, line 3: must be a JSON object, got \[1\]"),
        ("a.jsonl", lines(b'{"text": 1}'), ("text",), r"a.jsonl, line 2: field text must be a string, got 1"),
        ("a.jsonl", lines(b'{"txt": ""}'), ("text",), r"a.jsonl, line 2: has no field text; its fields: txt"),
        ("a.jsonl", lines(rb'{"text": "\ud800"}'), ("text",), r"line 2: field text must be Unicode text, got a lone"),
        ("a.jsonl", lines(b'{"messages": []}'), ("text",), r"line 2: chat formats \(field messages\) are not read"),
        (
            "a.jsonl", b'{"prompt": [{"role": "user"}], "answer": "x"}', ("prompt", "answer"),
            r"line 1: chat formats \(field prompt\) are not read",
        ),
        ("a.txt", b"a\nb\xffc", ("text",), r"a.txt, line 2: must be UTF-8 text, got byte 0xff"),
        ("a.txt", b"a\n\nb\0c", ("text",), r"a.txt, line 3: must be text, got a binary file: a byte is 0"),
        ("a.txt", b"a", ("prompt", "answer"), r"a text file has no fields prompt, answer: give JSON lines"),
        ("a.bin", b"a" * 2000, ("text",), r"a.bin: a .bin file must begin with 256 int32 of which the first are"),
        ("a.jsonl", b"\n", ("text",), r"the sources must have a document to train on, got none"),
    ],
)  # fmt: skip
def test_wrong_files_are_named_with_their_line(
    tmp_path: Path, small_units: None, name: str, data: bytes, fields: tuple[str, ...], message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        write_shards([tmp_path / name], tmp_path / "data", ShardConfig(tokenizer="bytes", fields=fields), processes=1)
    assert not (tmp_path / "data").exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: _cut(folder / "train-00000.tokens"), r"train-00000.tokens is damaged: it must have \d+ bytes"),
        (lambda folder: (folder / "train-00000.offsets").unlink(), "cannot read .*: No such file"),
        (lambda folder: (folder / "index.json").unlink(), "is not a data folder, it has no index.json"),
        (lambda folder: _cut(folder / "index.json") or _cut(folder / "index.json"), "index.json is not JSON"),
        (lambda folder: (folder / "index.json").write_text('{"format": 9}'), "format must be 1, got 9"),
        (lambda folder: (folder / "index.json").write_text('{"format": 1}'), "dtype is required"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = written(tmp_path, words(5, 10))
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        open_shards(folder)


def test_changed_tokens_are_found(tmp_path: Path) -> None:
    folder = written(tmp_path, words(5, 11))
    open_shards(folder).verify()
    tokens = bytearray((folder / "train-00000.tokens").read_bytes())
    tokens[4] ^= 1
    (folder / "train-00000.tokens").write_bytes(tokens)
    with pytest.raises(ConfigError, match="have changed since they were written"):
        open_shards(folder).verify()
