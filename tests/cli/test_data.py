"""data: what the command writes, prints and refuses."""

import json


def test_data_writes_and_shows_documents(run, tmp_path):
    lines = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "capital of France? ", "answer": "Paris"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "data"
    arguments = ["--tokenizer", "bytes", "--field", "prompt,answer", "--processes", 1, "--out", out]
    result = run("data", tmp_path / "a.jsonl", *arguments)
    assert result.code == 0
    assert result.out.splitlines()[:2] == [
        "train: 2 documents, 29 tokens (14 per document), 6 bytes of text",
        "tokenizer: bytes, 256 tokens, uint16",
    ]
    assert "no documents are held out for validation: --held-out 0.01" in result.err
    shown = run("data", "--show", out, "--first", 1).out
    assert shown.endswith("--- train document 1, 24 tokens\n[prompt] capital of France? \n[answer] Paris\n")
    assert "2+2" not in shown
    documents = run("data", "--show", out, "--json").json["documents"]
    assert [document["text"] for document in documents] == ["4", "Paris"]
    again = run("data", tmp_path / "a.jsonl", *arguments)
    assert again.code == 2
    assert f"{out} exists: choose a new or empty folder" in again.err
    assert "part must be one of train of" in run("data", "--show", out, "--part", "validation").err


def test_data_without_a_tokenizer_or_a_folder_is_refused(run, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    assert "missing --tokenizer: a tokenizer.json or the word bytes" in run("data", tmp_path / "a.txt").err
    assert "missing --out: the folder to create" in run("data", tmp_path / "a.txt", "--tokenizer", "bytes").err
    error = run("data", tmp_path / "a.txt", "--tokenizer", tmp_path / "b.json", "--out", tmp_path / "x").err
    assert f"cannot read the tokenizer {tmp_path / 'b.json'}: no such file" in error
