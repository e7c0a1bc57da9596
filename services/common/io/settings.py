"""Typed settings from flags, environment (`POINTSMAN_*`) and secret files; the models' fields are the one source."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

import typer
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from pointsman.common.io.reloading_file import ReloadingFile

S = TypeVar("S", bound=BaseSettings)
# json_schema_extra of a field that is given by its place on the command line.
ARGUMENT: dict[str, Any] = {"argument": True}
# As rich.markup.escape has it, whose import would cost each service memory that only --help needs.
_MARKUP = re.compile(r"(\\*)(\[[a-zA-Z#/@][^[]*?\])")


def _url(value: str) -> str:
    if value and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).netloc):
        raise ValueError("http://HOST:PORT or https://HOST:PORT is needed")
    return value


def _entries(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return value
    return [entry for text in texts for entry in text.split()]


def _pairs(value: list[str]) -> list[str]:
    if not all(all(entry.partition("=")[::2]) for entry in value):
        raise ValueError("each entry is MODEL=PATH, MODEL=HUB_ID or, for an alias, NAME=MODEL")
    return value


def _host_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("HOST:PORT is needed")
    return value


# The one way to write a list: entries with blanks between them, in the environment as in a flag, which may also come several
# times. (Commas are parts of URLs.)
Entries = Annotated[list[str], NoDecode, BeforeValidator(_entries)]
Numbers = Annotated[list[float], NoDecode, BeforeValidator(_entries)]
# Entries of NAME=VALUE, for `by_name`.
Pairs = Annotated[Entries, AfterValidator(_pairs)]
HostPort = Annotated[str, AfterValidator(_host_port)]
# Where spans go; empty: nowhere.
OtlpEndpoint = Annotated[str, AfterValidator(_url)]


class Tokens(BaseSettings):
    """Shared secrets of the gRPC doors. All empty: the doors are open, which is refused off the loopback interface."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_")

    agent_token: SecretStr = Field(SecretStr(""), description="what agents show to routers")
    gateway_token: SecretStr = Field(SecretStr(""), description="what gateways show to routers")
    operator_token: SecretStr = Field(SecretStr(""), description="what people show to routers")
    observer_token: SecretStr = Field(
        SecretStr(""),
        description="what shadows show to routers, and commands where there is no operator's: they look and ask, no more",
    )
    token_dir: Path | None = Field(
        None,
        description="folder with files agent, gateway, operator and observer: one token each, or two while it is rotated, one a "
        "line: both are taken, the first is shown; read again when they change",
    )

    def reader(self, role: str) -> RoleTokens:
        """The tokens of `role` (agent, gateway, operator or observer) for as long as the process lives; a file in token_dir wins
        over the environment. Raises OSError and ValueError, which name the file, when it cannot be used."""
        secret: SecretStr = getattr(self, f"{role}_token")
        file = None if self.token_dir is None else self.token_dir / role
        return RoleTokens(file if file is not None and file.is_file() else None, secret.get_secret_value())

    def of(self, role: str) -> str:
        """The token that `role` shows now; empty where it has none. Raises as `reader`."""
        return self.reader(role).shown


class RoleTokens:
    """The tokens of one role: those of `file`, as it is whenever they are asked for, or without one `otherwise`, which stays. A
    file that becomes unusable (gone, empty) changes nothing: whoever writes it anew opens no door meanwhile."""

    def __init__(self, file: Path | None, otherwise: str) -> None:
        """Raises OSError, and ValueError that names the file."""
        self._fixed = (otherwise,) if otherwise else ()
        self._file = None if file is None else ReloadingFile([file], lambda: _read_tokens(file))

    @property
    def accepted(self) -> tuple[str, ...]:
        """Those that prove the role, two at most; none where the role has none."""
        if self._file is None:
            return self._fixed
        self._file.reload_if_changed()
        return self._file.value

    @property
    def shown(self) -> str:
        """The one to show, the first; empty where the role has none."""
        return next(iter(self.accepted), "")


def _read_tokens(file: Path) -> tuple[str, ...]:
    found = tuple(filter(None, map(str.strip, file.read_text().splitlines())))
    if len(found) not in (1, 2):
        # More would be some other file.
        raise ValueError(
            f"{file}: one token is needed, or two while it is rotated, one a line; it has {len(found)} lines"
        )
    return found


def by_name(pairs: list[str]) -> dict[str, str]:
    """Name -> value of a field of Pairs; a value may hold "=" itself."""
    return dict(entry.split("=", 1) for entry in pairs)


_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH"}


def add_settings_command(
    app: typer.Typer, name: str, settings: type[S], run: Callable[[S], None], *, help_: str
) -> None:
    """Register a command whose flags are the fields of `settings`; what is not given comes from the environment.

    Fields of type list take the flag several times; one with `json_schema_extra=ARGUMENT` is given without a flag. An invalid
    value ends the command with status 2 and the field's name.
    """

    def command(**given: Any) -> None:
        try:
            loaded = settings(**{key: value for key, value in given.items() if value not in (None, [])})
        except ValidationError as invalid:
            for error in invalid.errors(include_url=False, include_input=False):
                typer.echo(f"pointsman {name}: {_invalid(settings, error)}", err=True)
            raise typer.Exit(2) from None
        except SettingsError as unreadable:
            typer.echo(f"pointsman {name}: {unreadable}", err=True)
            raise typer.Exit(2) from None
        run(loaded)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(key, field) for key, field in settings.model_fields.items()]
    )
    command.__annotations__ = {key: _flag_type(field) for key, field in settings.model_fields.items()}
    app.command(name, help=_as_it_is(help_))(command)


def _invalid(settings: type[BaseSettings], error: ErrorDetails) -> str:
    """What is wrong with a value; of one that is not given, how to give it."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] != "missing":
        return f"{name}: {error['msg']}"
    field = settings.model_fields[name]
    flag = name.upper() if field.json_schema_extra == ARGUMENT else f"--{name.replace('_', '-')}"
    return f"{flag} (or {settings.model_config['env_prefix']}{name.upper()}) must be given: {field.description}"


def _flag_type(field: FieldInfo) -> Any:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    told = default not in (None, "", [])
    text = _as_it_is(f"{field.description} (default: {default})" if told else field.description or "")
    kind: Any = str | None
    if field.json_schema_extra == ARGUMENT:
        return Annotated[kind, typer.Argument(help=text, show_default=False)]
    if field.annotation is bool:
        kind = bool | None
    elif str(field.annotation).startswith("list"):
        kind = list[str] | None
    metavar = None if kind == bool | None else _metavar(field.annotation)
    return Annotated[kind, typer.Option(help=text, show_default=False, metavar=metavar)]


def _metavar(annotation: Any) -> str:
    """What a flag takes, in help: the choices where there are some, else the kind of value."""
    inner = [one for one in get_args(annotation) if one is not type(None)]
    if get_origin(annotation) is Literal:
        return "|".join(map(str, inner))
    if inner:
        return _metavar(inner[0])
    return _METAVARS.get(annotation, "TEXT")


def _as_it_is(text: str) -> str:
    """A text that typer's help shows so: it takes words in square brackets for rich's markup, and leaves them out."""
    return _MARKUP.sub(r"\1\1\\\2", text)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_flag_type(field))
