"""What a saved run says of itself, and whether another run may go on from it. Runs in the owner: no torch here.

A checkpoint is a directory: torch's distributed checkpoint (`.metadata` and a file for each rank that wrote), and
`zeroviz.json`, which is written last, into a directory of another name that is renamed when all of it is there. A
directory without it, or with a file that is missing or cut, is none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroviz.errors import SpecError
from zeroviz.spec import Implementation, RunSpec

NAME = "zeroviz.json"
SCHEMA = "zeroviz.checkpoint"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished checkpoint.

    spec: of the run that wrote it. num_steps: made in all, those of earlier runs included. num_batches: micro-batches
    each rank has read. counters: the optimizer's step counters by name, the same in all its parts. moments: names of
    its states that are as large as what it updates. files: nbytes of each file beside the manifest. sha256: of their
    content, in hexadecimal.
    """

    spec: RunSpec
    num_steps: int
    num_batches: int
    counters: Mapping[str, float]
    moments: tuple[str, ...]
    files: Mapping[str, int] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {
                "schema": f"{SCHEMA}/{VERSION}",
                "spec": self.spec.to_dict(),
                "num_steps": self.num_steps,
                "num_batches": self.num_batches,
                "counters": dict(self.counters),
                "moments": list(self.moments),
                "files": dict(self.files),
                "sha256": dict(self.sha256),
            },
            indent=1,
        )


def part_of(directory: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return directory.with_name(f"{directory.name}.part")


def digest(path: Path) -> str:
    """The SHA-256 of the file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(directory: Path, *, check_content: bool = False) -> Manifest:
    """The manifest of a whole checkpoint. SpecError for anything else, saying what is wrong with it.

    check_content: read every file and compare it with what was written, which takes a second or two a gigabyte.
    """
    what = f"Checkpoint {str(directory)!r}"
    if not directory.is_dir():
        raise SpecError(f"{what} is no directory; name one that `zeroviz run --save` wrote.")
    try:
        data = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{what} has no {NAME}: it is none, or was not finished; name another.") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{what} has a {NAME} that cannot be read ({error}); save it again.") from None
    _check_version(what, data)
    try:
        manifest = Manifest(
            spec=RunSpec.from_dict(data["spec"]),
            num_steps=int(data["num_steps"]),
            num_batches=int(data["num_batches"]),
            counters={str(name): float(value) for name, value in data["counters"].items()},
            moments=tuple(map(str, data["moments"])),
            files={str(name): int(nbytes) for name, nbytes in data["files"].items()},
            sha256={str(name): str(value) for name, value in data["sha256"].items()},
        )
        if manifest.num_steps < 1 or manifest.num_batches < 1:
            raise ValueError(f"{manifest.num_steps} steps and {manifest.num_batches} batches")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{what} has a garbled {NAME} ({error}); save it again.") from None
    for name, nbytes in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise SpecError(f"{what} lacks its file {name!r}; copy all of it, or save it again.")
        if (got := path.stat().st_size) != nbytes:
            raise SpecError(f"{what} has {got:,} of the {nbytes:,} bytes of {name!r}; copy it again, or save it again.")
        if check_content and digest(path) != manifest.sha256.get(name):
            raise SpecError(
                f"{what} has a file {name!r} that is not as it was written; copy it again, or save it again."
            )
    return manifest


def _check_version(what: str, data: Any) -> None:
    schema = data.get("schema", "") if isinstance(data, dict) else ""
    name, _, version = str(schema).partition("/")
    if name != SCHEMA or not version.isdecimal():
        raise SpecError(f"{what} has a {NAME} of another kind ({schema!r}); name one that `zeroviz run --save` wrote.")
    if int(version) > VERSION:
        raise SpecError(
            f"{what} is of version {version}, written by a newer zeroviz; this one reads up to {VERSION}: update it."
        )


def check_job(spec: RunSpec, save_to: str, resume_from: str) -> None:
    """Raise SpecError where `spec` cannot be saved to, or cannot go on from, what is named; "" is nothing."""
    if (save_to or resume_from) and spec.impl is not Implementation.OWN:
        what = "saved" if save_to else "gone on with"
        raise SpecError(f"impl is {spec.impl.value!r}, whose run is not {what} here; use impl own.")
    if save_to:
        _check_new(Path(save_to))
    if resume_from:
        check_resume(spec, read_manifest(Path(resume_from), check_content=True), resume_from)


def check_resume(spec: RunSpec, manifest: Manifest, name: str) -> None:
    """Raise SpecError unless `spec` trains the model of the checkpoint on, by the same rules; strategy, ranks, units,
    batch and what lies where may differ."""
    saved = manifest.spec
    if spec.model != saved.model:
        raise SpecError(
            f"The model is {spec.model.name} ({spec.model.num_params:,} parameters), but checkpoint {name!r} is of "
            f"{saved.model.name} ({saved.model.num_params:,}); use that model, or another checkpoint."
        )
    for what, asked, has in (
        ("precision", spec.precision.value, saved.precision.value),
        ("optimizer", spec.optimizer.value, saved.optimizer.value),
        ("seed", spec.seed, saved.seed),
    ):
        if asked != has:
            raise SpecError(
                f"{what} is {asked!r}, but checkpoint {name!r} was trained with {has!r}; use --{what} {has}."
            )


def _check_new(directory: Path) -> None:
    if directory.exists():
        raise SpecError(f"{str(directory)!r} is there already, and a checkpoint is never written over; name a new one.")
    try:
        part_of(directory).mkdir(exist_ok=True)
        part_of(directory).rmdir()
    except OSError as error:
        if part_of(directory).is_dir():
            return  # what an interrupted run left behind; it is cleared before it is written to
        raise SpecError(
            f"{str(directory)!r} cannot be written ({error.strerror}); name a directory in a writable folder."
        ) from None
