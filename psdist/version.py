"""The version of psdist; ranks of different versions refuse to work together."""

VERSION = "0.1.0"
