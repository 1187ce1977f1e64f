"""The names that `gpulease.client.decode` exports. The package imports this module when one of them is accessed."""

from gpulease.client.decode.checkpoint import Checkpoint, RandomCheckpoint, open_model
from gpulease.client.decode.decode_errors import (
    AdmissionReason,
    AdmissionRefused,
    CompletionReason,
    DecodeError,
    EngineDecodeFailed,
    GrammarRefused,
    ModelRejected,
    NoModelLoaded,
    RebindLimited,
    RequestBreaksEngine,
    RequestIdInUse,
    RequestRejected,
    SequenceEnded,
    TextNotRead,
    TextProcessesFailed,
    WaitedTooLong,
)
from gpulease.client.decode.decode_reports import (
    DecoderObserver,
    EngineRebuilt,
    FinishedRequest,
    ForwardRevoked,
    PrefixChange,
    PrefixChanged,
    PromptRefused,
    RebindReport,
    StepReport,
)
from gpulease.client.decode.decode_requests import (
    PromptRequest,
    SamplingParameters,
    SchedulerEvent,
    SharedPrefix,
    StepTokens,
    TenantConfig,
)
from gpulease.client.decode.engine.engine import BlockPool, DecodeEngine
from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.model_config import Family, KvDtype, ModelConfig
from gpulease.client.decode.pooling import Pooling
from gpulease.client.decode.sample_models import TINY_MODEL, find_smollm2
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.decode.supervisor.decoder import Decoder, DecoderSettings
from gpulease.client.decode.supervisor.generation import Emitted, Generation

__all__ = [
    "TINY_MODEL",
    "AdmissionReason",
    "AdmissionRefused",
    "BlockPool",
    "Checkpoint",
    "CompletionReason",
    "ContinuousBatchScheduler",
    "DecodeEngine",
    "DecodeError",
    "Decoder",
    "DecoderObserver",
    "DecoderSettings",
    "Emitted",
    "EngineDecodeFailed",
    "EngineRebuilt",
    "Family",
    "FinishedRequest",
    "ForwardRevoked",
    "Generation",
    "GrammarRefused",
    "KvDtype",
    "ModelConfig",
    "ModelRejected",
    "NoModelLoaded",
    "Pooling",
    "PrefixChange",
    "PrefixChanged",
    "PromptRefused",
    "PromptRequest",
    "RandomCheckpoint",
    "RebindLimited",
    "RebindReport",
    "RequestBreaksEngine",
    "RequestIdInUse",
    "RequestRejected",
    "SamplingParameters",
    "SchedulerEvent",
    "SchedulerSettings",
    "SequenceEnded",
    "SharedPrefix",
    "StepLimits",
    "StepReport",
    "StepTokens",
    "TenantConfig",
    "TextNotRead",
    "TextProcessesFailed",
    "WaitedTooLong",
    "find_smollm2",
    "open_model",
]
