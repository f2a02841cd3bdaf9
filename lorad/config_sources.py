"""Where settings come from, in order: flags, environment, files, defaults; and which of them won.

Goes in: a config path or none, an environment, flags.  Comes out: Settings with the origin of each
value, or BadConfig that names the key, its nearest neighbour and the file and line.  Later layers
win: main file, `conf.d/*.toml` by name, `--config` (or LORAD_CONFIG), `LORAD_SECTION__KEY`, flags.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec

from engine.config import GIB, KIB, MIB
from lorad.config import Settings, check, model_key, resolved
from lorad.config_sections import SECTIONS, Model
from lorad.config_values import convert, convert_text, hints
from lorad.errors import BadConfig
from lorad.paths import Paths, find

ENV_PREFIX = "LORAD_"
MAX_FILE_BYTES = 4 * MIB
_MODEL_HINTS = hints(Model)


@dataclass(frozen=True, slots=True)
class Layer:
    """One source.  `text` is the file's, to find line numbers in; "" for environment and flags."""

    origin: str
    values: Mapping[str, Any]
    text: str = ""

    def at(self, section: str, key: str = "", nth: int = 0) -> str:
        """`lorad.toml:12`, as close as a scan for the section and the key gets; of a list of
        sections the `nth`."""
        inside = not section
        passed = 0
        for number, line in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]\]?", line)
            if header:
                inside = header[1] == section and passed == nth
                passed += header[1] == section
                if inside and not key:
                    return f"{self.origin}:{number}"
            elif inside and key and re.match(rf"\s*{re.escape(key)}\s*=", line):
                return f"{self.origin}:{number}"
        return self.origin


def load(
    config: Path | None, env: Mapping[str, str], flags: Mapping[str, str] | None = None
) -> tuple[Settings, Paths]:
    """Read every layer, check the whole, fill in the directories.  Raises BadConfig."""
    settings, paths = read(config, env, flags)
    return check(resolved(settings, paths)), paths


def read(
    config: Path | None, env: Mapping[str, str], flags: Mapping[str, str] | None = None
) -> tuple[Settings, Paths]:
    """The layers alone, for a machine that is not the daemon's: every key is known and every value
    what it should be, but nothing was looked for.  Raises BadConfig."""
    paths = find(env)
    merged, models, origins = _layered(config, env, paths, flags)
    if not models:
        raise _without_model(places(config, env, paths))
    settings = Settings(
        models=tuple(Model(**m) for m in models),  # type: ignore[arg-type]
        origins=origins,
        **{name: SECTIONS[name](**values) for name, values in merged.items()},  # type: ignore[arg-type]
    )
    return settings, paths


def load_for_gateway(config: Path | None, env: Mapping[str, str]) -> Settings:
    """The same layers for who serves no model: directories stay as they are written."""
    merged, _, origins = _layered(config, env, find(env), None)
    return Settings(
        models=(),
        origins=origins,
        **{name: SECTIONS[name](**values) for name, values in merged.items()},  # type: ignore[arg-type]
    )


def _layered(
    config: Path | None, env: Mapping[str, str], paths: Paths, flags: Mapping[str, str] | None
) -> tuple[dict[str, dict[str, object]], list[dict[str, object]], dict[str, str]]:
    """Sections, models, and where each value is from."""
    layers = [*_files(config, env, paths), *_environment(env)]
    if flags:
        layers.append(Layer("flag", _nest(flags)))
    merged: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    models: list[dict[str, object]] = []
    origins: dict[str, str] = {}
    for layer in layers:
        _merge(layer, merged, models, origins)
    return merged, models, origins


def dump(settings: Settings) -> str:
    """The effective configuration as TOML, each value with its origin as a comment."""
    lines = []
    for index, model in enumerate(settings.models):
        rows = _rows(model, partial(model_key, index), settings.origins)
        lines += ["[[models]]", *rows, ""]
    for name in SECTIONS:
        rows = _rows(getattr(settings, name), f"{name}.{{}}".format, settings.origins)
        lines += [f"[{name}]", *rows, ""]
    return "\n".join(lines)


def _rows(
    values: msgspec.Struct, key_of: Callable[[str], str], origins: Mapping[str, str]
) -> list[str]:
    known = hints(type(values))
    return [
        f"{key} = {spelled(known[key], value)}  # {origins.get(key_of(key), 'default')}"
        for key, value in msgspec.structs.asdict(values).items()
    ]


# ----------------------------------------------------------------- told
def each(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """(section, key, value as lorad.toml would have it), in the order of the documentation."""
    for model in settings.models:
        yield from _spelled("models", model)
    for name in SECTIONS:
        yield from _spelled(name, getattr(settings, name))


def _spelled(section: str, values: msgspec.Struct) -> Iterator[tuple[str, str, str]]:
    known = hints(type(values))
    for key, value in msgspec.structs.asdict(values).items():
        yield section, key, spelled(known[key], value)


def spelled(hint: object, value: object) -> str:
    """A value as it would stand in lorad.toml: `"16GiB"`, `"2s"`, `"auto"`."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    if "auto" in marks and value == 0:
        return '"auto"'
    if "size" in marks and isinstance(value, int):
        for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
            if value and value % size == 0:
                return f'"{value // size}{unit}"'
    if "duration" in marks:
        return f'"{value:g}s"'
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def load_defaults() -> Settings:
    """What nobody has to write.  No base is one of it, so it would not start."""
    return Settings(models=(Model(),))


def defaults() -> str:
    """A lorad.toml of every key with its default, each behind a #; only the base is asked for."""
    lines: list[str] = []
    section = ""
    for name, key, value in each(load_defaults()):
        if name != section:
            section = name
            lines += ["", "[[models]]" if name == "models" else f"[{name}]"]
        if (name, key) == ("models", "base"):
            lines.append('base = "/path/to/model"')
        else:
            lines.append(f"# {key} = {value}")
    return "\n".join(lines[1:]) + "\n"


# ----------------------------------------------------------------- layers
def places(
    config: Path | None, env: Mapping[str, str], paths: Paths | None = None
) -> tuple[Path, ...]:
    """The main file and its conf.d, then the explicit file, whether they exist or not."""
    paths = paths or find(env)
    named = config or (Path(env["LORAD_CONFIG"]) if env.get("LORAD_CONFIG") else None)
    parts = sorted((paths.config / "conf.d").glob("*.toml"))
    return (paths.config / "lorad.toml", *parts, *([named] if named else []))


def _files(config: Path | None, env: Mapping[str, str], paths: Paths) -> list[Layer]:
    """A file that was named must exist, the main one need not."""
    main, *others = places(config, env, paths)
    return [_file(path) for path in [*([main] if main.is_file() else []), *others]]


def _file(path: Path) -> Layer:
    try:
        with path.open("rb") as file:  # a pipe will do, but not one without an end
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise BadConfig(
                f"{path}: over {MAX_FILE_BYTES // MIB} MiB, wanted TOML",
                hint="is this the file you meant?",
            )
        text = data.decode("utf-8-sig")  # some editors begin with a mark
        return Layer(str(path), tomllib.loads(text), text)
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(
            f"{path}: {error}",
            hint="strings are in quotes, tables in [brackets], and each key once",
        ) from error
    except RecursionError:
        raise BadConfig(f"{path}: nested too deeply", hint="is this the file you meant?") from None
    except UnicodeDecodeError as error:
        raise BadConfig(
            f"{path}: not UTF-8 text", hint="is this the file you meant?  save it as UTF-8"
        ) from error
    except OSError as error:
        raise BadConfig(
            f"{path}: {error.strerror or error}", hint="check the path, and who may read it"
        ) from error


def _environment(env: Mapping[str, str]) -> list[Layer]:
    """One layer a variable, so that an error names the variable."""
    layers = []
    for name in sorted(env):
        if name.startswith(ENV_PREFIX) and "__" in name:
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            layers.append(Layer(name, _nest({key: env[name]})))
    return layers


def _nest(flat: Mapping[str, str]) -> dict[str, Any]:
    """`lora.slots` -> section and key; `models.0.base` is the first model's."""
    nested: dict[str, Any] = {}
    for dotted, text in flat.items():
        section, _, key = dotted.partition(".")
        nested.setdefault(section, {})[key] = _Text(text)
    return nested


class _Text(str):
    """A value without a type: it is read as the field wants it."""


# ----------------------------------------------------------------- merging
def _merge(
    layer: Layer,
    merged: dict[str, dict[str, object]],
    models: list[dict[str, object]],
    origins: dict[str, str],
) -> None:
    for section, values in layer.values.items():
        if section == "models":
            _merge_models(layer, values, models, origins)
            continue
        if section not in SECTIONS:
            raise _unknown(
                f"section [{section}]", section, [*SECTIONS, "models"], layer.at(section)
            )
        if not isinstance(values, dict):
            raise BadConfig(
                f"{layer.at('', section)}: {section} must be a table",
                hint=f"write [{section}], and its settings below it",
            )
        known = hints(SECTIONS[section])
        for key, raw in values.items():
            merged[section][key] = _read(layer, section, key, raw, known)
            origins[f"{section}.{key}"] = layer.at(section, key)


def _merge_models(
    layer: Layer, values: Any, models: list[dict[str, object]], origins: dict[str, str]
) -> None:
    """A file's [[models]] replace the list; `models.base` changes the first, `models.1.base` the
    second, or adds one behind the last."""
    if isinstance(values, dict) and all(isinstance(v, _Text) for v in values.values()):
        for dotted, raw in values.items():
            index, _, key = dotted.rpartition(".")
            if not re.fullmatch(r"[0-9]{0,3}", index) or int(index or 0) > len(models):
                rule = "models.0 is the first model, and none may be left out"
                raise BadConfig(f"{layer.origin}: {rule}", hint="count the models from 0")
            number = int(index or 0)
            if number == len(models):
                models.append({})
            models[number][key] = _read(layer, "models", key, raw, _MODEL_HINTS)
            origins[model_key(number, key)] = layer.origin
        return
    if not isinstance(values, list) or not all(isinstance(m, dict) for m in values):
        raise BadConfig(
            f"{layer.at('models')}: write [[models]], with two brackets",
            hint='a table [[models]], and in it base = "/path/to/model"',
        )
    models.clear()
    for key in [key for key in origins if key.startswith("models.")]:
        del origins[key]  # of entries that are replaced
    for number, table in enumerate(values):
        entry = {
            k: _read(layer, "models", k, raw, _MODEL_HINTS, number) for k, raw in table.items()
        }
        origins.update({model_key(number, k): layer.at("models", k, number) for k in entry})
        models.append(entry)


def _read(
    layer: Layer,
    section: str,
    key: str,
    raw: object,
    known: Mapping[str, object],
    nth: int = 0,
) -> object:
    if key not in known:
        raise _unknown(f"key {section}.{key}", key, list(known), layer.at(section, key, nth))
    try:
        if isinstance(raw, _Text):
            return convert_text(known[key], str(raw))
        return convert(known[key], raw)
    except ValueError as error:
        shown = str(raw) if isinstance(raw, str) else json.dumps(raw, default=str)
        where = layer.at(section, key, nth)
        raise BadConfig(
            f"{where}: {section}.{key} = {shown!s}: expected {error}",
            hint="lorad --print-config shows every setting as it may be written",
        ) from error


def _without_model(files: tuple[Path, ...]) -> BadConfig:
    """Most often the file is not the one that was meant: each is named, and whether it is there."""
    read = [path for path in files if path.is_file()]
    if not read:
        message = f"models: no configuration was found: {files[0]} is not there"
        return BadConfig(message, hint="name your file: --config lorad.toml; it needs a [[models]]")
    message = f"models: none is in {', '.join(map(str, read))}"
    return BadConfig(message, hint='a table [[models]], and in it base = "/path/to/model"')


def _unknown(what: str, name: str, known: list[str], where: str) -> BadConfig:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
    return BadConfig(f"{where}: unknown {what}", hint=hint)
