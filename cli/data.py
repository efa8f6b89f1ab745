"""`deltazoo data`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from deltazoo.cli.terminal.options import AsJson
from deltazoo.cli.terminal.output import print_json, print_line, print_lines, print_note, progress


class Part(StrEnum):
    """The parts of a data folder."""

    train = "train"
    validation = "validation"


def command(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Files and folders. *.jsonl, *.parquet, *.arrow and *.bin (tokens) are read as such, other files as "
            "UTF-8 text. With --show: one data folder.",
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="tokenizer.json, a folder that contains one, or the word bytes.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to create.", show_default=False)] = None,
    field: Annotated[
        str,
        typer.Option(
            help="Field of the text in JSON lines, Parquet and Arrow. Two fields, such as prompt,answer: each document "
            "is a prompt and an answer, with the loss on the answer alone."
        ),
    ] = "text",
    separator: Annotated[
        str | None,
        typer.Option(help="Text between the documents of a text file. Default: each text file is one document."),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option(
            help="Token after each document, by its text, or the word none. Default: the eos_token of "
            "tokenizer_config.json beside tokenizer.json; bytes have none."
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(help="Share of the documents that are held out for validation, such as 0.01.", min=0.0, max=1.0),
    ] = None,
    validation: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder that is held out for validation. Can be given several times."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help='Pattern of the names of files that are read in folders, such as "*.md".')
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that encode; the result is the same.", show_default="one per core"),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print documents of a data folder as text.")] = False,
    first: Annotated[int, typer.Option(min=0, help="With --show: first document.")] = 0,
    number: Annotated[int, typer.Option(min=1, help="With --show: number of documents.")] = 3,
    part: Annotated[Part, typer.Option(help="With --show: the documents to train on, or those held out.")] = Part.train,
    as_json: AsJson = False,
) -> None:
    """Encode texts into a folder of tokens for training, or show the documents of such a folder.

    Ctrl-C is safe: the same command continues, and the folder appears only when it is complete.
    """
    if show:
        _show(sources, part.value, first, number, as_json)
        return
    if tokenizer is None or out is None:
        missing = (
            "--tokenizer: a tokenizer.json or the word bytes" if tokenizer is None else "--out: the folder to create"
        )
        raise typer.BadParameter(f"missing {missing}; --show prints an existing folder")
    from deltazoo.blocks.data.preview import summary_lines
    from deltazoo.blocks.data.writing import ShardConfig, write_shards

    config = ShardConfig(
        tokenizer=tokenizer,
        end=end,
        fields=tuple(name.strip() for name in field.split(",")),
        separator=separator,
        held_out=held_out or 0.0,
        validation=tuple(str(path) for path in validation or ()),
        only=only,
    )
    with progress() as report_progress:
        index = write_shards(sources, out, config, processes, report_progress)
    if as_json:
        print_json(index)
        return
    print_lines(summary_lines(out, index))
    if "validation" not in index.parts:
        print_note("no documents are held out for validation: --held-out 0.01 holds out 1 % of them")


def _show(sources: list[Path], part: Literal["train", "validation"], first: int, number: int, as_json: bool) -> None:
    from deltazoo.blocks.data.preview import read_documents, summary_lines
    from deltazoo.blocks.data.shards import open_shards

    if len(sources) != 1:
        raise typer.BadParameter(f"--show takes one data folder, got {len(sources)}")
    shards = open_shards(sources[0], part)
    documents = read_documents(shards, first, number)
    if as_json:
        print_json({"index": shards.index, "documents": list(documents)})
        return
    print_lines(summary_lines(sources[0], shards.index))
    for document in documents:
        print_line()
        print_line(f"--- {part} document {document.number}, {document.tokens:,} tokens")
        if document.prompt is not None:
            print_line(f"[prompt] {document.prompt}")
        print_line(document.text if document.prompt is None else f"[answer] {document.text}")
