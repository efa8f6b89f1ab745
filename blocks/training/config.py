"""The settings of a training run, and the file train.yaml that holds them."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from deltazoo.backends.io.errors import ConfigError, cut, unknown_field
from deltazoo.backends.io.frozen_config import FrozenConfig
from deltazoo.blocks.data.text import Text, load_text
from deltazoo.blocks.model.checkpointing import Checkpointing


class TrainConfig(FrozenConfig):
    """The settings of a training run; `deltazoo.blocks.training.rules.RULES` lists which a resumed run can change.

    Args:
        steps: number of steps of the schedule.
        batch: sequences per step.
        length: bytes per sequence.
        learning_rate: peak; linear warm-up over `warmup` steps, then cosine decay to a tenth of the peak.
        weight_decay: applied to matrices only.
        clip: maximum norm of the gradient of all parameters.
        seed: random seed of the weights and of the crops.
        every: steps between two validations; a checkpoint follows each.
        validation_batches: batches per validation.
        dtype: compute dtype; "bfloat16" uses autocast and keeps the weights in float32.
        backend: as for `deltazoo.bind`.
        compile: compile the model layer by layer, see `deltazoo.blocks.model.compilation`. False: the first step starts
            at once, and each takes longer; without a CUDA device, updates whose backend is not named are eager too.
        checkpointing: what the backward recomputes to save memory, see `LanguageModel.checkpoint_layers`.
    """

    steps: int = Field(default=300, ge=1)
    batch: int = Field(default=8, ge=1)
    length: int = Field(default=256, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0, allow_inf_nan=False)
    warmup: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    clip: float = Field(default=1.0, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    every: int = Field(default=25, ge=1)
    validation_batches: int = Field(default=4, ge=1)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    backend: str | None = None
    compile: bool = True
    checkpointing: Checkpointing = "none"


class TextOrigin(FrozenConfig):
    """The text of a run.

    Args: path: absolute path of the file, None for the sources of the standard library; digest: `Text.digest`; source:
        description of the origin.
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
                parts[name] = model(**{**known, **value})
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from error
        return cls(**parts)


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
