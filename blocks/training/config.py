"""The settings of a training run, nested by subject, and the file train.yaml that holds them."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from deltazoo.backends.io.errors import ConfigError, cut, nearest, unknown_field
from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.blocks.data.packing import RowEnd
from deltazoo.blocks.data.text import Text, load_text
from deltazoo.blocks.model.checkpointing import Checkpointing
from deltazoo.blocks.parallel.config import ParallelConfig
from deltazoo.blocks.training.nested import flat, merged

Precision = Literal["float64", "float32", "autocast", "bfloat16"]


class DataConfig(FrozenConfig):
    """The text of a run.

    Args:
        path: a text file, whose bytes are the tokens, or a folder that `deltazoo data` wrote. None: the sources of
            Python's standard library, or `mixture`.
        mixture: folders of `deltazoo data` and their shares of the tokens, relative to each other.
        row_end: what happens to a document that does not fit into its row, see `Loader`; None: "whole" for data with
            prompts, else "carry".
    """

    path: str | None = None
    mixture: dict[str, float] = Field(default_factory=dict)
    row_end: RowEnd | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.path is not None and self.mixture:
            raise ValueError("path and mixture must not both be given")
        return self


class BatchConfig(FrozenConfig):
    """The tokens of a step, which do not depend on the number of processes.

    Args:
        rows: sequences per step, over all processes.
        length: tokens per sequence.
        tokens: tokens per step, a multiple of `length`; if given, `rows` does not count.
        micro_rows: sequences per forward pass of a process. A step then accumulates the gradients of several passes,
            weighted by their number of targets. None: one pass.
    """

    rows: int = Field(default=8, ge=1)
    length: int = Field(default=256, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    micro_rows: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.tokens is not None and self.tokens % self.length:
            raise ValueError(f"tokens must be a multiple of length = {self.length}, got {self.tokens}")
        return self

    @property
    def step_rows(self) -> int:
        """Sequences per step."""
        return self.rows if self.tokens is None else self.tokens // self.length

    @property
    def step_tokens(self) -> int:
        """Tokens per step."""
        return self.step_rows * self.length


class OptimizerConfig(FrozenConfig):
    """The optimizer.

    Args:
        name: "adamw", or "muon": torch.optim.Muon for the matrices of the layers, AdamW for all other parameters.
        learning_rate: peak of AdamW, and of Muon with `adjust_lr_fn="match_rms_adamw"`.
        weight_decay: applied to matrices only, without those in a module's `no_weight_decay` (decays, biases of steps).
        betas, eps: of AdamW.
        momentum: of Muon.
        rates: factor of the learning rate by a pattern of parameter names such as "embedding.*" or "*.mixer.*"; the
            first pattern that fits counts.
        clip: maximum norm of the gradient of all parameters.
        skips: a step with a gradient that is NaN or infinite is skipped; this many in a row stop the run.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=2e-3, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    rates: dict[str, float] = Field(default_factory=dict)
    clip: float = Field(default=1.0, gt=0)
    skips: int = Field(default=10, ge=1)


class ScheduleConfig(FrozenConfig):
    """The learning rate over the steps: linear warm-up, then the decay to `final` times the peak.

    Args:
        name: "cosine"; "linear"; "wsd": constant, then linear in the last steps; "constant".
        warmup: number of steps.
        final: rate that the decay reaches after the last step, not in it, as a fraction of the peak.
        decay: fraction of the steps in which "wsd" decays.
    """

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup: int = Field(default=20, ge=0)
    final: float = Field(default=0.1, ge=0, le=1)
    decay: float = Field(default=0.2, gt=0, le=1)


class CheckpointConfig(FrozenConfig):
    """Checkpoints.

    Args:
        every: steps between two checkpoints; None: one after each validation.
        keep: number of the last checkpoints that are kept.
        best: keep also the one with the lowest validation loss.
        background: write while the training continues, from a copy in main memory.
        pretrained: write the weights at the end to the folder `pretrained` by `save_pretrained`; refused before the
            first step if no family of transformers expresses the stack.
    """

    every: int | None = Field(default=None, ge=1)
    keep: int = Field(default=2, ge=1)
    best: bool = True
    background: bool = True
    pretrained: bool = False


class EvaluationConfig(FrozenConfig):
    """Validation.

    Args: every: steps between two validations; batches: batches of `batch.rows` sequences per validation; positions:
        also log the loss by position in the context, in ranges that end at powers of two.
    """

    every: int = Field(default=25, ge=1)
    batches: int = Field(default=4, ge=1)
    positions: bool = False


class LoggingConfig(FrozenConfig):
    """What a point of the curves has, besides the losses.

    Args: groups: the norm of the gradient of each layer; watch: norms of states and statistics of decays of each
        recurrent layer, by one more forward pass per validation; tensorboard: write events to the folder tensorboard.
    """

    groups: bool = False
    watch: bool = False
    tensorboard: bool = False


class TrainConfig(FrozenConfig):
    """The settings of a training run; `deltazoo.blocks.training.rules.RULES` lists which a resumed run can change.

        TrainConfig(steps=300, batch=dict(rows=8, length=256), optimizer=dict(learning_rate=2e-3))

    Args:
        model: a preset, a stack file, or a folder of weights to continue; None: the argument of `deltazoo.train`.
        data: the text.
        steps: number of steps of the schedule.
        seed: random seed of the weights and of the crops.
        batch, optimizer, schedule, parallel, checkpoint, evaluation, logging: the settings of each subject.
        z_loss: coefficient of the squared log-partition function of the logits; the training loss then contains it.
        device: as for `deltazoo.load`; with several processes "cuda" is the GPU of each.
        precision: "float32", or "float64" for comparisons; "autocast": float32 weights, computing in bfloat16;
            "bfloat16": weights and computing in bfloat16, with float32 copies of the weights in the optimizer.
        backend: as for `deltazoo.bind`.
        compile: compile the model layer by layer, see `deltazoo.blocks.model.compilation`. False: the first step starts
            at once, and each takes longer; without a CUDA device, updates whose backend is not named are eager too.
        checkpointing: what the backward recomputes to save memory, see `LanguageModel.checkpoint_layers`.
    """

    model: str | None = None
    data: DataConfig = DataConfig()
    steps: int = Field(default=300, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    z_loss: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    device: str = "cpu"
    precision: Precision = "float32"
    backend: str | None = None
    compile: bool = True
    checkpointing: Checkpointing = "none"
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()


class TextOrigin(FrozenConfig):
    """The text of a run.

    Args: path: absolute path of the file or folder, None for the sources of the standard library; digest: of the text;
        source: description of the origin.
    """

    path: str | None
    digest: str
    source: str


class RunSettings(FrozenConfig):
    """The settings of a run and its text, as train.yaml and the checkpoint hold them."""

    train: TrainConfig
    text: TextOrigin

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: object, defaults: "RunSettings | None" = None) -> "RunSettings":
        """Read plain data.

        Args: source: the file, for the error messages; defaults: the values of keys that the data leaves out.
        Raises: ConfigError: a key is unknown or missing, or a value is invalid.
        """
        parts: dict[str, Any] = {}
        for key in data:
            if key not in cls.model_fields:
                raise ConfigError(unknown_field(f"{source}: {key}", key, list(cls.model_fields)))
        for name, model in (("train", TrainConfig), ("text", TextOrigin)):
            value = data.get(name)
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise ConfigError(f"{source}: {name} must be a mapping with names as keys, got {cut(value)}")
            known = {} if defaults is None else getattr(defaults, name).model_dump()
            try:
                parts[name] = parse_nested(model, merged(known, value))
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from error
        return cls(**parts)


def parse_nested(model: type[FrozenConfig], data: Mapping[str, Any]) -> Any:
    """Build a config from plain data. Raises: ConfigError: of `check_names`, or a value is invalid."""
    check_names(model, data)
    return model(**data)


def check_names(model: type[FrozenConfig], data: Mapping[str, Any], path: str = "") -> None:
    """Raise ConfigError for an unknown key at any depth, which names the nearest known one."""
    for name, value in data.items():
        info = model.model_fields.get(name)
        if info is None:
            raise ConfigError(_unknown_setting(model, path, name))
        nested = info.annotation
        if isinstance(nested, type) and issubclass(nested, FrozenConfig) and isinstance(value, Mapping):
            check_names(nested, value, f"{path}{name}.")


def _unknown_setting(model: type[FrozenConfig], path: str, name: str) -> str:
    """Return the sentence for an unknown setting, which may belong to another subject, such as lr."""
    if nearest(name, model.model_fields):
        return unknown_field(f"{model.__name__}: {path}{name}", name, list(model.model_fields))
    paths = {inner.rpartition(".")[2]: inner for inner in flat(TrainConfig().model_dump())}
    near = nearest(name, paths)
    if near:
        found = near.split("'")[1]
        return f"{model.__name__}: {path}{name}: unknown field; did you mean {paths[found]!r}?"
    return unknown_field(f"{model.__name__}: {path}{name}", name, list(model.model_fields))


def text_of_run(settings: RunSettings, text: Text | None = None, file: object = "train.yaml") -> Text:
    """Return the text of a run, which is read from its path if `text` is None.

    Args: file: the file of the settings, for the error message.
    Raises: ConfigError: the text cannot be read, or is another one.
    """
    origin = settings.text
    if text is None:
        try:
            text = load_text(origin.path)
        except ConfigError as error:
            raise ConfigError(f"{error}; {file} names this text: pass its new path as text, or with --text") from error
        if text.path is not None and text.digest != origin.digest:
            raise ConfigError(f"{text.path} has changed since the run was trained on it")
    if text.digest != origin.digest:
        raise ConfigError(f"the run was trained on another text ({origin.source}), got {text.source}")
    return text._replace(source=origin.source) if text.path == origin.path else text
