"""A model server: each model has its own lease, kept for as long as the model is served.

`gpulease serve models` runs one: `model_server`, with calls through shared memory (`gpulease.client.serve.rpc`).
`ModelHost` serves models inside another program; `Instance` serves one model. `model_settings` describes a model.
"""

from gpulease.client.serve.models.host import ModelHost
from gpulease.client.serve.models.instance import Instance
from gpulease.client.serve.models.model_metrics import ModelServerMetrics
from gpulease.client.serve.models.model_settings import ModelSettings, load_settings

__all__ = ["Instance", "ModelHost", "ModelServerMetrics", "ModelSettings", "load_settings"]
