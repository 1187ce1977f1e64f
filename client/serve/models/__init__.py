"""A model server: each model on a lease of its own that is kept for as long as it is served.

`gpulease serve models` runs one (`app`, and calls through shared memory, `gpulease.client.serve.rpc`); `ModelHost` has
its models in a program of one's own, `Instance` one of them. `settings` says what a model is.
"""

from gpulease.client.serve.models.host import ModelHost
from gpulease.client.serve.models.instance import Instance
from gpulease.client.serve.models.model_metrics import ModelServerMetrics
from gpulease.client.serve.models.model_settings import ModelSettings, load_settings

__all__ = ["Instance", "ModelHost", "ModelServerMetrics", "ModelSettings", "load_settings"]
