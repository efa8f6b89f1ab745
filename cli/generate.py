"""`deltazoo generate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.terminal.options import AsJson, BackendName, Device, Seed, Trust
from deltazoo.cli.terminal.output import print_json, print_line, print_note, print_piece, progress
from deltazoo.cli.terminal.threads import let_idle_threads_sleep


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint folder of `deltazoo train`, or folder of transformers.")
    ],
    prompt: Annotated[str | None, typer.Option(show_default="def ", help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the text to continue, with its last line break; -: standard input.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines file with a prompt per line, to continue several at once: objects with prompt, and where "
            "they differ id and options such as max_tokens. Needs --out."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --prompts: JSON Lines file to append results to; prompts whose ids it has are skipped."
        ),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, show_default="16", help="With --prompts: prompts in progress.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens (bytes without a tokenizer).")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 selects the most likely byte.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely bytes.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the smallest set of bytes with total probability p.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample from the bytes at least p times as likely as the most likely one.")
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divisor of the positive logits, factor of the negative ones, of bytes in the text.")
    ] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop after this text; may be repeated.")] = None,
    seed: Seed = 0,
    speculate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Draft this number of tokens per step by prompt lookup, and verify them in one pass; for texts that "
            "repeat parts of themselves. The tokens stay the same, up to rounding.",
        ),
    ] = 0,
    device: Device = "cpu",
    backend: BackendName = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            show_default="compile for texts that repay it",
            help="Compile the decode step with torch.compile. Short texts are finished before the compilation. On a "
            "GPU the step is captured in a CUDA graph in any case.",
        ),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with a trained model by cached decoding, and print the text as it is generated.

    Why it stopped is printed on stderr, or is part of the JSON document.
    """
    let_idle_threads_sleep()
    import deltazoo
    from deltazoo.blocks.generation.completion import encode
    from deltazoo.blocks.generation.engine.prompt_file import generate_file
    from deltazoo.blocks.generation.kept import compiles

    sampling = deltazoo.Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        seed=seed,
    )
    for name, value in (("--out", out), ("--slots", slots)):
        if value is not None and prompts is None:
            raise typer.BadParameter(f"{name} {value} needs --prompts FILE")
    if prompts is not None:
        if prompt is not None or prompt_file is not None:
            raise typer.BadParameter("give one of --prompt, --prompt-file and --prompts, got several")
        if out is None:
            raise typer.BadParameter(f"--prompts {prompts} needs --out FILE for the results")
        model = deltazoo.load(checkpoint, device, backend, trust)
        with progress() as show:
            result = generate_file(model, prompts, out, sampling, slots or 16, bool(compile), show, speculate)
        if as_json:
            print_json(result)
        else:
            print_note(result.line())
        return
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give one of --prompt and --prompt-file, got both")
    if prompt_file is not None:
        prompt = _read(prompt_file)
    elif prompt is None:
        prompt = "def "
    model = deltazoo.load(checkpoint, device, backend, trust)
    compile = compiles(model, max_tokens) if compile is None else compile
    if compile:
        print_note("compiling the decode step, which takes seconds to minutes (--no-compile starts at once)")
    if as_json:
        print_json(deltazoo.generate(model, prompt, sampling, compile=compile, speculate=speculate))
        return
    encode("prompt", prompt)  # report an invalid prompt before it is printed
    print_piece(prompt)
    completion = deltazoo.generate(model, prompt, sampling, print_piece, compile, speculate)
    print_line()
    print_note(completion.reason_line())


def _read(path: Path) -> str:
    """Read a prompt from a file, or from standard input if the path is "-"."""
    from deltazoo.backends.io.errors import ConfigError, file_errors

    if str(path) == "-" and sys.stdin is None:
        raise ConfigError("--prompt-file - needs standard input, which is closed")
    with file_errors("read", path):
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompt-file {path} must be text in UTF-8: {error.reason} at byte {error.start}"
        ) from error
