"""State files, the same that torch models write: safetensors, and what the tensors make up.

A window of LEAP that is not full yet has fewer places in a file of torch; here it always has all of
them, the empty ones to the left.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from leap.errors import FileError
from leap.runtime.graph import Array
from leap.runtime.manifest import Manifest, StateTensor

TAG = "leap_state"
"""The entry of a file's metadata that says which states the tensors make up."""
ROOM = "room"
"""Tensors that tell by their shapes how many places of a window are still to come."""
MASK = "mask"
"""Tensors that are false at pads; there are none where nothing but tokens was read."""


def write_state(
    path: Path, manifest: Manifest, tensors: Mapping[str, Array], metadata: Mapping[str, str]
) -> None:
    """Write a state, and what else is to be kept, to a file, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.part")
    content = save(
        {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in tensors.items()},
        metadata={TAG: json.dumps(dict(manifest.kinds)), **metadata},
    )
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise FileError(
            f"cannot write {path} ({error.strerror}); make room, or give another file"
        ) from error


def read_state(path: Path, manifest: Manifest) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensors of a state file, those of the state with the manifest's shapes; and metadata.

    Raises:
        FileError: if the file is broken, or holds the state of another model.
    """
    if not path.is_file():
        raise FileError(f"no state file at {path}")
    try:
        with safe_open(path, framework="np") as file:
            metadata = dict(file.metadata() or {})
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} is not a whole safetensors file: {error}") from error
    try:
        kinds = dict(json.loads(metadata[TAG]))
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path} holds no state ({error})") from error
    known = {each.name for each in manifest.states}
    parts = {name.partition(".")[0] for name in manifest.kinds}
    strange = [
        name
        for name, x in found.items()
        if name not in known
        and name.partition(".")[0] in parts - {"progress"}
        and not name.endswith(f".{ROOM}")
        and not (name.endswith(f".{MASK}") and x.all())
    ]
    missing = known - {*found}
    if kinds != dict(manifest.kinds) or strange or missing:
        raise FileError(f"{path} holds the state of another model; give its own")
    for each in manifest.states:
        room = found.get(f"{each.name.rpartition('.')[0]}.{ROOM}")
        found[each.name] = _fitted(found[each.name], each, room, path)
    return found, metadata


def _fitted(x: Array, wanted: StateTensor, room: Array | None, path: Path) -> Array:
    """A tensor of a file with the places that the graph has."""
    rows = x.shape[0] if x.ndim else 0
    shape = [rows if size == "batch" else size for size in wanted.shape]
    if len(shape) == x.ndim:
        shape = [n if size == "tokens" else size for n, size in zip(x.shape, shape, strict=True)]
        if room is not None and x.ndim > 2:
            empty = [*x.shape]
            empty[2] = room.shape[1]
            x = np.concatenate([np.full(empty, wanted.fill, x.dtype), x], axis=2)
    if [*x.shape] != shape:
        raise FileError(
            f"{path} holds the state of another model: {wanted.name} is {list(x.shape)}, and "
            f"this one's {shape}"
        )
    return x.astype(wanted.type, copy=False)
