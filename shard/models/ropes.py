"""Reads the rotary position embedding, and its scaling, from config.json."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .fields import AGAIN, FULL, SIZES, SLIDING, Config, boolean, number, shown
from .shape import Unsupported
from .traits import Rope, TemperatureTuning

MISTRAL_YARN = {  # defaults
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


# The fields: transformers 5 writes the first; earlier versions `rope_theta` and, for scaled ones, the second.
ROPES = ("rope_parameters", "rope_scaling")
ORIGINAL = "original_max_position_embeddings"
FORMERLY = {"su": "longrope"}  # of Phi 3's first config.json
MOST = SIZES["max_position_embeddings"]


def rope(config: Config) -> Rope:
    """The rotary embedding that config.json describes. Raises Unsupported if both fields are there and differ."""
    found = [_rope_of(config, name) for name in ROPES if config.get(name)]
    if len(found) == 2 and found[0] != found[1]:
        raise Unsupported(
            f"config.json has both rope_parameters ({shown(config['rope_parameters'])}) and rope_scaling "
            f"({shown(config['rope_scaling'])}), and they differ: leave one of them"
        )
    return found[0] if found else _rope_of(config, "")


def with_rope(config: Config, usual: dict[str, Any]) -> Config:
    """The config with default scaling where it has none."""
    return config if _said(config) else config | {"rope_parameters": usual}


def with_only_rope(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with this rotary embedding and no other."""
    return config | {"rope_parameters": dict(values), "rope_scaling": None}


def _said(config: Config) -> Any:
    return next((config[name] for name in ROPES if config.get(name)), {})


def _kind(values: Mapping[str, Any]) -> str:
    kind = values.get("rope_type") or values.get("type") or "default"
    return FORMERLY.get(str(kind), kind)


def _rope_of(config: Config, field: str) -> Rope:
    """The rotary embedding that one of the two fields describes."""
    values = config.get(field) or {}
    if not isinstance(values, dict):
        raise Unsupported(f"config.json says {field} {shown(values)}, an object is needed: {AGAIN}")
    nested = next((name for name, value in values.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise Unsupported(f"config.json says {field} for {nested!r} by itself: the decoder has one rotary embedding for all layers")
    if config.get(ORIGINAL) is not None:  # beside the rotary embedding's own fields it takes precedence, as in transformers
        values = values | {ORIGINAL: config[ORIGINAL]}
    kind = _kind(values)
    theta = number(values if values.get("rope_theta") is not None else config, "rope_theta", 10000.0)
    # "dynamic" changes positions beyond max_position_embeddings, which are not served; "mrope" concerns image tokens.
    if kind in ("default", "dynamic", "mrope"):
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=number(values, "factor"))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=number(values, "factor"),
            original_positions=int(number(values, ORIGINAL)),
            many_turns=number(values, "high_freq_factor"),
            few_turns=number(values, "low_freq_factor"),
        )
    if kind == "yarn":
        return _yarn(config, values, theta)
    if kind == "longrope" and ORIGINAL in values:
        return _longrope(config, values, theta)
    known = f"default, linear, dynamic, llama3 and yarn, and longrope with {ORIGINAL}"
    raise Unsupported(f"rotary scaling {kind!r} is not supported: the decoder has {known}")


def stretched(config: Config, found: Rope, size: int) -> Rope:
    """The same with another theta where `dynamic` scaling has an `alpha` (HunYuan's NTK scaling). size: features of a head."""
    values = _said(config)
    if _kind(values) != "dynamic" or not values.get("alpha"):
        return found
    if size == 2:
        raise Unsupported(f"config.json means heads of 2 numbers, with alpha more are needed: {AGAIN}")
    return replace(found, theta=found.theta * number(values, "alpha") ** (size / (size - 2)))


def _yarn(config: Config, values: Mapping[str, Any], theta: float) -> Rope:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), with transformers' names and defaults."""
    factor = number(values, "factor")
    first, second = (number(values, name) if values.get(name) else 0.0 for name in ("mscale", "mscale_all_dim"))
    amplitude = _logarithmic(factor, first) / _logarithmic(factor, second) if first and second else _logarithmic(factor, 1.0)
    whole = boolean("truncate", values.get("truncate", True))
    original = int(number(values, ORIGINAL, float(config["max_position_embeddings"])))
    if theta <= 1 or not 1 <= original <= MOST / factor:
        raise Unsupported(
            f"config.json says rope_theta {theta:g}, and yarn from {original} positions to {factor:g} times as many: a theta above "
            f"1 is needed, and from 1 to {MOST} positions: {AGAIN}"
        )
    strength = number(values, "llama_4_scaling_beta") if values.get("llama_4_scaling_beta") else 0.0
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_positions=original,
        many_turns=number(values, "beta_fast", 32.0),
        few_turns=number(values, "beta_slow", 1.0),
        whole=whole,
        amplitude=number(values, "attention_factor", amplitude),
        query_scale=TemperatureTuning(strength=strength, positions=original, first=0) if strength else None,
    )


def _logarithmic(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def sharpness(config: Config) -> float:
    """A further factor of DeepSeek's queries, and of its keys, so that a stretched embedding does not blur attention
    (mscale_all_dim)."""
    values = _said(config)
    if _kind(values) == "default" or not values.get("mscale_all_dim"):
        return 1.0
    return _logarithmic(number(values, "factor"), number(values, "mscale_all_dim"))


def _longrope(config: Config, values: Mapping[str, Any], theta: float) -> Rope:
    """LongRoPE in Phi's form: the amplitude follows from the context length that it is stretched to, whichever factors are used."""
    original = number(values, ORIGINAL, most=MOST)
    factor = number(values, "factor", config["max_position_embeddings"] / original)
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return Rope(
        theta=theta,
        kind="longrope",
        factor=factor,
        original_positions=int(original),
        amplitude=number(values, "attention_factor", amplitude),
        short=_factors(values, "short_factor"),
        long=_factors(values, "long_factor"),
    )


def check_factors(found: Rope, turned: int) -> None:
    """Raises Unsupported unless longrope has a factor for each pair of so many features."""
    for factors in (found.short, found.long):
        if len(factors) not in (0, turned // 2):
            raise Unsupported(f"config.json says {len(factors)} factors of longrope, {turned // 2} are needed: {AGAIN}")


def with_amplitude(config: Config) -> Config:
    """The config with longrope in Phi 3's form instead of Phi 3.5 MoE's. Raises Unsupported for other scaling, or two
    amplitudes."""
    values = _said(config)
    kind = _kind(values) if isinstance(values, dict) else "default"
    if kind == "default":
        return config
    if kind != "longrope":
        raise Unsupported(f"rotary scaling {kind!r} is not supported: for this family the decoder has longrope")
    short, long = number(values, "short_mscale"), number(values, "long_mscale")
    if short != long:
        raise Unsupported(f"config.json says short_mscale {short:g} and long_mscale {long:g}: the decoder has one amplitude")
    name = next(filter(config.get, ROPES))
    return config | {name: values | {"attention_factor": short}, ORIGINAL: values[ORIGINAL]}


def _factors(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    given = values[name]
    if not isinstance(given, list) or not given:
        raise Unsupported(f"config.json says {name} {shown(given)}, a list of numbers is needed: {AGAIN}")
    return tuple(number({name: factor}, name) for factor in given)


def rotary_size(config: Config, head_size: int, default: float = 1.0) -> int:
    """How many features of a head rotate. default: the fraction, if config.json doesn't say."""
    name = "partial_rotary_factor"
    part = config.get(name, default)
    for values in map(config.get, ROPES):
        part = values.get(name, part) if isinstance(values, dict) else part
    size = int(head_size * number({name: part}, name, 1.0, 1.0))
    if size < 2 or size % 2:
        raise Unsupported(f"config.json says {name} {shown(part)}, {size} of {head_size}: an even number is needed: {AGAIN}")
    return size


def ropes_by_kind(config: Config, theta: float, local_theta: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary parameters of layers with full attention, and of those with a sliding window; thetas are defaults."""
    named, scaling = config.get("rope_parameters"), config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise Unsupported(f"config.json says rope_scaling {shown(scaling)}, an object is needed: {AGAIN}")
    if named is None:  # as before transformers 5
        named = {
            FULL: {"rope_theta": config.get("rope_theta"), **scaling},
            SLIDING: {"rope_theta": config.get("rope_local_base_freq")},
        }
    elif scaling:
        raise Unsupported("config.json has both rope_parameters and rope_scaling: leave one of them")
    if not isinstance(named, dict) or not all(isinstance(value, dict) for value in named.values()):
        raise Unsupported(f"config.json says rope_parameters {shown(named)}, an object for each kind of layers is needed: {AGAIN}")
    unknown = set(named) - {FULL, SLIDING}
    if unknown:
        raise Unsupported(
            f"config.json says rope_parameters for {', '.join(sorted(unknown))}: the decoder has {FULL} and {SLIDING}"
        )
    full, local = named.get(FULL, {}), named.get(SLIDING, {})
    return full | {"rope_theta": full.get("rope_theta") or theta}, local | {"rope_theta": local.get("rope_theta") or local_theta}


def rope_of_kind(values: dict[str, Any]) -> Rope:
    """The rotary embedding of one kind of layers: the usual one, or "proportional", which rotates a part of the pairs of features
    at the frequencies that they would have if all rotated."""
    kind, theta = values.get("rope_type") or "default", number(values, "rope_theta")
    if kind == "proportional":
        part = number(values, "partial_rotary_factor", 1.0, 1.0)
        return Rope(theta=theta, kind=kind, factor=number(values, "factor", 1.0), part=part)
    if kind != "default":
        raise Unsupported(f"rotary scaling {kind!r} is not supported: for this family the decoder has default and proportional")
    return Rope(theta=theta)
