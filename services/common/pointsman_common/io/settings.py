"""Typed settings from flags, environment (`POINTSMAN_*`) and secret files. The fields of the settings models define all flags
and variables."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin
from urllib.parse import urlsplit

import typer
import typer.core
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from pointsman_common.core.addresses import parse_address
from pointsman_common.io.reloading_file import ReloadingFile

S = TypeVar("S", bound=BaseSettings)
# json_schema_extra of a field that is a positional argument on the command line.
ARGUMENT: dict[str, Any] = {"argument": True}


def _url(value: str) -> str:
    if value and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).netloc):
        raise ValueError("http://HOST:PORT or https://HOST:PORT is needed")
    return value


def _entries(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return value
    return [entry for text in texts for entry in text.split()]


# How lists are written, for messages about one that is not.
SEPARATED = "several are separated by blanks, not by commas"


def _pairs(value: list[str]) -> list[str]:
    if not all(all(entry.partition("=")[::2]) for entry in value):
        raise ValueError("each entry is MODEL=PATH, MODEL=HUB_ID or, for an alias, NAME=MODEL")
    if joined := [entry for entry in value if re.search(",[^,=]+=", entry)]:
        raise ValueError(f"{joined[0]!r}: {SEPARATED}")
    return value


def _host_port(value: str) -> str:
    parse_address(value)
    return value


def _targets(value: list[str]) -> list[str]:
    for target in value:
        try:
            # gRPC also takes a resolver's name: dns:///HOST:PORT.
            parse_address(target.rpartition("/")[2])
        except ValueError as error:
            raise ValueError(f"{error}; {SEPARATED}" if "," in target else str(error)) from None
    return value


def sendable(secret: str) -> str:
    """Return a secret without the blanks around it, such as the line feed at the end of a file. Raises ValueError, without the
    secret, if no header can have it: each call would fail, with an error that shows it."""
    stripped = secret.strip()
    if not (stripped.isascii() and stripped.isprintable()):
        raise ValueError("it has a character that no header can have: use printable ASCII")
    return stripped


def _secret(value: SecretStr) -> SecretStr:
    given = value.get_secret_value()
    if given and not given.strip():  # it would open a server
        raise ValueError("it is set, but blank: give a secret, or do not set it")
    return SecretStr(sendable(given))


# A secret that is sent in a header; empty: none.
Secret = Annotated[SecretStr, AfterValidator(_secret)]

# A list is written as entries separated by blanks, in a variable and in a flag; a flag may also be repeated. Commas do not
# separate, because URLs contain them.
Entries = Annotated[list[str], NoDecode, BeforeValidator(_entries)]
Numbers = Annotated[list[float], NoDecode, BeforeValidator(_entries)]
# Entries of NAME=VALUE, for `by_name`.
Pairs = Annotated[Entries, AfterValidator(_pairs)]
HostPort = Annotated[str, AfterValidator(_host_port)]
# As HostPort, or empty.
OptionalHostPort = Annotated[str, AfterValidator(lambda value: value and _host_port(value))]
# Routers to connect to, each as HOST:PORT.
Targets = Annotated[Entries, AfterValidator(_targets)]
# URL that spans are sent to; empty: tracing is off.
OtlpEndpoint = Annotated[str, AfterValidator(_url)]


class Tokens(BaseSettings):
    """Shared secrets of the gRPC servers. Without any token every caller is accepted; a server then refuses to listen off the
    loopback interface."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_")

    agent_token: Secret = Field(SecretStr(""), description="token that agents send to routers")
    gateway_token: Secret = Field(SecretStr(""), description="token that gateways send to routers")
    operator_token: Secret = Field(SecretStr(""), description="token that operators send to routers")
    observer_token: Secret = Field(
        SecretStr(""),
        description="token that shadows, and commands without an operator token, send to routers; allows queries only",
    )
    token_dir: Path | None = Field(
        None,
        description="folder with files agent, gateway, operator and observer: one token each, or during a rotation two, one a "
        "line: both are accepted, the first is sent; read again when they change",
    )

    @classmethod
    def from_environment(cls) -> Tokens:
        """Return the tokens for a program that has not called load_settings. Raises ValueError if token_dir is empty, or for a
        token that no header can have."""
        for field in empty_paths(cls):
            raise ValueError(f"{holder_of(cls, field)}: {EMPTY_PATH}")
        try:
            return cls()
        except ValidationError as invalid:
            raise ValueError(_invalid(cls, invalid.errors(include_input=False)[0], {})) from None

    def reader(self, role: str) -> RoleTokens:
        """Return a reader of the tokens of `role` (agent, gateway, operator or observer), which follows changes of the file.

        A file in token_dir takes precedence over the environment. Raises OSError and ValueError, with the file's name, if the
        file cannot be used, or if token_dir has no file of any role and there is no other token.
        """
        # Without tokens everybody is let in, so a wrong folder must not count as none.
        if self.token_dir is not None:
            if not self.token_dir.is_dir():
                raise ValueError(f"POINTSMAN_TOKEN_DIR {self.token_dir}: there is no such folder")
            roles = [name.removesuffix("_token") for name in type(self).model_fields if name.endswith("_token")]
            found = [name for name in roles if (self.token_dir / name).is_file() or self._fixed(name)]
            if not found:
                raise ValueError(
                    f"POINTSMAN_TOKEN_DIR {self.token_dir}: it has none of the files {', '.join(roles)}: write a token into one, "
                    "or do not set it"
                )
        file = None if self.token_dir is None else self.token_dir / role
        return RoleTokens(file if file is not None and file.is_file() else None, self._fixed(role))

    def of(self, role: str) -> str:
        """Return the token that `role` sends now; empty if it has none. Raises as `reader`."""
        return self.reader(role).shown

    def _fixed(self, role: str) -> str:
        secret: SecretStr = getattr(self, f"{role}_token")
        return secret.get_secret_value()


class RoleTokens:
    """The tokens of one role: the current content of `file` or, without a file, the fixed token `otherwise`.

    A file that becomes unusable (missing, empty) leaves the tokens as they are, so that writing a file anew does not open a
    server for a moment.
    """

    def __init__(self, file: Path | None, otherwise: str) -> None:
        """Raises OSError, and ValueError with the file's name."""
        self._fixed = (otherwise,) if otherwise else ()
        self._file = None if file is None else ReloadingFile([file], lambda: _read_tokens(file))

    @property
    def accepted(self) -> tuple[str, ...]:
        """Tokens that prove the role, at most two; empty if the role has none."""
        if self._file is None:
            return self._fixed
        self._file.reload_if_changed()
        return self._file.value

    @property
    def shown(self) -> str:
        """The token to send: the first one; empty if the role has none."""
        return next(iter(self.accepted), "")


def _read_tokens(file: Path) -> tuple[str, ...]:
    found = tuple(filter(None, map(str.strip, file.read_text().splitlines())))
    if len(found) not in (1, 2):
        # A file with more lines is probably no token file.
        raise ValueError(
            f"{file}: one token is needed, or during a rotation two, one a line; it has {len(found)} lines"
        )
    try:
        return tuple(map(sendable, found))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def by_name(pairs: list[str]) -> dict[str, str]:
    """Return a map from name to value of a field of type Pairs. A value may contain "="."""
    return dict(entry.split("=", 1) for entry in pairs)


# How similar a name must be to one that is meant, of 1.
_NEAR = 0.7
# The words after POINTSMAN_ in the names of variables: of each part, whose settings only its own programs load.
PARTS = frozenset(
    {
        "AGENT", "AGREE", "CALIBRATE", "COMPARE", "DEMO", "EMULATE", "FINDINGS", "GATEWAY", "PROFILE", "REPLAY", "ROUTER",
        "SERVE", "SHADOW", "SIMULATE", "STUDY", "TLS", "UP",
    }
)  # fmt: skip
# Set for engines, beside which a service may run.
_OF_ENGINES = {"POINTSMAN_AGENT_LOADS"}
# What Kubernetes sets for a Service that is called, for example, pointsman-router.
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP|SCTP)\w*)")


class InvalidSetting(Exception):
    """A value of a settings class that only a command finds unusable. Ends the command as a value that the class refuses.
    `field`: "" if the message is about several fields, which it names."""

    def __init__(self, settings: BaseSettings | type[BaseSettings], field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.kind = settings if isinstance(settings, type) else type(settings)
        self.field, self.message = field, message


# What is told of a path that is set and empty.
EMPTY_PATH = "it is set, but empty: give a path, or do not set it"
_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH"}


def add_settings_command(
    app: typer.Typer, name: str, settings: type[S], run: Callable[[S], None], *, help_: str, program: str = "pointsman"
) -> None:
    """Register a command whose flags are the fields of `settings`. A field without its flag is read from the environment.

    The flag of a list may be repeated. A field with `json_schema_extra=ARGUMENT` is a positional argument. An invalid value ends
    the command with status 2 and a message with the flag or variable that holds it. `program`: what stands before `name` in
    messages. `settings.REMOVED`, if there is one: former fields, each with the value that counts now.
    """
    removed: Mapping[str, str] = getattr(settings, "REMOVED", {})

    def command(**given: Any) -> None:
        set_fields = {key: value for key, value in given.items() if value not in (None, [])}
        if gone := set_fields.keys() & removed:
            for key in sorted(gone):
                typer.echo(f"{program} {name}: --{key.replace('_', '-')} {_now(removed[key])}", err=True)
            raise typer.Exit(2)
        try:
            run(load_settings(f"{program} {name}", settings, **set_fields))
        except InvalidSetting as invalid:
            flags = set_fields if invalid.kind is settings else {}
            told = _with_holder(invalid.kind, invalid.field, invalid.message, flags)
            typer.echo(f"{program} {name}: {told}", err=True)
            raise typer.Exit(2) from None

    flags = {key: _flag_type(field) for key, field in settings.model_fields.items()}
    flags |= {key: Annotated[str | None, typer.Option(hidden=True)] for key in removed}
    example = next((key for key, field in settings.model_fields.items() if field.json_schema_extra != ARGUMENT), "")
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(key, flag) for key, flag in flags.items()]
    )
    command.__annotations__ = flags
    variable = f"{_flag(settings, example)} may be given as {_variable(settings, example)}" if example else ""
    epilog = f"Each flag has a variable: {variable}." if variable else None
    app.command(name, cls=_OfFlags, help=help_, epilog=epilog)(command)


class _OfFlags(typer.core.TyperCommand):
    """A command whose help has whole names of flags on a terminal of any width, which rich's tables cut, and which says where the
    value of a flag stands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Ends the program for a value without its flag."""
        ctx.allow_extra_args = True
        left = super().parse_args(ctx, args)
        if left:
            flag = next((option.opts[0] for option in self.params if option.param_type_name == "option"), "")
            ctx.fail(f"{left[0]!r} stands behind no flag; a value follows its flag, as in {flag} VALUE")
        return left

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without rich."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)


def load_settings(command: str, settings: type[S], **given: Any) -> S:
    """Return `settings` from `given`, the flags, and the environment. An invalid value ends `command` with status 2 and a message
    with the flag or variable that holds it. A variable that no setting reads is told on stderr."""
    for line in _unread_variables(settings):
        typer.echo(f"{command}: {line}", err=True)
    all_kinds: list[type[BaseSettings]] = [Tokens, *_shared_kinds()]
    empty = [holder_of(settings, name, given) for name in empty_paths(settings, given)]
    empty += [holder_of(kind, name) for kind in all_kinds for name in empty_paths(kind)]
    for holder in empty:
        typer.echo(f"{command}: {holder}: {EMPTY_PATH}", err=True)
    if empty:
        raise typer.Exit(2)
    kinds: list[type[BaseSettings]] = [*all_kinds, settings]
    for kind in kinds:
        flags = given if kind is settings else {}
        try:
            loaded = kind(**flags)
        except ValidationError as invalid:
            for error in invalid.errors(include_url=False, include_input=False):
                typer.echo(f"{command}: {_invalid(kind, error, flags)}", err=True)
            raise typer.Exit(2) from None
        except SettingsError as unreadable:
            field = unreadable_field(unreadable)
            message = f"{holder_of(kind, field)}: no JSON text" if field else unreadable
            typer.echo(f"{command}: {message}", err=True)
            raise typer.Exit(2) from None
    return cast(S, loaded)


def empty_paths(settings: type[BaseSettings], given: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield the fields of a path that the flags `given` or a variable sets to nothing. It would count as the working directory,
    or as not set, and a server with secrets would be one without."""
    flags, environment = given or {}, {name.upper(): value for name, value in os.environ.items()}
    for name, field in settings.model_fields.items():
        if Path in (field.annotation, *get_args(field.annotation)):
            value = flags[name] if name in flags else environment.get(holder_of(settings, name))
            if isinstance(value, str) and not value.strip():
                yield name


def unreadable_field(error: SettingsError) -> str:
    """Return the field whose variable is no JSON text; "" if the error does not name one."""
    return "".join(re.findall(r'field "(\w+)"', str(error))[:1])


def _invalid(settings: type[BaseSettings], error: ErrorDetails, flags: Mapping[str, Any]) -> str:
    """Return the message for an invalid value, or, for a missing value, how to give it."""
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return _with_holder(settings, "", message, flags)
    name, *below = map(str, error["loc"])
    if error["type"] == "missing" and not below:
        flag, variable = _flag(settings, name), _variable(settings, name)
        return f"{flag} (or {variable}) must be given: {settings.model_fields[name].description}"
    return f"{'.'.join([holder_of(settings, name, flags), *below])}: {message}"


def _with_holder(settings: type[BaseSettings], field: str, message: str, flags: Collection[str]) -> str:
    """Return a message with what holds the field before it; one about several fields (`field` is "") with the flag or variable of
    each in the place of its name."""
    if field:
        return f"{holder_of(settings, field, flags)}: {message}"
    names = rf"\b({'|'.join(settings.model_fields)})\b"
    return re.sub(names, lambda found: (_flag if found[1] in flags else _variable)(settings, found[1]), message)


def holder_of(settings: type[BaseSettings], name: str, flags: Collection[str] = ()) -> str:
    """Return what holds the value of a field: its variable, if that is set and the flag is not among `flags`, else its flag.
    `settings.OTHER_VARIABLES`, if there is one: a further variable of each field, which counts without the first."""
    others: Mapping[str, str] = getattr(settings, "OTHER_VARIABLES", {})
    present = set(map(str.upper, os.environ))
    for variable in (_variable(settings, name), others.get(name, "")):
        if name not in flags and variable in present:
            return variable
    return _flag(settings, name)


def reason_with_setting(error: Exception, *settings: BaseSettings) -> str:
    """Return an error's text. If it is about a file, it begins with the file's name; the setting that names this file, if one of
    `settings` does, is put before it."""
    text = str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    for of in settings:
        for name, value in of:
            if isinstance(value, str | Path) and str(value) and text.startswith((f"{value}:", f"{value}, ")):
                return f"{holder_of(type(of), name)} {text}"
    return text


def _flag(settings: type[BaseSettings], name: str) -> str:
    argument = settings.model_fields[name].json_schema_extra == ARGUMENT
    return name.upper() if argument else f"--{name.replace('_', '-')}"


def _variable(settings: type[BaseSettings], name: str) -> str:
    return f"{settings.model_config['env_prefix']}{name.upper()}"


def _unread_variables(settings: type[BaseSettings]) -> Iterator[str]:
    """Yield a line for each variable that looks like one of `settings`, or of those of all services, and is none."""
    kinds = list(_loaded_kinds(BaseSettings))
    known = {_variable(kind, name) for kind in kinds for name in kind.model_fields} | _OF_ENGINES
    prefixes = {kind.model_config["env_prefix"] for kind in (settings, *_shared_kinds())}
    removed = {_variable(settings, name): value for name, value in getattr(settings, "REMOVED", {}).items()}
    for name in sorted(map(str.upper, os.environ)):
        prefix = next(filter(name.startswith, filter(None, prefixes)), "")
        if name in known or _SERVICE_LINK.fullmatch(name):
            continue
        if not prefix:
            if meant := _meant(name):
                yield f"{name} has no effect: it is no setting; is {meant} meant?"
            continue
        if name in removed:
            yield f"{name} has no effect: it {_now(removed[name])}"
            continue
        fields = [of.removeprefix(prefix) for of in known if of.startswith(prefix)]
        nearest = difflib.get_close_matches(name.removeprefix(prefix), fields, n=1, cutoff=_NEAR)
        yield f"{name} has no effect: it is no setting" + (f"; is {prefix}{nearest[0]} meant?" if nearest else "")


def _meant(name: str) -> str:
    """Return what a variable of no part is probably meant to be; "" for none, and for one that is not POINTSMAN_..."""
    rest = name.removeprefix("POINTSMAN_")
    part, _, of_part = rest.partition("_")
    if rest == name or part in PARTS:
        return ""
    if of_part and (near := difflib.get_close_matches(part, PARTS, n=1, cutoff=_NEAR)):
        return f"POINTSMAN_{near[0]}_{of_part}"
    tokens = [field.upper() for field in Tokens.model_fields]
    return "".join(f"POINTSMAN_{near}" for near in difflib.get_close_matches(rest, tokens, n=1, cutoff=_NEAR))


def _shared_kinds() -> list[type[BaseSettings]]:
    """Return the settings that services share and that have a prefix of their own."""
    kinds = _loaded_kinds(BaseSettings)
    return [kind for kind in kinds if kind.__module__.startswith("pointsman_common.") and kind is not Tokens]


def _loaded_kinds(of: type[BaseSettings]) -> Iterator[type[BaseSettings]]:
    for kind in of.__subclasses__():
        yield kind
        yield from _loaded_kinds(kind)


def _now(value: str) -> str:
    return f"is no setting any more; its value is {value}"


def _flag_type(field: FieldInfo) -> Any:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    has_default = default not in (None, "", [])
    if isinstance(default, list):
        default = " ".join(map(str, default))
    text = f"{field.description} (default: {default})" if has_default else field.description or ""
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
    """Return the placeholder of a flag's value in the help text: the choices if the type has any, else the kind of value."""
    inner = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return "|".join(map(str, inner))
    if inner:
        return _metavar(inner[0])
    return _METAVARS.get(annotation, "TEXT")


def _parameter(name: str, flag: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag)


def split_urls(text: str) -> tuple[str, ...]:
    """Return the URLs of Redis servers in a list separated by commas. A comma in a password does not separate. Raises ValueError,
    without the text, which may have a password, if one is no such URL."""
    urls = tuple(url.strip() for url in re.split(r",(?=\s*(?:rediss?|unix)://)", text) if url.strip())
    for url in urls:
        try:
            known = re.match(r"(rediss?|unix)://", url) and (urlsplit(url).port or True)
        except ValueError:  # the port is no number, such as that of "redis://a:1,b:2"
            known = False
        if not known:
            raise ValueError("write each server as redis://HOST:PORT, or rediss://HOST:PORT for TLS")
    return urls
