"""Racks from Slurm's topology.yaml: one of the topologies in the file.

    tree = parse(text, where="topology.yaml", name="fast")

Switches and blocks are as in topology.conf. Keys that Slurm adds later are no mistake. A topology
of another plugin is one if it is meant: a flat one says nothing of racks, others are no trees.
"""

from __future__ import annotations

from typing import Final

from psdist.errors import PlacementError
from psdist.topology.network.slurm import Switches, add_block
from psdist.topology.network.tree import Tree, TreeBuilder
from psdist.topology.text import shown
from psdist.topology.text.hostlist import listed
from psdist.topology.text.strict_yaml import Limits, Node
from psdist.topology.text.strict_yaml import parse as parse_yaml

_LIMITS: Final = Limits(depth=12, nodes=200_000)
_MAX_NAMED: Final = 8
_KINDS: Final = ("tree", "block", "flat", "ring", "torus3d")
_TRUE: Final = ("true", "yes", "on")


def parse(text: str, *, where: str, name: str = "") -> Tree:
    """The tree of the topology called ``name``; of the default one, as Slurm chooses it, for "".

    That is the first with ``cluster_default: true``, else the first. Which one it was, and which
    others there are, is a note. Raises PlacementError, with the line, for what is no topology.yaml,
    for a name that is not there, and for a topology that is neither a tree nor made of blocks.
    """
    topologies: dict[str, Node] = {}
    default = ""
    for entry in parse_yaml(text, where=where, limits=_LIMITS).items("the file"):
        members = entry.members("a topology")
        if "topology" not in members:
            raise PlacementError(f"{entry.place}: this has no 'topology: NAME': give it a name")
        called = members["topology"].text("topology")
        if not called or not called.isprintable():
            raise PlacementError(f"{entry.place}: {shown(called)} is no name: correct it")
        if called in topologies:
            raise PlacementError(
                f"{entry.place}: topology {shown(called)} is already at "
                f"{topologies[called].place}: name each once"
            )
        topologies[called] = entry
        if not default and _is_true(members.get("cluster_default"), "cluster_default"):
            default = called
    if not topologies:
        raise PlacementError(f"{where}: no topology in it: give the right file")
    chosen = name or default or next(iter(topologies))
    if chosen not in topologies:
        raise PlacementError(
            f"{where}: no topology is called {shown(chosen)}: it has "
            f"{listed([*map(shown, topologies)], _MAX_NAMED)}"
        )
    builder = TreeBuilder(where=where, source=f"{where}#{chosen}" if name else where)
    others = listed([shown(each) for each in topologies if each != chosen], _MAX_NAMED)
    if others and not name:
        builder.notes.append(
            f"{where}: topology {shown(chosen)} is taken "
            f"({'cluster_default' if default else 'the first'}), not {others}; "
            f"{where}#NAME takes another"
        )
    _fill(builder, topologies[chosen], chosen, others)
    return builder.build()


def _fill(builder: TreeBuilder, entry: Node, name: str, others: str) -> None:
    members = entry.members("a topology")
    named = [key for key in members if key not in ("topology", "cluster_default")]
    # A key that Slurm adds later is none of the kinds, if one of those is there.
    kinds = [key for key in named if key in _KINDS] or named
    known = [key for key in kinds if key in ("tree", "block")]
    if len(kinds) > 1 and known:
        raise PlacementError(
            f"{members[kinds[1]].place}: topology {shown(name)} is of two kinds, "
            f"{shown(kinds[0])} and {shown(kinds[1])}: leave one"
        )
    if not known:
        other = f"name one of {others} (FILE#NAME)" if others else "give racks of your own"
        kind = f"of the kind {shown(kinds[0])}" if kinds else "of no kind"
        raise PlacementError(
            f"{entry.place}: topology {shown(name)} is {kind}, which says nothing of racks: {other}"
        )
    kind = known[0]
    inside = members[kind].members(kind)
    key, word = ("switches", "switch") if kind == "tree" else ("blocks", "block")
    if key not in inside:
        raise PlacementError(f"{members[kind].place}: {kind} has no {key!r}: list them")
    switches = Switches(builder, words=("children", "nodes"))
    for each in inside[key].items(key):
        fields = each.members(f"a {word}")
        if word not in fields:
            raise PlacementError(f"{each.place}: this has no '{word}: NAME': give it a name")
        called, nodes = fields[word].text(word), _text(fields.get("nodes"), "nodes")
        if kind == "tree":
            children = _text(fields.get("children"), "children")
            switches.add(called, each.place, switches=children, nodes=nodes)
        else:
            add_block(builder, called, each.place, nodes=nodes)
    switches.join()


def _text(node: Node | None, what: str) -> str:
    """A host list: a text, or a list of them."""
    if node is None:
        return ""
    if isinstance(node.content, list):
        return ",".join(each.text(f"one of {what}") for each in node.content)
    return node.text(what)


def _is_true(node: Node | None, what: str) -> bool:
    return node is not None and node.text(what).lower() in _TRUE
