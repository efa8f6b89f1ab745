"""FrozenConfig: the base class of every config and spec, and the sentences of its errors.

pydantic reports invalid fields with an exception that cannot be subclassed. The constructor of a `FrozenConfig` raises
`ConfigError` in its place, so that one `except DeltazooError`, or `except ValueError`, catches every error of a config.
"""

import functools
import typing
from abc import ABC
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from deltazoo.backends.io.errors import ConfigError, cut, describe_invalid, nearest, unknown_field

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _RaisesConfigError(ModelMetaclass):
    """Converts the errors of the constructor.

    `model_validate` and fields that hold another config do not pass here, so pydantic adds the path of nested fields.
    """

    if not TYPE_CHECKING:  # type checkers still see the fields as parameters

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValidationError as error:
                raise ConfigError(f"{self.__name__}: {describe_errors((), error, self)}") from error


class FrozenConfig(BaseModel, ABC, metaclass=_RaisesConfigError):
    """A frozen pydantic model that refuses unknown fields, and true or false in place of a number.

    Raises: ConfigError: one sentence for each invalid field; the nearest field for an unknown one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # type checkers report an assignment to a field of a frozen model

        def __setattr__(self, name: str, value: Any) -> None:
            try:
                super().__setattr__(name, value)
            except ValidationError as error:
                raise ConfigError(f"{type(self).__name__}.{name} cannot be set: a config does not change") from error

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false as numbers, and the word "none" for null."""
        types = _field_types(cls, str(info.field_name))
        if not types & {int, float}:
            return value
        rule = "an integer" if int in types else "a number"
        items = value if isinstance(value, list | tuple) else (value,)
        if bool not in types and any(isinstance(item, bool) for item in items):
            raise PydanticCustomError("bool_as_number", f"Input should be {rule}")
        if type(None) in types and str not in types and isinstance(value, str) and value.lower() == "none":
            raise PydanticCustomError("none_as_text", f"Input should be {rule} or null (None in Python)")
        return value


@functools.cache
def _field_types(model: type[BaseModel], field: str) -> frozenset[Any]:
    return frozenset(_types(model.model_fields[field].annotation))


def changed_fields(config: BaseModel) -> dict[str, Any]:
    """Return the fields of a config that differ from their defaults."""
    defaults = {name: info.get_default(call_default_factory=True) for name, info in type(config).model_fields.items()}
    return {name: getattr(config, name) for name, default in defaults.items() if getattr(config, name) != default}


def describe_errors(path: tuple[str, ...], error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Join pydantic's errors into one message, a sentence for each key, which begins with its path.

    Args: model: the validated class; its fields are the suggestions for an unknown field.
    """
    sentences = []
    for problem in without_consequences(error):
        location = ".".join(map(str, (*path, *problem["loc"])))
        owner = _nested_model(model, problem["loc"][:-1])
        if problem["type"] == "extra_forbidden" and owner is not None:
            sentences.append(_unknown_field(location, str(problem["loc"][-1]), owner))
            continue
        sentence = describe_invalid(location, problem["msg"])
        # A "value_error" comes from a validator of this package, whose sentence already contains the value.
        if problem["type"] not in ("missing", "value_error") and problem["loc"]:
            sentence += f", got {cut(problem['input'])}"
        if problem["type"] == "literal_error" and isinstance(problem["input"], str):
            sentence += nearest(problem["input"], _choices(problem.get("ctx", {})))
        sentences.append(sentence)
    return "; ".join(sentences)


def without_consequences(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's errors without that of a sequence which is too short because its items are invalid."""
    problems = error.errors()
    invalid = {problem["loc"][:n] for problem in problems for n in range(len(problem["loc"]))}
    return [problem for problem in problems if not (problem["type"] == "too_short" and problem["loc"] in invalid)]


def _nested_model(model: type[BaseModel] | None, names: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Return the class of the config that the names of nested fields lead to; None if they lead to something else."""
    for name in names:
        info = None if model is None else model.model_fields.get(str(name))
        nested = None if info is None else info.annotation
        model = nested if isinstance(nested, type) and issubclass(nested, BaseModel) else None
    return model


def _unknown_field(location: str, field: str, model: type[BaseModel]) -> str:
    """Format the message for an unknown field, which may be a value of another field."""
    for name, info in model.model_fields.items():
        if field in _literals(info.annotation):
            return f"{location}: unknown field; did you mean {name}={field!r}?"
    return unknown_field(location, field, list(model.model_fields))


def _literals(annotation: Any) -> typing.Iterator[Any]:
    """Yield the values of every Literal in a type annotation."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    else:
        for argument in typing.get_args(annotation):
            yield from _literals(argument)


def _choices(context: Mapping[str, Any]) -> list[str]:
    """Return the values of a Literal, from the text "'none', 'head' or 'channel'"."""
    return str(context.get("expected", "")).split("'")[1::2]


def _types(annotation: Any) -> typing.Iterator[Any]:
    """Yield every class in a type annotation, and the types of the values of its literals."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from map(type, typing.get_args(annotation))
    elif typing.get_args(annotation):
        for argument in typing.get_args(annotation):
            yield from _types(argument)
    else:
        yield annotation
