"""A plan as text: the tree of switches and hosts with the ranks on it, and what limits it.

    print(draw_text.tree(plan, cluster))

A large cluster is told in less detail, step by step, until it fits: alike hosts fold into one line
(``n[2-16]  as n1``), then hosts that differ in load only, then hosts lose their ranks, and at last
only switches are told. The worst link is always told by itself. Lines fit the width; beyond ASCII
there are only box-drawing characters.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice

from psdist.topology.draw import (
    Scene,
    bound_words,
    counted,
    duration,
    gain_words,
    limit_words,
    link_name,
    percent,
    plain,
    roles_words,
    shortened,
    size,
    speed,
    times,
    worst_words,
)
from psdist.topology.draw.text_tree import Detail, Line, Tree
from psdist.topology.network import Cluster
from psdist.topology.plan import LinkLoad, Plan

MAX_TREE_LINES = 160
MAX_NOTES = 20
MAX_INDENT = 30
"""Maximum indent in columns; deeper levels stay at it."""
LABEL_COLUMN = 12
"""Columns before the text of a line of the summary."""
BAR = 8
MIN_NAME = 16
"""Characters of a name that are shown in the narrowest tree."""
LOAD_COLUMNS = len("  123 GB    123 ms  ") + len("<= 100 %  worst")
"""Without the bar, for which a terminal of fewer columns than WIDTH_OF_BARS has no room."""
WIDTH_OF_BARS = 80


def tree(plan: Plan, cluster: Cluster, *, width: int = 100) -> str:
    """The tree with ranks on it, each link with its load, and a summary; at most 200 lines.

    The load of a link is what one exchange (a push and its pull) sends over it in each direction,
    its time, and that time over the worst link's. Raises PlacementError where the plan has a host
    that the cluster does not have.
    """
    scene = Scene.of(plan, cluster)
    lines: list[Line] = []
    for detail in Detail:
        most = MAX_TREE_LINES + 1 if detail < Detail.SWITCHES else None
        shown = Tree(scene, detail, name_room=max(MIN_NAME, _room(width) // 2))
        lines = list(islice(shown.lines(), most))
        if len(lines) <= MAX_TREE_LINES:
            break
    left_out = len(lines) - MAX_TREE_LINES
    drawn = [_drawn(scene, line, width) for line in lines[:MAX_TREE_LINES]]
    if left_out > 0:
        drawn.append(f"... and {counted(left_out + 1, 'line')} more")
    heading = "link: bytes each way, time, of the worst"
    return "\n".join([heading.rjust(width).rstrip(), *drawn, "", *_summary(scene, width)]) + "\n"


def _drawn(scene: Scene, line: Line, width: int) -> str:
    room = _room(width) if line.loads else width
    text = shortened(line.indent + plain(line.label), room - 1 if line.loads else room)
    if not line.loads:
        return text.rstrip()
    most = max(line.loads, key=lambda link: link.seconds)
    share = scene.share(most)
    filled = min(BAR, round(BAR * share))
    uneven = percent(min(map(scene.share, line.loads))) != percent(share)
    load = (
        f"{size(most.num_bytes):>8}  {duration(most.seconds):>8}  "
        f"{'━' * filled + '╌' * (BAR - filled) + '  ' if width >= WIDTH_OF_BARS else ''}"
        f"{'<= ' if uneven else '   '}{percent(share):>5}"
        f"{'  worst' if scene.is_worst(most) else ''}"
    )
    return f"{text:<{room}}{load}"


def _room(width: int) -> int:
    """Columns before a load."""
    return width - LOAD_COLUMNS - (BAR + 2 if width >= WIDTH_OF_BARS else 0)


def _summary(scene: Scene, width: int) -> list[str]:
    plan = scene.plan
    num_groups = len({each.group for each in plan.ranks if each.role == "worker"})
    entries = [
        (
            "plan",
            f"{roles_words(plan.ranks)} in {counted(num_groups, 'group')} on "
            f"{counted(len(plan.hosts), 'node')}, servers placed by: {plan.placement}",
        ),
        *(_network_entries(scene) if plan.links else [("exchange", "nothing crosses a link")]),
        *(("note", note) for note in plan.notes[:MAX_NOTES]),
    ]
    if len(plan.notes) > MAX_NOTES:
        entries.append(("note", f"and {counted(len(plan.notes) - MAX_NOTES, 'note')} more"))
    lines: list[str] = []
    for label, words in entries:
        lines += textwrap.wrap(
            plain(shortened(words, 4 * width)),
            width,
            initial_indent=f"{label:<{LABEL_COLUMN}}",
            subsequent_indent=" " * LABEL_COLUMN,
        )
    return lines


def _network_entries(scene: Scene) -> list[tuple[str, str]]:
    plan = scene.plan
    exchange = (
        f"{duration(plan.exchange_s)} predicted for a push and a pull of "
        f"{size(plan.model_bytes)}: {limit_words(plan)}"
    )
    bound = bound_words(plan)
    if plan.bound_s <= 0:
        bound = "none: that no other placement is faster was not proved here"
    elif plan.limit != "links":
        bound += f"; the {plan.limit} take longer: {_parts_words(plan)}"
    elif plan.is_at_bound:
        bound += f": no other placement of {counted(len(plan.weights), 'server')} is faster"
    return [
        ("exchange", exchange),
        ("worst link", worst_words(scene)),
        *_group_entries(plan),
        ("bound", bound),
        ("others", "; ".join(gain_words(plan)) or "not compared"),
        ("tree from", plan.source),
    ]


def _parts_words(plan: Plan) -> str:
    """Describe a limit that is not the links."""
    if plan.limit == "servers" and plan.has_equal_parts:
        return "each holds an equal part"
    return "of them nothing is proved"


def _group_entries(plan: Plan) -> list[tuple[str, str]]:
    if not plan.groups_s:
        return []
    slowest = max(plan.links, key=lambda link: link.group_seconds, default=None)
    where = "the GPUs of a host"
    if slowest is not None and slowest.group_bytes:
        where = f"the hosts of a group ({size(slowest.group_bytes)} each way over {slowest.name})"
        if slowest.group_seconds < plan.groups_s:
            where += " and the GPUs of a host"
    return [
        (
            "groups",
            f"{duration(plan.groups_s)} predicted in addition for reducing between {where}, and "
            "handing parameters round",
        )
    ]


def explain(
    plan: Plan,
    cluster: Cluster,
    *,
    alternatives: Sequence[tuple[str, float]] = (),
    width: int = 100,
) -> str:
    """Which link limits the plan, what is on it, and what would help.

    ``alternatives`` are changes and the seconds that an exchange would take with each, as
    ``("one more server", 0.38)``; they are ranked, and those that gain less than 1 % are said to be
    no help. Raises PlacementError where the plan has a host that the cluster does not have.
    """
    scene = Scene.of(plan, cluster)
    worst = scene.worst
    if worst is None:
        return "Nothing crosses a link: servers and workers sit on the same node.\n"
    paragraphs = [
        *_other_limits(plan),
        f"The {'limit' if plan.limit == 'links' else 'slowest link'} is {link_name(worst)} "
        f"({speed(worst.bytes_per_s)}): one exchange sends "
        f"{size(worst.num_bytes)} each way over it, which takes {duration(worst.seconds)}.",
        _traffic_words(scene, worst),
        _next_words(scene, worst),
        f"The plan is {bound_words(plan)}: {_bound_advice(plan)}",
    ]
    lines = [
        line
        for paragraph in paragraphs
        for line in textwrap.wrap(plain(shortened(paragraph, 6 * width)), width)
    ]
    return "\n".join([*lines, *_alternative_lines(plan, alternatives, width)]) + "\n"


def _other_limits(plan: Plan) -> list[str]:
    """Lines about the limit if it is not the links, else no lines."""
    if plan.limit == "links":
        return []
    if plan.limit == "network cards":
        return [f"The network cards limit: the busiest takes {duration(plan.cards_s)}."]
    num_groups = len({each.group for each in plan.ranks if each.role == "worker"})
    return [
        f"The servers limit: the busiest one takes {duration(plan.servers_s)} to apply "
        f"what {counted(num_groups, 'group')} push to it; faster links alone would not help."
    ]


def _bound_advice(plan: Plan) -> str:
    if plan.bound_s <= 0:
        return "another placement of the servers may be faster."
    if plan.limit != "links":
        return f"that says nothing of the {plan.limit}, which take longer: {_parts_words(plan)}."
    if plan.is_at_bound:
        return "moving servers cannot help, only other hosts, links or ranks can."
    return (
        "a better placement of the same servers could save at most "
        f"{duration(plan.cost_s - plan.bound_s)}."
    )


def _traffic_words(scene: Scene, link: LinkLoad) -> str:
    plan = scene.plan
    inside = [each for place in scene.below(link) for each in place.ranks]
    sizes = Counter(each.group for each in plan.ranks if each.role == "worker")
    num_groups = len(sizes)
    below = Counter(each.group for each in inside if each.role == "worker")
    # A group on both sides counts by its workers.
    groups = sum(Fraction(count, sizes[group]) for group, count in below.items())
    servers = [each for each in inside if each.role == "server"]
    share = sum(plan.weights[each.index] for each in servers)
    served = share * float(num_groups - groups) * plan.model_bytes
    asked = (1 - share) * float(groups) * plan.model_bytes
    return (
        f"Behind it are {counted(len(servers), 'server')} of {len(plan.weights)} with "
        f"{100 * share:.1f} % of the model, and {_groups_words(groups)} of {num_groups}. "
        f"{size(served)} is what the {_exchanging(num_groups - groups, 'outside')} those "
        f"servers; {size(asked)} is what the {_exchanging(groups, 'inside')} the servers "
        "outside."
    )


def _groups_words(number: Fraction | int) -> str:
    if number == int(number):
        return counted(int(number), "group")
    return f"{float(number):.3g} groups"


def _exchanging(number: Fraction | int, where: str) -> str:
    verb = "exchanges" if number == 1 else "exchange"
    return f"{_groups_words(number)} {where} {verb} with"


def _next_words(scene: Scene, worst: LinkLoad) -> str:
    others = [link for link in scene.plan.links if not scene.is_worst(link)]
    if not others:
        return "There is no other link."
    after = max(others, key=lambda link: link.seconds)
    if scene.num_tied:
        return (
            f"{counted(scene.num_tied, 'other link is', 'other links are')} within 1 % of it, "
            f"{link_name(after)} first: making this link alone faster gains little."
        )
    return (
        f"Next is {link_name(after)} with {duration(after.seconds)}: with this link faster, an "
        f"exchange would take that, {percent(1 - after.seconds / worst.seconds)} less."
    )


def _alternative_lines(
    plan: Plan, alternatives: Sequence[tuple[str, float]], width: int
) -> list[str]:
    ranked = sorted(alternatives, key=lambda each: each[1])
    helping = [each for each in ranked if each[1] < 0.99 * plan.exchange_s]
    others = [each for each in ranked if each[1] >= 0.99 * plan.exchange_s]
    lines: list[str] = []
    if helping:
        lines += ["", "What would help (predicted time of an exchange), best first:"]
        lines += [
            f"  {duration(cost_s):>8}  {percent(1 - cost_s / plan.exchange_s):>5} less  {what}"
            for what, cost_s in helping
        ]
    if others:
        heading = "What would not help, or by less than 1 %:"
        if not helping:
            heading = "Nothing that was tried would help by 1 % or more:"
        lines += ["", heading]
        lines += [
            f"  {duration(cost_s):>8}  {times(cost_s / plan.exchange_s)} as long  {what}"
            for what, cost_s in others
        ]
    return [shortened(plain(line), width) for line in lines]
