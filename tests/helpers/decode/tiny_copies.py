"""The tiny model as other authors would publish it: with a chat template for tools, or as an embedding model."""

import json
import shutil
from pathlib import Path
from typing import Any

from gpulease.client.decode import TINY_MODEL

HERMES_TEMPLATE = (
    "{% if tools %}<tool_call>:{% for tool in tools %}{{ tool.function.name }} {% endfor %}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def embedding_model(folder: Path, pooling: dict[str, Any], modules: Any = None) -> Path:
    """Write the tiny model as an embedding model of sentence-transformers."""
    shutil.copytree(TINY_MODEL, folder)
    return add_pooling(folder, pooling, modules)


def add_pooling(folder: Path, pooling: dict[str, Any], modules: Any = None) -> Path:
    """Add the files that make a model an embedding model."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    kinds = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    made = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(made if modules is None else modules))
    return folder


MEAN = {"word_embedding_dimension": 128, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
