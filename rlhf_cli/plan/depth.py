"""Deep models from shallow ones: layers are alike, so what a phase holds at a moment is linear in their number.

A stage is counted with 2, 3 and 4 units of layers. Each moment that all three have, and in which they lie on a line, is
drawn on to the whole depth; the fullest there is the phase's. Moments are those of the first layers and of the last, in
each pass: between these a phase holds no more. Which moment is the fullest may change with the depth. Where the fullest
of one of the three is on no line, the stage is counted whole, as it is for models whose layers are not alike.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from torch import nn

from rlhf_cli.config import Config, PPOConfig
from rlhf_cli.models import build, sharding
from rlhf_cli.plan.memory import Phase

UNITS = (2, 3, 4)
DEEP = 20  # units from which three shallow counts take less time than a whole one
Found = tuple[dict[str, int], list[Phase]]  # parameters of each model, phases


def of(count: Callable[[Config, dict[str, Any]], Found], config: Config, bodies: dict[str, Any]) -> Found:
    """What `count` finds for a config and its models' transformers configs, without the counting of all layers."""
    whole = _units(config, bodies)
    if whole >= DEEP and all(map(_has_like_layers, bodies.values())):
        found = [count(*_cut(config, bodies, whole, units)) for units in UNITS]
        phases = [_drawn_on(each, whole) for each in zip(*(one[1] for one in found), strict=True)]
        numbers = _by_name([one[0] for one in found])
        if all(phases) and all(map(_is_straight, numbers.values())):
            parameters = {name: round(_at(whole, counts)) for name, counts in numbers.items()}
            return parameters, [phase for phase in phases if phase]
    return count(config, bodies)


def _units(config: Config, bodies: dict[str, Any]) -> int:
    """Into how many like parts the models can be cut together, and what they share."""
    shared = (config.ppo.num_shared_layers or 0) if isinstance(config, PPOConfig) else 0
    depths = [_depth(body) for body in bodies.values()]
    return math.gcd(shared, *depths) if shared < min(depths) else 1


def _depth(body: Any) -> int:
    return int(body.get_text_config().num_hidden_layers)


def _cut(config: Any, bodies: dict[str, Any], whole: int, units: int) -> tuple[Config, dict[str, Any]]:
    """The config and its models with so many of the `whole` units."""
    if isinstance(config, PPOConfig) and config.ppo.num_shared_layers:
        shared = {"num_shared_layers": config.ppo.num_shared_layers // whole * units}
        config = config.model_copy(update={"ppo": config.ppo.model_copy(update=shared)})
    return config, {key: _shallow(body, _depth(body) // whole * units) for key, body in bodies.items()}


def _shallow(body: Any, depth: int) -> Any:
    body, whole = deepcopy(body), _depth(body)
    text = body.get_text_config()
    for key, each in _of_each_layer(text, whole):
        setattr(text, key, each[:depth])
    text.num_hidden_layers = depth
    return body


def _of_each_layer(text: Any, depth: int) -> list[tuple[str, list[Any]]]:
    return [(key, each) for key, each in vars(text).items() if isinstance(each, list) and len(each) == depth]


def _has_like_layers(body: Any) -> bool:
    kind: Any = type(body)
    return _are_alike(kind, body.to_json_string())


@cache
def _are_alike(kind: Any, body: str) -> bool:
    """Whether each layer has the modules, settings and weights of the first, and the config says no more of one."""
    config = kind.from_dict(json.loads(body))
    text = config.get_text_config()
    if any(one != each[0] for _, each in _of_each_layer(text, text.num_hidden_layers) for one in each):
        return False
    try:
        first, *others = map(_looks, sharding.decoder_layers(build.backbone_from_config(config)))
    except ValueError:  # a family that is built in another way
        return False
    return all(layer == first for layer in others)


def _looks(layer: nn.Module) -> list[Any]:
    plain = (int, float, str, bool)
    modules = [
        (name, type(each), {key: told for key, told in vars(each).items() if isinstance(told, plain)})
        for name, each in layer.named_modules()
    ]
    for _, _, settings in modules:
        settings.pop("layer_idx", None)
    return [*modules, *((name, weight.shape, weight.dtype) for name, weight in layer.named_parameters())]


def _drawn_on(phases: Sequence[Phase], whole: int) -> Phase | None:
    """A phase at its whole depth, with its fullest moment alone; None where that cannot be told."""
    common = set.intersection(*(set(phase.moments) for phase in phases))
    totals = {moment: [sum(phase.moments[moment].values()) for phase in phases] for moment in common}

    def straight(moment: Any) -> bool:
        return all(map(_is_straight, _by_name([phase.moments[moment] for phase in phases]).values()))

    for number, phase in enumerate(phases):
        if not any(straight(moment) for moment in common if totals[moment][number] == phase.total):
            return None
    fullest = next(filter(straight, sorted(common, key=lambda moment: -_at(whole, totals[moment]))))
    held = _by_name([phase.moments[fullest] for phase in phases])
    work = [phase.work for phase in phases]
    if not _is_straight(work):
        return None
    moments = {fullest: {kind: round(_at(whole, counts)) for kind, counts in held.items()}}
    return Phase(phases[0].name, phases[0].rows, moments, _at(whole, work))


def _by_name(seen: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    names = dict.fromkeys(name for each in seen for name in each)
    return {name: [each.get(name, 0) for each in seen] for name in names}


def _at(units: int, seen: Sequence[float]) -> float:
    """A number where so many units are, on the line through what it was with the last two of UNITS."""
    (_, before, last), (_, low, high) = seen, UNITS
    return last + (last - before) * (units - high) / (high - low)


def _is_straight(seen: Sequence[float]) -> bool:
    """Whether what it was with the first is on that line, too."""
    return math.isclose(_at(UNITS[0], seen), seen[0], rel_tol=1e-9)
