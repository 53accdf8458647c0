"""Read a Hugging Face config.json. Only JSON is parsed; nothing in it is imported or executed, whatever it names.

`read_config_notes` reads a file and `config_from_text` a pasted text; both give the model and, sentence by sentence,
what was filled in or not read. `read_config` and `model_from_config` give the model alone.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from zeroviz.errors import SpecError
from zeroviz.hf_config_families import READERS, UNREAD
from zeroviz.hf_config_fields import MAX_SHOWN, Fields, shown
from zeroviz.models import Family, ModelShape

MAX_CONFIG_NBYTES = 2**20
BOM = "\ufeff"
_ENDINGS = ("ForCausalLM", "LMHeadModel")


class ConfigModel(NamedTuple):
    """The model of a config.json, and what is to be said of it: one sentence for each field that was not there and what
    was taken instead, and for what stands there and is not read."""

    model: ModelShape
    notes: tuple[str, ...]


def read_config(path: Path) -> ModelShape:
    """The model of a config.json file. Raises SpecError with one sentence for whatever is wrong with it."""
    return read_config_notes(path).model


def read_config_notes(path: Path) -> ConfigModel:
    """The model of a config.json file and what was filled in. Raises SpecError as `read_config`."""
    name = _name(path)
    return _config_model(_parsed(_text_of(path), str(path), "give the path of a config.json"), name)


def config_from_text(text: str, name: str = "config") -> ConfigModel:
    """The model of a config.json's text, as pasted, called `name`. Raises SpecError with one sentence."""
    what = "The pasted text"
    nbytes = len(text.encode("utf-8", "surrogatepass"))
    if nbytes > MAX_CONFIG_NBYTES:
        raise SpecError(
            f"{what} holds {nbytes:,} bytes; a config.json is at most {MAX_CONFIG_NBYTES:,}. Paste a config.json alone."
        )
    return _config_model(_parsed(text, what, "paste a whole config.json"), name.strip() or "config")


def model_from_config(config: Any, *, name: str) -> ModelShape:
    """The model of a parsed config.json. Raises SpecError as `read_config`."""
    return _config_model(config, name).model


def _name(path: Path) -> str:
    """A checkpoint's folder is named after the model; a config under another file name is named after that."""
    try:
        return path.resolve().parent.name or "config" if path.name == "config.json" else path.stem
    except (OSError, ValueError, RuntimeError):  # a NUL in it, a loop of links
        return "config"


def _text_of(path: Path) -> str:
    """The file's text; no more of it is read than a config.json may hold, and nothing that may wait for ever."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise OSError("it is no file on a disk")
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_NBYTES + 1)
        text = content.decode("utf-8") if len(content) <= MAX_CONFIG_NBYTES else ""
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist; give a preset's name or the path of a config.json.") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name with a NUL
        raise SpecError(f"{path} cannot be read as a text file ({error}); give the path of a config.json.") from None
    if len(content) > MAX_CONFIG_NBYTES:
        raise SpecError(
            f"{path} holds {max(status.st_size, len(content)):,} bytes; a config.json is at most "
            f"{MAX_CONFIG_NBYTES:,}. Is it a weights file?"
        )
    return text


class _FlawError(Exception):
    """What JSON's reader would pass over: the rest of a sentence that begins with what was read."""


def _parsed(text: str, what: str, remedy: str) -> Any:
    if text.startswith(BOM):
        raise SpecError(
            f"{what} begins with a byte order mark, which JSON does not have; save it as UTF-8 without one."
        )
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
        reason = str(error).partition("; use sys.")[0]  # which is for whoever writes Python
        raise SpecError(f"{what} is not valid JSON ({reason}); {remedy}.") from None
    except _FlawError as flaw:
        raise SpecError(f"{what} {flaw}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a field that stands there twice, readers take the one or the other."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise _FlawError(f"has the field {shown(key)} twice in one object; leave one of them out.")
        fields[key] = value
    return fields


def _no_constant(name: str) -> NoReturn:
    raise _FlawError(f"has {name} in it, which is no number in JSON; write a number, or null.")


def _config_model(config: Any, name: str) -> ConfigModel:
    """A model and its notes from a parsed config.json.

    Sizes must be there. Other missing fields take the family's default, and the notes say so
    (`zeroviz.hf_config_families`). A config with a `text_config` is that one's. Raises SpecError for a missing,
    wrong-typed or impossible field, for another family, for parts whose parameters would not be counted, and where the
    two levels of a nested config contradict each other.
    """
    if not isinstance(config, dict):
        raise SpecError(f"The config of {name!r} is a JSON {type(config).__name__}; it must be an object with fields.")
    for part in ("vision_config", "audio_config"):
        if config.get(part):
            raise SpecError(
                f"The config of {name!r} has a {part!r}, whose parameters are not counted here; give the part "
                "'text_config' alone as a config.json."
            )
    outside: dict[str, Any] = {}
    if isinstance(config.get("text_config"), dict):
        config, outside = config["text_config"], config
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in READERS:
        raise SpecError(
            f"The config of {name!r} has model_type {shown(model_type)}; supported are {', '.join(READERS)}, and "
            "of any other model a bare parameter count: --params COUNT."
        )
    family, reader = READERS[model_type]
    others = ("num_local_experts", "num_experts") if family != Family.MIXTRAL.label else ()
    for key in (*others, "add_cross_attention"):
        if config.get(key):
            raise SpecError(
                f"The config of {name!r} has {key} = {shown(config[key])}; experts and cross-attention are not "
                f"supported in a {family} model."
            )
    fields = Fields(config, name or "config", family)
    model = reader(fields)
    ties = outside.get("tie_word_embeddings")
    if ties is not None and ties is not model.tied:
        # Which of the two a loader follows depends on its version, and a whole embedding depends on it.
        raise SpecError(
            f"The config of {name!r} has tie_word_embeddings = {shown(ties)} outside 'text_config' and means "
            f"{model.tied} inside it; set it in 'text_config'."
        )
    return ConfigModel(model, (*fields.notes(), *_unread(config, outside, model_type, family)))


def _unread(config: dict[str, Any], outside: dict[str, Any], model_type: str, family: str) -> list[str]:
    """What stands in the config and could be expected to change bytes, but is not counted."""
    both = {**outside, **config}
    notes = [
        f"{key} = {shown(config[key])} is not read: a {family} model's layers do not depend on it."
        for key in UNREAD[model_type]
        if config.get(key) is not None
    ]
    if both.get("auto_map"):
        notes.append(
            "auto_map names code that comes with the model; it is never run, and layers of its own do not count."
        )
    if both.get("quantization_config"):
        notes.append("quantization_config is not read: parameters are held as the precision says.")
    dropouts = [
        f"{key} {shown(value)}"
        for key, value in config.items()
        if key.endswith(("dropout", "_pdrop")) and key != "summary_first_dropout" and value
    ]
    if dropouts:
        notes.append(f"Dropout is not counted ({', '.join(dropouts)[:MAX_SHOWN]}); its masks would be kept besides.")
    named = both.get("architectures")
    whole = named if isinstance(named, list) else [named]
    if outside:
        parts = f" of model_type {shown(outside['model_type'])}" if outside.get("model_type") else ""
        notes.append(f"What is counted is the text_config alone; whatever else the model{parts} has is not.")
    elif named and not any(str(each).lower().startswith(model_type) for each in whole):
        notes.append(f"architectures is {shown(named)}; what is counted is a {family} model, as model_type says.")
    elif named and not any(str(each).endswith(_ENDINGS) for each in whole):
        notes.append(f"architectures is {shown(named)}; what is counted is the model with its language-model head.")
    return notes
