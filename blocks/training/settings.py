"""The settings of a run from a file, from PATH=VALUE, and from options, as one nested mapping."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltazoo.backends.io.errors import ConfigError, cut
from deltazoo.blocks.spec import document
from deltazoo.blocks.training.config import RunSettings, TrainConfig, check_names
from deltazoo.blocks.training.nested import flat, merged


def read_config(
    file: Path | None, settings: Sequence[str] | None, changes: Mapping[str, Any], paths: bool = False
) -> dict[str, Any]:
    """Merge the settings; later ones win: file, settings, changes.

    Args: file: YAML or JSON, also the train.yaml of a run; settings: "path=value" with YAML values; changes: by path;
        paths: return them by path, as `deltazoo.resume` takes them.
    Raises: ConfigError: names an unknown key, and the nearest known one.
    """
    data: dict[str, Any] = {}
    if file is not None:
        data = document.read(file)
        if {*data} == {"train", "text"}:  # the train.yaml of a run, whose text may have been an argument
            run = RunSettings.parse(data, file)
            data = run.train.model_dump()
            if run.train.data.path is None and not run.train.data.mixture:
                data["data"]["path"] = run.text.path
        _check(data, str(file))
    for setting in settings or ():
        path, equals, text = setting.partition("=")
        if not equals or not all(path.strip().split(".")):
            raise ConfigError(f"a setting must be PATH=VALUE, such as schedule.name=wsd, got {cut(setting)}")
        data = merged(data, {path.strip(): document.parse_value(text, setting)})
        _check(data, setting)
    data = merged(data, changes)
    return flat(data) if paths else data


def _check(data: Mapping[str, Any], source: str) -> None:
    try:
        check_names(TrainConfig, data)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
