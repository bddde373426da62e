"""Tests of psdist.topology, in a folder for each of its rooms."""
