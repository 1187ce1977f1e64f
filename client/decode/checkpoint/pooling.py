"""How a model turns a text into one vector: the mean of the rows after the last norm, or the last row.

A folder declares this as sentence-transformers does (`modules.json` and the configuration of its pooling), a GGUF file
by `pooling_type`. Models without either can only generate text.
"""

import json
from pathlib import Path
from typing import Final

from gpulease.client.decode.checked_file import MAX_JSON_BYTES, Members, json_object, quoted_value, read_bytes
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.library_errors import rejected
from gpulease.client.decode.pooling import Pooling
from gpulease.client.texts import quoted

MODULES: Final = "modules.json"

_KNOWN_MODULES: Final = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers, by the last part of their type. Here every vector is normalised in any case."""

_MODES: Final = {"pooling_mode_mean_tokens": Pooling.MEAN, "pooling_mode_lasttoken": Pooling.LAST}
"""Switches of a pooling's configuration, each with its meaning."""

_GGUF_TYPES: Final = {0: None, 1: Pooling.MEAN, 3: Pooling.LAST}
"""GGUF's `pooling_type` (llama.cpp, enum llama_pooling_type): none, mean, last."""


def folder_pooling(folder: Path) -> Pooling | None:
    """Return the pooling of a model in a folder; None if the model has none.

    Raises ModelRejected for modules, and ways of pooling, that the engine does not compute.
    """
    path = folder / MODULES
    if not path.exists():
        return None
    pooling: Pooling | None = None
    for module in _modules(path):
        kind = module.text("type", "").rpartition(".")[2]
        if kind not in _KNOWN_MODULES:
            raise ModelRejected(f"{path}: module {quoted(kind)} must be one of {', '.join(_KNOWN_MODULES)}")
        if kind == "Pooling":
            pooling = _pooling_of(folder, module)
    return pooling


def gguf_pooling(metadata: Members) -> Pooling | None:
    """Return the pooling in a GGUF file's metadata, or None. Raises ModelRejected if it is unsupported."""
    name = f"{metadata.text('general.architecture')}.pooling_type"
    kind = metadata.whole(name, 0)
    if kind not in _GGUF_TYPES:
        raise ModelRejected(f"{metadata.where}: {name} must be 0 (none), 1 (mean) or 3 (last), not {kind}")
    return _GGUF_TYPES[kind]


def _modules(path: Path) -> list[Members]:
    with rejected(ModelRejected, f"{path}: must be JSON"):
        modules = json.loads(read_bytes(path, MAX_JSON_BYTES))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelRejected(f"{path}: must be a list of objects, not {quoted_value(modules)}")
    return [Members(module, str(path)) for module in modules]


def _pooling_of(folder: Path, module: Members) -> Pooling:
    name = module.text("path")
    # A path with several parts could point to any file of the host.
    if Path(name).name != name:
        raise ModelRejected(f"{module.where}: path must be a folder's name, not {quoted(name)}")
    path = folder / name / "config.json"
    members = Members(json_object(read_bytes(path, MAX_JSON_BYTES), path), str(path))
    # There is one switch for each way of pooling. If several are on, sentence-transformers joins their vectors.
    modes = [key for key in members.values if key.startswith("pooling_mode_") and members.flag(key, False)]
    mode = members.text("pooling_mode", "")
    pooling = _MODES.get(modes[0]) if len(modes) == 1 and not mode else None
    if not modes and mode:
        pooling = {"mean": Pooling.MEAN, "lasttoken": Pooling.LAST}.get(mode)
    if pooling is None:
        modes_text = ", ".join(filter(None, [*modes, mode])) or "nothing"
        raise ModelRejected(f"{path}: pooling must be the mean or the last token alone, not {quoted(modes_text)}")
    return pooling
