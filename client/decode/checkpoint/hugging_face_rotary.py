"""The base and the scaling of rotary embeddings from config.json, as transformers 5 reads them."""

from dataclasses import dataclass
from typing import Final

from gpulease.client.decode.checked_file import Members, quoted_value
from gpulease.client.decode.checkpoint.hugging_face_keys import LAYERED_ROPE_KEYS, PHI3_ROPE_KEYS, ROPE_KEYS
from gpulease.client.decode.checkpoint.rotary import MIN_DIVISOR, long_attention_factor, yarn_attention_factor
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.file_keys import used_members
from gpulease.client.decode.model_config import AnyScaling, LinearScaling, LongScaling, RopeScaling, YarnScaling
from gpulease.client.texts import quoted

DEFAULT_ROPE_THETA: Final = 10_000.0
DEFAULT_GLOBAL_THETA: Final = 1_000_000.0
DEFAULT_BETA_FAST: Final = 32.0
DEFAULT_BETA_SLOW: Final = 1.0

KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Values of `rope_type`."""

MAX_ATTENTION_FACTOR: Final = 1000.0
"""Maximum attention factor; published models have factors below 2. Scores grow with its square, and could overflow.
"""

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LAYERED_KINDS: Final = ("default", "linear")
"""The kinds of layers of a Gemma 3, and the values of `rope_type` for the first kind."""

PHI3_KINDS: Final = ("default", "longrope")
PHI3_NAMES: Final = ("su", "yarn")
"""The values of `rope_type` in a Phi-3, and its older names of longrope."""

PHI3_ORIGINAL_CONTEXT: Final = 4096
"""Phi3Config's default, which applies whatever rope_scaling contains."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embeddings of a config.json, in the form of ModelConfig."""

    theta: float
    scaling: AnyScaling | None
    turned_width: int | None
    local_theta: float | None = None


def rotary_of(members: Members, head_width: int, *, is_phi3: bool) -> Rotary:
    """Return the base of the rotary embeddings, their scaling, and how many values of a head they rotate.

    The rule is transformers 5's (convert_rope_params_to_dict, standardize_rope_params): `rope_scaling`, or else
    `rope_parameters`, which takes precedence over members next to it. Phi3Config has only LongRoPE, with two older
    names, and rotates only part of each head. Raises ModelRejected for a scaling that is unknown or wrong.
    """
    # An empty object counts as missing.
    inner = members.object("rope_scaling")
    if inner is None or not inner.values:
        inner = members.object("rope_parameters") or Members({}, members.where)
    if nested := [key for key, value in inner.values.items() if isinstance(value, dict) and key not in ROPE_KEYS]:
        raise ModelRejected(
            f"{inner.where}: {quoted(nested[0])} is an object; the engine rotates the heads of all layers alike"
        )
    inner = used_members(inner, PHI3_ROPE_KEYS if is_phi3 else ROPE_KEYS)
    theta = inner.number("rope_theta", members.number("rope_theta", DEFAULT_ROPE_THETA))
    share = inner.number("partial_rotary_factor", members.number("partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        raise ModelRejected(f"{inner.where}: partial_rotary_factor must be above 0, and at most 1, not {share}")
    width = int(head_width * share)
    scaling = _scaling(members, inner, theta, width // 2, is_phi3=is_phi3)
    return Rotary(theta, scaling, None if width == head_width else width)


def layered_rotary_of(members: Members) -> Rotary:
    """Return the rotary embeddings of a Gemma 3: layers with a window have a separate base, and no scaling.

    The rule is Gemma3TextConfig's (convert_rope_params_to_dict). There is one object for each kind of layers.
    `rope_scaling`, an older name of the object for layers without a window, takes precedence.
    """
    parameters = members.object("rope_parameters") or Members({FULL: {}, SLIDING: {}}, members.where)
    if unknown := [key for key in parameters.values if key not in (FULL, SLIDING)]:
        raise ModelRejected(
            f"{parameters.where}: {quoted(unknown[0])} must be in {FULL} or {SLIDING}, for the layers that it is of"
        )
    scaling, kinds = members.object("rope_scaling"), []
    for kind in (FULL, SLIDING):
        inner = parameters.object(kind) or Members({}, parameters.where)
        if kind == FULL and scaling is not None:
            inner = Members(inner.values | scaling.values, scaling.where)
        kinds.append(used_members(inner, LAYERED_ROPE_KEYS))
    full, local = kinds
    local_kind = local.text("rope_type", local.text("type", "default"))
    if local_kind != "default":
        raise ModelRejected(f"{local.where}: rope_type of {SLIDING} must be default, not {quoted(local_kind)}")
    # transformers 4 scales by a rope_scaling with `type` alone, and transformers 5 does not.
    if scaling is not None and scaling.values.get("rope_type") is None and scaling.values.get("type") is not None:
        raise ModelRejected(f"{scaling.where}: rope_type is missing; versions of transformers read type differently")
    kind = full.text("rope_type", full.text("type", "default"))
    if kind not in LAYERED_KINDS:
        raise ModelRejected(f"{full.where}: rope_type must be one of {', '.join(LAYERED_KINDS)}, not {quoted(kind)}")
    return Rotary(
        full.number("rope_theta", members.number("rope_theta", DEFAULT_GLOBAL_THETA)),
        LinearScaling(_factor(full)) if kind == "linear" else None,
        None,
        local.number("rope_theta", members.number("rope_local_base_freq", DEFAULT_ROPE_THETA)),
    )


def _scaling(members: Members, scaling: Members, theta: float, pairs: int, *, is_phi3: bool) -> AnyScaling | None:
    """Return the scaling of an object in config.json; None if it has none. `members` are those next to it."""
    # `type` is the older name of `rope_type`.
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if is_phi3 and kind in PHI3_NAMES:
        kind = "longrope"
    if kind not in (kinds := PHI3_KINDS if is_phi3 else KINDS):
        raise ModelRejected(f"{scaling.where}: rope_type must be one of {', '.join(kinds)}, not {quoted(kind)}")
    if kind == "default":
        return None
    if kind in ("linear", "dynamic"):
        factor = _factor(scaling)
        # A dynamic scaling takes effect only beyond max_position_embeddings, and no sequence is that long.
        return LinearScaling(factor) if kind == "linear" else None
    # For this value the member of config.json takes precedence, as in transformers. Without either, it is the context.
    context = members.whole("max_position_embeddings")
    inner = PHI3_ORIGINAL_CONTEXT if is_phi3 else scaling.whole("original_max_position_embeddings", context)
    original = members.whole("original_max_position_embeddings", inner)
    # LongRoPE divides by the logarithm of this value.
    if original < (least := 2 if kind == "longrope" else 1):
        raise ModelRejected(
            f"{scaling.where}: original_max_position_embeddings must be at least {least}, not {original}"
        )
    if kind == "llama3":
        return _llama3(scaling, original)
    if kind == "yarn":
        return _yarn(scaling, original, theta)
    return _longrope(scaling, original, context, pairs)


def _llama3(scaling: Members, original: int) -> RopeScaling:
    factor = _factor(scaling)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    # Other values would make the rule (`rotary.rotation_of`) divide by zero, or scale in the wrong direction.
    if not 0 < low < high:
        raise ModelRejected(
            f"{scaling.where}: low_freq_factor must be above 0 and below high_freq_factor, not {low} and {high}"
        )
    return RopeScaling(factor, low, high, original)


def _yarn(scaling: Members, original: int, theta: float) -> YarnScaling:
    factor = _factor(scaling)
    # 0 counts as missing, as in transformers.
    fast = scaling.number("beta_fast", DEFAULT_BETA_FAST) or DEFAULT_BETA_FAST
    slow = scaling.number("beta_slow", DEFAULT_BETA_SLOW) or DEFAULT_BETA_SLOW
    if not 0 < slow <= fast:
        raise ModelRejected(f"{scaling.where}: beta_slow must be above 0, and at most beta_fast, not {slow} and {fast}")
    if theta <= 1:
        raise ModelRejected(f"{scaling.where}: rope_theta must be above 1 for yarn, not {theta}")
    # The two count only if both are given.
    magnitudes = [scaling.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if min(magnitudes) < 0:
        raise ModelRejected(f"{scaling.where}: mscale and mscale_all_dim must not be negative")
    return YarnScaling(
        factor,
        fast,
        slow,
        original,
        _attention_factor(scaling, yarn_attention_factor(factor, *magnitudes)),
        # null counts as false, and a missing member as true.
        scaling.flag("truncate", "truncate" not in scaling.values),
    )


def _longrope(scaling: Members, original: int, context: int, pairs: int) -> LongScaling:
    factor = _factor(scaling) if scaling.values.get("factor") is not None else context / original
    return LongScaling(
        _divisors(scaling, "short_factor", pairs),
        _divisors(scaling, "long_factor", pairs),
        original,
        _attention_factor(scaling, long_attention_factor(factor, original)),
    )


def _divisors(scaling: Members, key: str, pairs: int) -> tuple[float, ...]:
    """Return a list of divisors, one for each pair of a head's values."""
    values = scaling.items(key)
    if len(values) != pairs:
        raise ModelRejected(
            f"{scaling.where}: {key} must have {pairs} numbers, one for each rotated pair of a head's values, not"
            f" {len(values)}"
        )
    divisors = tuple(Members({key: value}, scaling.where).number(key) for value in values)
    if too_small := [divisor for divisor in divisors if divisor < MIN_DIVISOR]:
        raise ModelRejected(f"{scaling.where}: {key} must have numbers of at least {MIN_DIVISOR}, not {too_small[0]}")
    return divisors


def _factor(scaling: Members) -> float:
    # A divisor below 1 would shorten wavelengths, for which no model is trained.
    if not (factor := scaling.number("factor")) >= 1:
        raise ModelRejected(f"{scaling.where}: factor must be at least 1, not {factor}")
    return factor


def _attention_factor(scaling: Members, default: float) -> float:
    if not 0 < (factor := scaling.number("attention_factor", default)) <= MAX_ATTENTION_FACTOR:
        raise ModelRejected(
            f"{scaling.where}: attention_factor must be above 0, and at most {MAX_ATTENTION_FACTOR}, not"
            f" {quoted_value(factor)}"
        )
    return factor
