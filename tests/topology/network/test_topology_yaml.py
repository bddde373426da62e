"""Slurm's topology.yaml: the trees of topology.conf, which topology is meant, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.network import slurm, topology_yaml
from psdist.topology.network.sources import parse_tree, read_tree
from psdist.topology.network.tree import Tree

# As in Slurm's manual: a tree, blocks and a flat one in one file.
SEVERAL = """\
---
- topology: topo1
  cluster_default: false
  flat: true
- topology: topo2
  cluster_default: true
  tree:
    switches:
      - switch: sw_root
        children: s[1-2]
      - switch: s1
        nodes: node[01-02]
      - switch: s2
        nodes: node[03-04]
- topology: topo3
  cluster_default: true
  block:
    block_sizes:
      - 2
      - 4
    blocks:
      - block: b1
        nodes: node[01-02]
      - block: b2
        nodes: node[03-04]
"""
CONF = """\
SwitchName=sw_root Switches=s[1-2]
SwitchName=s1 Nodes=node[01-02]
SwitchName=s2 Nodes=node[03-04]
"""
BLOCKS = "BlockName=b1 Nodes=node[01-02]\nBlockName=b2 Nodes=node[03-04]\nBlockSizes=2,4\n"


def read(text: str, name: str = "") -> Tree:
    return parse_tree(text.encode(), where="racks", name=name)


def without_notes(tree: Tree) -> Tree:
    return replace(tree, notes=(), source="")


def one(topology: str) -> str:
    return "- topology: a\n" + "".join(f"  {line}\n" for line in topology.splitlines())


def test_the_first_default_is_taken_and_the_others_are_named() -> None:
    tree = read(SEVERAL)
    assert without_notes(tree) == without_notes(slurm.parse_topology_conf(CONF, where="racks"))
    assert tree.source == "racks"
    assert tree.notes == (
        "racks: topology 'topo2' is taken (cluster_default), not 'topo1', 'topo3'; racks#NAME "
        "takes another",
    )


def test_a_topology_is_taken_by_its_name() -> None:
    tree = read(SEVERAL, "topo3")
    assert without_notes(tree) == without_notes(slurm.parse_topology_conf(BLOCKS, where="racks"))
    assert tree.source == "racks#topo3"
    assert not any("is taken" in note for note in tree.notes)


def test_without_a_default_the_first_is_taken() -> None:
    text = SEVERAL.replace("true", "false").replace("flat: false", "tree: {switches: [{switch: x, "
                                                    "nodes: n1}]}")  # fmt: skip
    assert [node.name for node in read(text).nodes] == ["n1"]
    assert "topology 'topo1' is taken (the first), not 'topo2', 'topo3'" in read(text).notes[0]


def test_of_many_topologies_some_are_named() -> None:
    text = "".join(f"- topology: t{n}\n  tree: {{switches: [{{switch: s, nodes: n1}}]}}\n"
                   for n in range(12))  # fmt: skip
    assert "not 't1', 't2', 't3', 't4', 't5', 't6', 't7', 't8' and 3 more" in read(text).notes[0]


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", '"true"'])
def test_every_spelling_of_true_makes_a_default(word: str) -> None:
    text = SEVERAL.replace("cluster_default: true", "cluster_default: no", 1)
    text = text.replace("cluster_default: true", f"cluster_default: {word}")
    assert "topology 'topo3' is taken (cluster_default)" in read(text).notes[0]


def test_a_list_of_host_lists_is_taken_and_unknown_keys_are_passed_over() -> None:
    text = one("tree:\n  later: 1\n  switches:\n  - {switch: s, nodes: [n1, 'n[2-3]'], speed: 4}")
    assert [node.name for node in read(text).nodes] == ["n1", "n2", "n3"]


def test_flow_style_is_yaml_as_well() -> None:
    tree = read('[{topology: a, tree: {switches: [{switch: s, nodes: "n[1-2]"}]}}]')
    assert [node.name for node in tree.nodes] == ["n1", "n2"]


def test_the_name_follows_the_path_where_no_such_file_is(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(SEVERAL)
    assert [each.name for each in read_tree(Path(f"{path}#topo3")).switches][1:] == ["b1", "b2"]
    (tmp_path / "topology.yaml#topo3").write_text(CONF)
    assert [each.name for each in read_tree(Path(f"{path}#topo3")).switches][1:] == ["s1", "s2"]
    with pytest.raises(PlacementError, match=r"#x: only a topology\.yaml has topologies"):
        read_tree(tmp_path / "topology.yaml#topo3#x")
    with pytest.raises(PlacementError, match="other: cannot be read"):
        read_tree(tmp_path / "other#x")


def test_keys_that_slurm_adds_later_are_no_second_kind() -> None:
    text = SEVERAL.replace("  tree:\n", "  routing: {weights: [1, 2]}\n  tree:\n")
    assert without_notes(read(text, "topo2")) == without_notes(read(SEVERAL, "topo2"))


NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True), unique=True, min_size=2,
                 max_size=8)  # fmt: skip


@given(NAMES, st.booleans(), st.data())
def test_a_random_tree_is_that_of_topology_conf(
    names: list[str], is_flow: bool, data: st.DataObject
) -> None:
    """Every switch but the first under an earlier one; leaves have nodes."""
    parents = [data.draw(st.integers(0, at - 1)) for at in range(1, len(names))]
    switches, lines = [], []
    for at, name in enumerate(names):
        below = ",".join(names[child + 1] for child, parent in enumerate(parents) if parent == at)
        key, word = ("children", "Switches") if below else ("nodes", "Nodes")
        below = below or f"n{at}x[1-3]"
        switches.append({"switch": name, key: below})
        lines.append(f"SwitchName={name} {word}={below}\n")
    made = [{"topology": "a", "cluster_default": True, "tree": {"switches": switches}}]
    text = yaml.safe_dump(made, default_flow_style=is_flow, sort_keys=False)
    expected = slurm.parse_topology_conf("".join(lines), where="racks")
    assert without_notes(read(text)) == without_notes(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- topology: a\n  flat: true\n", "racks:1: topology 'a' is of the kind 'flat', which says "
         "nothing of racks: give racks of your own"),
        (SEVERAL.replace("true", "false"), "nothing of racks: name one of 'topo2', 'topo3' (FILE#"),
        (one("ring:\n  rings: []"), "topology 'a' is of the kind 'ring'"),
        (one("ring: {}\ntorus3d: {}"), "racks:1: topology 'a' is of the kind 'ring'"),
        (one("cluster_default: true"), "racks:1: topology 'a' is of no kind"),
        (one("tree:\n  switches: []\nblock: {}"), "racks:4: topology 'a' is of two kinds, 'tree' "
         "and 'block'"),
        (one("flat: true\nblock: {}"), "racks:3: topology 'a' is of two kinds"),
        (one("tree: 1"), "racks:2: tree is '1', not 'key: value' lines"),
        (one("tree:\n  nodes: 1"), "racks:3: tree has no 'switches'"),
        (one("block:\n  block_sizes: [1]"), "racks:3: block has no 'blocks'"),
        (one("tree:\n  switches: s1"), "racks:3: switches is 's1', not a list"),
        (one("tree:\n  switches: []"), "racks: no switch in it"),
        (one("tree:\n  switches:\n  - s1"), "racks:4: a switch is 's1', not 'key: value' lines"),
        (one("tree:\n  switches:\n  - nodes: n1"), "racks:4: this has no 'switch: NAME'"),
        (one("block:\n  blocks:\n  - nodes: n1"), "racks:4: this has no 'block: NAME'"),
        (one("tree:\n  switches:\n  - switch: s 1\n    nodes: n1"), "racks:4: 's 1' is not a name"),
        (one("tree:\n  switches:\n  - switch: s"), "switch 's' has neither children nor nodes"),
        (one("tree:\n  switches:\n  - {switch: s, nodes: n1, children: t}"), "racks:4: switch 's' "
         "has both children and nodes: Slurm takes one of them"),
        (one("tree:\n  switches:\n  - {switch: s, nodes: {a: b}}"), "racks:4: nodes is a mapping"),
        (one("tree:\n  switches:\n  - {switch: s, children: {a: b}}"), "racks:4: children is a"),
        (one("tree:\n  switches:\n  - {switch: s, nodes: [{a: b}]}"), "racks:4: one of nodes is a"),
        (one("tree:\n  switches:\n  - {switch: s, nodes: 'n[1-'}"), "racks:4: host list: "),
        (one("tree:\n  switches:\n  - {switch: s, children: t}"), "racks:4: switch 't' is descri"),
        (one("tree:\n  switches:\n  - {switch: s, nodes: a}\n  - {switch: s, nodes: b}"),
         "racks:5: switch 's' is already at racks:4"),
        (one("cluster_default: [1]\ntree: {}"), "racks:2: cluster_default is a list, not a text"),
        ("- flat: true\n", "racks:1: this has no 'topology: NAME'"),
        ("- topology: ''\n", "racks:1: '' is no name"),
        ('- topology: "a\\x07"\n', "racks:1: 'a\\x07' is no name"),
        ("- topology: a\n- topology: a\n", "racks:2: topology 'a' is already at racks:1"),
        ("--- []\n", "racks: no topology in it"),
        ("topology: a\n", "racks:1: the file is a mapping, not a list"),
        ("- topology: &a a\n- topology: *a\n", "racks:2: *a is an alias"),
        ("- topology: [a\n", "not YAML ("),
        (SEVERAL + "---\n- topology: b\n", "racks:26: a second document begins"),
    ],
)  # fmt: skip
def test_what_is_no_topology_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(PlacementError) as caught:
        read(text)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(PlacementError, match="no topology is called 'x': it has 'topo1', 'topo2'"):
        topology_yaml.parse(SEVERAL, where="racks", name="x")
