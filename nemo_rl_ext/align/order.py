# SPDX-License-Identifier: Apache-2.0
"""Whose run is it: assignments that the lengths leave open, and what the whole request says of them.

Runs and media are paired by their order. Where media could exchange their runs and every run would still have a
length that its medium can have, the lengths do not prove the order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl_ext.align.evidence import EngineRequest
from nemo_rl_ext.align.families.family import Geometry, MediaFamily, Seen
from nemo_rl_ext.align.grids import Grid
from nemo_rl_ext.align.items import MediaItem
from nemo_rl_ext.align.limits import ANY, Limits

MAX_STEPS = 20_000
"""Assignments that are tried before the order of a turn is given up as open."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What runs say if they are a certain item's: its frames, where they name any, and the geometries left open."""

    frames: tuple[int, ...] | None
    geometries: tuple[Geometry, ...]


def rivals(
    runs: Sequence[tuple[Seen, Grid | None]],
    accepts: Callable[[int, int], tuple[Limits, ...]],
    proven: Sequence[bool],
) -> dict[int, int]:
    """Items that are part of another possible assignment, each with an item whose runs it could have instead.

    `runs` are the items' own runs with what the engine recorded of them. `accepts(i, j)` gives the limits under which
    item i could have the runs of item j, () where it could not; one request has one set of limits. `proven` items are
    out of question. Items whose runs are alike may exchange them without any difference; everybody else is in question
    as soon as a circle of exchanges closes.
    """
    classes: dict[Hashable, int] = {}
    class_of = [classes.setdefault((seen, said), len(classes)) for seen, said in runs]
    if len(classes) == 1:
        return {}
    members: list[list[int]] = [[] for _ in classes]
    for index, own in enumerate(class_of):
        if not proven[index]:
            members[own].append(index)
    # steps[a][b]: an item that has runs of class a and could have those of class b.
    steps: list[dict[int, int]] = [
        {
            other: taker
            for other in range(len(classes))
            if other != own and members[other]
            for taker in [next((i for i in members[own] if accepts(i, members[other][0])), None)]
            if taker is not None
        }
        for own in range(len(classes))
    ]
    open_ = {
        steps[own][other]: members[other][0]
        for own in range(len(classes))
        for other in steps[own]
        if _reaches(steps, other, own)
    }
    if not open_:
        return {}
    circle = {class_of[index] for index in open_}
    asked = [index for own in sorted(circle) for index in members[own]]
    options = {
        index: {
            other: limits
            for other in circle
            if (limits := accepts(index, members[other][0] if other != class_of[index] else index))
        }
        for index in asked
    }
    if all(limits == (ANY,) for own in options.values() for limits in own.values()):
        return open_
    return _another_assignment(asked, class_of, members, options, open_)


def _another_assignment(
    asked: Sequence[int],
    class_of: Sequence[int],
    members: Sequence[Sequence[int]],
    options: dict[int, dict[int, tuple[Limits, ...]]],
    open_: dict[int, int],
) -> dict[int, int]:
    """The first assignment but the given one that one set of limits allows; {} where there is none."""
    room = {
        own: sum(class_of[index] == own for index in asked) for own in {class_of[index] for index in asked}
    }
    left = MAX_STEPS

    def place(position: int, limits: Limits, moved: dict[int, int]) -> dict[int, int] | None:
        nonlocal left
        left -= 1
        if left < 0:
            return open_
        if position == len(asked):
            return moved or None
        index = asked[position]
        for other, ranges in options[index].items():
            if not room[other]:
                continue
            for own_range in ranges:
                both = limits.meet(own_range)
                if both is None:
                    continue
                room[other] -= 1
                further = {**moved, index: members[other][0]} if other != class_of[index] else moved
                found = place(position + 1, both, further)
                room[other] += 1
                if found is not None:
                    return found
        return None

    return place(0, ANY, {}) or {}


def _reaches(steps: Sequence[dict[int, int]], start: int, goal: int) -> bool:
    seen, todo = {start}, [start]
    while todo:
        place = todo.pop()
        if place == goal:
            return True
        new = steps[place].keys() - seen
        seen |= new
        todo += new
    return False


def settled(
    request: EngineRequest, items: Sequence[MediaItem], seen: Sequence[Seen], family: MediaFamily
) -> list[Grid | None] | None:
    """Per item the grid that every budget of the request names; None where the order or the request is not proven.

    The budget that the images share is unknown (text, other media and the version take their part off it), so all of
    them are tried. Those that give the turn's images these lengths in any order must give them in this order, and an
    item's grid is proven when all of them name the same one.
    """
    last = request.first + len(items)
    images = [item for item in items if item.kind == "image"]
    if len(images) != len(items) or request.sizes[request.first : last] != tuple(item.size for item in items):
        return None
    outcomes = family.shared_outcomes(request.sizes, request.max_model_len)
    if outcomes is None:
        return None
    lengths = np.array([share.lengths[0] for share in seen])
    tokens = np.array(
        [
            [family.run_lengths(Geometry(Grid(*map(int, grid))), "image")[0] for grid in outcome]
            for outcome in outcomes
        ]
    ).reshape(len(outcomes), len(request.sizes))
    turn = tokens[:, request.first : last]
    possible = (np.sort(turn, axis=1) == np.sort(lengths)).all(axis=1)
    if request.lengths is not None:
        outside = np.ones(len(request.sizes), dtype=bool)
        outside[request.first : last] = False
        if len(request.lengths) != len(request.sizes):
            return None
        possible &= (tokens == np.array(request.lengths))[:, outside].all(axis=1)
    if not possible.any() or not (turn[possible] == lengths).all():
        return None
    grids = outcomes[possible][:, request.first : last]
    return [
        Grid(*map(int, grids[0, place])) if (grids[:, place] == grids[0, place]).all() else None
        for place in range(len(items))
    ]
