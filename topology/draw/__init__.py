"""A plan for people: as text for a terminal, and as an SVG picture.

``drawing`` joins a plan to its cluster and writes amounts in words; ``text`` (with ``text_tree``)
and ``svg`` (with ``svg_racks``, ``svg_node_full``, ``svg_style``, ``svg_canvas``)
draw that. Computes no load and changes no plan. Imports plan and what is below it; never emit.
"""
